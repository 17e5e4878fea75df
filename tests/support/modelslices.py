"""A small model whose ranks publish parts and need slices, in whatever layouts, and ranks that only
write and read weights versions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.specs import Layout
from phaseloom.common.contract.state_layout import (
    Role,
    Slice,
    TensorSlot,
    VersionPart,
    VersionParts,
)
from phaseloom.common.tensors.blockhash import digest_in_threads
from phaseloom.common.tensors.resharding import SliceFetch, parts_of, plan_fetches
from phaseloom.worker.state.client import RankStateClient
from phaseloom.worker.state.layouts import packed
from tests.support.sharded import Array, Parameter, Sharded, arrays, inside, tensors
from tests.support.statedaemon import Daemon

MODEL = [
    Parameter("embed", (250, 64), "bfloat16", 0.0, 0),
    *(
        parameter
        for layer in range(4)
        for parameter in (
            Parameter(f"{layer}.q", (64, 64), "bfloat16", layer / 4, 0),
            Parameter(f"{layer}.k", (16, 64), "bfloat16", layer / 4, 0, heads=2),
            Parameter(f"{layer}.out", (64, 64), "bfloat16", layer / 4, 1),
            Parameter(f"{layer}.norm", (64,), "float32", layer / 4),
            *(
                Parameter(f"{layer}.{expert}.up", (96, 64), "bfloat16", layer / 4, 0, None, expert)
                for expert in range(4)
            ),
            *(
                Parameter(f"{layer}.{expert}.down", (64, 48), "int8", layer / 4, 1, None, expert)
                for expert in range(4)
            ),
        )
    ),
    Parameter("head", (250, 64), "bfloat16", 1.0, 0),
]
TENSORS = tensors(MODEL)
LAYOUTS = [
    Sharded(Layout()),
    Sharded(Layout(tp=4)),
    Sharded(Layout(dp=2, tp=2, pp=2, ep=2)),
    Sharded(Layout(dp=4, ep=4), is_fsdp=True),
    Sharded(Layout(dp=2, tp=2, ep=4), is_fsdp=True),
    Sharded(Layout(tp=2, pp=4, ep=2)),
    Sharded(Layout(dp=2, tp=2, pp=2)),
]


@dataclass(frozen=True)
class Plan:
    """How the model reaches another layout."""

    source: Sharded
    target: Sharded

    @cached_property
    def parts(self) -> list[list[int]]:
        """The source ranks that share each part."""
        return parts_of(self.source.holdings(MODEL))

    @cached_property
    def held(self) -> list[dict[str, Array]]:
        """What each part has."""
        return [arrays(MODEL, self.source.holding(MODEL, ranks[0])) for ranks in self.parts]

    def fetches(self, ranks: Collection[int]) -> list[SliceFetch]:
        """What a node with these target ranks fetches."""
        parts = [self.source.holding(MODEL, held[0]) for held in self.parts]
        return plan_fetches(
            TENSORS, parts, {rank: self.target.holding(MODEL, rank) for rank in ranks}
        )


async def version_rank(d: Daemon, key: DeploymentKey) -> RankStateClient:
    """A rank that only writes or reads versions."""
    await d.agent.register_wpg([f"{key}"], key, 1, [0], 0)
    client = await RankStateClient.connect(
        d.socket, f"{key}", applied=lambda: 0, on_loaded=lambda: None
    )
    d.ranks.append(client)
    return client


async def write(client: RankStateClient, key: VersionKey, content: dict[str, Array]) -> str:
    slots, _ = packed(
        [
            TensorSlot(name, Role.WEIGHT, dtype, list(each.shape), 0, each.nbytes)
            for name, each in content.items()
            for dtype in [_dtype_of(name)]
        ]
    )
    memory = await client.versions.reserve(key, slots)
    assert isinstance(memory, memoryview)
    for slot, each in zip(slots, content.values(), strict=True):
        memory[slot.offset : slot.offset + slot.num_bytes] = np.ascontiguousarray(each).tobytes()
    return (await client.versions.commit(key, memory, digest_in_threads(memory))).digest


def _dtype_of(name: str) -> str:
    return next((each.dtype for each in MODEL if each.name == name), "uint8")


async def commit(digests: dict[str, str], key: VersionKey, *writers: RankStateClient) -> None:
    """All of its parts are written, maybe on other nodes."""
    parts = [VersionPart(part, 0, digest, b"") for part, digest in digests.items()]
    for writer in writers:
        await writer.versions.commit_parts(key, VersionParts("", parts))


def part_called(number: int, parts: Sequence[object]) -> str:
    return f"{number}of{len(parts)}"


def slices_of(found: list[SliceFetch], parts: Sequence[object]) -> list[Slice]:
    slices: list[Slice] = []
    offset = 0
    for fetch in found:
        slices.append(
            Slice(
                part=part_called(fetch.part, parts),
                name=fetch.name,
                dtype=TENSORS[fetch.name].dtype,
                start=list(fetch.start),
                size=list(fetch.size),
                offset=offset,
                num_bytes=fetch.num_bytes,
            )
        )
        offset += -(-fetch.num_bytes // 64) * 64
    return slices


def check_slices(plan: Plan, ranks: set[int], got: memoryview) -> int:
    """Every target rank's bytes are what they are to be; returns how many are needed."""
    found = plan.fetches(ranks)
    expected = {rank: arrays(MODEL, plan.target.holding(MODEL, rank)) for rank in ranks}
    built = {rank: {n: np.zeros_like(a) for n, a in expected[rank].items()} for rank in ranks}
    written = {
        rank: {n: np.zeros(a.shape, np.uint8) for n, a in expected[rank].items()} for rank in ranks
    }
    for fetch, at in zip(found, slices_of(found, plan.parts), strict=True):
        content = got[at.offset : at.offset + at.num_bytes]
        for use in fetch.uses:
            mine = built[use.rank][fetch.name]
            box = inside(use.start, fetch.size)
            mine[box] = np.frombuffer(content, mine.dtype).reshape(fetch.size)
            written[use.rank][fetch.name][box] += 1
    for rank in ranks:
        for name, each in built[rank].items():
            assert np.array_equal(each, expected[rank][name]), (name, rank)
            assert written[rank][name].max(initial=0) <= 1
    return sum(fetch.num_bytes for fetch in found)
