"""Weights from one parallel layout to another: a plan of exact slices. See `planning`."""

from phaseloom.common.resharding.planning import Copy, Plan, Topology, plan
from phaseloom.common.resharding.scattering import (
    Traffic,
    missing_bytes,
    scatter_broadcast,
    traffic,
)
from phaseloom.common.resharding.sharding import (
    Along,
    End,
    FusedQkv,
    GatedMlp,
    Parameter,
    Rule,
    Shard,
    Sharding,
    Vocabulary,
    item_bytes,
    shards,
)

__all__ = [
    "Along",
    "Copy",
    "End",
    "FusedQkv",
    "GatedMlp",
    "Parameter",
    "Plan",
    "Rule",
    "Shard",
    "Sharding",
    "Topology",
    "Traffic",
    "Vocabulary",
    "item_bytes",
    "missing_bytes",
    "plan",
    "scatter_broadcast",
    "shards",
    "traffic",
]
