"""Which deployments are on this node, which of them is in device memory, and whether a switch fits.

Pure book-keeping: the shell asks for a plan, moves the memory, and reports each step; `TRANSITIONS`
is the table of what may follow what. Invariants (`validate`): the heaps that are or are being moved
in device memory never exceed its budget; of each deployment only the newest incarnation and epoch
is obeyed; a host copy that is being sealed is not overwritten; a lost deployment has no memory.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from phaseloom.common.errors import CallerError, Code, InternalError, ResourceError
from phaseloom.common.ids import DeploymentKey, check_name
from phaseloom.common.statewire import DeploymentState, TensorSlot
from phaseloom.statemgr.core.layout import check_layout


class State(StrEnum):
    AWAITING = "awaiting"
    """The agent announced it; no rank has registered its heap."""
    FILLING = "filling"
    """The rank has its extent, which holds no state yet."""
    HOST = "host"
    """Offloaded: the host copy is whole and verified."""
    LOADING = "loading"
    RESIDENT = "resident"
    """In device memory: the host copy, if any, is older."""
    OFFLOADING = "offloading"
    LOST = "lost"
    """Its rank is gone, or it was fenced."""


class Step(StrEnum):
    HEAP_REGISTERED = "heap registered"
    FILLED = "filled"
    LOAD_BEGUN = "load begun"
    LOAD_VERIFIED = "load verified"
    LOAD_FAILED = "load failed"
    OFFLOAD_BEGUN = "offload begun"
    OFFLOAD_VERIFIED = "offload verified"
    OFFLOAD_FAILED = "offload failed"
    RELEASE_UNVERIFIED = "release unverified"
    """Copied out, but the device memory was not given back: it is loaded again."""


TRANSITIONS: dict[tuple[State, Step], State] = {
    (State.AWAITING, Step.HEAP_REGISTERED): State.FILLING,
    (State.FILLING, Step.FILLED): State.HOST,
    (State.HOST, Step.LOAD_BEGUN): State.LOADING,
    (State.LOADING, Step.LOAD_VERIFIED): State.RESIDENT,
    (State.LOADING, Step.LOAD_FAILED): State.HOST,
    (State.RESIDENT, Step.OFFLOAD_BEGUN): State.OFFLOADING,
    (State.OFFLOADING, Step.OFFLOAD_VERIFIED): State.HOST,
    (State.OFFLOADING, Step.OFFLOAD_FAILED): State.RESIDENT,
    (State.OFFLOADING, Step.RELEASE_UNVERIFIED): State.LOADING,
}
ON_DEVICE = frozenset({State.LOADING, State.RESIDENT, State.OFFLOADING})


class InvalidTransition(InternalError):
    """The shell reported a step that the table does not have; carries the deployment's history."""


@dataclass(slots=True)
class PreparedSeal:
    """A host copy kept whole until it is on disk."""

    seq: int
    is_writing: bool = False


@dataclass(slots=True, eq=False)
class Wpg:
    """One life of a deployment on this node."""

    key: DeploymentKey
    incarnation: int
    device: int
    token: str
    seal_seq: int
    state: State = State.AWAITING
    epoch: int = 0
    heap_bytes: int = 0
    tensors: list[TensorSlot] = field(default_factory=list)
    extent: int | None = None
    applied: int = 0
    """Of the newest host copy."""
    digest: str = ""
    """Of the newest host copy; empty: there is none that is whole."""
    prepared: PreparedSeal | None = None
    history: deque[str] = field(default_factory=lambda: deque(maxlen=32))

    def __str__(self) -> str:
        return f"{self.key} (incarnation {self.incarnation})"


@dataclass(frozen=True, slots=True)
class SwitchPlan:
    wpg: Wpg
    offload: list[Wpg]
    is_load_needed: bool


class Residency:
    """The table of deployments and devices. Every mutation goes through its methods."""

    def __init__(self, device_budget_bytes: list[int]) -> None:
        self.device_budget_bytes = device_budget_bytes
        self._wpgs: dict[DeploymentKey, Wpg] = {}
        self._tokens: dict[str, Wpg] = {}
        self._fences: dict[DeploymentKey, int] = {}
        """Newest incarnation ever seen."""
        self._retired: set[Wpg] = set()
        """Lost or replaced ones that still hold an extent."""

    # --- who is here ---

    def register(
        self, token: str, key: DeploymentKey, incarnation: int, device: int, seal_seq: int
    ) -> Wpg | None:
        """A rank with this token will come. Returns the older life, now lost, that it replaces.

        Registering the same life again changes nothing.
        Raises: CallerError: a bad name, device or token. ResourceError: ABORTED, fenced.
        """
        for name in (key.tenant, key.job, key.deployment):
            check_name(name, "deployment")
        if not 0 <= device < len(self.device_budget_bytes):
            raise CallerError(f"device {device} of {len(self.device_budget_bytes)}", field="device")
        if incarnation < self._fences.get(key, 0):
            raise _fenced(key, incarnation, self._fences[key])
        known = self._wpgs.get(key)
        if known is not None and known.incarnation == incarnation:
            if known.token == token and known.device == device:
                return None
            raise CallerError(
                f"incarnation {incarnation} of {key} is registered already",
                code=Code.ALREADY_EXISTS,
                remedy="give each life its own incarnation",
            )
        if not token or token in self._tokens:
            raise CallerError("empty, or in use", field="token", remedy="draw a fresh one")
        replaced = self._remove(known) if known is not None else None
        wpg = Wpg(key, incarnation, device, token, seal_seq)
        self._wpgs[key] = self._tokens[token] = wpg
        self._fences[key] = incarnation
        return replaced

    def authenticate(self, token: str) -> Wpg:
        """Raises: CallerError: PERMISSION_DENIED: no live deployment has this token."""
        wpg = self._tokens.get(token)
        if wpg is None or wpg.state is not State.AWAITING:
            raise CallerError(
                "the token names no deployment that awaits a rank",
                code=Code.PERMISSION_DENIED,
                field="token",
            )
        return wpg

    def current(self, key: DeploymentKey, incarnation: int) -> Wpg:
        """Raises: CallerError: NOT_FOUND. ResourceError: ABORTED: another incarnation."""
        wpg = self._wpgs.get(key)
        if wpg is not None and wpg.incarnation == incarnation:
            return wpg
        newest = self._fences.get(key, 0)
        if incarnation < newest:
            raise _fenced(key, incarnation, newest)
        raise CallerError(f"{key} (incarnation {incarnation}) is not here", code=Code.NOT_FOUND)

    def drop(self, key: DeploymentKey, incarnation: int) -> Wpg | None:
        """This life and older ones are over. Returns it, now lost, if it was the current one."""
        wpg = self._wpgs.get(key)
        if wpg is None or wpg.incarnation > incarnation:
            return None
        return self._remove(wpg)

    def forget(self, key: DeploymentKey) -> None:
        """The deployment will never come again: drop its fence, so that the table stays small."""
        if key not in self._wpgs:
            self._fences.pop(key, None)

    def _remove(self, wpg: Wpg) -> Wpg:
        del self._wpgs[wpg.key]
        self._tokens.pop(wpg.token, None)
        if wpg.prepared is not None and not wpg.prepared.is_writing:
            wpg.prepared = None
        self.lose(wpg)
        return wpg

    def lose(self, wpg: Wpg) -> None:
        """Its rank is gone: device memory with it, and the host copy counts no more. Idempotent."""
        if wpg.state is not State.LOST:
            wpg.history.append(f"{wpg.state} → lost")
        wpg.state = State.LOST
        self._tokens.pop(wpg.token, None)
        if wpg.extent is not None:
            self._retired.add(wpg)

    def reap(self, wpg: Wpg) -> int | None:
        """The extent of a lost one, to be freed now; None while a seal needs it, or it has none."""
        if wpg.state is not State.LOST or wpg.prepared is not None or wpg.extent is None:
            return None
        extent, wpg.extent = wpg.extent, None
        self._retired.discard(wpg)
        return extent

    # --- heaps and switches ---

    def check_heap(self, wpg: Wpg, heap_bytes: int, tensors: list[TensorSlot]) -> None:
        """Whether it can be registered.

        Raises: CallerError: a bad layout, or registered already. ResourceError: RESOURCE_EXHAUSTED,
                with the numbers: the heap cannot fit on its device even alone.
        """
        if wpg.state is not State.AWAITING:
            raise CallerError(f"{wpg} is {wpg.state}", code=Code.FAILED_PRECONDITION)
        check_layout(tensors, heap_bytes)
        budget = self.device_budget_bytes[wpg.device]
        if heap_bytes > budget:
            raise _no_room(wpg, heap_bytes, 0, budget)

    def register_heap(
        self, wpg: Wpg, heap_bytes: int, tensors: list[TensorSlot], extent: int
    ) -> None:
        self.step(wpg, Step.HEAP_REGISTERED)
        wpg.heap_bytes, wpg.tensors, wpg.extent = heap_bytes, tensors, extent

    def fill(self, wpg: Wpg, applied: int, digest: str) -> None:
        """The extent holds the whole state: the rank's initial one, or a seal's."""
        self.step(wpg, Step.FILLED)
        wpg.applied, wpg.digest = applied, digest

    def plan_switch_in(
        self, key: DeploymentKey, incarnation: int, epoch: int, displaces: list[DeploymentKey]
    ) -> SwitchPlan:
        """What to offload and whether the rest fits; decided before anything is moved.

        Raises: ResourceError: ABORTED: stale epoch or incarnation; RESOURCE_EXHAUSTED, with the
                numbers; UNAVAILABLE: its rank is gone. CallerError: it cannot be switched now.
        """
        wpg = self.current(key, incarnation)
        self._enter_epoch(wpg, epoch)
        if wpg.state not in {State.HOST, State.RESIDENT}:
            raise _not_ready(wpg)
        offload = [other for other in self._named(displaces) if other.state in ON_DEVICE]
        for other in offload:
            if other.device != wpg.device:
                raise CallerError(
                    f"{other} is on device {other.device}, not {wpg.device}", field="displaces"
                )
            if other is wpg:
                raise CallerError(f"{wpg} cannot displace itself", field="displaces")
        if wpg.state is State.HOST:
            used = self.device_used_bytes(wpg.device) - sum(o.heap_bytes for o in offload)
            self._check_room(wpg, used)
        return SwitchPlan(wpg, offload, is_load_needed=wpg.state is State.HOST)

    def plan_switch_out(self, key: DeploymentKey, incarnation: int, epoch: int) -> Wpg | None:
        """The deployment to offload; None: it is in host memory already.

        Raises: as `plan_switch_in`.
        """
        wpg = self.current(key, incarnation)
        self._enter_epoch(wpg, epoch)
        if wpg.state not in {State.HOST, State.RESIDENT}:
            raise _not_ready(wpg)
        return wpg if wpg.state is State.RESIDENT else None

    def begin_load(self, wpg: Wpg) -> None:
        """Raises: ResourceError: RESOURCE_EXHAUSTED: no room on the device."""
        if wpg.state is State.HOST:
            self._check_room(wpg, self.device_used_bytes(wpg.device))
        self.step(wpg, Step.LOAD_BEGUN)

    def begin_offload(self, wpg: Wpg) -> None:
        """Raises: InternalError: the host copy is being sealed and must not be overwritten."""
        if wpg.prepared is not None:
            raise InternalError(f"offload of {wpg} over the seal prepared at {wpg.prepared.seq}")
        self.step(wpg, Step.OFFLOAD_BEGUN)
        wpg.digest = ""

    def finish_offload(self, wpg: Wpg, applied: int, digest: str) -> None:
        self.step(wpg, Step.OFFLOAD_VERIFIED)
        wpg.applied, wpg.digest = applied, digest

    def step(self, wpg: Wpg, step: Step) -> None:
        """Raises: ResourceError: it is lost. InvalidTransition: the table does not have it."""
        if wpg.state is State.LOST:
            raise _not_ready(wpg)
        following = TRANSITIONS.get((wpg.state, step))
        if following is None:
            raise InvalidTransition(
                f"{wpg} is {wpg.state}: no {step!r} from there; before: {'; '.join(wpg.history)}"
            )
        wpg.history.append(f"{wpg.state} → {following} ({step})")
        wpg.state = following

    # --- seals ---

    def check_sealable(self, wpg: Wpg) -> None:
        """Raises: CallerError, ResourceError: it has no whole state, or its rank is gone."""
        if wpg.state not in {State.HOST, State.RESIDENT}:
            raise _not_ready(wpg)

    def begin_copy(self, wpg: Wpg) -> None:
        """The host copy of a resident deployment is about to be renewed while it stays resident."""
        assert wpg.state is State.RESIDENT
        assert wpg.prepared is None
        wpg.digest = ""

    def finish_copy(self, wpg: Wpg, applied: int, digest: str) -> None:
        """Raises: ResourceError: its rank is gone."""
        if wpg.state is State.LOST:
            raise _not_ready(wpg)
        wpg.applied, wpg.digest = applied, digest

    def prepare_seal(self, wpg: Wpg, seq: int) -> None:
        """Keep the host copy, which holds `seq`, from being overwritten.

        Raises: CallerError: FAILED_PRECONDITION: it holds another seq, or none.
        """
        if wpg.applied != seq or not wpg.digest:
            raise CallerError(
                f"{wpg} has applied {wpg.applied}, not {seq}",
                code=Code.FAILED_PRECONDITION,
                field="seq",
                remedy="seal between operations, at the seq that was applied last",
            )
        wpg.prepared = PreparedSeal(seq)

    def begin_write(self, wpg: Wpg, seq: int) -> None:
        """Raises: CallerError: FAILED_PRECONDITION: no such copy was prepared."""
        if wpg.prepared is None or wpg.prepared.seq != seq or wpg.prepared.is_writing:
            raise CallerError(
                f"no copy of {wpg} at {seq} is prepared",
                code=Code.FAILED_PRECONDITION,
                field="seq",
                remedy="send PrepareSeal first",
            )
        wpg.prepared.is_writing = True

    def end_seal(self, wpg: Wpg) -> None:
        """Written, failed or given up: the copy may be overwritten again."""
        wpg.prepared = None

    def unwritten_seals(self) -> list[Wpg]:
        """Those prepared and not being written: nobody will, once the agent is gone."""
        every = [*self._wpgs.values(), *self._retired]
        return [w for w in every if w.prepared is not None and not w.prepared.is_writing]

    # --- looking ---

    def device_used_bytes(self, device: int) -> int:
        return sum(
            wpg.heap_bytes
            for wpg in self._wpgs.values()
            if wpg.device == device and wpg.state in ON_DEVICE
        )

    def deployments(self) -> list[DeploymentState]:
        return [
            DeploymentState(
                deployment=wpg.key,
                incarnation=wpg.incarnation,
                device=wpg.device,
                heap_bytes=wpg.heap_bytes,
                resident=wpg.state in ON_DEVICE,
                applied=wpg.applied,
            )
            for _, wpg in sorted(self._wpgs.items())
            if wpg.state is not State.LOST
        ]

    def extents(self) -> list[int]:
        every = {*self._wpgs.values(), *self._retired}
        return [wpg.extent for wpg in every if wpg.extent is not None]

    def validate(self) -> None:
        """Raises: AssertionError: an invariant of this module does not hold."""
        for device, budget in enumerate(self.device_budget_bytes):
            assert self.device_used_bytes(device) <= budget, f"device {device} over its budget"
        for key, wpg in self._wpgs.items():
            assert wpg.key == key
            assert wpg.incarnation == self._fences[key]
            assert (wpg.token in self._tokens) == (wpg.state is not State.LOST)
            assert wpg.state is not State.HOST or wpg.digest, f"{wpg}: no whole host copy"
            assert wpg.state is not State.OFFLOADING or wpg.prepared is None
            has_memory = wpg.state not in {State.AWAITING, State.LOST}
            assert not has_memory or wpg.extent is not None
        for wpg in self._retired:
            assert wpg.state is State.LOST
            assert wpg.extent is not None
        for wpg in {*self._wpgs.values(), *self._retired}:
            assert wpg.prepared is None or wpg.digest
        extents = self.extents()
        assert len(extents) == len(set(extents)), "one extent, two owners"

    def _named(self, keys: list[DeploymentKey]) -> list[Wpg]:
        return [self._wpgs[key] for key in dict.fromkeys(keys) if key in self._wpgs]

    def _enter_epoch(self, wpg: Wpg, epoch: int) -> None:
        if epoch < wpg.epoch:
            raise ResourceError(
                f"epoch {epoch} of {wpg} is stale: {wpg.epoch} was seen", code=Code.ABORTED
            )
        wpg.epoch = epoch

    def _check_room(self, wpg: Wpg, used_bytes: int) -> None:
        budget = self.device_budget_bytes[wpg.device]
        if used_bytes + wpg.heap_bytes > budget:
            raise _no_room(wpg, wpg.heap_bytes, used_bytes, budget)


def _fenced(key: DeploymentKey, incarnation: int, newest: int) -> ResourceError:
    return ResourceError(
        f"incarnation {incarnation} of {key} is fenced: the newest is {newest}", code=Code.ABORTED
    )


def _not_ready(wpg: Wpg) -> CallerError | ResourceError:
    if wpg.state is State.LOST:
        return ResourceError(f"{wpg} has lost its rank", remedy="start a new incarnation")
    return CallerError(f"{wpg} is {wpg.state}", code=Code.FAILED_PRECONDITION)


def _no_room(wpg: Wpg, heap_bytes: int, used_bytes: int, budget_bytes: int) -> ResourceError:
    return ResourceError(
        f"{wpg} needs {heap_bytes} bytes of device {wpg.device}: {used_bytes} of {budget_bytes} "
        f"are in use",
        code=Code.RESOURCE_EXHAUSTED,
        remedy="displace what is resident, or place it on a larger device",
        details={
            "needed_bytes": str(heap_bytes),
            "used_bytes": str(used_bytes),
            "budget_bytes": str(budget_bytes),
        },
    )
