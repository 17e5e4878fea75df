"""Weights from one parallel layout to another: a plan of exact slices. See `planning`."""

from phaseloom.common.tensors.resharding.gathering import (
    Fetch,
    Use,
    node_fetches,
    part_bytes,
    source_parts,
)
from phaseloom.common.tensors.resharding.planning import Copy, Plan, Topology, plan
from phaseloom.common.tensors.resharding.scattering import (
    Traffic,
    missing_bytes,
    scatter_broadcast,
    traffic,
)
from phaseloom.common.tensors.resharding.sharding import (
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
    "Fetch",
    "FusedQkv",
    "GatedMlp",
    "Parameter",
    "Plan",
    "Rule",
    "Shard",
    "Sharding",
    "Topology",
    "Traffic",
    "Use",
    "Vocabulary",
    "item_bytes",
    "missing_bytes",
    "node_fetches",
    "part_bytes",
    "plan",
    "scatter_broadcast",
    "shards",
    "source_parts",
    "traffic",
]
