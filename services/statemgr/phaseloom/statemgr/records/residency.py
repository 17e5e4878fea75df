"""The deployments on this node, those in device memory, and the plans of switches.

Pure: the shell requests a plan, moves the memory, and reports each step. `incarnations.py` has the
table of steps.

Invariants (`validate`): heaps in device memory, or on their way in or out, never exceed its budget;
only the newest incarnation and epoch of a deployment is obeyed; a host copy that is being sealed is
neither overwritten nor demoted; a lost incarnation keeps only the memory that a seal still needs;
all ranks of an incarnation are lost together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from phaseloom.common.contract.errors import CallerError, Code, InternalError, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, check_key
from phaseloom.common.contract.state_agent import DeploymentState, RegisterWpg
from phaseloom.common.contract.state_layout import extent_bytes
from phaseloom.common.contract.state_rank import RegisterHeap
from phaseloom.common.tensors.tensortable import EMPTY, TensorTable
from phaseloom.statemgr.records.hostcopies import HostCopies
from phaseloom.statemgr.records.incarnations import (
    ON_DEVICE,
    HostCopy,
    PreparedSeal,
    Rank,
    State,
    Step,
    Wpg,
    following,
)
from phaseloom.statemgr.records.layouts import check_layout, exhausted

_MODEL = re.compile(r"([0-9a-f]{64})?")


@dataclass(frozen=True, slots=True)
class SwitchPlan:
    """The ranks to offload and to load so that `wpg` is switched in."""

    wpg: Wpg
    offload: list[Rank]
    load: list[Rank]


class Residency:
    """The table of deployments and devices. Every change goes through its methods."""

    def __init__(
        self, device_budget_bytes: list[int], frozen_bases: Mapping[str, str] | None = None
    ) -> None:
        """Args: frozen_bases: see `HostCopies`."""
        self.device_budget_bytes = device_budget_bytes
        self.copies = HostCopies(frozen_bases or {})
        self._wpgs: dict[DeploymentKey, Wpg] = {}
        self._tokens: dict[str, Rank] = {}
        self._fences: dict[DeploymentKey, int] = {}
        """Newest incarnation of each deployment seen so far."""
        self._retired: set[Wpg] = set()
        """Lost or replaced incarnations that still hold memory."""
        self._num_uses = 0

    # --- who is here ---

    def register(self, request: RegisterWpg) -> Wpg | None:
        """Register an incarnation; its ranks will come with their tokens. Idempotent.

        Returns: the older incarnation that it replaces, now lost, if any.
        Raises:  CallerError: a bad name, device or token. ResourceError: ABORTED: the incarnation
                 is fenced.
        """
        key, incarnation = request.deployment, request.incarnation
        tokens, devices = request.tokens, request.devices
        check_key(key)
        if not devices or len(tokens) != len(devices):
            raise CallerError(
                f"expected one device for each of {len(tokens)} ranks, got {len(devices)}",
                field="devices",
                remedy="name one device and one token for each rank",
            )
        for device in devices:
            if not 0 <= device < len(self.device_budget_bytes):
                raise CallerError(
                    f"device must be below {len(self.device_budget_bytes)}, got {device}",
                    field="devices",
                )
        if incarnation < self._fences.get(key, 0):
            raise _fenced(key, incarnation, self._fences[key])
        previous = self._wpgs.get(key)
        if previous is not None and previous.incarnation == incarnation:
            if [rank.token for rank in previous.ranks] == tokens and previous.devices == devices:
                return None
            raise CallerError(
                f"incarnation {incarnation} of {key} is registered already",
                code=Code.ALREADY_EXISTS,
                remedy="give each start its own incarnation",
            )
        if len(set(tokens)) != len(tokens) or any(
            not token or token in self._tokens for token in tokens
        ):
            raise CallerError("a token is empty or in use", field="tokens", remedy="use new tokens")
        replaced = self._remove(previous) if previous is not None else None
        wpg = Wpg(key, incarnation, request.seal_seq, rank_offset=request.rank_offset)
        wpg.num_ranks = request.num_ranks or len(devices)
        for index, (token, device) in enumerate(zip(tokens, devices, strict=True)):
            wpg.ranks.append(Rank(wpg, index, device, token))
            self._tokens[token] = wpg.ranks[-1]
        self._wpgs[key] = wpg
        self._fences[key] = incarnation
        return replaced

    def authenticate(self, token: str) -> Rank:
        """The awaited rank that has this token.

        Raises: CallerError: PERMISSION_DENIED: no awaited rank has the token.
        """
        rank = self._tokens.get(token)
        if rank is None or rank.state is not State.AWAITING:
            raise CallerError(
                "the token belongs to no rank that is expected",
                code=Code.PERMISSION_DENIED,
                field="token",
            )
        return rank

    def current(self, key: DeploymentKey, incarnation: int) -> Wpg:
        """The deployment's current incarnation, which must be the given one.

        Raises: CallerError: NOT_FOUND: it is not on this node. ResourceError: ABORTED: a newer
                incarnation was seen.
        """
        wpg = self._wpgs.get(key)
        if wpg is not None and wpg.incarnation == incarnation:
            return wpg
        newest = self._fences.get(key, 0)
        if incarnation < newest:
            raise _fenced(key, incarnation, newest)
        raise CallerError(f"{key} (incarnation {incarnation}) is not here", code=Code.NOT_FOUND)

    def drop(self, key: DeploymentKey, incarnation: int) -> Wpg | None:
        """End the deployment's current incarnation, unless it is newer than the given one.

        Returns: the incarnation that was ended, now lost, if any.
        """
        wpg = self._wpgs.get(key)
        if wpg is None or wpg.incarnation > incarnation:
            return None
        return self._remove(wpg)

    def forget(self, key: DeploymentKey) -> None:
        """Drop the fence of a deployment that will never come back, so that the table stays
        small."""
        if key not in self._wpgs:
            self._fences.pop(key, None)

    def _remove(self, wpg: Wpg) -> Wpg:
        del self._wpgs[wpg.key]
        if wpg.prepared is not None and not wpg.prepared.is_writing:
            wpg.prepared = None
        self.lose(wpg)
        return wpg

    def lose(self, wpg: Wpg) -> None:
        """Mark all ranks of an incarnation as lost. Idempotent.

        Their device memory counts as free at once; `reap` frees their host memory.
        """
        for rank in wpg.ranks:
            if rank.state is not State.LOST:
                rank.history.append(f"{rank.state} → lost")
            rank.state = State.LOST
            self._tokens.pop(rank.token, None)
            if rank.has_memory:
                self._retired.add(wpg)

    def reap(self, wpg: Wpg) -> tuple[list[int], list[HostCopy]]:
        """Detach from an incarnation the memory that nothing needs: all memory of a lost
        incarnation, or the snapshots of a seal that has ended. Does nothing while a seal is
        prepared.

        Returns: extents other than host copies, and host copies without a user; the caller frees
                 both.
        """
        if wpg.prepared is not None:
            return [], []
        extents = [rank.snapshot for rank in wpg.ranks if rank.snapshot is not None]
        copies: list[HostCopy] = []
        for rank in wpg.ranks:
            rank.snapshot = None
            if wpg.is_lost:
                extents += rank.extents + rank.borrowed
                rank.new_extent = None
                rank.loans.clear()
                copy = self.copies.detach(rank)
                copies += [copy] if copy is not None else []
        if wpg.is_lost:
            self._retired.discard(wpg)
        return extents, copies

    # --- after a kill of the daemon before ---

    def fence(self, key: DeploymentKey, incarnation: int) -> None:
        """Refuse all older incarnations from now on."""
        self._fences[key] = max(incarnation, self._fences.get(key, 0))

    def take_over(self, wpg: Wpg) -> None:
        """Adopt an incarnation of the previous daemon. The caller restores the fields of its
        ranks."""
        assert wpg.key not in self._wpgs
        self.fence(wpg.key, wpg.incarnation)
        self._wpgs[wpg.key] = wpg
        self._tokens.update({rank.token: rank for rank in wpg.ranks})

    def resume(self, rank: Rank, state: State) -> None:
        """Record where the state of a returned rank is."""
        _check_alive(rank.wpg)
        rank.history.append(f"{rank.state} → {state} (resumed)")
        rank.state = state

    def reset(self, rank: Rank) -> int | None:
        """Return a rank without a host copy to AWAITING; it registers its heap again.

        Returns: the extent that the rank had, if any; the caller frees it.
        """
        assert rank.copy is None
        extent, rank.new_extent = rank.new_extent, None
        rank.history.append(f"{rank.state} → awaiting (begins again)")
        rank.state, rank.heap_bytes, rank.table, rank.host_bytes = State.AWAITING, 0, EMPTY, 0
        rank.scratch_bytes = 0
        return extent

    def known(self, token: str) -> Rank:
        """The live rank that has this token.

        Raises: CallerError: PERMISSION_DENIED: no live rank has the token.
        """
        rank = self._tokens.get(token)
        if rank is None:
            raise CallerError(
                "the token belongs to no rank here", code=Code.PERMISSION_DENIED, field="token"
            )
        return rank

    def alive(self) -> list[Wpg]:
        """The current incarnations that are not lost, ordered by deployment."""
        return [wpg for _, wpg in sorted(self._wpgs.items()) if not wpg.is_lost]

    def find(self, key: DeploymentKey) -> Wpg | None:
        """The deployment's current incarnation, which may be lost, if any."""
        return self._wpgs.get(key)

    def is_alive(self, key: DeploymentKey, incarnation: int | None) -> bool:
        wpg = self._wpgs.get(key)
        return wpg is not None and wpg.incarnation == incarnation and not wpg.is_lost

    def newest(self, key: DeploymentKey) -> int:
        """The newest incarnation of the deployment that this node has had; 0: none."""
        return self._fences.get(key, 0)

    def fences(self) -> list[tuple[DeploymentKey, int]]:
        """The newest incarnation of each deployment seen so far."""
        return sorted(self._fences.items())

    def holds_memory(self, wpg: Wpg) -> bool:
        return any(rank.has_memory for rank in wpg.ranks)

    # --- heaps and switches ---

    def check_heap(self, rank: Rank, request: RegisterHeap, table: TensorTable) -> None:
        """Check that a rank may register this heap and its scratch memory.

        Args:   table: the heap's layout.
        Raises: CallerError: the layout is bad, a size is negative, the model's hash is not hex
                BLAKE3, a frozen heap has host-only state, or the rank has registered already.
                ResourceError: RESOURCE_EXHAUSTED, with the numbers: the heap alone exceeds its
                device.
        """
        if rank.state is not State.AWAITING:
            raise CallerError(f"{rank} is {rank.state}", code=Code.FAILED_PRECONDITION)
        for field in ("host_bytes", "scratch_bytes"):
            if (num_bytes := getattr(request, field)) < 0:
                raise CallerError(f"{num_bytes} bytes", field=field, remedy="use zero or more")
        if not _MODEL.fullmatch(request.model):
            raise CallerError(
                "not a BLAKE3 in hex", field="model", remedy="use 64 digits, or leave it empty"
            )
        if request.frozen and request.host_bytes:
            raise CallerError(
                "a frozen heap cannot have host-only state",
                field="host_bytes",
                remedy="use 0",
            )
        check_layout(table, extent_bytes(request.heap_bytes, request.host_bytes))
        device_bytes = request.heap_bytes + request.scratch_bytes
        self._check_room(rank.wpg, rank.device, device_bytes, 0)

    def register_heap(
        self,
        rank: Rank,
        request: RegisterHeap,
        table: TensorTable,
        extent: int | None,
        *,
        has_memory: bool = True,
    ) -> None:
        """Record the heap of an awaited rank, and the extent that the rank got for it.

        Args: has_memory: whether the extent has memory. A frozen rank has none otherwise.
        """
        self.step(rank, Step.HEAP_REGISTERED)
        rank.heap_bytes, rank.table = request.heap_bytes, table
        rank.host_bytes, rank.scratch_bytes = request.host_bytes, request.scratch_bytes
        rank.pins, rank.frozen, rank.model = request.pins, request.frozen, request.model
        rank.emulated = request.emulated
        if rank.frozen:
            rank.new_extent = extent
        else:
            assert extent is not None
            copy = self.copies.add(rank, extent)
            copy.state = State.HOST if has_memory else State.DEMOTED

    def fill(self, rank: Rank, applied: int, digest: str) -> None:
        """Record that the rank's extent holds its whole state: the initial one, or a seal's."""
        self.step(rank, Step.FILLED)
        if rank.frozen:
            self.take_new(rank, applied, digest)
        else:
            rank.copied(applied, digest)

    def take_new(self, rank: Rank, applied: int, digest: str) -> HostCopy:
        """Make the bytes in a frozen rank's `new_extent` its host copy. It has left the old one
        already.

        Args: applied: the seq of the state in the extent.
              digest: of the bytes.
        """
        assert rank.new_extent is not None
        extent, rank.new_extent = rank.new_extent, None
        rank.applied, rank.held_version = applied, None
        return self.copies.add(rank, extent, digest)

    def plan_switch_in(
        self,
        key: DeploymentKey,
        incarnation: int,
        epoch: int,
        displaces: list[DeploymentKey],
        ranks: list[int] | None = None,
    ) -> SwitchPlan:
        """Plan a switch, before anything moves.

        Displaced deployments leave only the devices that the newcomer needs.

        Args:   ranks: the ranks of the deployment to load; None or empty: all.
        Raises: ResourceError: ABORTED: the epoch or incarnation is stale; RESOURCE_EXHAUSTED, with
                the numbers: it does not fit on a device; UNAVAILABLE: a rank has left. CallerError:
                the deployment cannot be switched now.
        """
        wpg = self.current(key, incarnation)
        self._enter_epoch(wpg, epoch)
        self.check_ready(wpg)
        offload: list[Rank] = []
        local_ranks = [
            rank for rank in wpg.ranks if not ranks or wpg.rank_offset + rank.index in ranks
        ]
        devices = {rank.device for rank in local_ranks}
        for displaced in map(self._wpgs.get, dict.fromkeys(displaces)):
            if displaced is None or not displaced.on_device:
                continue
            if displaced is wpg:
                raise CallerError(f"{wpg} cannot displace itself", field="displaces")
            if not set(displaced.devices) & set(wpg.devices):
                raise CallerError(
                    f"{displaced} is on device {_listed(displaced.devices)}, not "
                    f"{_listed(wpg.devices)}",
                    field="displaces",
                )
            if displaced.epoch > epoch:
                # A redelivered command that later ones have overtaken.
                raise ResourceError(
                    f"epoch {epoch} of {wpg} is over: {displaced} was switched in at "
                    f"{displaced.epoch}",
                    code=Code.ABORTED,
                )
            offload += [rank for rank in displaced.on_device if rank.device in devices]
        load = [rank for rank in local_ranks if rank.state is State.HOST]
        for device in sorted({rank.device for rank in load}):
            leaving = sum(rank.device_bytes for rank in offload if rank.device == device)
            needed = sum(rank.device_bytes for rank in load if rank.device == device)
            self._check_room(wpg, device, needed, self.device_used_bytes(device) - leaving)
        return SwitchPlan(wpg, offload, load)

    def plan_switch_out(self, key: DeploymentKey, incarnation: int, epoch: int) -> list[Rank]:
        """The ranks to offload; empty: all are offloaded already."""
        wpg = self.current(key, incarnation)
        self._enter_epoch(wpg, epoch)
        self.check_ready(wpg)
        return wpg.on_device

    def begin_load(self, rank: Rank) -> None:
        if rank.state is State.HOST:
            used_bytes = self.device_used_bytes(rank.device)
            self._check_room(rank.wpg, rank.device, rank.device_bytes, used_bytes)
        self.step(rank, Step.LOAD_BEGUN)

    def begin_copy_out(self, rank: Rank, *, release: bool) -> None:
        """Record that a resident rank starts to copy to its host copy.

        Args:   release: whether the rank is offloaded; otherwise it stays resident.
        Raises: InternalError: the host copy is being sealed and must not be overwritten.
                ResourceError: the rank is lost.
        """
        prepared = rank.wpg.prepared
        if prepared is not None:
            raise InternalError(
                f"copying {rank} would overwrite the seal prepared at {prepared.seq}"
            )
        if release:
            self.step(rank, Step.OFFLOAD_BEGUN)
        else:
            _check_alive(rank.wpg)
            assert rank.state is State.RESIDENT
        if not rank.frozen and not rank.is_below:
            assert rank.copy is not None
            rank.copy.overwritten()

    def finish_copy_out(self, rank: Rank, applied: int, digest: str = "") -> None:
        """Record that the host copy of a rank is complete, and the rank offloaded if that was the
        purpose.

        Args: digest: of the host copy; empty: not computed yet.
        """
        if rank.state is State.OFFLOADING:
            self.step(rank, Step.OFFLOAD_VERIFIED)
        _check_alive(rank.wpg)
        rank.copied(applied, digest)

    def digested(self, rank: Rank, digest: str) -> None:
        """Record the digest of a dirty host copy."""
        assert rank.is_dirty
        assert digest
        rank.copied(rank.applied, digest)

    def step(self, rank: Rank, step: Step) -> None:
        """Apply a step of the transition table.

        Raises: ResourceError: the rank is lost. InvalidTransition: the table does not have the
                step.
        """
        _check_alive(rank.wpg)
        state = following(rank, step)
        rank.history.append(f"{rank.state} → {state} ({step})")
        rank.state = state

    # --- NVMe ---

    @contextmanager
    def using(self, *wpgs: Wpg) -> Iterator[None]:
        """Keep host copies from being demoted within the block. This counts as a use of the
        deployments."""
        for wpg in wpgs:
            self._num_uses += 1
            wpg.num_users += 1
            wpg.last_used = self._num_uses
            wpg.next_use_s = math.inf
        try:
            yield
        finally:
            for wpg in wpgs:
                wpg.num_users -= 1

    # --- seals ---

    def prepare_seal(self, wpg: Wpg, seq: int) -> None:
        """Keep the host copies, which must be at `seq`, from being overwritten until `end_seal`.

        Raises: CallerError: FAILED_PRECONDITION: a host copy is at another seq, or not whole.
        """
        for rank in wpg.ranks:
            if rank.applied != seq or not rank.is_whole:
                raise CallerError(
                    f"{rank} has applied {rank.applied}, not {seq}",
                    code=Code.FAILED_PRECONDITION,
                    field="seq",
                    remedy="seal between operations, at the seq that was applied last",
                )
        wpg.prepared = PreparedSeal(seq)

    def begin_write(self, wpg: Wpg, seq: int) -> None:
        """Record that the prepared seal is being written.

        Raises: CallerError: FAILED_PRECONDITION: no seal is prepared at `seq`, or it is being
                written already.
        """
        if wpg.prepared is None or wpg.prepared.seq != seq or wpg.prepared.is_writing:
            raise CallerError(
                f"no seal of {wpg} is prepared at {seq}",
                code=Code.FAILED_PRECONDITION,
                field="seq",
                remedy="send PrepareSeal first",
            )
        wpg.prepared.is_writing = True

    def end_seal(self, wpg: Wpg) -> None:
        """End a seal that was written, failed or was given up. Its host copies may be overwritten
        again."""
        wpg.prepared = None

    def unwritten_seals(self) -> list[Wpg]:
        """Incarnations with a prepared seal that is not being written. Once the agent has left,
        nobody will write it."""
        every = [*self._wpgs.values(), *self._retired]
        return [w for w in every if w.prepared is not None and not w.prepared.is_writing]

    # --- looking ---

    def device_used_bytes(self, device: int) -> int:
        """Bytes of heaps and scratch memory on a device, including heaps on their way in or out."""
        return sum(
            rank.device_bytes
            for wpg in self._wpgs.values()
            for rank in wpg.on_device
            if rank.device == device
        )

    def deployments(self) -> list[DeploymentState]:
        return [
            DeploymentState(
                deployment=wpg.key,
                incarnation=wpg.incarnation,
                devices=wpg.devices,
                heap_bytes=wpg.heap_bytes,
                resident=bool(wpg.on_device),
                applied=wpg.ranks[0].applied,
                device_bytes=sum(rank.device_bytes for rank in wpg.on_device),
                scratch_bytes=sum(rank.scratch_bytes for rank in wpg.ranks),
                nvme_bytes=sum(rank.copy_bytes for rank in wpg.ranks if rank.is_below),
                host_only_bytes=sum(rank.host_bytes for rank in wpg.ranks),
                host_bytes=sum(_bytes_above(rank) for rank in wpg.ranks),
                shared_bytes=sum(rank.copy_bytes for rank in wpg.ranks if _shares(rank)),
                dirty_bytes=sum(
                    rank.extent_bytes
                    for rank in wpg.ranks
                    if rank.is_dirty and rank.state not in ON_DEVICE
                ),
            )
            for wpg in self.alive()
        ]

    def extents(self) -> list[int]:
        """The extents of all ranks other than host copies, including loans and lost
        incarnations."""
        return [extent for rank in self._every() for extent in rank.extents + rank.borrowed]

    def _every(self) -> Iterator[Rank]:
        """All ranks that may hold memory, including those of lost incarnations."""
        for wpg in {*self._wpgs.values(), *self._retired}:
            yield from wpg.ranks

    def validate(self) -> None:
        """Raises: AssertionError: an invariant of this module does not hold."""
        for device, budget in enumerate(self.device_budget_bytes):
            assert self.device_used_bytes(device) <= budget, f"device {device} over its budget"
        for key, wpg in self._wpgs.items():
            assert wpg.key == key
            assert wpg.incarnation == self._fences[key]
            for rank in wpg.ranks:
                self._validate_rank(rank)
        for wpg in self._retired:
            assert all(rank.state is State.LOST for rank in wpg.ranks)
            assert self.holds_memory(wpg)
        for wpg in {*self._wpgs.values(), *self._retired}:
            assert wpg.prepared is None or all(rank.is_whole for rank in wpg.ranks)
        extents = [extent for rank in self._every() for extent in rank.extents]
        assert len(extents) == len(set(extents)), "one extent, two owners"

    def _validate_rank(self, rank: Rank) -> None:
        assert (rank.state is State.LOST) == rank.wpg.is_lost, f"{rank.wpg} is lost in part"
        assert (rank.token in self._tokens) == (rank.state is not State.LOST)
        assert rank.state is not State.HOST or rank.is_whole, f"{rank}: no whole host copy"
        assert rank.state is not State.OFFLOADING or rank.wpg.prepared is None
        assert rank.snapshot is None or rank.host_bytes or rank.is_in_extent
        assert not rank.loans or rank.state not in {State.AWAITING, State.LOST}
        has_memory = rank.state not in {State.AWAITING, State.LOST}
        is_straight = rank.frozen and rank.state is State.FILLING
        assert not has_memory or is_straight or rank.has_memory
        assert rank.frozen or (rank.new_extent is None and rank.held_version is None)

    def _enter_epoch(self, wpg: Wpg, epoch: int) -> None:
        if epoch < wpg.epoch:
            raise ResourceError(
                f"epoch {epoch} of {wpg} is stale: the newest is {wpg.epoch}", code=Code.ABORTED
            )
        wpg.epoch = epoch

    def check_ready(self, wpg: Wpg) -> None:
        """Check that every rank of the incarnation has a whole state."""
        _check_alive(wpg)
        for rank in wpg.ranks:
            if rank.state not in {State.HOST, State.RESIDENT}:
                raise CallerError(f"{rank} is {rank.state}", code=Code.FAILED_PRECONDITION)

    def _check_room(self, wpg: Wpg, device: int, needed_bytes: int, used_bytes: int) -> None:
        budget = self.device_budget_bytes[device]
        if used_bytes + needed_bytes > budget:
            raise ResourceError(
                f"{wpg} needs {needed_bytes} bytes of device {device}: {used_bytes} of {budget} "
                f"are in use",
                code=Code.RESOURCE_EXHAUSTED,
                remedy="raise `devices` of the node (for `phaseloom up`: in the mesh file), or use "
                "less device memory: an adapter, optimizer_on HOST, more ranks",
                details=exhausted(needed_bytes, used_bytes, budget),
            )


def _fenced(key: DeploymentKey, incarnation: int, newest: int) -> ResourceError:
    return ResourceError(
        f"incarnation {incarnation} of {key} is fenced: the newest is {newest}", code=Code.ABORTED
    )


def _check_alive(wpg: Wpg) -> None:
    if wpg.is_lost:
        raise ResourceError(f"{wpg} has lost its rank", remedy="start a new incarnation")


def _bytes_above(rank: Rank) -> int:
    """Host memory of a rank's host copies and loans. A frozen rank has two copies while a new one
    is made."""
    next_bytes = 0 if rank.new_extent is None else rank.extent_bytes
    return next_bytes + (0 if rank.is_below else rank.copy_bytes) + rank.borrowed_bytes


def _shares(rank: Rank) -> bool:
    return rank.copy is not None and (len(rank.copy.users) > 1 or rank.copy.version is not None)


def _listed(devices: list[int]) -> str:
    return ", ".join(str(device) for device in sorted(set(devices)))
