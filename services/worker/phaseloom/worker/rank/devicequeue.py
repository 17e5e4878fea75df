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
from phaseloom.worker.core.permits import CancelledOperations
from phaseloom.worker.rank.calls import (
    Clocks,
    DeviceCall,
    requests_of,
    share_of,
    share_of_remainder,
)
from phaseloom.worker.rank.executor import (
    Executor,
    OperationDeferred,
    OperationRefused,
    unavailable_error,
)
from phaseloom.worker.rank.group import WpgRanks
from phaseloom.worker.rank.tails import Remainder, TailBarrier, TailMonitor, remainder_of
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

    def __init__(self, executor: Executor, ranks: WpgRanks, batching: Batching) -> None:
        self._executor = executor
        self._ranks = ranks
        self._is_shared = batching is Batching.SHARED
        self._waiting: deque[DeviceCall] = deque()
        self._has_waiting = asyncio.Event()
        self._running: list[DeviceCall] = []
        self._clocks = Clocks()
        self._joining: deque[DeviceCall] | None = None
        """Calls that the running `generate` may pick up in the device thread; None: no call may
        join."""
        self._tail_barrier: TailBarrier | None = None
        """The ranks of the running call that have only tails left; None unless its tail may be
        gathered."""
        self.gathered_tails: asyncio.Queue[TailGathered] = asyncio.Queue()
        """Events for the decision log about tails that are being gathered."""
        self.new_tokens: asyncio.Queue[tuple[DeviceCall, list[DrawnTokens]]] = asyncio.Queue()
        """New tokens of streaming operations, for their controllers."""
        self._remainders: dict[OperationKey, Remainder] = {}
        """Operation → its remaining samples, while its tail runs on fewer ranks."""
        self._cancelled = CancelledOperations()
        self._loop = asyncio.get_running_loop()

    @property
    def running(self) -> Iterable[DeviceCall]:
        return self._running

    async def run(self, call: DeviceCall) -> Result | None:
        """Run an operation of any kind except those that move state.

        Returns: its result; None: it was cancelled.
        Raises:  OperationRefused: nothing happened. Any other error: it failed half-way.
        """
        if call.is_reading and call.key in self._cancelled:
            return None
        # Joining must not overtake a waiting call, so it requires an empty queue.
        can_join = self._joining is not None and call.kind.shares_calls and not self._waiting
        if can_join and all(self._can_share_call(call, running) for running in self._running):
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
            if call.key == key and not call.has_started and not call.ended.done():
                call.ended.set_result(None)

    def abandon_all(self) -> None:
        """Stop a running `generate` between two tokens, because nobody waits for the
        results."""
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

    def _next(self) -> list[DeviceCall]:
        first = self._waiting.popleft()
        calls = [first]
        if self._is_shared and first.kind.shares_calls:
            num_bytes = len(first.payload.payload)
            for call in list(self._waiting):
                num_bytes += len(call.payload.payload)
                is_alike = call.kind is first.kind and self._can_share_call(call, first)
                if is_alike and num_bytes <= MAX_SHARED_BYTES:
                    self._waiting.remove(call)
                    calls.append(call)
        if self._runs_back_to_back(first):
            while self._waiting and self._runs_back_to_back(self._waiting[0]):
                calls.append(self._waiting.popleft())
        return calls

    def _can_share_call(self, first: DeviceCall, second: DeviceCall) -> bool:
        """Whether one backend call can use the weights of both."""
        call_weights_name = self._executor.call_weights_name
        return call_weights_name(first.version) == call_weights_name(second.version)

    def _runs_back_to_back(self, call: DeviceCall) -> bool:
        """Whether calls of this kind may run back to back in the device thread.

        Handing over each call separately takes longer than a short call runs.
        """
        return self._ranks.is_alone and call.is_reading and not call.kind.shares_calls

    async def _run_back_to_back(self, calls: list[DeviceCall]) -> None:
        loop = asyncio.get_running_loop()

        def run() -> None:
            for call in calls:
                if call.ended.done():
                    continue  # cancelled
                self._clocks.start(call)
                outcome: Result | Exception
                try:
                    outcome = self._executor.run(call.operation.args, call.version)
                except Exception as error:
                    outcome = error
                self._clocks.stop(call)
                loop.call_soon_threadsafe(call.end, outcome)

        await self._ranks.on_device_thread(run)

    async def _run(self, calls: list[DeviceCall]) -> None:
        """Run calls together and complete each of them, even if an error occurs."""
        if self._runs_back_to_back(calls[0]):
            await self._run_back_to_back(calls)
            return
        try:
            await self._prepare(calls)
        except Exception as failure:
            for call in calls:
                call.end(failure)
            return
        if calls[0].kind.shares_calls and self._executor.is_one_replica:
            await self._generate_on_one(calls)
            return
        for call in calls:
            self._clocks.start(call)
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

    async def _prepare(self, calls: list[DeviceCall]) -> None:
        """Have the other ranks read the named weights before any rank starts.

        The backends may wait for one another, so a rank that starts without the weights would block
        all.
        Raises: OperationDeferred, OperationRefused: a rank could not read them, and nothing has
                changed. RanksDiverged, GroupLost.
        """
        if self._ranks.is_alone or not self._executor.call_weights_name(calls[0].version):
            return
        share = replace(share_of(calls[:1]), prepares=True)
        _, peer_results = await self._ranks.together(asyncio.sleep(0), share)
        try:
            _check_readable(result for results in peer_results for result in results)
        except (OperationDeferred, OperationRefused):
            # Let the other ranks drop what they have read, which frees the memory.
            await self._ranks.together(asyncio.sleep(0), replace(share, gives_up=True))
            raise

    async def _compute(self, call: DeviceCall) -> Result:
        args = call.operation.args
        if self._ranks.is_alone:
            return await self._ranks.on_device_thread(
                lambda: self._executor.run(args, call.version)
            )
        await self._ranks.on_device_thread(lambda: self._executor.check(args))
        local_result, peer_results = await self._ranks.on_all_ranks(
            lambda: self._executor.compute(args, call.version), share_of([call])
        )
        results = [result for (result,) in peer_results]
        _check_readable(results)
        no_results = Generated | PartWritten | Failed | None
        shares = [local_result, *(r for r in results if not isinstance(r, no_results))]
        return await self._ranks.on_device_thread(lambda: self._executor.finish(args, shares))

    async def _generate_on_one(self, calls: list[DeviceCall]) -> None:
        """Run `generate` operations as one batch on one replica, including operations that join
        while it runs.

        If the replica has several ranks, all of them compute the same results, and the leader's
        backend announces joining requests to the others.
        """
        loop = asyncio.get_running_loop()
        joining: deque[DeviceCall] = deque()

        def end(call: DeviceCall, outcome: Result | Exception | None) -> None:
            self._clocks.stop(call)
            loop.call_soon_threadsafe(call.end, outcome)

        def start(candidates: Iterable[DeviceCall]) -> list[DeviceCall]:
            accepted = []
            for call in candidates:
                if call.ended.done():
                    continue  # cancelled
                self._clocks.start(call)
                refused = self._refusal(call)
                if refused is None:
                    accepted.append(call)
                else:
                    end(call, refused)
            return accepted

        def joined() -> list[DeviceCall]:
            return start(joining.popleft() for _ in range(len(joining)))

        watch = CallsWatch(self._cancelled, joined, end, self.report_tokens)

        def run() -> None:
            if watch.calls:
                with self._executor.reading(watch.calls[0].version):
                    self._executor.backend.generate(requests_of(watch.calls), watch)

        def start_and_run() -> None:
            watch.add_calls(start(calls))
            run()

        self._joining = joining if self._is_shared else None
        try:
            if self._ranks.is_alone:
                await self._ranks.on_device_thread(start_and_run)
            else:
                # The other ranks receive only requests that the leader has validated.
                watch.add_calls(await self._ranks.on_device_thread(lambda: start(calls)))
                if watch.calls:
                    await self._ranks.on_all_ranks(run, share_of(watch.calls))
        except Exception as error:
            for call in watch.calls:
                end(call, error)
        finally:
            self._joining = None
            unstarted = [call for call in joining if not call.ended.done()]
            # Calls that did not join were the oldest waiting ones, so they stay at the front.
            self._waiting.extendleft(reversed(unstarted))

    async def _generate(self, calls: list[DeviceCall]) -> list[Result | Exception | None]:
        """Run `generate` operations together on several ranks.

        Returns: a result, a refusal or None for each. An invalid operation does not affect the
                 others.
        """
        refused = await self._ranks.on_device_thread(
            lambda: {call: self._refusal(call) for call in calls}
        )
        accepted = [call for call in calls if refused[call] is None]
        if not accepted:
            return [refused[call] for call in calls]
        watch = LeaderWatch(self._cancelled, accepted, self.report_tokens)
        if accepted[0].permit.tail_on and not self._executor.call_weights_name(accepted[0].version):
            merged = await self._generate_and_gather(accepted, watch)
        else:
            merged = await self._on_all(accepted, watch)
        results = dict(zip(accepted, merged, strict=True))
        return [refused[call] or results[call] for call in calls]

    async def _on_all(
        self, calls: list[DeviceCall], watch: LeaderWatch, tail_share: float = 0.0
    ) -> list[Result | Exception | None]:
        """Run `generate` operations on all ranks that their permit names.

        Args: tail_share: as in `RunShare`.
        """
        replicas = tuple(calls[0].permit.ranks)
        share = share_of(calls, replicas=replicas, tail_share=tail_share)
        shares = await self._shares(calls, requests_of(calls), share, watch)

        def merged(call: DeviceCall, results: list[ShareResult]) -> Result | Exception | None:
            try:
                _check_readable(results)
            except (OperationDeferred, OperationRefused) as error:
                return error
            parts = [result for result in results if isinstance(result, GenerateResult)]
            if len(parts) < len(results):
                return None
            if replicas:
                return _merge_replicas(parts)
            return self._executor.finish(call.operation.args, parts)

        return await self._ranks.on_device_thread(
            lambda: [merged(call, results) for call, *results in zip(calls, *shares, strict=True)]
        )

    async def _shares(
        self, calls: list[DeviceCall], requests: list[Generate], share: RunShare, watch: ShareWatch
    ) -> list[list[ShareResult]]:
        """Run requests over the ranks of a share and record the steps in their calls.

        Returns: [rank of the share][request].
        """
        participates = not share.replicas or self._executor.settings.rank in share.replicas
        part = self._executor.part(requests, share.replicas) if participates else []
        if participates:
            watch.first_prompts = self._executor.first_prompts(requests, share.replicas)
        barrier, loop = self._tail_barrier, asyncio.get_running_loop()
        if share.tail_share and barrier is not None and participates:

            def report() -> None:
                loop.call_soon_threadsafe(barrier.add, self._executor.settings.rank)

            watch.tail = TailMonitor(part, share.tail_share, report)

        def generate() -> None:
            with self._executor.reading(watch.call_version):
                self._executor.backend.generate(part, watch)

        async def run_local() -> None:
            if participates:
                await self._ranks.on_device_thread(generate)

        _, peer_shares = await self._ranks.together(run_local(), share)
        ranks = [*share.replicas] or [*range(self._ranks.num_ranks)]
        own_rank = self._executor.settings.rank
        for rank, row in zip((r for r in ranks if r != own_rank), peer_shares, strict=True):
            for i, result in enumerate(row):
                if isinstance(result, Generated):
                    self._record_steps(calls[i], rank, result.steps)
                    row[i] = result.result
        if not participates:
            return peer_shares
        for call, record in zip(calls, watch.records, strict=True):
            self._record_steps(call, own_rank, record.runs)
        return [[*watch.results], *peer_shares]

    def _record_steps(self, call: DeviceCall, rank: int, runs: list[StepRun]) -> None:
        layout = self._executor.settings.spec.layout
        if rank in reporting_ranks(layout):
            call.record_steps(coordinates(rank, layout).dp, runs)

    async def _generate_and_gather(
        self, calls: list[DeviceCall], watch: LeaderWatch
    ) -> list[Result | Exception | None]:
        """Run `generate` operations on all ranks until only the tail remains, then run the tail on
        fewer.

        See `tails`.
        """
        spec = self._executor.settings.spec
        num_ranks = len(calls[0].permit.ranks) or self._ranks.num_ranks
        self._tail_barrier = barrier = TailBarrier(calls[0].key, num_ranks)
        stopping = asyncio.ensure_future(self._stop_at_tail(barrier, watch))
        try:
            results = await self._on_all(calls, watch, spec.tail_share)
        finally:
            self._tail_barrier = None
            if not barrier.is_stopping:
                stopping.cancel()
            # Wait for it: a rank must not receive StopShare after it has started the tail.
            await asyncio.wait([stopping])
        remainders: dict[int, Remainder] = {}
        for i, (call, result) in enumerate(zip(calls, results, strict=True)):
            continues = barrier.is_stopping and call.key not in self._cancelled
            if continues and isinstance(result, GenerateResult):
                remainder = remainder_of(requests_of([call])[0], result)
                if remainder is not None:
                    remainders[i] = remainder
        if remainders:
            ends = await self._run_tail([calls[i] for i in remainders], [*remainders.values()])
            for i, result in zip(remainders, ends, strict=True):
                results[i] = result
        return results

    async def _stop_at_tail(self, barrier: TailBarrier, watch: LeaderWatch) -> None:
        """Stop all ranks once each has only its tail left, unless other operations are waiting."""
        await barrier.wait_for_all()
        if self._waiting:
            return
        barrier.is_stopping = True
        watch.stop()
        with contextlib.suppress(PhaseloomError):  # the call itself fails if a rank is lost
            await self._ranks.agent.call(StopShare(barrier.operation))

    async def _run_tail(
        self, calls: list[DeviceCall], remainders: list[Remainder]
    ) -> list[Result | Exception | None]:
        permit = calls[0].permit
        replicas = tuple(sorted(permit.tail_on))
        freed = [rank for rank in range(self._ranks.num_ranks) if rank not in replicas]
        running = [call.key for call in self._running]
        self.gathered_tails.put_nowait(
            TailGathered(running, permit.epoch, permit.incarnation, freed)
        )
        requests = [remainder.args for remainder in remainders]
        watch = ShareWatch(self._cancelled, [call.key for call in calls], self.report_tokens)
        watch.versions = [call.version for call in calls]
        self._remainders = {
            call.key: remainder for call, remainder in zip(calls, remainders, strict=True)
        }
        try:
            share = share_of_remainder(calls, requests, replicas)
            shares = await self._shares(calls, requests, share, watch)
        finally:
            self._remainders = {}

        def completed(
            remainder: Remainder, results: list[ShareResult]
        ) -> Result | Exception | None:
            try:
                _check_readable(results)
            except (OperationDeferred, OperationRefused) as error:
                return error
            parts = [result for result in results if isinstance(result, GenerateResult)]
            return (
                remainder.complete_with(_merge_replicas(parts))
                if len(parts) == len(results)
                else None
            )

        return await self._ranks.on_device_thread(
            lambda: [
                completed(remainder, results)
                for remainder, *results in zip(remainders, *shares, strict=True)
            ]
        )

    def tail_reached(self, message: TailReached) -> None:
        """Record that a rank has only the tail of its share of the running call left."""
        if self._tail_barrier is not None and self._tail_barrier.operation == message.operation:
            self._tail_barrier.add(message.rank)

    def report_tokens(self, key: OperationKey, tokens: list[DrawnTokens]) -> None:
        """Forward new tokens of a running call from the device thread to the event loop."""
        self._loop.call_soon_threadsafe(self.queue_tokens, key, tokens)

    def queue_tokens(self, key: OperationKey, tokens: list[DrawnTokens]) -> None:
        """Queue new tokens of a running call, from this rank or another one."""
        call = next((call for call in self._running if call.key == key), None)
        if call is None:
            return  # the call has ended, and its result includes the tokens
        remainder = self._remainders.get(key)
        self.new_tokens.put_nowait(
            (call, [remainder.with_position(entry) for entry in tokens] if remainder else tokens)
        )

    def _refusal(self, call: DeviceCall) -> OperationRefused | None:
        try:
            self._executor.check(call.operation.args)
        except OperationRefused as error:
            return error
        return None


def _merge_replicas(parts: Sequence[GenerateResult]) -> GenerateResult:
    """Merge the parts of a `generate` that was split over replicas of one rank each."""
    merge = KINDS["generate"].merge
    assert merge is not None
    merged: GenerateResult = merge(parts)
    return merged


def _check_readable(results: Iterable[ShareResult]) -> None:
    """Check that every rank could read the named weights.

    Raises: OperationDeferred, OperationRefused: one could not.
    """
    for result in results:
        if isinstance(result, Failed):
            raise unavailable_error(result.error)
