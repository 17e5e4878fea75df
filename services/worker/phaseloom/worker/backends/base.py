"""The protocol of a runtime adapter: one module per runtime, one line in the registry.

A backend owns no memory of its own state: every weight, gradient and optimizer tensor is a view
into the `DeviceMemory`, whose bytes the state manager moves. It is called from one thread, one call
at a time, never from the event loop. It uses no global random state: its draws come from seeds that
the operation names.

Over several ranks each has a backend and a heap of its own. A method marked *collective* must be
called on all ranks of the WPG alike, in the same order, each with its own share of the data
(`phaseloom.common.tensors.layouts.split`), which may be empty. It returns the share's result, and
raises `GroupBroken` where another rank does not take part. The `check_…` methods are given the
whole operation, before it is split.

A backend runs an operation of a kind in its `kinds` by two methods named after the kind,
`check_<kind>(args)` and `<kind>(args)`. The protocol lists today's kinds; a kind of only one
backend need not be in it. Kinds that move state are run without the backend.
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
    """This rank's place among those of its WPG, and on its node."""

    rank: int = 0
    world_size: int = 1
    store_path: str = ""
    """The path of a file that does not exist yet, where the ranks of this incarnation find each
    other. Unused where there is one rank, or where `store_address` is given."""
    store_address: str = ""
    """The host:port of a TCP store, for ranks on several nodes."""
    store_fd: int = -1
    """On rank 0: the listening socket of that store, which rank 0 serves."""
    store_prefix: str = ""
    """The prefix of this incarnation's names in that store, which keeps other incarnations
    apart."""
    timeout_s: float = 300.0
    """Seconds after which a collective that some rank does not join fails on the others."""
    device_kind: DeviceKind = DeviceKind.EMULATED
    node_directory: str = ""
    """The directory of this node for files that its ranks share, where adapters run."""
    num_units: int = 1
    """The compute units of the rank's device. If there are several, the rank may have any part of
    them, and its results must be the same bits with each."""


ALONE = RankGroup()


class GroupBroken(ResourceError):
    """A collective failed because another rank is gone, or did not join in time.

    The WPG is lost, whatever kind the operation was; the operation may not be at fault.
    """


@dataclass(frozen=True)
class AdapterVersion:
    """Weights of an adapter, which never change, for generation on the base of the deployment."""

    name: str
    """A name that stands for these weights and no others."""
    adapter: Adapter
    slots: Sequence[TensorSlot]
    """The tensors, by their names in files."""
    memory: memoryview
    """The host memory in which the tensors lie."""


@dataclass(frozen=True, eq=False)
class WholeVersion:
    """All weights of the deployment's model, other than its own, which never change."""

    name: str
    """Names these weights and no others."""
    exchanged: Callable[[], AbstractContextManager[None]]
    """Within it, in the device thread, the rank's heap has these weights in place of its own."""


Version = AdapterVersion | WholeVersion
"""Weights that an operation names."""


class Watch(Protocol):
    """The view that a `generate` call has of those who wait for its requests.

    The call asks between two tokens, in the device thread, so the methods must be quick. `i` is the
    request's place in the call.
    """

    def joined(self) -> Sequence[Generate]:
        """Take the checked requests that came since the last time.

        They are decoded with the others as soon as there is room, and have the next places.
        """
        ...

    def adapter(self, i: int) -> AdapterVersion | None:
        """The adapter version to generate the request with; None: the deployment's own weights."""
        ...

    def is_cancelled(self, i: int) -> bool:
        """Whether nobody wants the request any more."""
        ...

    def is_stopped(self, i: int) -> bool:
        """Whether the request ends now with the tokens that it has, its open samples as
        `partial`."""
        ...

    def progress(self, i: int, num_done: int, num_total: int) -> None:
        """Report a request's new tokens so far, and the most that there may be; it may end
        before."""
        ...

    def stepped(self, tokens: int) -> None:
        """Report that a forward step over so many tokens has ended, before what has come of it:
        those that it prefilled, and one for each row that it decoded, of all requests."""
        ...

    def wants_tokens(self, i: int) -> bool:
        """Whether to report the request's new tokens now; asked for requests with `stream`."""
        ...

    def drawn(self, i: int, tokens: Sequence[DrawnTokens]) -> None:
        """Report the tokens that were drawn for a request since the last time, by its prompts'
        places."""
        ...

    def still_open(self, i: int, num_samples: int) -> None:
        """Report how many samples of a request have not ended, whenever some have."""
        ...

    def ended(self, i: int, result: GenerateResult | None) -> None:
        """Report a request's result as soon as it is whole; None: the request was cancelled."""
        ...


class Unwatched:
    """A `Watch` for a call that nobody joins, follows or cancels."""

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
    """The kinds of operations that it runs; any other kind is refused at admission."""
    slots: list[TensorSlot]
    """The tensors of this rank's heap: weights first, contiguous, sorted by name. The slot of a
    part of a tensor has that part's shape, and says which part it is."""
    host_bytes: int
    """The bytes of its state that are in host memory, never on its device; their slots lie behind
    the heap's end. 0: none."""
    version_slots: list[TensorSlot]
    """The tensors of a weights version: whole tensors from offset 0 at 64-byte offsets, sorted by
    name, the same for every layout and backend. The version's size is the last one's end, rounded
    up to the next 64. Where ranks hold different weights, each writes a part of its own instead."""
    holdings: Sequence[Holding]
    """The slice of these tensors that each rank holds, in the order of ranks."""

    config: dict[str, Any]
    """The model's config, with the content of `config.json` beside its weights."""

    def use_host_memory(self, buffer: memoryview) -> None:
        """Use this memory for the state of `host_bytes` bytes. It holds zeroes, or a seal's
        content.

        Called once, before any operation, if there are host bytes.
        """
        ...

    def check_generate(self, args: Generate) -> None:
        """Check a `generate`; touches no state. Raises: CallerError: it cannot be run."""
        ...

    def generate(self, requests: Sequence[Generate], watch: Watch) -> None:
        """Decode checked requests together, and those that join them, until all have ended.

        A request alone gives the same bits whenever it runs, without a prefix cache. Beside others,
        or with one, the last bits of its log-probabilities may differ, but each token is still
        drawn from (prompt seed, sample, position) and nothing else.
        """
        ...

    def check_forward(self, args: Forward) -> None:
        """Check a `forward`; touches no state. Raises: CallerError: it cannot be run."""
        ...

    def forward(self, args: Forward) -> ForwardResult:
        """Compute the log-probabilities of the share's targets. Collective."""
        ...

    def check_forward_backward(self, args: ForwardBackward) -> None:
        """Check a `forward_backward`; touches no state. Raises: CallerError: it cannot be run."""
        ...

    def forward_backward(self, args: ForwardBackward) -> ForwardBackwardResult:
        """Add to the gradients of all ranks. Collective.

        Raises: CallerError: on all ranks alike, the loss or its gradients are not finite.
        """
        ...

    def check_optim_step(self, args: OptimStep) -> None:
        """Check an `optim_step`; touches no state. Raises: CallerError: it cannot be run."""
        ...

    def optim_step(self, args: OptimStep) -> OptimStepResult:
        """Take a step and zero the gradients. Collective.

        Raises: CallerError: the step cannot be taken; nothing has changed.
        """
        ...

    def zero_gradients(self) -> None:
        """Drop the gradients that were added up for the next step."""
        ...

    def weights_sha256(self) -> str:
        """The SHA-256 of the whole weights, the same on all ranks and for every layout.
        Collective."""
        ...

    def weights_changed(self) -> None:
        """Drop everything that was derived from the weights: the heap's bytes were replaced (load,
        sync)."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class KeepsKv(Protocol):
    """A backend whose prefix cache can outlast an update of the weights."""

    def weights_updated(self) -> None:
        """Keep the keys and values of the weights before, for samples that the update has stopped.

        It is called in place of `weights_changed`, after a sync has replaced the heap's bytes.
        """
        ...


@runtime_checkable
class ReadsOtherWeights(Protocol):
    """A backend that reads with all weights of another deployment or time in its heap."""

    def weights_exchanged(self, name: str) -> None:
        """Read with the weights of this name, which the heap has for the calls that come now;
        empty: with its own, which the heap has again before the next call."""
        ...


@runtime_checkable
class WritesPastWeights(ReadsOtherWeights, Protocol):
    """A backend that writes more of the heap than the weights for as long as it reads with
    others."""

    @property
    def exchanged_bytes(self) -> int:
        """The first bytes of the heap, weights included, that it writes then. Every one of them is
        kept meanwhile, and given back afterwards."""
        ...


@runtime_checkable
class ReadsAdapters(Protocol):
    """A backend that computes with versions of other adapters in place of its own."""

    def adapter_slots(self, adapter: Adapter) -> list[TensorSlot]:
        """The tensors of a version of an adapter on this deployment's base. The adapter's rank and
        targets are within those of the deployment's own."""
        ...

    def check_adapter(self, version: AdapterVersion) -> None:
        """Check that operations can be run with a version. Raises: CallerError: they cannot."""
        ...


@runtime_checkable
class BatchesAdapters(ReadsAdapters, Protocol):
    """A backend that decodes rows of several adapters in one batch, as `Watch.adapter` says."""

    def forward_with(self, args: Forward, version: AdapterVersion) -> ForwardResult:
        """Run `forward` with a version of an adapter."""
        ...


@runtime_checkable
class SwitchesAdapters(ReadsAdapters, Protocol):
    """A backend that reads with one adapter at a time."""

    def switched(self, version: AdapterVersion) -> AbstractContextManager[None]:
        """Within this, calls read with a version."""
        ...


@runtime_checkable
class Divides(Protocol):
    """A backend whose work can go on with another share of its device's compute units."""

    at_boundary: Callable[[], None]
    """Called in the device thread between two steps of an operation; the share may change then."""

    def use_threads(self, count: int) -> None:
        """Work with this number of threads from now on. Called in the device thread, at a
        boundary."""
        ...


def nothing() -> None:
    """Do nothing: the function for boundaries of a rank that has its device alone."""


@dataclass(frozen=True)
class Memory:
    """The device memory that one rank needs."""

    heap_bytes: int
    """The bytes of its state, alignment included."""
    scratch_bytes: int = 0
    """The bytes beside the heap that nobody moves; their content is undefined whenever the heap's
    bytes were replaced (`Backend.weights_changed`)."""


class BackendFactory(Protocol):
    @staticmethod
    def plan(spec: DeploymentSpec, ranks: RankGroup = ALONE) -> Memory:
        """The device memory that this rank needs. Raises: as the constructor."""
        ...

    def __call__(
        self, spec: DeploymentSpec, heap: DeviceMemory, ranks: RankGroup = ALONE
    ) -> Backend:
        """Build the model on the heap and fill it from the spec's seeds. Collective.

        Raises: CallerError: a model or a layout that this runtime cannot do.
        """
        ...
