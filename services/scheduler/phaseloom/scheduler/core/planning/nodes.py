"""Nodes that could take a job: free nodes, and nodes of a group with enough memory left.

All jobs pinned to a node stay in its host memory (invariant I4; residency in WEAVE §4.2). An exact
fit is allowed. Called by all other modules of `planning`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.specs import Capabilities
from phaseloom.scheduler.core.state.cluster import Cluster, Demand, Group, Host, Member, Need, Pool

Pinned = dict[Pool, list[NodeId]]


class Lack(NamedTuple):
    """A request of a deployment that a backend cannot meet."""

    field: str
    """Field of the deployment's spec."""
    feature: str
    instead: tuple[str, ...]
    """Values of the field that the backend supports."""


def could_take(host: Host, need: Need) -> bool:
    """Whether the node would suit the job if it were up and empty."""
    is_large = host.num_devices >= need.num_devices and host.host_bytes >= need.host_bytes
    return is_large and can_run(host, need)


def can_run(host: Host, need: Need) -> bool:
    """Whether the node's backends support what the job requires."""
    return not host.backends or all(meets(host, demand) for demand in need.demands)


def meets(host: Host, demand: Demand) -> bool:
    capabilities = host.backends.get(demand.backend)
    return capabilities is not None and not any(lacks(capabilities, demand))


def lacks(capabilities: Capabilities, demand: Demand) -> Iterator[Lack]:
    """Yield the demands of a deployment that a backend cannot meet."""
    if demand.trains and not capabilities.trains:
        yield Lack("trainable", "trainable = true", ("false",))
    for axis in demand.axes:
        if axis not in capabilities.axes:
            yield Lack(f"layout.{axis}", f"{axis} above 1", capabilities.axes)
    if capabilities.model_types and demand.model_type not in capabilities.model_types:
        yield Lack(
            "model.config.model_type", f"{demand.model_type!r} models", capabilities.model_types
        )
    if demand.dtype and capabilities.dtypes and demand.dtype not in capabilities.dtypes:
        yield Lack("model.config.dtype", f"weights of {demand.dtype}", capabilities.dtypes)
    if demand.is_shared and not capabilities.joins:
        yield Lack("batching", "batching = 'shared'", ("operation",))
    if demand.caches_prefixes and not capabilities.prefix_cache:
        yield Lack("prefix_cache", "prefix_cache = true", ("false",))
    if demand.has_adapter and not capabilities.adapters:
        yield Lack("model.adapter", "adapters", ("no adapter, to train or sample all weights",))


def is_usable(host: Host, need: Need) -> bool:
    """Whether the node is up and would suit the job if it were empty."""
    return host.is_up and could_take(host, need)


def free_nodes(cluster: Cluster, pool: Pool, need: Need, count: int) -> list[NodeId]:
    """Return up to `count` free nodes that could take the job, sorted by name."""
    free = cluster.free.get(pool, [])
    return list(islice((n for n in free if is_usable(cluster.hosts[n], need)), count))


def own_nodes(cluster: Cluster, member: Member) -> Pinned | None:
    """Free nodes for the whole job, or None if there are too few."""
    nodes: Pinned = {}
    for pool, need in member.needs.items():
        nodes[pool] = free_nodes(cluster, pool, need, need.num_nodes)
        if len(nodes[pool]) < need.num_nodes:
            return None
    return nodes


def users(members: Iterable[Member], pool: Pool, node: NodeId) -> list[Member]:
    return [member for member in members if node in member.nodes.get(pool, ())]


def has_room(host: Host, need: Need, neighbours: Iterable[Member]) -> bool:
    """Whether a node could take a job next to the members that are already pinned to it."""
    taken_bytes = sum(member.needs[host.pool].host_bytes for member in neighbours)
    return is_usable(host, need) and taken_bytes + need.host_bytes <= host.host_bytes


def with_room(cluster: Cluster, group: Group, pool: Pool, need: Need) -> list[NodeId]:
    """Nodes of a group that could take one more job next to their present members."""
    return [
        name
        for name in group.nodes.get(pool, [])
        if has_room(cluster.hosts[name], need, users(group.members.values(), pool, name))
    ]


def alone_takes(cluster: Cluster, member: Member) -> str:
    """Describe to users how many nodes the job would take alone, and how many are free."""
    return ", ".join(
        f"{need.num_nodes} of pool {pool} ({len(cluster.free.get(pool, ()))} free)"
        for pool, need in member.needs.items()
    )


def other_jobs(count: int) -> str:
    return f"{count} other {'job' if count == 1 else 'jobs'}"
