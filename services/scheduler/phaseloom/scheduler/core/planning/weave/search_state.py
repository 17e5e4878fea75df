"""Groups on paper: priced, changed and compared without touching the cluster.

New nodes have names that no node has until a plan is carried out. What a group is worth is its
price less the value of the progress that it makes: of two ways to add a job at one price, the one
that slows people less. Cost: everything about a pair of group and job is worked out once a board.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from phaseloom.common.contract.ids import NodeId
from phaseloom.scheduler.core.planning.weave import candidates
from phaseloom.scheduler.core.planning.weave.candidates import Seat, Seats
from phaseloom.scheduler.core.planning.weave.pool import serves
from phaseloom.scheduler.core.planning.weave.timing import ROLLOUT, TRAIN
from phaseloom.scheduler.core.state.cluster import Cluster, Group, Pool

VALUE = 0.25
"""Of a job's progress at full speed, as a share of the price of its own nodes."""
BROKEN = 10.0
"""What a group that breaks a budget costs more, in prices of one job's nodes."""
MOST_TRIED = 64
"""Groups that are looked at closely for one job, the most promising first."""
NEW = "+"
"""First letter of the name of a node that is not chosen yet."""


class Best(NamedTuple):
    """Where a job would go."""

    worth: float
    """$/h that it changes, the least being the best."""
    group: str
    seat: Seat


@dataclass
class Board:
    cluster: Cluster
    groups: Mapping[str, Seats]
    """By name: those that jobs can be added to."""

    def __post_init__(self) -> None:
        self.switch_s = self.cluster.limits.switch_s
        self.num_new = 0
        self._fresh = {pool: self._fresh_host(pool) for pool in (ROLLOUT, TRAIN)}
        self._worth: dict[object, float] = {}
        self._holds: dict[object, bool] = {}
        self._added: dict[object, list[tuple[float, Seat]]] = {}

    def _fresh_host(self, pool: Pool) -> tuple[float, int]:
        """Price and memory of a node of the pool: the least of the free ones."""
        hosts = [self.cluster.hosts[node] for node in self.cluster.free.get(pool, ())]
        hosts = hosts or [h for h in self.cluster.hosts.values() if h.pool == pool]
        price = min((h.price_per_hour for h in hosts), default=0.0)
        return price or 1.0, min((h.host_bytes for h in hosts), default=0)

    # --- prices ----------------------------------------------------------------------------------

    def price(self, group: Seats) -> float:
        """$/h of its nodes; nodes without a price count alike."""
        if not group:
            return 0.0
        rolling = sum(self._node_price(node) for node in candidates.nodes_of(group))
        return rolling + group[0].train.num_nodes * self._fresh[TRAIN][0]

    def _node_price(self, node: str) -> float:
        host = self.cluster.hosts.get(NodeId(node))
        return (host.price_per_hour if host is not None else 0.0) or self._fresh[ROLLOUT][0]

    def own_price(self, seat: Seat) -> float:
        """$/h of as many nodes as it takes."""
        rolling = seat.rollout.num_nodes * self._fresh[ROLLOUT][0]
        return rolling + seat.train.num_nodes * self._fresh[TRAIN][0]

    def worth(self, group: Seats) -> float:
        """Price less the value of progress."""
        if not group:
            return 0.0
        key = candidates.signature(group)
        if key not in self._worth:
            made = zip(group, candidates.progress(group, self.switch_s), strict=True)
            value = sum(VALUE * self.own_price(seat) * speed for seat, speed in made)
            self._worth[key] = self.price(group) - value
        return self._worth[key]

    def holds(self, group: Seats, *, is_changed: bool) -> bool:
        key = candidates.signature(group), is_changed
        if key not in self._holds:
            self._holds[key] = candidates.holds(group, self.switch_s, is_changed=is_changed)
        return self._holds[key]

    def standing(self, group: Seats) -> float:
        """Worth of a group as it runs, dear if it breaks a budget."""
        if not group:
            return 0.0
        broken = not self.holds(group, is_changed=False)
        return self.worth(group) + (BROKEN * self.own_price(group[0]) if broken else 0.0)

    # --- places ----------------------------------------------------------------------------------

    def alone(self, seat: Seat) -> Seat:
        return seat._replace(nodes=self._new_nodes(seat.rollout.num_nodes))

    def new_group(self) -> str:
        """A name for a group that is not there yet."""
        self.num_new += 1
        return f"{NEW}{self.num_new - 1}"

    def _new_nodes(self, count: int) -> tuple[str, ...]:
        first = self.num_new
        self.num_new += count
        return tuple(f"{NEW}{k}" for k in range(first, self.num_new))

    def best(self, groups: Mapping[str, Seats], seat: Seat, below: float) -> Best | None:
        """The group and nodes that cost least to add a job to, where that is below `below`.

        Whether a group holds is asked of the best first, as it costs most to find out. Ties: the
        group that comes first, and of its nodes those that come first.
        """
        ranked = sorted(
            (
                Best(worth, name, option)
                for name, options in self._options_by_group(groups, seat)
                for worth, option in options
                if worth < below
            ),
            key=lambda best: best.worth,
        )
        for option in ranked:
            if self.holds((*groups[option.group], option.seat), is_changed=True):
                return option
        return None

    def _options_by_group(
        self, groups: Mapping[str, Seats], seat: Seat
    ) -> Iterator[tuple[str, list[tuple[float, Seat]]]]:
        """Of the first groups that have any."""
        full = self.cluster.limits.max_group_jobs
        tried = 0
        is_new = not self._added
        for name, group in groups.items():
            if is_new and tried >= MOST_TRIED:
                return
            if len(group) >= full or group[0].train.num_nodes != seat.train.num_nodes:
                continue
            key = candidates.signature(group), seat.job
            if key not in self._added:
                if tried >= MOST_TRIED:
                    continue
                self._added[key] = self._adding(group, seat)
            if self._added[key]:
                tried += 1
                yield name, self._added[key]

    def _adding(self, group: Seats, seat: Seat) -> list[tuple[float, Seat]]:
        """What each choice of nodes would change, in $/h, where the job could be added."""
        if not self._trains_fit(group, seat):
            return []
        found = []
        for option in self._options(group, seat):
            bigger = (*group, option)
            if candidates.could_hold(bigger) and self._rollouts_fit(bigger, option):
                found.append((self.worth(bigger) - self.worth(group), option))
        return found

    def _options(self, group: Seats, seat: Seat) -> Iterator[Seat]:
        """On nodes of the group, then with just enough new ones (WEAVE §4.2)."""
        count = seat.rollout.num_nodes
        own = candidates.nodes_of(group)
        free = len(self.cluster.free.get(ROLLOUT, ()))
        if count == 1:
            yield from (seat._replace(nodes=(node,)) for node in own)
            if free:
                yield self.alone(seat)
            return
        same = dict.fromkeys(other.nodes for other in group if len(other.nodes) == count)
        yield from (seat._replace(nodes=nodes) for nodes in same)
        ranked = candidates.by_load(group, own)
        for kept in range(min(count, len(ranked)), -1, -1):
            nodes = (*ranked[:kept], *self._new_nodes(count - kept))
            if nodes not in same and count - kept <= free:
                yield seat._replace(nodes=nodes)

    def _trains_fit(self, group: Seats, seat: Seat) -> bool:
        taken = sum(other.train.host_bytes for other in group) + seat.train.host_bytes
        return _fits(taken, self._fresh[TRAIN][1])

    def _rollouts_fit(self, group: Seats, seat: Seat) -> bool:
        """Residency on the job's rollout nodes; an exact fit is allowed."""
        for node in seat.nodes:
            taken = sum(other.rollout.host_bytes for other in group if node in other.nodes)
            host = self.cluster.hosts.get(NodeId(node))
            room = host.host_bytes if host is not None else self._fresh[ROLLOUT][1]
            if not _fits(taken, room) or (host is not None and not serves(host, seat.rollout)):
                return False
        return True


def _fits(taken_bytes: int, host_bytes: int) -> bool:
    return host_bytes == 0 or taken_bytes <= host_bytes


def is_plannable(cluster: Cluster, group: Group) -> bool:
    """All cycles known, all nodes there, one set of train nodes: others are left as they are."""
    if group.is_closed or any(m.cycle is None for m in group.members.values()):
        return False
    hosts = [cluster.hosts[node] for names in group.nodes.values() for node in names]
    trains = group.nodes.get(TRAIN, [])
    return all(host.is_up for host in hosts) and all(
        set(member.nodes.get(TRAIN, ())) == set(trains) for member in group.members.values()
    )


class _Groups(Mapping[str, Seats]):
    """Made when they are looked at: to place one job only the first ones are."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._made: dict[str, Seats] = {}

    def __getitem__(self, name: str) -> Seats:
        if name not in self._made:
            members = self._cluster.groups[name].members.values()
            self._made[name] = tuple([candidates.seat_of(self._cluster, m) for m in members])
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        groups = self._cluster.groups
        return (name for name in groups if is_plannable(self._cluster, groups[name]))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def board_of(cluster: Cluster) -> Board:
    return Board(cluster, _Groups(cluster))
