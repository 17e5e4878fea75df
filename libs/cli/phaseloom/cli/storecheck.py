"""Checks a run's store before anything is decided on it, and recovers from a loss.

A NATS server starts with any content of its files. Without any message, it drops a damaged block,
skips a damaged entry, or continues from an older copy. Other records show what the store must
contain: the decision log's entries are numbered without gaps, the scheduler's snapshot names its
log entry, each node keeps a mark of the log's end, and the run keeps one for every stream.
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
"""Name of the file in a run's directory that records the newest sequence of each stream."""
_KEEP_EVERY_S = 1.0
_LAG_PAUSE_S = 0.2
_SESSIONS_SKIPPED = 2**20
"""More sessions than any job can have opened since an older copy of the store was made."""


class StoreMarks:
    """The newest sequence of each stream of a run, recorded on disk next to the store.

    A mark may lag behind its stream by a second, but is never ahead of it.
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
        sure_at_s = time.monotonic() + bus.lag_s
        while True:
            ends = await self._ends(bus)
            # The decision log goes first: its error says how many decisions are lost.
            in_order = sorted(self._marks.items(), key=lambda item: item[0] != SCHED)
            behind = [(s, mark, ends[s]) for s, mark in in_order if ends[s] < mark]
            if not behind:
                break
            if time.monotonic() >= sure_at_s:
                raise _stream_went_back(*behind[0])
            await asyncio.sleep(_LAG_PAUSE_S)
        if ends != self._marks:
            await asyncio.to_thread(replace_file, self._file, msgspec.json.encode(ends))
            self._marks = ends

    async def _ends(self, bus: Bus) -> dict[str, int]:
        """Return the newest sequence of each stream, or 0 if it no longer exists.

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
                continue  # the server is away
            except OSError as error:  # the disk is full: the marks lag behind until there is room
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
    """Return the newest sequence of the decision log that a node has recorded, or 0.

    Args: nodes: the directory with one directory for each node's state.
    """
    return max((read_mark(node) for node in nodes.glob("*/")), default=0)


async def check_when_up(bus: Bus, marks: StoreMarks, known: int) -> LogExtent:
    """Check the streams and the store of servers that have just started.

    Retries until they answer: servers that replicate streams need a while to elect leaders.

    Args, returns, raises: as for `check_store` and `StoreMarks.check`.
    """
    await until_done(partial(marks.check, bus), "check the streams")
    return await until_done(partial(check_store, bus, known), "check the store")


async def check_store(bus: Bus, known: int = 0) -> LogExtent:
    """Check that the decision log is complete and that all keys can be read.

    Args:    known: a sequence that the log once had.
    Returns: the extent of the log.
    Raises:  ResourceError: DATA_LOSS: something is lost; the message says what.
    """
    extent = await bus.log.check()
    for bucket in Bucket:
        if bucket is not Bucket.LEASES:  # they come and go by themselves
            await _check_keys(bus, bucket)
    snapshot = await Snapshots(bus).load()
    if snapshot is not None:
        known = max(known, snapshot.manifest.sequence)
    if extent.last < known:
        raise log_end_lost(known, extent.last)
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
    """Check that the server can read every key of a bucket.

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

    A controller may know of operations that an older store does not have. Its requests are refused
    (ABORTED), and `attach` tells it where the job stands.

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
    """Move the state of a run's nodes aside, and delete the marks of its streams.

    Seals and weights versions that are newer than the store would be confused with those that jobs
    will write again under the same names. Without its state, a node is like one that has lost its
    disk: jobs fall back to their checkpoints.

    Returns: the new paths of the nodes' directories.
    """
    (run_dir / MARKS).unlink(missing_ok=True)
    place = run_dir / f"set-aside-{time.strftime('%Y%m%d-%H%M%S')}"
    moved = []
    for node in sorted((run_dir / "nodes").glob("*/")):
        place.mkdir(exist_ok=True)
        moved.append(node.rename(place / node.name))
    return moved
