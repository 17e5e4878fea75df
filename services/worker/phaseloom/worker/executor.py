"""Runs one operation on a backend: the part of a rank that needs no bus.

Runs in the device thread. `applied` moves with the heap's content, never ahead of it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from phaseloom.common.errors import CallerError, Code, ErrorInfo
from phaseloom.common.ids import check_name
from phaseloom.common.messages import (
    Args,
    Forward,
    ForwardBackward,
    Generate,
    LoadState,
    LoadStateResult,
    OptimStep,
    Result,
    SaveState,
    SaveStateResult,
    kind_of,
)
from phaseloom.common.statewire import Role, TensorSlot
from phaseloom.worker.backends.base import Backend
from phaseloom.worker.rankwire import RankConfig


class Refused(Exception):
    """The operation cannot be done; no state was touched."""

    def __init__(self, error: ErrorInfo) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(slots=True)
class Executor:
    settings: RankConfig
    backend: Backend
    applied: int = 0
    """seq of the last mutating operation in the heap."""

    @property
    def weight_slots(self) -> list[TensorSlot]:
        return [slot for slot in self.backend.slots if slot.role is Role.WEIGHT]

    def check(self, args: Args) -> None:
        """Raises: Refused: names the field."""
        try:
            self._check(args)
        except CallerError as error:
            raise Refused(error.info) from error

    def _check(self, args: Args) -> None:
        if kind_of(args) not in self.backend.kinds:
            raise CallerError(
                f"backend {self.settings.spec.backend!r} cannot do {kind_of(args)}",
                code=Code.FAILED_PRECONDITION,
                field="args.type",
                remedy="send it to a deployment whose backend can",
            )
        match args:
            case ForwardBackward():
                self.backend.check_forward_backward(args)
            case SaveState():
                check_name(args.name, "args.name")
                if self._checkpoint(args.name).exists():
                    raise CallerError(
                        f"checkpoint {args.name!r} exists",
                        code=Code.ALREADY_EXISTS,
                        field="args.name",
                        remedy="choose another name",
                    )
            case LoadState():
                check_name(args.name, "args.name")
                if not self._checkpoint(args.name).is_dir():
                    raise CallerError(
                        f"checkpoint {args.name!r} does not exist",
                        code=Code.NOT_FOUND,
                        field="args.name",
                    )
            case _:
                pass

    def run(self, args: Args) -> Result:
        """Check, then do, every kind that moves no weights between deployments.

        Raises: Refused. Anything else: it failed half-way.
        """
        self.check(args)
        match args:
            case Generate():
                return self.backend.generate(args)
            case Forward():
                return self.backend.forward(args)
            case ForwardBackward():
                return self.backend.forward_backward(args)
            case OptimStep():
                return self.backend.optim_step(args.adam)
            case SaveState():
                return self._save(args.name)
            case LoadState():
                self.backend.load(self._checkpoint(args.name))
                return LoadStateResult(self.backend.weights_sha256())
            case _:
                raise AssertionError(f"{kind_of(args)} is the leader's")

    def _checkpoint(self, name: str) -> Path:
        key = self.settings.deployment
        root = Path(self.settings.checkpoint_root)
        return root / key.tenant / key.job / key.deployment / name

    def _save(self, name: str) -> SaveStateResult:
        final = self._checkpoint(name)
        draft = final.with_name(f".{name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        self.backend.save(draft)
        digest = self.backend.weights_sha256()
        draft.rename(final)
        key = self.settings.deployment
        return SaveStateResult(f"{key.job}/{key.deployment}/{name}", digest)
