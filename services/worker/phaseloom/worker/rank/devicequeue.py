"""The queue in front of a WPG's devices. It runs one backend call at a time, in order of arrival.

Several reading operations can wait, because the scheduler permits them concurrently.
- If the deployment shares batches, one backend call runs all `generate`s that wait when the devices
  become free. On one replica, a `generate` that arrives during the call joins it if nothing else is
  waiting. Each operation ends when its own samples are done.
- If the backend reads with one version of the weights at a time, only operations that name the same
  version share a call.
- Consecutive `forward`s go to the device thread together, each as a separate backend call.

A cancelled operation that has not started ends immediately; a running `generate` stops between two
tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from phaseloom.common.contract.errors import PhaseloomError
from phaseloom.common.contract.events import StepRun, TailGathered
from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.kinds import KINDS
from phaseloom.common.contract.operations import (
    DrawnTokens,
    Generate,
    GenerateResult,
    Result,
)
from phaseloom.common.contract.specs import Batching
from phaseloom.common.contract.state_rank import Failed
from phaseloom.common.tensors.layouts import coordinates, reporting_ranks
from phaseloom.worker.core.permits import Cancelled
from phaseloom.worker.rank.calls import Call, Clocks, requests_of, share_of, share_of_rest
from phaseloom.worker.rank.executor import Executor, NotNow, Refused, not_had
from phaseloom.worker.rank.group import Ranks
from phaseloom.worker.rank.tails import Reached, Rest, Tail, rest_of
from phaseloom.worker.rank.watches import CallsWatch, LeaderWatch, ShareWatch
from phaseloom.worker.rank.wire import (
    Generated,
    PartWritten,
    RunShare,
    ShareResult,
    StopShare,
    TailReached,
)

MAX_SHARED_BYTES = 8 * 1024 * 1024
"""Maximum total size of the payloads in one call."""


class DeviceQueue:
    """The operations that wait for a WPG's devices, and those that run there."""

    def __init__(self, executor: Executor, ranks: Ranks, batching: Batching) -> None:
        self._executor = executor
        self._ranks = ranks
        self._is_shared = batching is Batching.SHARED
        self._waiting: deque[Call] = deque()
        self._has_waiting = asyncio.Event()
        self._running: list[Call] = []
        self._clocks = Clocks()
        self._joining: deque[Call] | None = None
        """Calls that the running `generate` may pick up in the device thread; None: no call may
        join."""
        self._reached: Reached | None = None
        """The ranks of the running call that have only tails left; None unless its tail may be
        gathered."""
        self.gathered: asyncio.Queue[TailGathered] = asyncio.Queue()
        """Events for the decision log about tails that are being gathered."""
        self.drawn: asyncio.Queue[tuple[Call, list[DrawnTokens]]] = asyncio.Queue()
        """New tokens of streaming operations, for their controllers."""
        self._rests: dict[OperationKey, Rest] = {}
        """Operation → its remaining samples, while its tail runs on fewer ranks."""
        self._cancelled = Cancelled()
        self._loop = asyncio.get_running_loop()

    @property
    def running(self) -> Iterable[Call]:
        return self._running

    async def run(self, call: Call) -> Result | None:
        """Run an operation of any kind except those that move state.

        Returns: its result; None: it was cancelled.
        Raises:  Refused: nothing happened. Any other error: it failed half-way.
        """
        if call.is_reading and call.key in self._cancelled:
            return None
        can_join = self._joining is not None and call.kind.shares_calls and not self._waiting
        if can_join and all(self._reads_alike(call, each) for each in self._running):
            self._running.append(call)
            assert self._joining is not None
            self._joining.append(call)
        else:
            self._waiting.append(call)
            self._has_waiting.set()
        return await call.ended

    def cancel(self, key: OperationKey, *, keeps_partial: bool = False) -> None:
        """Cancel a reading operation, waiting or running. Harmless if it has ended.

        With `keeps_partial`, a running `generate` completes with the tokens that it has.
        """
        self._cancelled.add(key, keeps_partial=keeps_partial)
        for call in [c for c in self._waiting if c.key == key and c.is_reading]:
            self._waiting.remove(call)
            call.ended.set_result(None)
        for call in self._running:
            if call.key == key and not call.has_begun and not call.ended.done():
                call.ended.set_result(None)

    def give_up(self) -> None:
        """Stop a running `generate` between two tokens, because nobody waits for results any
        longer."""
        self._cancelled.add_all()

    def is_cancelled(self, key: OperationKey) -> bool:
        """Whether the operation has been cancelled."""
        return key in self._cancelled

    async def serve(self) -> None:
        """Run incoming operations until cancelled."""
        while True:
            await self._has_waiting.wait()
            while self._waiting:
                await self._run_next()
            self._has_waiting.clear()

    async def _run_next(self) -> None:
        """Run the next calls.

        Keeps no reference to the calls afterwards, because the weights that they have read occupy
        host memory.
        """
        calls = self._next()
        self._running = list(calls)
        try:
            await self._run(calls)
        finally:
            self._running = []

    def _next(self) -> list[Call]:
        first = self._waiting.popleft()
        calls = [first]
        if self._is_shared and first.kind.shares_calls:
            num_bytes = len(first.payload.payload)
            for call in list(self._waiting):
                num_bytes += len(call.payload.payload)
                is_alike = call.kind is first.kind and self._reads_alike(call, first)
                if is_alike and num_bytes <= MAX_SHARED_BYTES:
                    self._waiting.remove(call)
                    calls.append(call)
        if self._is_in_a_row(first):
            while self._waiting and self._is_in_a_row(self._waiting[0]):
                calls.append(self._waiting.popleft())
        return calls

    def _reads_alike(self, one: Call, other: Call) -> bool:
        """Whether one backend call can use the weights of both."""
        call_wide = self._executor.call_wide
        return call_wide(one.version) == call_wide(other.version)

    def _is_in_a_row(self, call: Call) -> bool:
        """Whether calls of this kind may run back to back in the device thread.

        Handing over each call separately takes longer than a short call runs.
        """
        return self._ranks.is_alone and call.is_reading and not call.kind.shares_calls

    async def _run_in_a_row(self, calls: list[Call]) -> None:
        loop = asyncio.get_running_loop()

        def run() -> None:
            for call in calls:
                if call.ended.done():
                    continue  # cancelled
                self._clocks.begin(call)
                outcome: Result | Exception
                try:
                    outcome = self._executor.run(call.operation.args, call.version)
                except Exception as error:
                    outcome = error
                self._clocks.stop(call)
                loop.call_soon_threadsafe(call.end, outcome)

        await self._ranks.here(run)

    async def _run(self, calls: list[Call]) -> None:
        """Run calls together and complete each of them, even if an error occurs."""
        if self._is_in_a_row(calls[0]):
            await self._run_in_a_row(calls)
            return
        try:
            await self._prepare(calls)
        except Exception as why:
            for call in calls:
                call.end(why)
            return
        if calls[0].kind.shares_calls and self._executor.is_one_replica:
            await self._generate_on_one(calls)
            return
        for call in calls:
            self._clocks.begin(call)
        outcomes: list[Result | Exception | None]
        try:
            if calls[0].kind.shares_calls:
                outcomes = await self._generate(calls)
            else:
                outcomes = [await self._compute(calls[0])]
        except Exception as error:
            outcomes = [error] * len(calls)
        for call, outcome in zip(calls, outcomes, strict=True):
            self._clocks.stop(call)
            call.end(outcome)

    async def _prepare(self, calls: list[Call]) -> None:
        """Have the other ranks read the named weights before any rank starts.

        The backends may wait for one another, so a rank that starts without the weights would block
        all.
        Raises: NotNow, Refused: a rank could not read them, and nothing has changed. Broken,
                 GroupLost.
        """
        if self._ranks.is_alone or not self._executor.call_wide(calls[0].version):
            return
        share = replace(share_of(calls[:1]), prepares=True)
        _, others = await self._ranks.together(asyncio.sleep(0), share)
        try:
            _check_had(result for results in others for result in results)
        except (NotNow, Refused):
            # Let the other ranks drop what they have read, which frees the memory.
            await self._ranks.together(asyncio.sleep(0), replace(share, gives_up=True))
            raise

    async def _compute(self, call: Call) -> Result:
        args = call.operation.args
        if self._ranks.is_alone:
            return await self._ranks.here(lambda: self._executor.run(args, call.version))
        await self._ranks.here(lambda: self._executor.check(args))
        own, others = await self._ranks.everywhere(
            lambda: self._executor.compute(args, call.version), share_of([call])
        )
        known = [result for (result,) in others]
        _check_had(known)
        no_results = Generated | PartWritten | Failed | None
        shares = [own, *(r for r in known if not isinstance(r, no_results))]
        return await self._ranks.here(lambda: self._executor.finish(args, shares))

    async def _generate_on_one(self, calls: list[Call]) -> None:
        """Run `generate` operations together on one replica, including those that join them.

        If the replica has several ranks, all of them compute the same results, and the leader's
        backend announces joining requests to the others.
        """
        loop = asyncio.get_running_loop()
        joining: deque[Call] = deque()

        def end(call: Call, outcome: Result | Exception | None) -> None:
            self._clocks.stop(call)
            loop.call_soon_threadsafe(call.end, outcome)

        def begin(some: Iterable[Call]) -> list[Call]:
            good = []
            for call in some:
                if call.ended.done():
                    continue  # cancelled
                self._clocks.begin(call)
                refused = self._refusal(call)
                if refused is None:
                    good.append(call)
                else:
                    end(call, refused)
            return good

        def joined() -> list[Call]:
            return begin(joining.popleft() for _ in range(len(joining)))

        watch = CallsWatch(self._cancelled, joined, end, self.tell_drawn)

        def run() -> None:
            if watch.calls:
                with self._executor.reading(watch.calls[0].version):
                    self._executor.backend.generate(requests_of(watch.calls), watch)

        def begin_and_run() -> None:
            watch.take(begin(calls))
            run()

        self._joining = joining if self._is_shared else None
        try:
            if self._ranks.is_alone:
                await self._ranks.here(begin_and_run)
            else:
                # The other ranks receive only requests that the leader has validated.
                watch.take(await self._ranks.here(lambda: begin(calls)))
                if watch.calls:
                    await self._ranks.everywhere(run, share_of(watch.calls))
        except Exception as error:
            for call in watch.calls:
                end(call, error)
        finally:
            self._joining = None
            left = [call for call in joining if not call.ended.done()]
            self._waiting.extendleft(reversed(left))

    async def _generate(self, calls: list[Call]) -> list[Result | Exception | None]:
        """Run `generate` operations together on several ranks.

        Returns: a result, a refusal or None for each. An invalid operation does not affect the
                 others.
        """
        refused = await self._ranks.here(lambda: {call: self._refusal(call) for call in calls})
        good = [call for call in calls if refused[call] is None]
        if not good:
            return [refused[call] for call in calls]
        watch = LeaderWatch(self._cancelled, good, self.tell_drawn)
        if good[0].permit.tail_on and not self._executor.call_wide(good[0].version):
            merged = await self._generate_and_gather(good, watch)
        else:
            merged = await self._on_all(good, watch)
        results = dict(zip(good, merged, strict=True))
        return [refused[call] or results[call] for call in calls]

    async def _on_all(
        self, calls: list[Call], watch: LeaderWatch, tail_share: float = 0.0
    ) -> list[Result | Exception | None]:
        """Run `generate` operations on all ranks that their permit names.

        Args: tail_share: as in `RunShare`.
        """
        replicas = tuple(calls[0].permit.ranks)
        share = share_of(calls, replicas=replicas, tail_share=tail_share)
        shares = await self._shares(calls, requests_of(calls), share, watch)

        def merged(call: Call, results: list[ShareResult]) -> Result | Exception | None:
            try:
                _check_had(results)
            except (NotNow, Refused) as why:
                return why
            whole = [result for result in results if isinstance(result, GenerateResult)]
            if len(whole) < len(results):
                return None
            if replicas:
                return _merged(whole)
            return self._executor.finish(call.operation.args, whole)

        return await self._ranks.here(
            lambda: [merged(call, results) for call, *results in zip(calls, *shares, strict=True)]
        )

    async def _shares(
        self, calls: list[Call], requests: list[Generate], share: RunShare, watch: ShareWatch
    ) -> list[list[ShareResult]]:
        """Run requests over the ranks of a share and record the steps in their calls.

        Returns: [rank of the share][request].
        """
        takes_part = not share.replicas or self._executor.settings.rank in share.replicas
        part = self._executor.part(requests, share.replicas) if takes_part else []
        if takes_part:
            watch.first_prompts = self._executor.first_prompts(requests, share.replicas)
        reached, loop = self._reached, asyncio.get_running_loop()
        if share.tail_share and reached is not None and takes_part:

            def tell() -> None:
                loop.call_soon_threadsafe(reached.add, self._executor.settings.rank)

            watch.tail = Tail(part, share.tail_share, tell)

        def generate() -> None:
            with self._executor.reading(watch.call_wide):
                self._executor.backend.generate(part, watch)

        async def own() -> None:
            if takes_part:
                await self._ranks.here(generate)

        _, others = await self._ranks.together(own(), share)
        ranks = [*share.replicas] or [*range(self._ranks.num_ranks)]
        own_rank = self._executor.settings.rank
        for rank, row in zip((r for r in ranks if r != own_rank), others, strict=True):
            for i, result in enumerate(row):
                if isinstance(result, Generated):
                    self._note_steps(calls[i], rank, result.steps)
                    row[i] = result.result
        if not takes_part:
            return others
        for call, record in zip(calls, watch.records, strict=True):
            self._note_steps(call, own_rank, record.runs)
        return [[*watch.results], *others]

    def _note_steps(self, call: Call, rank: int, runs: list[StepRun]) -> None:
        layout = self._executor.settings.spec.layout
        if rank in reporting_ranks(layout):
            call.note_steps(coordinates(rank, layout).dp, runs)

    async def _generate_and_gather(
        self, calls: list[Call], watch: LeaderWatch
    ) -> list[Result | Exception | None]:
        """Run `generate` operations on all ranks until only the tail remains, then run the tail on
        fewer.

        See `tails`.
        """
        spec = self._executor.settings.spec
        num_ranks = len(calls[0].permit.ranks) or self._ranks.num_ranks
        self._reached = reached = Reached(calls[0].key, num_ranks)
        stopping = asyncio.ensure_future(self._stop_at_tail(reached, watch))
        try:
            results = await self._on_all(calls, watch, spec.tail_share)
        finally:
            self._reached = None
            if not reached.is_stopping:
                stopping.cancel()
            # Wait for it: a rank must not receive StopShare after it has started the tail.
            await asyncio.wait([stopping])
        rests: dict[int, Rest] = {}
        for i, (call, result) in enumerate(zip(calls, results, strict=True)):
            is_wanted = reached.is_stopping and call.key not in self._cancelled
            if is_wanted and isinstance(result, GenerateResult):
                rest = rest_of(requests_of([call])[0], result)
                if rest is not None:
                    rests[i] = rest
        if rests:
            ends = await self._gathered([calls[i] for i in rests], [*rests.values()])
            for i, result in zip(rests, ends, strict=True):
                results[i] = result
        return results

    async def _stop_at_tail(self, reached: Reached, watch: LeaderWatch) -> None:
        """Stop all ranks once each has only its tail left, unless other operations are waiting."""
        await reached.by_all()
        if self._waiting:
            return
        reached.is_stopping = True
        watch.stop()
        with contextlib.suppress(PhaseloomError):  # the call itself fails if a rank is lost
            await self._ranks.agent.call(StopShare(reached.operation))

    async def _gathered(
        self, calls: list[Call], rests: list[Rest]
    ) -> list[Result | Exception | None]:
        """Run the remaining samples of operations on the ranks that their permit names for the
        tail."""
        permit = calls[0].permit
        replicas = tuple(sorted(permit.tail_on))
        freed = [rank for rank in range(self._ranks.num_ranks) if rank not in replicas]
        running = [call.key for call in self._running]
        self.gathered.put_nowait(TailGathered(running, permit.epoch, permit.incarnation, freed))
        requests = [rest.args for rest in rests]
        watch = ShareWatch(self._cancelled, [call.key for call in calls], self.tell_drawn)
        watch.versions = [call.version for call in calls]
        self._rests = {call.key: rest for call, rest in zip(calls, rests, strict=True)}
        try:
            share = share_of_rest(calls, requests, replicas)
            shares = await self._shares(calls, requests, share, watch)
        finally:
            self._rests = {}

        def completed(rest: Rest, results: list[ShareResult]) -> Result | Exception | None:
            try:
                _check_had(results)
            except (NotNow, Refused) as why:
                return why
            whole = [result for result in results if isinstance(result, GenerateResult)]
            return rest.completed(_merged(whole)) if len(whole) == len(results) else None

        return await self._ranks.here(
            lambda: [
                completed(rest, results) for rest, *results in zip(rests, *shares, strict=True)
            ]
        )

    def tail_reached(self, told: TailReached) -> None:
        """Record that a rank has only the tail of its share of the running call left."""
        if self._reached is not None and self._reached.operation == told.operation:
            self._reached.add(told.rank)

    def tell_drawn(self, key: OperationKey, drawn: list[DrawnTokens]) -> None:
        """Forward new tokens of a running call from the device thread to the event loop."""
        self._loop.call_soon_threadsafe(self.tokens_drawn, key, drawn)

    def tokens_drawn(self, key: OperationKey, drawn: list[DrawnTokens]) -> None:
        """Queue new tokens of a running call, from this rank or another one."""
        call = next((call for call in self._running if call.key == key), None)
        if call is None:
            return  # the call has ended, and its result includes the tokens
        rest = self._rests.get(key)
        self.drawn.put_nowait((call, [rest.placed(each) for each in drawn] if rest else drawn))

    def _refusal(self, call: Call) -> Refused | None:
        try:
            self._executor.check(call.operation.args)
        except Refused as why:
            return why
        return None


def _merged(parts: Sequence[GenerateResult]) -> GenerateResult:
    """Merge the parts of a `generate` that was split over replicas of one rank each."""
    merge = KINDS["generate"].merge
    assert merge is not None
    whole: GenerateResult = merge(parts)
    return whole


def _check_had(results: Iterable[ShareResult]) -> None:
    """Check that every rank could read the named weights. Raises: NotNow, Refused: one could
    not."""
    for result in results:
        if isinstance(result, Failed):
            raise not_had(result.error)
