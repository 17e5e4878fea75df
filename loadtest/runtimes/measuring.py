"""All comparisons, in both interpreters."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec

from loadtest.records import Record, Records, describe, record
from loadtest.runtimes import models
from phaseloom.common.process import diewithparent


class Settings(msgspec.Struct, frozen=True):
    rounds: int = 5
    rows: int = 32
    tokens: int = 128
    """The new tokens of each of the `rows` sequences."""
    tp: int = 2
    """The tensor-parallel ranks of the sampler that weights are synced to, beside one rank."""
    is_quick: bool = False
    """Whether models are small: figures of such a run say nothing."""

    @property
    def small(self) -> tuple[int, int]:
        """Hidden size and layers: 14 million parameters; with AdamW, 220 MiB of state."""
        return (128, 2) if self.is_quick else (512, 4)

    @property
    def large(self) -> tuple[int, int]:
        """Hidden size and layers: 55 million parameters, 210 MiB of weights."""
        return (128, 2) if self.is_quick else (1024, 4)

    @property
    def smallest(self) -> tuple[int, int]:
        """Hidden size and layers: next to nothing to copy, 3 MiB of weights."""
        return (128, 1)

    @property
    def largest(self) -> tuple[int, int]:
        """Hidden size and layers: 210 million parameters, 800 MiB of weights."""
        return (256, 2) if self.is_quick else (2048, 4)

    @property
    def decoded(self) -> tuple[int, int]:
        """Hidden size and layers: so small that what we add would show."""
        return (128, 2) if self.is_quick else (256, 4)


async def measure(settings: Settings, python: Path, directory: Path, file: Path) -> Records:
    """Measure everything; the figures are merged into the file by name.

    Args: python: the interpreter that has vLLM.
          directory: an existing directory for state files and the mesh.
    """
    from loadtest.runtimes import switching, syncing, training

    figures = await asyncio.to_thread(training.measure, settings.rounds, *settings.small)
    for backend, size in (("fsdp", settings.small), ("sampler", settings.large)):
        spec = models.spec(backend, *size)
        figures += await switching.measure(spec, directory / backend, settings.rounds)
    for tp in (1, settings.tp):
        figures += await _measure_syncs(settings, tp, python, directory / f"sync-{tp}")
    apart = syncing.Sync(*settings.large, python, settings.tp, crosses_nodes=True)
    over = await syncing.measure(apart, directory / "sync-apart", settings.rounds)
    figures += [each.time() for each in over]
    figures += await _measure_vllm(settings, python, directory)
    return record(figures, describe("torch", "transformers"), file)


async def _measure_syncs(
    settings: Settings, tp: int, python: Path, directory: Path
) -> list[Record]:
    """Measure syncs of three sizes, and what each GiB takes."""
    from loadtest.runtimes import syncing

    sizes = (settings.smallest, settings.large, settings.largest)
    every = []
    for hidden, layers in sizes:
        has_aim = (hidden, layers) != settings.smallest
        sync = syncing.Sync(hidden, layers, python, tp, has_aim=has_aim)
        name = f"{hidden}-{layers}"
        every += await syncing.measure(sync, directory / name, settings.rounds)
    return [*(each.time() for each in every), syncing.each_gib(sync, every[0], every[-1])]


async def measure_here(settings: Settings, directory: Path) -> list[Record]:
    """Measure what needs an interpreter that has vLLM."""
    from loadtest.runtimes import decoding, switching

    load = decoding.Load(settings.rows, settings.tokens)
    spec = models.spec("vllm", *settings.decoded)
    figures = await asyncio.to_thread(decoding.measure, spec, load, settings.rounds)
    spec = models.spec("vllm", *settings.large)
    return figures + await switching.measure(spec, directory / "vllm", settings.rounds)


async def _measure_vllm(settings: Settings, python: Path, directory: Path) -> list[Record]:
    """Run `measure_here` in that interpreter. Raises: RuntimeError: it failed."""
    results = directory / "figures.json"
    process = await asyncio.create_subprocess_exec(
        *diewithparent.launcher(
            [
                *(str(python), "-W", "ignore", "-m", "loadtest.runtimes"),
                *(msgspec.json.encode(settings).decode(), str(results)),
            ]
        ),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if await process.wait():
        raise RuntimeError(f"{python} -m loadtest.runtimes ended with {process.returncode}")
    return msgspec.json.decode(results.read_bytes(), type=list[Record])
