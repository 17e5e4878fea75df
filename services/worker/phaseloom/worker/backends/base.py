"""What a runtime adapter must do: one module per runtime, one line in the registry.

A backend owns no memory of its own state: every weight, gradient and optimizer tensor is a view
into the `DeviceMemory`, whose bytes the state manager moves. It is called from one thread, one call
at a time, never from the event loop. It uses no global random state: what it draws comes from seeds
that the operation names.

Over several ranks each has a backend and a heap of its own. What is marked *collective* must be
called on all ranks of the WPG alike, in the same order, each with its own share of the data
(`phaseloom.common.tensors.layouts.split`), which may be empty; it returns the share's result, and
raises `GroupBroken` where another rank does not take part. The `check_…` calls are for the whole
operation, before it is split.

A backend does an operation of a kind that it names in `kinds` by two methods called like the kind,
`check_<kind>(args)` and `<kind>(args)`. The protocol lists those of today; a kind that one backend
alone can do need not stand in it. Kinds that move state are done without the backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from phaseloom.common.contract.errors import ResourceError
from phaseloom.common.contract.operations import (
    Forward,
    ForwardBackward,
    ForwardBackwardResult,
    ForwardResult,
    Generate,
    GenerateResult,
    OptimStep,
    OptimStepResult,
)
from phaseloom.common.contract.specs import DeploymentSpec
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.tensors.resharding import Sharding
from phaseloom.worker.state.devicememory import DeviceMemory


@dataclass(frozen=True)
class RankGroup:
    """This rank's place among those of its WPG."""

    rank: int = 0
    world_size: int = 1
    store_path: str = ""
    """Of a file that does not exist yet, the same for all ranks and for this incarnation only: how
    they find each other. Unused where there is one rank, or where `store_address` is said."""
    store_address: str = ""
    """host:port of a TCP store, for ranks on several nodes."""
    store_fd: int = -1
    """On rank 0: the socket that listens there, to be served by it."""
    life: str = ""
    """Tells this incarnation's ranks from any others that come to that address."""
    timeout_s: float = 300.0
    """A collective that some rank does not join for so long fails on the others."""


ALONE = RankGroup()


class GroupBroken(ResourceError):
    """A collective failed because another rank is gone, or did not join in time.

    The WPG is lost, whatever kind the operation was; nothing says that the operation was at fault.
    """


class Watch(Protocol):
    """Whoever waits for requests that are generated together; asked between two tokens, in the
    device thread, so both must be quick. `i` is the request's place in the call."""

    def is_cancelled(self, i: int) -> bool:
        """Asked only while some of the request's samples are not done."""
        ...

    def progress(self, i: int, num_done: int, num_total: int) -> None:
        """New tokens so far, and at most; a request may end before."""
        ...


class Backend(Protocol):
    kinds: frozenset[str]
    """Operation kinds that it can do; another is refused at admission."""
    slots: list[TensorSlot]
    """What lies where in this rank's heap: weights first, contiguous, sorted by name. A slot that
    holds a part of a tensor has that part's shape, and says which part it is."""
    host_bytes: int
    """State that it works on in host memory, never on its device: what lies behind the heap's end
    in `slots`. 0: none."""
    version_slots: list[TensorSlot]
    """What lies where in a weights version: whole tensors from offset 0 at 64-byte offsets, sorted
    by name, the same for every layout and backend; its size is the last one's end, rounded up to
    the next 64. Where ranks hold different weights each writes a part of its own instead."""
    sharding: Sharding
    """What of these tensors each rank holds."""

    config: dict[str, Any]
    """Of the model, as `config.json` has it beside its weights."""

    def use_host_memory(self, buffer: memoryview) -> None:
        """Where those `host_bytes` are from now on: zeroes, or what a seal held. Called where there
        are some, once, before any operation."""
        ...

    def check_generate(self, args: Generate) -> None:
        """Raises: CallerError: what `generate` could not do. Touches no state."""
        ...

    def generate(self, requests: Sequence[Generate], watch: Watch) -> list[GenerateResult | None]:
        """Decode all checked requests together; None: it was cancelled.

        A request alone gives the same bits whenever it runs. Beside others the last bits of its
        log-probabilities may differ, but each token is still drawn from (prompt seed, sample,
        position) and nothing else.
        """
        ...

    def check_forward(self, args: Forward) -> None:
        """Raises: CallerError: what `forward` could not do. Touches no state."""
        ...

    def forward(self, args: Forward) -> ForwardResult:
        """Collective."""
        ...

    def check_forward_backward(self, args: ForwardBackward) -> None:
        """Raises: CallerError: what `forward_backward` could not do. Touches no state."""
        ...

    def forward_backward(self, args: ForwardBackward) -> ForwardBackwardResult:
        """Collective. Adds to the gradients of all ranks.

        Raises: CallerError: on all ranks alike, the loss or its gradients are not finite.
        """
        ...

    def check_optim_step(self, args: OptimStep) -> None:
        """Raises: CallerError: what `optim_step` could not do. Touches no state."""
        ...

    def optim_step(self, args: OptimStep) -> OptimStepResult:
        """Collective. Raises: CallerError, before anything happened."""
        ...

    def zero_gradients(self) -> None:
        """Forget what was accumulated for the next step."""
        ...

    def weights_sha256(self) -> str:
        """Collective. Of the whole weights, the same on all ranks and for every layout."""
        ...

    def weights_changed(self) -> None:
        """The heap's bytes were replaced (load, sync): drop what was derived from them."""
        ...

    def close(self) -> None: ...


class BackendFactory(Protocol):
    @staticmethod
    def heap_bytes(spec: DeploymentSpec, ranks: RankGroup = ALONE) -> int:
        """Bytes of this rank's state on its device, alignment included."""
        ...

    def __call__(
        self, spec: DeploymentSpec, heap: DeviceMemory, ranks: RankGroup = ALONE
    ) -> Backend:
        """Build the model on the heap and fill it from the spec's seeds. Collective.

        Raises: CallerError: a model or a layout that this runtime cannot do.
        """
        ...
