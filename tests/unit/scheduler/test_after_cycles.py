"""Operations that would wait for each other, against a search of all their edges."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloom.common.contract.operations import After
from tests.unit.scheduler.test_late_messages import POLICY, SAMPLER, Teller, queued

KEYS = {"policy": POLICY, "sampler": SAMPLER}
KINDS = {"policy": ("optim_step", "forward"), "sampler": ("load_state", "generate")}


@dataclass(frozen=True)
class Drawn:
    name: str
    seq: int
    is_mutating: bool
    after: tuple[tuple[str, int], ...]


def _closes_cycle(new: Drawn, known: dict[tuple[str, int], Drawn]) -> bool:
    """Whether one can come back to an operation along what each one waits for."""

    def waits_for(op: Drawn) -> set[tuple[str, int]]:
        below = {
            ref
            for ref, other in known.items()
            if other.name == op.name
            and other.seq < op.seq
            and (op.is_mutating or other.is_mutating)
        }
        return below | set(op.after)

    start = (new.name, new.seq)
    reached: set[tuple[str, int]] = set()
    frontier = [start]
    while frontier:
        op = known.get(frontier.pop())
        for target in waits_for(op) - reached if op else ():
            reached.add(target)
            frontier.append(target)
    return start in reached


NAMES = st.sampled_from(sorted(KEYS))
REFS = st.tuples(NAMES, st.integers(1, 6))


@settings(max_examples=60)
@given(
    st.permutations([(name, seq) for name in sorted(KEYS) for seq in range(1, 7)]),
    st.lists(st.tuples(st.booleans(), st.lists(REFS, max_size=2)), min_size=12, max_size=12),
)
def test_operation_is_refused_exactly_if_it_closes_a_cycle(
    order: list[tuple[str, int]], drawn: list[tuple[bool, list[tuple[str, int]]]]
) -> None:
    teller = Teller()
    teller.submit()
    known: dict[tuple[str, int], Drawn] = {}
    for (name, seq), (is_mutating, after) in zip(order, drawn, strict=True):
        op = Drawn(name, seq, is_mutating, tuple(after))
        known[name, seq] = op
        kind = KINDS[name][0 if is_mutating else 1]
        named = tuple(After(target, number) for target, number in after)
        made = teller.tell(queued(KEYS[name], seq, kind, after=named))
        assert any("closes a cycle" in str(o) for o in made) == _closes_cycle(op, known)
        # What is refused fails the operations that wait for it, too.
        for ref in list(known):
            operations = teller.core.state.deployments[str(KEYS[ref[0]])].queue.operations
            if ref[1] not in operations or operations[ref[1]].has_ended:
                del known[ref]
