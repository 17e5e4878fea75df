"""A kind of operation that the tree does not have, added as somebody would add it: `score`, which
reads. `ADDED` says what is written in which file; run as a program, on a tree that has it, this
takes one `score` from the controller to the ranks and back.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from phaseloom.client import Deployment
from phaseloom.client.operations import OperationPart, Outbox
from phaseloom.common.contract.codec import JSON, MSGPACK
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.ids import DeploymentKey, JobKey
from phaseloom.common.contract.operations import Datum, Operation, Result
from phaseloom.common.contract.specs import DeploymentSpec, Layout, ModelSpec
from phaseloom.router.core import validate
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.rank.executor import Executor
from phaseloom.worker.rank.wire import RankConfig
from phaseloom.worker.state.heap import Heap
from tests.support.contention import Call, Contention, Loop, config_of

ADDED: dict[str, list[tuple[str, str]]] = {
    "libs/common/phaseloom/common/contract/operations.py": [
        (
            "\nArgs = (\n    ",
            '''
class Score(Message, frozen=True):
    """Reading. The log-probability of each datum's targets together."""

    batch: list[Datum]


class ScoreResult(Message, frozen=True):
    totals: list[float]
    """One a datum."""


Args = (
    Score
    | ''',
        ),
        ("\nResult = (\n    ", "\nResult = (\n    ScoreResult\n    | "),
    ],
    "libs/common/phaseloom/common/contract/kinds.py": [
        (
            "\n_TABLE: tuple[Kind[Any, Any], ...] = (\n",
            """
_TABLE: tuple[Kind[Any, Any], ...] = (
    Kind(
        args=ops.Score,
        result=ops.ScoreResult,
        is_mutating=False,
        check=lambda key, args: checks.check_batch(args.batch),
        items="batch",
        item_tokens=batch_tokens,
        merge=lambda parts: ops.ScoreResult(concatenate(part.totals for part in parts)),
    ),
""",
        )
    ],
    "services/worker/phaseloom/worker/backends/noop.py": [
        (
            "\n    def check_optim_step(",
            '''
    def check_score(self, args: Any) -> None:
        """Everything is accepted: nothing is computed."""

    def score(self, args: Any) -> Any:
        from phaseloom.common.contract.operations import ScoreResult

        return ScoreResult([-float(length(datum.targets)) for datum in args.batch])

    def check_optim_step(''',
        )
    ],
    "libs/client/phaseloom/client/job.py": [
        (
            "\n    @checked\n    def optim_step(\n",
            '''
    @checked
    def score(
        self, batch: Iterable[ops.Datum], *, after: Dependencies = (), timeout_s: float = 0.0
    ) -> Any:
        """The log-probability of each sample's targets together."""
        from phaseloom.common.contract.operations import Score, ScoreResult

        parts = [Score(part) for part in split_batch(batch)]
        return self._submit(parts, after, ScoreResult, timeout_s)

    @checked
    def optim_step(
''',
        ),
    ],
}
"""File → (the place, what stands there afterwards)."""


def add(root: Path) -> None:
    """Write `score` into the tree at `root`."""
    for name, changes in ADDED.items():
        text = (root / name).read_text()
        for place, written in changes:
            assert text.count(place) == 1, (name, place)
            text = text.replace(place, written)
        (root / name).write_text(text)


SIZES = [*range(1, 9), 500_000, 500_000, 500_000]
"""Tokens of each sample: too many together for one message."""


class Kept:
    """An outbox that sends nothing."""

    def __init__(self) -> None:
        self.parts: list[OperationPart] = []

    def check_room(self, *sizes: int) -> None:
        """There is room."""

    def submit(self, part: OperationPart) -> None:
        self.parts.append(part)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Nothing runs in the background here."""
        raise AssertionError(work)


def submitted() -> tuple[Awaitable[Any], list[OperationPart]]:
    """The controller submits it; it is cut by samples where one message cannot hold them."""
    outbox = Kept()
    policy: Any = Deployment(JobKey("acme", "sums"), "policy", 1, 1, cast("Outbox", outbox))
    handle = policy.score([Datum([1] * size, [2] * size) for size in SIZES])
    assert len(outbox.parts) == 3
    return handle, outbox.parts


def routed(parts: list[OperationPart]) -> list[Operation]:
    """A router lets it pass and says how large it is; an unsound one is refused by its field."""
    operations = [validate.read(part.key, part.payload, MSGPACK) for part in parts]
    headers = [validate.queued(p.key, o) for p, o in zip(parts, operations, strict=True)]
    assert {header.kind for header in headers} == {"score"}
    assert sum(header.size for header in headers) == sum(SIZES)
    bad = b'{"id": "a", "session": 1, "args": {"type": "score", "batch": []}}'
    with pytest.raises(CallerError) as raised:
        validate.read(parts[0].key, bad, JSON)
    assert raised.value.info.field == "args.batch"
    assert validate.refused(parts[0].key, bad, JSON, raised.value.info).kind == "score"
    return operations


def scheduled() -> None:
    """The scheduler runs it like any that reads: a rebuild does not run it again."""
    contention = Contention(config_of("fcfs"), [Loop("sums", [Call("score", 1.0)], 3)]).run()
    assert len(contention.runs) == 3
    assert not contention.core.state.deployments["t.sums.policy"].durability.history


def ran(operations: list[Operation]) -> Iterator[Result]:
    """Two replicas do a share each, and the leader merges what they made."""
    spec = DeploymentSpec("policy", "train", "noop", ModelSpec({}), layout=Layout(dp=2))
    key, factory = DeploymentKey("acme", "sums", "policy"), backend_factory("noop")
    ranks = [
        Executor(
            RankConfig("", key, 1, spec, "n0", 0, "", "", rank=rank, num_ranks=2),
            factory(spec, Heap(factory.plan(spec).heap_bytes)),
        )
        for rank in range(2)
    ]
    for operation in operations:
        ranks[0].check(operation.args)
        shares = [rank.compute(operation.args) for rank in ranks]
        yield ranks[0].finish(operation.args, shares)


async def main() -> None:
    handle, parts = submitted()
    operations = routed(parts)
    scheduled()
    for part, result in zip(parts, ran(operations), strict=True):
        part.outcome.set_result(result)
    answer = await handle
    assert answer.totals == [-float(size) for size in SIZES]
    sys.stdout.write("scored\n")


if __name__ == "__main__":
    asyncio.run(main())
