"""Clusters of one-device nodes at WEAVE's prices, for tests of co-execution."""

from __future__ import annotations

from typing import Any

from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.specs import Cycle, Segment
from phaseloom.scheduler.core.planning import groups
from phaseloom.scheduler.core.state.cluster import (
    Cluster,
    Decision,
    Host,
    Limits,
    Member,
    Need,
    Placed,
)

GB = 10**9
PRICES = {"rollout": 14.8, "train": 42.24}


def empty(
    num_nodes: int = 20, host_gb: float = 2048, beside: tuple[float, ...] = (), **limits: Any
) -> Cluster:
    """Nodes r000, r001, ... and t000, ..., all free.

    Args: beside: how much longer rollouts take beside one another; none: they take turns.
    """
    if beside:
        limits["counts_on_space"] = True
    cluster = Cluster(limits=Limits(**limits))
    for pool, price in PRICES.items():
        for i in range(num_nodes):
            name = NodeId(f"{pool[0]}{i:03d}")
            host = Host(name, pool, 1, round(host_gb * GB), price)
            if pool == "rollout":
                host.rollout_slowdowns, host.device_bytes = beside, 700 * GB
            groups.host_up(cluster, host)
    return cluster


def job(name: str, rollout_s: float, train_s: float, slo: float = 2.0, **more: Any) -> Member:
    """More: nr, nt (nodes), mr, mt (GB a node), iterations in all."""
    needs = {
        "rollout": Need(more.get("nr", 1), 1, round(more.get("mr", 0) * GB)),
        "train": Need(more.get("nt", 1), 1, round(more.get("mt", 0) * GB)),
    }
    cycle = Cycle(
        rollout_s + train_s,
        [Segment("rollout", 0.0, rollout_s), Segment("train", rollout_s, train_s)],
    )
    return Member(name, slo, needs, cycle, num_iterations=more.get("iterations", 0))


def pin(
    cluster: Cluster, group: str, member: Member, rolls: list[str], trains: list[str]
) -> Member:
    """Group: empty for a new one."""
    nodes = {"rollout": [NodeId(n) for n in rolls], "train": [NodeId(n) for n in trains]}
    groups.join(cluster, member, Placed(group, nodes))
    groups.validate(cluster)
    return member


def keep(cluster: Cluster, member: Member, decision: Decision) -> Placed:
    assert isinstance(decision, Placed), decision
    groups.join(cluster, member, decision)
    groups.validate(cluster)
    return decision


def partition(cluster: Cluster) -> set[frozenset[str]]:
    return {frozenset(group.members) for group in cluster.groups.values()}
