"""The state that a gateway holds for each tenant that it serves."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from phaseloom.client import CallerError, Code
from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.ids import from_token, is_model_name, to_token
from phaseloom.common.contract.specs import RegisteredModel
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.transport.bus import Bus
from phaseloom.gateway.futures import Futures
from phaseloom.gateway.models import Models
from phaseloom.gateway.records import Book

_FRESH_S = 1.0


@dataclass(frozen=True)
class Tenant:
    """A tenant. Its calls to the mesh use a connection of its own, as a controller's do."""

    name: str
    models: Models
    futures: Futures
    book: Book
    bus: Bus
    beats: dict[str, float] = field(default_factory=dict)
    """Monotonic time of each session's last heartbeat."""
    asked_s: dict[str, float] = field(default_factory=dict)
    """Time of each model's last call, in Unix seconds."""
    read: dict[str, tuple[float, RegisteredModel]] = field(default_factory=dict)
    """Registered models, each with the monotonic time at which it was read."""
    loading: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Running loads of each checkpoint, by (source, name)."""

    async def remove_files(self, source: str, name: str) -> bool:
        """Remove a checkpoint's files, unless the checkpoint is being loaded.

        Returns: whether the files are gone.
        Raises: PhaseloomError: the files could not be removed.
        """
        if self.loading[source, name]:
            return False
        await self.models.delete(source, name)
        return True

    async def bases(self) -> list[RegisteredModel]:
        """Return the registered models, which can be trained and sampled."""
        keys = await self.bus.keys.names(Bucket.MODELS)
        names = sorted(from_token(key) for key in keys)
        models = [await self._registered(name) for name in names]
        return [model for model in models if model is not None]

    async def base(self, name: str) -> RegisteredModel:
        """Return the registered model with this name or directory, at most `_FRESH_S` old. It is
        cached because each sample needs it.

        Raises: CallerError: NOT_FOUND: there is no registered model with this name.
        """
        read_s, registered = self.read.get(name, (0.0, None))
        if registered is None or time.monotonic() - read_s > _FRESH_S:
            read_s, registered = time.monotonic(), await self._registered(name)
        if registered is None and name.startswith("/"):
            by_path = {model.directory.path.rstrip("/"): model for model in await self.bases()}
            registered = by_path.get(name.rstrip("/"))
        if registered is None:
            names = ", ".join(model.name for model in await self.bases()) or "none"
            raise CallerError(
                f"there is no model {name!r}",
                code=Code.NOT_FOUND,
                field="model",
                remedy=f"use one of: {names}; the operator adds one with `phaseloom model add`",
            )
        self.read[name] = (read_s, registered)
        return registered

    async def _registered(self, name: str) -> RegisteredModel | None:
        if not is_model_name(name):
            return None
        stored = await self.bus.keys.get(Bucket.MODELS, to_token(name))
        if stored is None:
            return None
        model: RegisteredModel = decode(stored.payload, RegisteredModel)
        return model
