"""Computes the answers of `session.attach` and `result.get` from stream contents. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from phaseloom.common.contract.api import JobStatus, ResultReply
from phaseloom.common.contract.codec import decode, encode
from phaseloom.common.contract.errors import CallerError, Code, ErrorInfo
from phaseloom.common.contract.events import QueuedOperation
from phaseloom.common.contract.ids import JobKey, OperationKey, parse_operation_key
from phaseloom.common.contract.operations import Completion

_NEVER_PUBLISHED = ErrorInfo(
    Code.ABORTED,
    "the session that reserved this sequence number ended before it published the operation",
    remedy="attach again and continue with the next sequence number",
)

MAX_HOLES = 1024
"""Maximum gaps that an attach fills per deployment. Clients have far fewer operations in flight."""


def reply(stored: bytes, stored_type: str, content_type: str) -> bytes:
    """Encode the answer of `result.get` from the stored completion.

    Args: stored_type, content_type: encodings of the completion and of the answer.
    """
    completion: Completion = decode(stored, Completion, stored_type)
    return encode(ResultReply(stored_id=completion.id, completion=completion), content_type)


def check_attachable(status: JobStatus) -> None:
    """Raises: CallerError: the job has ended. The message gives the reason."""
    if status.has_ended:
        reason = f": {status.error.message}" if status.error else ""
        raise CallerError(
            f"job {status.job} is {status.state}{reason}",
            code=Code.FAILED_PRECONDITION,
            field="job",
            remedy="submit it again, or submit a job with another name",
        )


def stored_seqs(subjects: Iterable[str]) -> dict[str, set[int]]:
    """Return the sequence numbers with a stored message, by deployment.

    Subjects without a sequence number are ignored.
    """
    seqs_by_deployment: dict[str, set[int]] = {}
    for subject in subjects:
        key = key_of(subject)
        if key is not None and key.seq is not None:
            seqs_by_deployment.setdefault(key.deployment, set()).add(key.seq)
    return seqs_by_deployment


def key_of(subject: str) -> OperationKey | None:
    """Return the key of a subject `pl.v1.<kind>.<key>`, or None if it has no valid one."""
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
    """Correct a job's status from the streams, and return operations that fill gaps.

    The scheduler's view may lag behind the streams. An earlier session may also have died between
    two publishes, and operations above such a gap would wait forever. Each gap is therefore filled
    with a refused operation, which counts as failed. Operations beyond more than `MAX_HOLES` gaps
    were never meant to run: they keep waiting, and the new session's numbers start below them.

    Args:    operations, outcomes: `stored_seqs` of the two streams.
             numbered: deployments whose gaps stay open, because their controller numbers operations
             itself and submits lost ones again.
    Returns: the status with each deployment's next free `seq` and open operations, and the fillers.
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
            keys = [OperationKey(job.tenant, job.job, deployment.name, str(seq)) for seq in holes]
            fillers += [
                QueuedOperation(key, id="", kind="", error=_NEVER_PUBLISHED) for key in keys
            ]
    return msgspec.structs.replace(status, deployments=deployments), fillers


def _close(next_seq: int, seqs: set[int]) -> tuple[int, list[int]]:
    """Return the next free seq from `next_seq` on and the gaps below it. Cost: linear in `seqs`."""
    holes: list[int] = []
    for seq in sorted(s for s in seqs if s >= next_seq):
        if len(holes) + seq - next_seq > MAX_HOLES:
            break
        holes += range(next_seq, seq)
        next_seq = seq + 1
    return next_seq, holes
