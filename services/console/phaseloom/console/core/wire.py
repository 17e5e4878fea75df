"""Messages from the console to a page (console → browser, JSON).

An `Update` is the whole view, or the changes since the previous one. Its rows refer to deployments,
kinds and devices by index into the lists of the same update. Times in rows are integers, in units
of `TICK_S` since `origin_s`, which keeps them short.
"""

from __future__ import annotations

import msgspec

TICK_S = 1e-4


class OperationRow(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One execution of an operation."""

    deployment: int
    kind: int
    slot: str
    queued: int
    ready: int
    start: int
    end: int
    report_delay: int
    """Delay from the end of the operation until its entry in the log, in ticks."""
    devices: list[int]
    num_tokens: int = 0
    outcome: str = ""
    """The operation's outcome. Empty: COMPLETED."""
    is_replay: bool = False
    """Whether the operation was run again after a loss; its first outcome stands."""


class ActivationRow(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """An activation: a deployment got its devices, with a context switch if bytes had to move."""

    deployment: int
    start: int
    offload: int
    load: int
    hidden: int
    """Time of the offload and load during which no ready operation waited for the devices."""
    devices: list[int]
    bytes_out: int = 0
    bytes_in: int = 0
    is_speculative: bool = False
    displaced: list[int] = []
    """Displaced deployments, without those of other tenants."""


class HeadRow(msgspec.Struct, frozen=True, array_like=True):
    """The operation of a deployment that is running, or its next ready one."""

    deployment: int
    kind: int
    slot: str
    ready: int
    num_ready: int
    devices: list[int]


class Decision(msgspec.Struct, frozen=True, omit_defaults=True):
    """A decision or event in words, with its reason."""

    time_s: float
    """The time of the event in the log, in Unix seconds."""
    what: str
    why: str = ""
    job: str = ""
    """The job, as `<tenant>.<job>`; empty: the decision is about the mesh."""
    is_trouble: bool = False


class ReportRow(msgspec.Struct, frozen=True, array_like=True):
    """Metrics that a job's controller reported for a step."""

    job: str
    """`<tenant>.<job>`"""
    step: int
    values: dict[str, float]
    run: str = ""
    """See `JobRow.run`."""


class NodeRow(msgspec.Struct, frozen=True, omit_defaults=True):
    node: str
    pool: str
    devices: list[int]
    """The memory budget of each device, in bytes."""
    host_memory_bytes: int
    is_up: bool = True


class ProblemRow(msgspec.Struct, frozen=True, omit_defaults=True):
    message: str
    remedy: str = ""


class DeploymentRow(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    pool: str
    node: str
    state: str
    incarnation: int = 0
    moving: str = ""
    error: ProblemRow | None = None


class SegmentRow(msgspec.Struct, frozen=True, array_like=True):
    pool: str
    offset_s: float
    duration_s: float


class JobRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A job as the scheduler and the profiler see it, with counts of its operations."""

    job: str
    """`<tenant>.<job>`"""
    state: str
    has_ended: bool = False
    placement: str = ""
    error: ProblemRow | None = None
    deployments: list[DeploymentRow] = []
    num_open: int = 0
    num_done: int = 0
    num_failed: int = 0
    device_s: float = 0.0
    """Seconds for which the job's operations had a device, summed over devices."""
    period_s: float = 0.0
    """The learned length of the job's cycle, in seconds; 0: no cycle is known yet."""
    worst_period_s: float = 0.0
    drift: float = 0.0
    segments: list[SegmentRow] = []
    run: str = ""
    """The job's present run: its start in UTC."""
    submitted_s: float = 0.0
    """When the run was submitted, in Unix seconds."""
    ended_s: float = 0.0
    """When the run ended, in Unix seconds; 0: it has not ended."""
    tags: list[str] = []
    has_config: bool = False
    """Whether the run has a config; `/api/explain/<job>` returns it."""


class Update(msgspec.Struct, frozen=True, omit_defaults=True):
    cursor: int
    """Position in the view at which the next update begins."""
    now_s: float
    """The console's clock when the update was made, in Unix seconds."""
    origin_s: float
    """The zero of the rows' times, Unix seconds."""
    is_whole: bool = False
    """Whether the update replaces all earlier ones."""
    deployments: list[str] = []
    """`<tenant>.<job>.<deployment>`"""
    kinds: list[str] = []
    devices: list[str] = []
    """`<node>/<index>`"""
    operations: list[OperationRow] = []
    activations: list[ActivationRow] = []
    decisions: list[Decision] = []
    reports: list[ReportRow] = []
    heads: list[HeadRow] = []
    nodes: list[NodeRow] | None = None
    """All nodes; None: unchanged."""
    jobs: list[JobRow] | None = None
    """All jobs; None: unchanged."""


class Leg(msgspec.Struct, frozen=True, omit_defaults=True):
    """One span of an operation's waterfall."""

    name: str
    """`submit`, `route`, `queue`, `permit`, `switch`, `offload`, `load`, `execute`, `complete`."""
    origin: str = msgspec.field(name="where")
    """The service that made the span, with the node and device if it worked for one."""
    begin: int
    end: int
    depth: int = 0
    """Number of enclosing spans."""
    error: str = ""


class Caller(msgspec.Struct, frozen=True, omit_defaults=True):
    """The person or program that uses the page; the answer of `/api/me`."""

    tenant: str = ""
    """The caller's tenant; empty: an operator, who sees all tenants."""
    can_act: bool = False
    """Whether the caller may cancel jobs and drain nodes."""


class Replay(msgspec.Struct, frozen=True):
    """A whole run, as `phaseloom replay` embeds it in a page."""

    title: str
    update: Update
