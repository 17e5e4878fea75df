"""Run operations on a backend, in the device thread. Needs no bus.

`applied` follows the heap's content and is never ahead of it. In a WPG of several ranks, only the
leader checks operations and merges results; every rank computes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from phaseloom.common.contract.checks import MAX_BLOB_BYTES
from phaseloom.common.contract.errors import CallerError, Code, ErrorInfo
from phaseloom.common.contract.ids import check_name
from phaseloom.common.contract.kinds import kind_for
from phaseloom.common.contract.operations import (
    Args,
    Forward,
    Generate,
    LoadState,
    LoadStateResult,
    PublishWeights,
    Result,
    SaveState,
    SyncWeights,
    kind_of,
)
from phaseloom.common.contract.state_layout import Places, Role, TensorSlot
from phaseloom.common.tensors.layouts import item_ranges, merge, split, split_shared
from phaseloom.worker.backends.base import (
    AdapterVersion,
    Backend,
    BatchesAdapters,
    KeepsKv,
    ReadsOtherWeights,
    SwitchesAdapters,
    Version,
    WholeVersion,
)
from phaseloom.worker.rank.wire import RankConfig


class OperationRefused(Exception):
    """The operation cannot be done; no state was touched."""

    def __init__(self, error: ErrorInfo) -> None:
        super().__init__(error.message)
        self.error = error


_UNAVAILABLE_CODES = frozenset({Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED})
"""Error codes that mean that a source of weights is restarting or cannot be reached."""


class OperationDeferred(Exception):
    """A resource that the operation needs is temporarily unavailable; nothing was changed."""

    def __init__(self, error: ErrorInfo) -> None:
        super().__init__(error.message)
        self.error = error


def unavailable_error(error: ErrorInfo) -> OperationDeferred | OperationRefused:
    """Return the error for an operation whose weights are unavailable. Nothing has changed."""
    return OperationDeferred(error) if error.code in _UNAVAILABLE_CODES else OperationRefused(error)


@dataclass(slots=True)
class Executor:
    settings: RankConfig
    backend: Backend
    applied: int = 0
    """The seq of the last mutating operation in the heap."""
    _keeps_kv: bool = False
    """Whether the running sync keeps the prefix cache."""

    @property
    def weight_slots(self) -> list[TensorSlot]:
        return [slot for slot in self.backend.slots if slot.role is Role.WEIGHT]

    @property
    def adapter_config(self) -> str:
        """The `adapter_config.json` of the deployment's adapter; empty: it has none."""
        has_adapter = self.settings.spec.model.adapter is not None
        return json.dumps(self.backend.config) if has_adapter else ""

    def locate(self, names: Sequence[str]) -> Places:
        """Return where a checkpoint of another program has each tensor. Runs in any thread.

        Args:   names: of the tensors in its files.
        Raises: CallerError: FAILED_PRECONDITION: it is of another model.
        """
        problem = f"the backend {self.settings.spec.backend!r} reads only checkpoints of its own"
        if self.settings.spec.model.config.get("model_type"):
            from phaseloom.worker.backends.model import model_names  # imports torch

            try:
                return model_names(self.settings.spec.model).locate(names)
            except ValueError as error:
                problem = str(error)
        raise CallerError(
            f"the checkpoint is not of this model: {problem}",
            code=Code.FAILED_PRECONDITION,
            field="args.name",
            remedy="load a checkpoint of the same architecture",
        )

    @property
    def is_alone(self) -> bool:
        return self.settings.num_ranks == 1

    @property
    def is_one_replica(self) -> bool:
        """Whether every rank runs each operation as a whole and has its whole result."""
        return self.settings.spec.layout.dp == 1

    # --- the leader's -----------------------------------------------------------------------------

    def check(self, args: Args) -> None:
        """Check an operation before anything is done. Raises: OperationRefused: names the field."""
        try:
            self._check(args)
        except CallerError as error:
            raise OperationRefused(error.info) from error

    def _check(self, args: Args) -> None:
        kind = kind_for(args)
        if kind.name not in self.backend.kinds:
            raise CallerError(
                f"backend {self.settings.spec.backend!r} does not support {kind.name}",
                code=Code.FAILED_PRECONDITION,
                field="args.type",
                remedy="send the operation to a deployment whose backend supports it",
            )
        if not kind.moves_state:
            getattr(self.backend, f"check_{kind.name}")(args)
        elif isinstance(args, SaveState):
            _check_save(args)
        elif isinstance(args, SyncWeights) and args.keeps_kv and not self._can_keep_kv:
            raise CallerError(
                "keeps_kv requires a prefix cache, and this deployment has none",
                code=Code.FAILED_PRECONDITION,
                field="args.keeps_kv",
                remedy="omit keeps_kv, or declare the deployment with the backend 'sampler' and "
                "prefix_cache = true",
            )

    def run(self, args: Args, version: Version | None = None) -> Result:
        """Run a whole operation of any kind except `generate` and those that move state.

        Args:   version: as in `compute`.
        Raises: OperationRefused. Any other error: it failed half-way.
        """
        self.check(args)
        return self.finish(args, [self.compute(args, version)])

    def check_publish(self, args: PublishWeights) -> None:
        """Check that this rank's weights may be published. Called in the device thread.

        Raises: CallerError: some are NaN or infinite, and `args` does not allow it.
        """
        nonfinite = [] if args.allow_nonfinite else self.backend.nonfinite_weights()
        if nonfinite:
            raise CallerError(
                f"{len(nonfinite)} tensors hold NaN or infinity, such as {nonfinite[0]}",
                code=Code.FAILED_PRECONDITION,
                field="args.allow_nonfinite",
                remedy="load the last good checkpoint and lower the learning rate, or publish with "
                "allow_nonfinite=True",
            )

    def finish(self, args: Args, shares: Sequence[Result]) -> Result:
        """Merge the results of all ranks, in rank order, into the operation's result."""
        if self.is_alone:
            return shares[0]
        return merge(kind_of(args), shares, self.settings.spec.layout)

    # --- every rank's -----------------------------------------------------------------------------

    @property
    def _can_keep_kv(self) -> bool:
        return self.settings.spec.prefix_cache and isinstance(self.backend, KeepsKv)

    @contextmanager
    def syncing(self, args: SyncWeights) -> Iterator[None]:
        """Apply the options of a `sync_weights` while the block replaces the weights."""
        self._keeps_kv = args.keeps_kv and self._can_keep_kv
        try:
            yield
        finally:
            self._keeps_kv = False

    def weights_changed(self) -> None:
        """Notify the backend that the heap's bytes were replaced. Called in the device thread."""
        if self._keeps_kv:
            assert isinstance(self.backend, KeepsKv)
            self.backend.weights_updated()
        else:
            self.backend.weights_changed()

    def part(
        self, requests: Sequence[Generate], replicas: Sequence[int] = ()
    ) -> Sequence[Generate]:
        """Run this rank's share of a group of requests that run together.

        Args: replicas: the participating ranks, one for each replica; empty: all ranks.
        """
        if replicas:
            place = replicas.index(self.settings.rank)
            return kind_for(requests[0]).split(requests, len(replicas), place)
        if self.is_alone:
            return requests
        return split_shared(requests, self.settings.spec.layout, self.settings.rank)

    def first_prompts(
        self, requests: Sequence[Generate], replicas: Sequence[int] = ()
    ) -> list[int]:
        """The index of the first prompt of each request in this rank's `part`. Args: as in
        `part`."""
        if replicas:
            place = replicas.index(self.settings.rank)
            runs = kind_for(requests[0]).item_ranges(requests, len(replicas), place)
        else:
            runs = item_ranges(requests, self.settings.spec.layout, self.settings.rank)
        return [run.start for run in runs]

    def compute(self, args: Args, version: Version | None = None) -> Result:
        """Run this rank's part of a checked operation.

        Args:   version: the weights that the operation names; None: the deployment's current
                 weights.
        Raises: the backend's error: the operation failed half-way.
        """
        if isinstance(args, LoadState):
            # The state manager has already loaded the checkpoint; return the digest of the heap.
            return LoadStateResult(self.backend.weights_sha256())
        kind = kind_for(args)
        assert not kind.moves_state, f"ranks and state managers do {kind.name}"
        assert not kind.shares_calls, f"{kind.name} goes through `generate`"
        share = args
        if not self.is_alone:
            share = split(args, self.settings.spec.layout, self.settings.rank)
        assert version is None or isinstance(share, Forward), f"{kind.name} names no weights"
        if isinstance(version, AdapterVersion) and isinstance(self.backend, BatchesAdapters):
            assert isinstance(share, Forward)
            return self.backend.forward_with(share, version)
        with self.reading(version):
            result: Result = getattr(self.backend, kind.name)(share)
        return result

    def call_weights_name(self, version: Version | None) -> str:
        """The name of the weights that a whole backend call must read with.

        Empty: the backend's current weights, or weights named per request.
        """
        if version is None:
            return ""
        is_mixed = isinstance(version, AdapterVersion) and isinstance(self.backend, BatchesAdapters)
        return "" if is_mixed else version.name

    @contextmanager
    def reading(self, version: Version | None) -> Iterator[None]:
        """Make the backend read with these weights inside the block, if they apply to the whole
        call.

        Use it in the device thread.
        """
        backend = self.backend
        if isinstance(version, WholeVersion):
            assert isinstance(backend, ReadsOtherWeights), "refused when the version was read"
            with version.exchanged():
                backend.weights_exchanged(version.name)
                try:
                    yield
                finally:
                    backend.weights_exchanged("")
        elif version is not None and isinstance(backend, SwitchesAdapters):
            with backend.switched(version):
                yield
        else:
            yield


def _check_save(args: SaveState) -> None:
    check_name(args.name, "args.name")
    if len(args.controller_blob) > MAX_BLOB_BYTES:
        raise CallerError(
            f"controller_blob must have at most {MAX_BLOB_BYTES} bytes, got "
            f"{len(args.controller_blob)}",
            field="args.controller_blob",
            remedy="save less, or store the data elsewhere and save its location",
        )
    for deployment, name in args.checkpoints.items():
        check_name(deployment, "args.checkpoints")
        check_name(name, f"args.checkpoints.{deployment}")
