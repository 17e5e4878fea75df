"""The `Backend` protocol, which adapts a runtime to a rank.

A backend owns no memory for its state: every weight, gradient and optimizer tensor is a view into
the `DeviceMemory`, whose bytes the state manager moves. It is called from one thread, one call at a
time, never from the event loop. It uses no global random state: its draws depend only on seeds that
the operation names.

With several ranks, each rank has its own backend and heap. A method marked *collective* must be
called on all ranks of the WPG, in the same order. Each rank passes its own share of the data
(`phaseloom.common.tensors.layouts.split`), which may be empty, and gets that share's result. The
call raises `GroupBroken` if another rank does not take part. The `check_…` methods are not
collective: they see the whole operation, before it is split.

For each kind in its `kinds`, a backend has two methods named after the kind: `check_<kind>(args)`
and `<kind>(args)`. The protocol lists today's kinds; a kind that only one backend supports need not
be listed. Kinds that only move state run without the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from phaseloom.common.contract.errors import ResourceError
from phaseloom.common.contract.operations import (
    DrawnTokens,
    Forward,
    ForwardBackward,
    ForwardBackwardResult,
    ForwardResult,
    Generate,
    GenerateResult,
    OptimStep,
    OptimStepResult,
)
from phaseloom.common.contract.specs import Adapter, DeploymentSpec, DeviceKind
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.tensors.resharding import Holding
from phaseloom.worker.state.devicememory import DeviceMemory


@dataclass(frozen=True)
class RankGroup:
    """A rank's position in its WPG and on its node."""

    rank: int = 0
    world_size: int = 1
    store_path: str = ""
    """The file through which the ranks of this incarnation meet; it must not exist yet. Unused with
    one rank or a `store_address`."""
    store_address: str = ""
    """The host:port of a TCP store where ranks on several nodes meet."""
    store_fd: int = -1
    """On rank 0: the listening socket of that store, which rank 0 serves."""
    store_prefix: str = ""
    """Prefix of this incarnation's keys in that store, so that incarnations do not mix."""
    timeout_s: float = 300.0
    """Seconds after which a collective fails if some rank has not joined it."""
    device_kind: DeviceKind = DeviceKind.EMULATED
    node_directory: str = ""
    """The node's directory for files that its ranks share. Needed for adapters."""
    num_units: int = 1
    """Compute units of the rank's device. If there are several, the rank may get any share of them,
    and its results must be bit-identical with every share."""


ALONE = RankGroup()


class GroupBroken(ResourceError):
    """A collective failed because another rank is gone or did not join in time.

    The WPG is lost. The operation itself may be fine.
    """


@dataclass(frozen=True)
class AdapterVersion:
    """An immutable version of an adapter on this deployment's base, for generating with it."""

    name: str
    """Identifies these weights: no others ever have this name."""
    adapter: Adapter
    slots: Sequence[TensorSlot]
    """The adapter's tensors, by their names in files."""
    memory: memoryview
    """Host memory that holds the tensors."""


@dataclass(frozen=True, eq=False)
class WholeVersion:
    """Immutable weights of the whole model that replace the deployment's own for some calls."""

    name: str
    """Identifies these weights: no others ever have this name."""
    exchanged: Callable[[], AbstractContextManager[None]]
    """Returns a context in which the rank's heap holds these weights instead of its own. Enter it
    in the device thread."""


Version = AdapterVersion | WholeVersion
"""Weights that an operation names, to be used instead of the deployment's own."""


NONFINITE = "nonfinite"
"""The stop reason of a sample whose logits are NaN or infinite. No caller sees it: the operation
fails."""


class Watch(Protocol):
    """The channel between a running `generate` call and the operations that it serves.

    The call uses it in the device thread, between two tokens, so every method must be quick. `i` is
    the index of the request in the call; requests that join later get the next indices.
    """

    def joined(self) -> Sequence[Generate]:
        """Return the requests that have joined since the last call. They are already checked.

        The backend decodes them together with the others as soon as there is room.
        """
        ...

    def adapter(self, i: int) -> AdapterVersion | None:
        """Return the adapter version for a request; None means the deployment's own weights."""
        ...

    def is_cancelled(self, i: int) -> bool:
        """Return whether the request was cancelled and its result is no longer wanted."""
        ...

    def is_stopped(self, i: int) -> bool:
        """Return whether the request must end now with the tokens it has. Its open samples end as
        `partial`."""
        ...

    def progress(self, i: int, num_done: int, num_total: int) -> None:
        """Report how many new tokens a request has, out of the most that it can get. It may end
        early."""
        ...

    def stepped(self, tokens: int) -> None:
        """Report the end of a forward step, before its results are handled.

        Args: tokens: tokens run over all requests: prefilled ones, plus one per decoded row.
        """
        ...

    def wants_tokens(self, i: int) -> bool:
        """Return whether to report a request's new tokens now. Called for requests with
        `stream`."""
        ...

    def drawn(self, i: int, tokens: Sequence[DrawnTokens]) -> None:
        """Report the tokens sampled for a request since the last report, by the index of the
        prompt."""
        ...

    def still_open(self, i: int, num_samples: int) -> None:
        """Report how many samples of a request are still open, each time some have ended."""
        ...

    def ended(self, i: int, result: GenerateResult | None) -> None:
        """Report a request's result as soon as it is complete; None if it was cancelled."""
        ...


class Unwatched:
    """A `Watch` for a call without joining requests, reports or cancels."""

    def joined(self) -> Sequence[Generate]:
        return ()

    def adapter(self, i: int) -> AdapterVersion | None:
        return None

    def is_cancelled(self, i: int) -> bool:
        return False

    def is_stopped(self, i: int) -> bool:
        return False

    def progress(self, i: int, num_done: int, num_total: int) -> None:
        pass

    def stepped(self, tokens: int) -> None:
        pass

    def wants_tokens(self, i: int) -> bool:
        return False

    def drawn(self, i: int, tokens: Sequence[DrawnTokens]) -> None:
        pass

    def still_open(self, i: int, num_samples: int) -> None:
        pass

    def ended(self, i: int, result: GenerateResult | None) -> None:
        pass


class Backend(Protocol):
    kinds: frozenset[str]
    """Kinds of operations that it runs. Any other kind is refused at admission."""
    slots: list[TensorSlot]
    """The tensors of this rank's heap: weights first, contiguous, sorted by name. A slot of a
    tensor's slice has the slice's shape and says which slice it is."""
    host_bytes: int
    """Bytes of state that live in host memory and never on the device; 0 if none. Their slots have
    offsets behind the heap's end."""
    version_slots: list[TensorSlot]
    """The tensors of a weights version: whole tensors from offset 0, at 64-byte offsets, sorted by
    name. They are the same for every layout and backend. The version's size is the end of the last
    one, rounded up to a multiple of 64. If ranks hold different weights, each writes its own part
    instead."""
    holdings: Sequence[Holding]
    """The slices of these tensors that each rank holds, in rank order."""

    config: dict[str, Any]
    """The content of the `config.json` that belongs to the weights."""

    def use_host_memory(self, buffer: memoryview) -> None:
        """Use this memory for the state of `host_bytes` bytes. It holds zeros, or a seal's content.

        Called once, before any operation, and only if `host_bytes` is greater than 0.
        """
        ...

    def check_generate(self, args: Generate) -> None:
        """Check a `generate` without touching state. Raises: CallerError: it cannot run."""
        ...

    def generate(self, requests: Sequence[Generate], watch: Watch) -> None:
        """Decode checked requests together with those that join them, until all have ended.

        Without a prefix cache, a request that runs alone gives the same bits every time. With one,
        or next to other requests, the last bits of its log-probabilities may differ. Each token is
        still drawn by (prompt seed, sample, position) and nothing else.
        """
        ...

    def check_forward(self, args: Forward) -> None:
        """Check a `forward` without touching state. Raises: CallerError: it cannot run."""
        ...

    def forward(self, args: Forward) -> ForwardResult:
        """Compute the log-probabilities of the targets of this rank's share. Collective."""
        ...

    def check_forward_backward(self, args: ForwardBackward) -> None:
        """Check a `forward_backward` without touching state. Raises: CallerError: it cannot run."""
        ...

    def forward_backward(self, args: ForwardBackward) -> ForwardBackwardResult:
        """Add to the gradients on all ranks. Collective.

        Raises: CallerError: the loss or its gradients are not finite. Every rank raises it.
        """
        ...

    def check_optim_step(self, args: OptimStep) -> None:
        """Check an `optim_step` without touching state. Raises: CallerError: it cannot run."""
        ...

    def optim_step(self, args: OptimStep) -> OptimStepResult:
        """Update the weights and zero the gradients. Collective.

        Raises: CallerError: the step cannot run; nothing has changed.
        """
        ...

    def zero_gradients(self) -> None:
        """Discard the gradients accumulated for the next step."""
        ...

    def nonfinite_weights(self) -> list[str]:
        """Return the names of this rank's weights that hold NaN or infinity."""
        ...

    def weights_sha256(self) -> str:
        """Return the SHA-256 of the whole weights, the same on all ranks and for every layout.
        Collective."""
        ...

    def weights_changed(self) -> None:
        """Discard everything derived from the weights, because the heap's bytes were replaced by a
        load or a sync."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class KeepsKv(Protocol):
    """A backend whose prefix cache can survive an update of the weights."""

    def weights_updated(self) -> None:
        """Keep the old weights' keys and values for samples that the update interrupted.

        Called instead of `weights_changed`, after a sync has replaced the heap's bytes.
        """
        ...


@runtime_checkable
class ReadsOtherWeights(Protocol):
    """A backend that can compute with other whole weights that temporarily replace its own."""

    def weights_exchanged(self, name: str) -> None:
        """React to an exchange of the heap's weights.

        Args: name: identifies the weights that the heap now holds for the next calls; empty if it
                 holds the deployment's own again.
        """
        ...


@runtime_checkable
class WritesPastWeights(ReadsOtherWeights, Protocol):
    """A backend that also overwrites heap bytes behind the weights while it uses other weights."""

    @property
    def exchanged_bytes(self) -> int:
        """Length of the start of the heap, weights included, that an exchange overwrites. The
        caller saves these bytes and restores them afterwards."""
        ...


@runtime_checkable
class ReadsAdapters(Protocol):
    """A backend that can compute with versions of other adapters instead of its own."""

    def adapter_slots(self, adapter: Adapter) -> list[TensorSlot]:
        """Return the tensors of a version of another adapter on this deployment's base.

        The adapter's rank and targets must be within those of the deployment's own.
        """
        ...

    def check_adapter(self, version: AdapterVersion) -> None:
        """Check that operations can use this version. Raises: CallerError: they cannot."""
        ...


@runtime_checkable
class BatchesAdapters(ReadsAdapters, Protocol):
    """A backend that decodes rows with different adapters in one batch (see `Watch.adapter`)."""

    def forward_with(self, args: Forward, version: AdapterVersion) -> ForwardResult:
        """Run `forward` with a version of an adapter."""
        ...


@runtime_checkable
class SwitchesAdapters(ReadsAdapters, Protocol):
    """A backend that computes with one adapter at a time."""

    def switched(self, version: AdapterVersion) -> AbstractContextManager[None]:
        """Return a context in which calls compute with this version."""
        ...


@runtime_checkable
class Divides(Protocol):
    """A backend whose share of the device's compute units can change during an operation."""

    at_boundary: Callable[[], None]
    """Called in the device thread between two steps of an operation. The share may change there."""

    def use_threads(self, count: int) -> None:
        """Use this many threads from now on. Called in the device thread, at a boundary."""
        ...


def nothing() -> None:
    """Do nothing. It is the `at_boundary` of a rank that does not share its device."""


@dataclass(frozen=True)
class Memory:
    """Device memory that one rank needs."""

    heap_bytes: int
    """Bytes of its state, alignment included."""
    scratch_bytes: int = 0
    """Bytes next to the heap that are never moved. Their content is undefined after the heap's
    bytes were replaced (see `Backend.weights_changed`)."""


class BackendFactory(Protocol):
    @staticmethod
    def plan(spec: DeploymentSpec, ranks: RankGroup = ALONE) -> Memory:
        """Return the device memory that this rank needs. Raises: as the constructor."""
        ...

    def __call__(
        self, spec: DeploymentSpec, heap: DeviceMemory, ranks: RankGroup = ALONE
    ) -> Backend:
        """Build the model on the heap and fill it from the spec's seeds. Collective.

        Raises: CallerError: this runtime does not support the model or the layout.
        """
        ...
