"""Weights over a slow link once: scattered to the far side, and relayed from rank to rank there.

Where ranks on a site need what no source rank there holds, each byte crosses to the site once, to
one of the ranks that need it, in as many disjoint parts as there are such ranks. The others get it
over the fast links: first one rank of each node, from whoever received it, then its neighbours.
`traffic` says what a plan costs on each kind of link.

Source: WEAVE §5.2; deviation: parts are whole cells of whole parameters, not equal byte ranges of
one flat buffer, so that a rank relays nothing that it does not hold itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from phaseloom.common.tensors.resharding.cells import Cell, Index
from phaseloom.common.tensors.resharding.planning import (
    Group,
    Leg,
    Plan,
    Topology,
    deal,
    deal_legs,
    nearest,
)


def scatter_broadcast(plan: Plan, topology: Topology) -> Plan:
    """The same weights to the same ranks, every byte to each far site once."""
    dealing = _Dealing(topology)
    return replace(
        plan, groups=tuple(replace(each, legs=dealing.legs(each)) for each in plan.groups)
    )


class _Dealing:
    """Legs of one group after another, with what every rank sends and receives so far."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def legs(self, group: Group) -> tuple[Leg, ...]:
        legs: list[Leg] = []
        for cell in group.cells:
            senders = group.sources_of(cell)
            by_site: dict[str, list[tuple[int, Index]]] = {}
            for target in group.targets_of(cell):
                by_site.setdefault(self._site(self._topology.targets[target[0]]), []).append(target)
            for site, targets in by_site.items():
                near = [s for s in senders if self._site(self._topology.sources[s[0]]) == site]
                if near:
                    legs += self._direct(group, cell, near, targets)
                else:
                    legs += self._across(group, cell, senders, targets)
        return tuple(legs)

    def _direct(
        self,
        group: Group,
        cell: Cell,
        senders: list[tuple[int, Index]],
        targets: list[tuple[int, Index]],
    ) -> list[Leg]:
        legs: list[Leg] = []
        for target in targets:
            near = nearest(senders, target[0], self._topology)
            legs += deal_legs(group, cell, near, target, self._sent)
        return legs

    def _across(
        self,
        group: Group,
        cell: Cell,
        senders: list[tuple[int, Index]],
        targets: list[tuple[int, Index]],
    ) -> list[Leg]:
        legs: list[Leg] = []
        num_bytes = cell.num_elements * group.item_bytes
        starts = dict(targets)
        everyone = range(len(group.parameters))
        for receiver, members in deal(everyone, num_bytes, [*starts], self._received):
            there = (receiver, starts[receiver])
            legs += deal_legs(group, cell, senders, there, self._sent, members=members)
            legs += self._relayed(cell, there, targets, members)
        return legs

    def _relayed(
        self,
        cell: Cell,
        receiver: tuple[int, Index],
        targets: list[tuple[int, Index]],
        members: range,
    ) -> list[Leg]:
        first_on = {self._topology.targets[receiver[0]]: receiver}
        legs: list[Leg] = []
        for target in targets:
            if target != receiver:
                sender = first_on.setdefault(self._topology.targets[target[0]], target)
                rank, start = receiver if sender == target else sender
                legs.append(Leg(cell, rank, start, *target, members, is_relayed=True))
        return legs

    def _site(self, node: str) -> str:
        return self._topology.sites[node]


@dataclass(frozen=True)
class Traffic:
    """Bytes that a plan moves."""

    within_nodes: int
    within_sites: int
    """Between nodes that a fast link joins."""
    crossing: Counter[tuple[str, str]]
    """Over the slow link from a site to another."""
    sent: Counter[str]
    """By each node, to others."""
    received: Counter[str]

    def seconds(self, slow_bytes_per_s: float, node_bytes_per_s: float) -> float:
        """The least that it can take: the busiest link is always in use.

        Args: slow_bytes_per_s: of the link between two sites, each way.
              node_bytes_per_s: of a node, each way.
        """
        return max(
            max(self.crossing.values(), default=0) / slow_bytes_per_s,
            max(self.sent.values(), default=0) / node_bytes_per_s,
            max(self.received.values(), default=0) / node_bytes_per_s,
        )


def traffic(plan: Plan, topology: Topology) -> Traffic:
    within_nodes = within_sites = 0
    crossing: Counter[tuple[str, str]] = Counter()
    sent: Counter[str] = Counter()
    received: Counter[str] = Counter()
    for group in plan.groups:
        for leg in group.legs:
            num_bytes = group.bytes_of(leg)
            nodes = topology.targets if leg.is_relayed else topology.sources
            there, here = nodes[leg.source], topology.targets[leg.target]
            if there == here:
                within_nodes += num_bytes
                continue
            sent[there] += num_bytes
            received[here] += num_bytes
            if topology.distance(there, here) == 1:
                within_sites += num_bytes
            else:
                crossing[topology.sites[there], topology.sites[here]] += num_bytes
    return Traffic(within_nodes, within_sites, crossing, sent, received)


def missing_bytes(plan: Plan, topology: Topology) -> Counter[str]:
    """Of each site, the different bytes that its ranks need and no source rank there holds."""
    missing: Counter[str] = Counter()
    for group in plan.groups:
        for cell in group.cells:
            there = {topology.sites[topology.sources[rank]] for rank, _ in group.sources_of(cell)}
            here = {topology.sites[topology.targets[rank]] for rank, _ in group.targets_of(cell)}
            for site in here - there:
                missing[site] += cell.num_elements * group.item_bytes * len(group.parameters)
    return missing
