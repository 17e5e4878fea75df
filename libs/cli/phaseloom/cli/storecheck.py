"""Checks the store of a run before the mesh starts, and recovers from lost messages.

A NATS server starts with any content of its files. Without reporting it, the server drops a damaged
block, skips a damaged entry, or continues from an older copy. Other records show what the store
must contain:

- The entries of the decision log are numbered without gaps.
- The scheduler's snapshot names a log entry.
- Each node records the end of the log.
- The run directory records the end of every stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from pathlib import Path

import msgspec
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.api import StorageType
from nats.js.errors import NotFoundError

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.streams import SCHED, Bucket
from phaseloom.common.process.files import replace_file
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.decisionlog import LogExtent, log_end_lost
from phaseloom.common.transport.keys import Conflict
from phaseloom.common.transport.logmark import read_mark
from phaseloom.common.transport.retry import until_done
from phaseloom.scheduler.snapshots import Snapshots

log = logging.getLogger(__name__)

MARKS = "store-marks.json"
"""Name of the file in a run directory that records the newest sequence number of each stream."""
_KEEP_EVERY_S = 1.0
_LAG_PAUSE_S = 0.2
_SESSIONS_SKIPPED = 2**20
"""More sessions than any job can have opened since an older copy of the store was made."""


class StoreMarks:
    """The newest sequence number of each stream of a run, recorded on disk next to the store.

    A mark may be a second older than its stream, but is never ahead of it.
    """

    def __init__(self, file: Path) -> None:
        """Raises: ResourceError: DATA_LOSS: the file exists but cannot be read."""
        self._file = file
        self._marks: dict[str, int] = {}
        if file.is_file():
            try:
                self._marks = msgspec.json.decode(file.read_bytes(), type=dict[str, int])
            except msgspec.DecodeError as error:
                raise ResourceError(
                    f"{file} is damaged: {error}",
                    code=Code.DATA_LOSS,
                    remedy="if the NATS store is the right one, remove this file: the mesh writes "
                    "a new one",
                ) from error

    async def check(self, bus: Bus) -> None:
        """Compare the streams with their marks, and advance the marks.

        Raises: ResourceError: DATA_LOSS: a stream has lost its newest messages.
        """
        # A follower may answer with older numbers for this long.
        sure_at_s = time.monotonic() + bus.lag_s
        while True:
            ends = await self._ends(bus)
            # The decision log comes first, because its error says how many decisions are lost.
            in_order = sorted(self._marks.items(), key=lambda item: item[0] != SCHED)
            behind = [(s, mark, ends[s]) for s, mark in in_order if ends[s] < mark]
            if not behind:
                break
            # A server that lags behind its leader may have answered: give it time to catch up.
            if time.monotonic() >= sure_at_s:
                raise _stream_went_back(*behind[0])
            await asyncio.sleep(_LAG_PAUSE_S)
        if ends != self._marks:
            await asyncio.to_thread(replace_file, self._file, msgspec.json.encode(ends))
            self._marks = ends

    async def _ends(self, bus: Bus) -> dict[str, int]:
        """Return the newest sequence number of each stream, or 0 for a stream that no longer
        exists.

        Raises: nats.errors.Error: a stream has no leader now, or the server does not answer.
        """
        ends = {
            info.config.name or "": info.state.last_seq
            for info in await bus.js.streams_info()
            if info.config.storage == StorageType.FILE
        }
        for stream in self._marks.keys() - ends.keys():
            try:  # the list omits streams without a leader
                ends[stream] = (await bus.js.stream_info(stream)).state.last_seq
            except NotFoundError:
                ends[stream] = 0
        return ends

    async def keep(self, bus: Bus) -> None:
        """Check the streams and advance their marks every second, until cancelled.

        Raises: ResourceError: DATA_LOSS: a stream has lost its newest messages.
        """
        is_reported = False
        while True:
            await asyncio.sleep(_KEEP_EVERY_S)
            try:
                await self.check(bus)
            except (NatsError, NatsTimeoutError):
                continue  # the server does not answer now
            except OSError as error:  # the disk is full; the marks stay behind until it has space
                level = logging.DEBUG if is_reported else logging.WARNING
                log.log(level, "%s cannot be written: %s", self._file, error.strerror)
                is_reported = True
            else:
                is_reported = False


def _stream_went_back(stream: str, mark: int, end: int) -> ResourceError:
    if stream == SCHED:
        return log_end_lost(mark, end)
    return ResourceError(
        f"stream {stream} ends at message {end}, but had {mark}: the last messages are lost",
        code=Code.DATA_LOSS,
        remedy="put the right store back, restore a backup (`phaseloom restore`), or continue "
        "without the lost messages (`phaseloom up --resume --accept-loss`)",
        details={"first_lost": end + 1, "last_lost": mark},
    )


def newest_mark(nodes: Path) -> int:
    """Return the highest sequence number of the decision log that any node has recorded, or 0.

    Args: nodes: the directory that contains one directory per node.
    """
    return max((read_mark(node) for node in nodes.glob("*/")), default=0)


async def check_when_up(bus: Bus, marks: StoreMarks, log_mark: int) -> LogExtent:
    """Check the streams and the store of NATS servers that have just started.

    Retries until they answer: servers that replicate streams first have to elect leaders.

    Args, returns, raises: as for `check_store` and `StoreMarks.check`.
    """
    await until_done(partial(marks.check, bus), "check the streams")
    return await until_done(partial(check_store, bus, log_mark), "check the store")


async def check_store(bus: Bus, log_mark: int = 0) -> LogExtent:
    """Check that the decision log is complete and that all keys can be read.

    Args:    log_mark: a sequence number that the log is known to have reached.
    Returns: the first and last sequence number of the log.
    Raises:  ResourceError: DATA_LOSS: something is lost; the message says what.
    """
    extent = await bus.log.check()
    for bucket in Bucket:
        if bucket is not Bucket.LEASES:  # leases expire by themselves
            await _check_keys(bus, bucket)
    snapshot = await Snapshots(bus).load()
    if snapshot is not None:
        log_mark = max(log_mark, snapshot.manifest.sequence)
    if extent.last < log_mark:
        raise log_end_lost(log_mark, extent.last)
    begins = snapshot.manifest.sequence + 1 if snapshot else 1
    if extent.first > begins:
        raise ResourceError(
            f"the decision log starts at entry {extent.first}, but entry {begins} is needed: a "
            "newer snapshot of the scheduler is lost",
            code=Code.DATA_LOSS,
            remedy="put the right store back, or restore a backup (`phaseloom restore`)",
        )
    return extent


async def _check_keys(bus: Bus, bucket: Bucket) -> None:
    """Check that the server can read the value of every key in a bucket.

    Raises: ResourceError: DATA_LOSS: the server lists a key but cannot read its value.
    """
    for key in await bus.keys.names(bucket):
        if await bus.keys.get_raw(bucket, key) is None:
            raise ResourceError(
                f"the value of {key} in bucket {bucket} is damaged",
                code=Code.DATA_LOSS,
                remedy="put the right store back, or restore a backup (`phaseloom restore`)",
            )


async def end_sessions(bus: Bus) -> int:
    """End the session of every job, so that its controller must attach again.

    A controller may have submitted operations that are missing in an older store. Its requests are
    then refused (ABORTED), and `attach` returns the current state of the job.

    Returns: the number of jobs that had a session.
    """
    jobs = await bus.keys.names(Bucket.SESSIONS)
    for job in jobs:
        while (stored := await bus.keys.get(Bucket.SESSIONS, job)) is not None:
            session = str(int(stored.payload) + _SESSIONS_SKIPPED).encode()
            try:
                await bus.keys.swap(Bucket.SESSIONS, job, session, stored.sequence)
                break
            except Conflict:
                continue
    return len(jobs)


def set_aside(run_dir: Path) -> list[Path]:
    """Move the state of a run's nodes to another directory, and delete the marks of its streams.

    Seals and weights versions that are newer than the store must not stay: jobs will write others
    under the same names. A node without its state is like a node that has lost its disk, so jobs
    fall back to their checkpoints.

    Returns: the new paths of the nodes' directories.
    """
    (run_dir / MARKS).unlink(missing_ok=True)
    place = run_dir / f"set-aside-{time.strftime('%Y%m%d-%H%M%S')}"
    moved = []
    for node in sorted((run_dir / "nodes").glob("*/")):
        place.mkdir(exist_ok=True)
        moved.append(node.rename(place / node.name))
    return moved
