"""When operations became ready, in the order of a log."""

from __future__ import annotations

from collections.abc import Iterator

from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.events import JobFinished, OperationFinished, QueuedOperation
from phaseloom.common.contract.ids import JobKey, OperationKey
from phaseloom.common.contract.operations import After, Outcome
from phaseloom.common.observability.readiness import Readiness

KINDS = {"sampler": "generate", "policy": "forward_backward"}


class Log:
    """Speaks of operations as `policy.3`; answers with what became ready."""

    def __init__(self) -> None:
        self.readiness = Readiness()

    def queue(
        self, name: str, *after: str, kind: str = "", error: ErrorInfo | None = None
    ) -> list[str]:
        key = self._key(name)
        named = [After(d, int(s)) for d, s in (a.split(".") for a in after)]
        operation = QueuedOperation(
            key, name, kind or KINDS[key.deployment], after=named, error=error
        )
        return self._names(self.readiness.step(operation))

    def finish(self, name: str, kind: str = "") -> list[str]:
        key = self._key(name)
        event = OperationFinished(
            key, kind or KINDS[key.deployment], Outcome.COMPLETED, 1, 1, 0.0, 0.0
        )
        return self._names(self.readiness.step(event))

    @staticmethod
    def _key(name: str) -> OperationKey:
        deployment, slot = name.split(".")
        return OperationKey("acme", "sums", deployment, slot)

    @staticmethod
    def _names(keys: list[OperationKey]) -> list[str]:
        return [f"{key.deployment}.{key.slot}" for key in keys]


def test_mutating_operations_become_ready_one_after_the_other() -> None:
    log = Log()
    assert log.queue("policy.1") == ["policy.1"]
    assert log.queue("policy.2") == []
    assert log.queue("policy.3") == []
    assert log.finish("policy.1") == ["policy.2"]
    assert log.finish("policy.2") == ["policy.3"]


def test_reading_operations_between_two_mutating_ones_are_ready_together() -> None:
    log = Log()
    assert log.queue("sampler.1", kind="sync_weights") == ["sampler.1"]
    assert log.queue("sampler.2") == []
    assert log.queue("sampler.3") == []
    assert log.queue("sampler.4", kind="sync_weights") == []
    assert log.finish("sampler.1", "sync_weights") == ["sampler.2", "sampler.3"]
    assert log.finish("sampler.3") == []
    assert log.finish("sampler.2") == ["sampler.4"]


def test_gap_holds_back_what_overtook_it() -> None:
    """Two router replicas: the later operation arrives first."""
    log = Log()
    assert log.queue("policy.2") == []
    assert log.queue("policy.1") == ["policy.1"]
    assert log.finish("policy.1") == ["policy.2"]


def test_after_holds_until_the_named_operation_is_done() -> None:
    log = Log()
    assert log.queue("sampler.1", "policy.1") == []
    assert log.queue("policy.1") == ["policy.1"]
    assert log.finish("policy.1") == ["sampler.1"]


def test_unordered_operation_is_ready_at_once_and_blocks_nobody() -> None:
    log = Log()
    assert log.queue("policy.1") == ["policy.1"]
    assert log.queue("policy.rA1", kind="forward") == ["policy.rA1"]
    assert log.queue("policy.2") == []
    assert log.finish("policy.1") == ["policy.2"]


def test_refused_operation_is_no_gap() -> None:
    log = Log()
    assert log.queue("policy.1", error=ErrorInfo(Code.INVALID_ARGUMENT, "bad")) == []
    assert log.queue("policy.2") == ["policy.2"]


def test_first_entry_for_a_key_decides() -> None:
    log = Log()
    assert log.queue("policy.1") == ["policy.1"]
    assert log.queue("policy.1") == []
    assert log.finish("policy.1") == []
    assert log.queue("policy.1") == []


def test_log_that_begins_in_the_middle_is_caught_up_with() -> None:
    log = Log()
    assert log.queue("policy.41") == []
    assert log.queue("reference.rX", "policy.40", kind="forward") == []
    assert log.finish("policy.40") == ["policy.41", "reference.rX"]
    assert log.queue("policy.42") == []
    assert log.finish("policy.41") == ["policy.42"]


def test_finished_job_leaves_nothing_behind() -> None:
    log = Log()
    log.queue("policy.1")
    log.queue("policy.2")
    log.readiness.step(JobFinished(JobKey("acme", "sums"), "r1"))
    assert log.queue("policy.1") == ["policy.1"]


def test_cost_of_an_event_does_not_grow_with_the_operations_behind_a_gap() -> None:
    log = Log()
    number_behind = 2000
    for seq in range(2, number_behind):
        assert log.queue(f"sampler.{seq}") == []

    looks = _Counting(log.readiness)
    assert log.queue(f"sampler.{number_behind}") == []
    assert looks.count < 10

    assert len(log.queue("sampler.1")) == number_behind
    assert looks.count < 3 * number_behind


def test_operations_that_await_several_others_are_ready_after_the_last() -> None:
    log = Log()
    assert log.queue("policy.1", "sampler.1", "sampler.2") == []
    assert log.queue("sampler.1") == ["sampler.1"]
    assert log.queue("sampler.2") == ["sampler.2"]
    assert log.finish("sampler.2") == []
    assert log.finish("sampler.1") == ["policy.1"]


class _Counting:
    """Counts how often any operation is examined."""

    def __init__(self, readiness: Readiness) -> None:
        self.count = 0
        deployments = readiness._deployments.values()
        for deployment in deployments:
            deployment.blocked = _CountingDict(deployment.blocked, self)


class _CountingDict(dict[int, QueuedOperation]):
    def __init__(self, items: dict[int, QueuedOperation], counter: _Counting) -> None:
        super().__init__(items)
        self._counter = counter

    def __contains__(self, key: object) -> bool:
        self._counter.count += 1
        return super().__contains__(key)

    def __iter__(self) -> Iterator[int]:
        for key in super().__iter__():
            self._counter.count += 1
            yield key
