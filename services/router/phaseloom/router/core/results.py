"""The answers of `session.attach` and `result.get`, worked out from what the streams hold.

Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from phaseloom.common.contract.api import JobStatus
from phaseloom.common.contract.errors import CallerError, Code, ErrorInfo
from phaseloom.common.contract.events import QueuedOperation
from phaseloom.common.contract.ids import JobKey, OperationKey, parse_operation_key

_NEVER_PUBLISHED = ErrorInfo(
    Code.ABORTED,
    "the session that reserved this sequence number ended before it published the operation",
    remedy="attach again and go on from the next sequence number",
)

MAX_HOLES = 1024
"""The most holes of one deployment that an attach closes. A client has far fewer operations under
way at once."""


def check_attachable(status: JobStatus) -> None:
    """Refuse to attach to a job that has ended.

    Raises: CallerError: the job has ended; the message says why.
    """
    if status.has_ended:
        reason = f": {status.error.message}" if status.error else ""
        raise CallerError(
            f"job {status.job} is {status.state}{reason}",
            code=Code.FAILED_PRECONDITION,
            field="job",
            remedy="submit it again, or a job under another name",
        )


def stored_seqs(subjects: Iterable[str]) -> dict[str, set[int]]:
    """For each deployment, the sequence numbers that have a stored message.

    Subjects that name no such number are left out.
    """
    found: dict[str, set[int]] = {}
    for subject in subjects:
        key = key_of(subject)
        if key is not None and key.seq is not None:
            found.setdefault(key.deployment, set()).add(key.seq)
    return found


def key_of(subject: str) -> OperationKey | None:
    """The key of a subject `pl.v1.<kind>.<key>`, or None where it has no valid one."""
    try:
        return parse_operation_key(subject.split(".", 3)[-1])
    except CallerError:
        return None


def attach_status(
    job: JobKey,
    status: JobStatus,
    operations: dict[str, set[int]],
    outcomes: dict[str, set[int]],
    numbered: Collection[str] = (),
) -> tuple[JobStatus, list[QueuedOperation]]:
    """The status with each deployment's next free `seq` and open operations, and filler operations.

    The scheduler's view may lag behind the streams, and an earlier session may have died between
    two publishes: the operations that it published above a hole would wait for ever. So each hole
    is filled with a refused operation, which is a failed one and not a gap. Operations behind more
    than `MAX_HOLES` holes were never meant to run: they go on waiting, and the new session's
    numbers begin below them.

    Args: operations, outcomes: `stored_seqs` of the two streams.
          numbered: deployments whose holes are left open: others number their operations, and
          submit again what was lost.
    """
    deployments, fillers = [], []
    for deployment in status.deployments:
        done = outcomes.get(deployment.name, set())
        seqs = operations.get(deployment.name, set()) | done
        next_seq, holes = _close(deployment.next_seq, seqs)
        waiting = [str(seq) for seq in sorted(seqs - done)]
        deployments.append(
            msgspec.structs.replace(deployment, next_seq=next_seq, open_operations=waiting)
        )
        if deployment.name not in numbered:
            fillers += [_filler(job, deployment.name, seq) for seq in holes]
    return msgspec.structs.replace(status, deployments=deployments), fillers


def _close(next_seq: int, seqs: set[int]) -> tuple[int, list[int]]:
    """The next free seq from `next_seq` on, and the holes below it. Cost: linear in `seqs`."""
    holes: list[int] = []
    for seq in sorted(s for s in seqs if s >= next_seq):
        if len(holes) + seq - next_seq > MAX_HOLES:
            break
        holes += range(next_seq, seq)
        next_seq = seq + 1
    return next_seq, holes


def _filler(job: JobKey, deployment: str, seq: int) -> QueuedOperation:
    key = OperationKey(job.tenant, job.job, deployment, str(seq))
    return QueuedOperation(key=key, id="", kind="", error=_NEVER_PUBLISHED)
