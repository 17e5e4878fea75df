"""Weights from one parallel layout to another: a plan of exact slices. See `planning`."""

from phaseloom.common.tensors.resharding.planning import (
    Fetch,
    Plan,
    Use,
    byte_runs,
    node_fetches,
    part_bytes,
    plan,
    source_parts,
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
    "End",
    "Fetch",
    "FusedQkv",
    "GatedMlp",
    "Parameter",
    "Plan",
    "Rule",
    "Shard",
    "Sharding",
    "Use",
    "Vocabulary",
    "byte_runs",
    "item_bytes",
    "node_fetches",
    "part_bytes",
    "plan",
    "shards",
    "source_parts",
]
