"""Sampling from weights that a caller names: a base, a checkpoint's path or a sampling session."""

from __future__ import annotations

from dataclasses import dataclass

from phaseloom.client import (
    Adapter,
    CallerError,
    Code,
    GenerateHandle,
)
from phaseloom.common.contract.checks import MAX_SAMPLES
from phaseloom.common.contract.specs import RegisteredModel
from phaseloom.gateway.models import (
    BASE,
    POLICY,
    Draw,
    SharedSampler,
    Version,
    VersionedSampler,
    context_of,
)
from phaseloom.gateway.records import CheckpointRecord, ModelRecord, SamplerRecord
from phaseloom.gateway.tenants import Tenant

PATHS = "tinker://"
NATIVE = "checkpoint:"
"""Prefix of a checkpoint that a controller of the mesh saved: `checkpoint:JOB/DEPLOYMENT/NAME`."""


@dataclass(frozen=True)
class Source:
    """The weights to sample from, and the sampler that has them."""

    base: RegisteredModel
    version: Version
    model: str = ""
    """The trained model whose own sampler has them. Empty: the tenant's sampler of the base."""
    adapter: Adapter | None = None
    """The version's adapter, for the shared sampler. None: the version has all weights."""

    @property
    def context(self) -> int:
        """Maximum tokens of prompt and sample together."""
        return context_of(self.base)

    async def generate(self, tenant: Tenant, draw: Draw) -> GenerateHandle:
        return await (await self._sampler(tenant)).generate(self.version, draw)

    async def _sampler(self, tenant: Tenant) -> VersionedSampler | SharedSampler:
        if self.adapter is not None:
            return await tenant.models.shared_sampler(self.base, self.adapter)
        if not self.model:
            return await tenant.models.base_sampler(self.base)
        record = tenant.book.get(ModelRecord, tenant.name, self.model)
        sampler = (await tenant.models.trained(record.job, None)).sampler
        assert sampler is not None
        return sampler


async def source_of(tenant: Tenant, name: str) -> Source:
    """Find the weights that a base's name, a checkpoint's path or a sampling session stands for.

    Raises: CallerError: NOT_FOUND: the tenant has none of that name.
    """
    session = tenant.book.find(SamplerRecord, tenant.name, name)
    if session is not None and session.model:
        base = await tenant.base(session.base)
        record = tenant.book.get(ModelRecord, tenant.name, session.model)
        if record.adapter is not None:
            version = Version(session.version, f"{record.job}/{POLICY}")
            return Source(base, version, adapter=record.adapter)
        return Source(base, Version(session.version), session.model)
    path = session.path if session is not None else name
    if path.startswith(PATHS):
        saved = tenant.book.get(CheckpointRecord, tenant.name, path)
        version = Version(saved.name, saved.source)
        return Source(await tenant.base(saved.base), version, adapter=saved.adapter)
    if path.startswith(NATIVE):
        return await _native(tenant, path)
    return Source(await tenant.base(session.base if session is not None else name), BASE)


async def _native(tenant: Tenant, path: str) -> Source:
    job, _, rest = path.removeprefix(NATIVE).partition("/")
    deployment, _, name = rest.partition("/")
    saved = await tenant.models.checkpoint(job, deployment, name)
    if not saved.model:
        raise CallerError(
            f"checkpoint {path!r} does not name a registered model, so it has no tokenizer",
            code=Code.FAILED_PRECONDITION,
            field="model",
            remedy="save it from a deployment of a registered model, or register its directory "
            "with `phaseloom model add`",
        )
    version = Version(saved.name, f"{saved.job}/{saved.deployment}", saved.weights_sha256)
    return Source(await tenant.base(saved.model), version, adapter=saved.adapter)


def check_samples(num_samples: int, field: str) -> None:
    if not 1 <= num_samples <= MAX_SAMPLES:
        raise CallerError(
            f"num_samples must be between 1 and {MAX_SAMPLES}, got {num_samples}",
            field=field,
            remedy=f"use 1 to {MAX_SAMPLES}",
        )
