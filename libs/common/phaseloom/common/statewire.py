"""The node-local protocol with the state manager, over its Unix socket.

Two kinds of peers: the node's agent (it presents the node's secret) and ranks (each presents the
token that the agent got registered for one deployment and incarnation). `phaseloom.common.framing`
carries the messages; memory travels as a file descriptor (memfd) by SCM_RIGHTS beside the frame
that names it. Calls go both ways on a rank's connection: a rank asks for memory,
the state manager tells it to copy its device heap out or in.

The state manager keeps a deployment's state as one host extent that mirrors the rank's device heap
byte for byte; the `TensorSlot`s say what lies where. Digests are xxh3-128 in hex.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from phaseloom.common.errors import ErrorInfo
from phaseloom.common.ids import DeploymentKey, VersionKey
from phaseloom.common.messages import Message


class Role(StrEnum):
    WEIGHT = "weight"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"


class TensorSlot(msgspec.Struct, frozen=True):
    """A tensor's place in a heap or in a weights version."""

    name: str
    """The parameter's fully qualified name; optimizer state: `<parameter>.<key>`."""
    role: Role
    dtype: str
    """As numpy spells it: `float32`."""
    shape: list[int]
    offset: int
    """Bytes, a multiple of 64."""
    num_bytes: int


# --- agent → state manager -----------------------------------------------------------------------


class AgentHello(Message, frozen=True):
    """First frame of an agent. Answer: Done."""

    secret: str


class RegisterWpg(Message, frozen=True):
    """A rank with this token will come. Older incarnations are fenced from now on. Answer: Done."""

    token: str
    deployment: DeploymentKey
    incarnation: int
    device: int
    seal_seq: int
    """Restore this seal into the extent when the rank registers its heap; 0: none."""


class SwitchIn(Message, frozen=True):
    """Offload `displaces` (whatever of them is resident), then load. Answer: Switched."""

    deployment: DeploymentKey
    incarnation: int
    epoch: int
    displaces: list[DeploymentKey]
    traceparent: str = ""
    """W3C context that the offload and load spans belong to; empty: none."""


class SwitchOut(Message, frozen=True):
    """Offload. Answer: Switched."""

    deployment: DeploymentKey
    incarnation: int
    epoch: int


class Switched(Message, frozen=True):
    offload_s: float
    load_s: float
    bytes_out: int
    bytes_in: int
    displaced: list[DeploymentKey]


class PrepareSeal(Message, frozen=True):
    """Make the host copy whole as of now and keep it from being overwritten. Between operations.

    Answer: Done; then the deployment may run on.
    """

    deployment: DeploymentKey
    incarnation: int
    seq: int


class WriteSeal(Message, frozen=True):
    """Write the prepared copy, and these versions, to disk; fsync. Answer: Sealed."""

    deployment: DeploymentKey
    incarnation: int
    seq: int
    versions: list[int]
    committed: int = 0
    """seq of the newest committed seal, whose file is kept whatever is written; 0: none is."""


class Sealed(Message, frozen=True):
    file: str
    digest: str
    num_bytes: int


class DropWpg(Message, frozen=True):
    """The ranks are dead. With `forget`, the seals, checkpoints excepted, go too. Answer: Done."""

    deployment: DeploymentKey
    incarnation: int
    forget: bool


class DropVersions(Message, frozen=True):
    """Answer: Done."""

    versions: list[VersionKey]


class StatusRequest(Message, frozen=True):
    """Answer: StatusReport."""


class DeploymentState(msgspec.Struct, frozen=True):
    deployment: DeploymentKey
    incarnation: int
    device: int
    heap_bytes: int
    resident: bool
    applied: int


class StatusReport(Message, frozen=True):
    device_budget_bytes: list[int]
    device_used_bytes: list[int]
    host_budget_bytes: int
    host_used_bytes: int
    deployments: list[DeploymentState]
    versions: list[VersionKey]
    endpoint: str
    """host:port where this daemon serves weights versions to other nodes' daemons."""


# --- rank → state manager ------------------------------------------------------------------------


class RankHello(Message, frozen=True):
    """First frame of a rank. Answer: Done, or PERMISSION_DENIED."""

    token: str


class RegisterHeap(Message, frozen=True):
    """Answer: HeapRegistered with the extent's memfd. The heap starts out released.

    Raises: RESOURCE_EXHAUSTED with the numbers where the host extent, or the heap on its device
    alone, cannot fit.
    """

    heap_bytes: int
    tensors: list[TensorSlot]


class HeapRegistered(Message, frozen=True):
    applied: int
    """seq that the extent holds; 0: nothing, the rank must fill its heap and `CommitInitial`."""


class CommitInitial(Message, frozen=True):
    """The rank has copied its initial state into the extent itself. Answer: Done."""

    digest: str


class CreateVersion(Message, frozen=True):
    """Answer: VersionExtent with a writable memfd, or `exists` and no memfd."""

    version: VersionKey
    num_bytes: int
    tensors: list[TensorSlot]


class CommitVersion(Message, frozen=True):
    """The rank has written the extent: it is immutable from now on. Answer: Done."""

    version: VersionKey
    digest: str


class OpenVersion(Message, frozen=True):
    """Answer: VersionExtent with a read-only memfd; fetched from `sources` where absent here."""

    version: VersionKey
    sources: list[str]


class VersionExtent(Message, frozen=True):
    version: VersionKey
    num_bytes: int
    tensors: list[TensorSlot]
    digest: str
    exists: bool


# --- state manager → rank ------------------------------------------------------------------------


class CopyOut(Message, frozen=True):
    """Copy the whole heap to the extent; with `release`, give its memory back. Answer: Copied."""

    release: bool


class CopyIn(Message, frozen=True):
    """Copy the extent to the heap and verify. Answer: Copied, or DATA_LOSS."""

    digest: str


class Copied(Message, frozen=True):
    digest: str
    applied: int
    """seq of the last mutating operation in the heap."""
    resident_bytes: int
    """Heap memory resident afterwards."""
    duration_s: float


# --- both ----------------------------------------------------------------------------------------


class Done(Message, frozen=True):
    """It took effect."""


class Failed(Message, frozen=True):
    """It did not, and what it had begun is rolled back."""

    error: ErrorInfo


StateMessage = (
    AgentHello
    | RegisterWpg
    | SwitchIn
    | SwitchOut
    | Switched
    | PrepareSeal
    | WriteSeal
    | Sealed
    | DropWpg
    | DropVersions
    | StatusRequest
    | StatusReport
    | RankHello
    | RegisterHeap
    | HeapRegistered
    | CommitInitial
    | CreateVersion
    | CommitVersion
    | OpenVersion
    | VersionExtent
    | CopyOut
    | CopyIn
    | Copied
    | Done
    | Failed
)
