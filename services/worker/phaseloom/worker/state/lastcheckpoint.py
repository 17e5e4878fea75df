"""The job's last checkpoint with a controller's blob. A job falls back to it, so it must stay."""

from __future__ import annotations

from phaseloom.common.contract.api import Checkpoint, JobStatus
from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.ids import JobKey
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.retry import until_done


async def has_ended(bus: Bus, job: JobKey) -> bool:
    """Whether a job has ended or is unknown. Such a job needs no checkpoint to fall back to."""
    stored = await until_done(lambda: bus.keys.get(Bucket.VIEW, str(job)), "read the job's status")
    return stored is None or decode(stored.payload, JobStatus).has_ended


async def last_checkpoint(bus: Bus, job: JobKey) -> Checkpoint | None:
    """Return a job's last checkpoint; None if it has none or has ended."""
    stored = await until_done(
        lambda: bus.keys.get(Bucket.CHECKPOINTS, str(job)), "read the checkpoint"
    )
    last: Checkpoint | None = decode(stored.payload, Checkpoint) if stored else None
    return last


def needed_error(name: str) -> CallerError:
    return CallerError(
        f"checkpoint {name!r} is still needed: the job falls back to it",
        code=Code.FAILED_PRECONDITION,
        field="args.name",
        remedy="first save another checkpoint with a controller_blob",
    )
