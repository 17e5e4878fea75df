"""A small model whose ranks publish parts and need slices, in whatever layouts, and ranks that only
write and read weights versions."""

from __future__ import annotations

from collections.abc import Sequence

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
from phaseloom.common.tensors.resharding import (
    Along,
    End,
    Fetch,
    FusedQkv,
    GatedMlp,
    Parameter,
    Plan,
    Sharding,
    Vocabulary,
    node_fetches,
    source_parts,
)
from phaseloom.worker.state.client import RankStateClient
from phaseloom.worker.state.copying import hashed
from phaseloom.worker.state.layouts import packed
from tests.support.sharded import Array, tensors
from tests.support.statedaemon import Daemon

QKV = FusedQkv(num_heads=8, num_kv_heads=4, head_size=8)
MODEL = [
    Parameter("embed", (250, 64), "bfloat16", End.FIRST, Vocabulary(multiple=16)),
    *(
        parameter
        for layer in range(4)
        for parameter in (
            Parameter(f"{layer}.qkv", (128, 64), "bfloat16", layer, QKV),
            Parameter(f"{layer}.out", (64, 64), "bfloat16", layer, Along(1)),
            Parameter(f"{layer}.norm", (64,), "float32", layer),
            *(
                Parameter(f"{layer}.{expert}.up", (96, 64), "bfloat16", layer, GatedMlp(), expert)
                for expert in range(4)
            ),
            *(
                Parameter(f"{layer}.{expert}.down", (64, 48), "int8", layer, Along(1), expert)
                for expert in range(4)
            ),
        )
    ),
    Parameter("head", (250, 64), "bfloat16", End.LAST, Vocabulary(multiple=16)),
]
LAYOUTS = [
    Sharding(Layout(1, 1, 1, 1, 1), 4, 4),
    Sharding(Layout(1, 4, 1, 1, 1), 4, 4, expert_tp=4),
    Sharding(Layout(2, 2, 2, 1, 2), 4, 4, expert_tp=2),
    Sharding(Layout(4, 1, 1, 1, 4), 4, 4, fsdp=4),
    Sharding(Layout(2, 2, 1, 1, 4), 4, 4, fsdp=2),
    Sharding(Layout(1, 2, 4, 1, 2), 4, 4),
    Sharding(Layout(2, 2, 2, 1, 1), 4, 4, rules={QKV: None}),
]


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
    memory = await client.versions.begin(key, slots)
    assert isinstance(memory, memoryview)
    for slot, each in zip(slots, content.values(), strict=True):
        memory[slot.offset : slot.offset + slot.num_bytes] = np.ascontiguousarray(each).tobytes()
    return (await client.versions.commit(key, memory, hashed(memory))).digest


def _dtype_of(name: str) -> str:
    return next((each.dtype for each in MODEL if each.name == name), "uint8")


async def commit(digests: dict[str, str], key: VersionKey, *writers: RankStateClient) -> None:
    """All of its parts are written, maybe on other nodes."""
    parts = [VersionPart(part, 0, digest, "") for part, digest in digests.items()]
    for writer in writers:
        await writer.versions.commit_parts(key, VersionParts(Layout(), 1, "", parts))


def part_called(number: int, parts: Sequence[object]) -> str:
    return f"{number}of{len(parts)}"


def slices_of(fetches: list[Fetch], parts: Sequence[object]) -> list[Slice]:
    found: list[Slice] = []
    offset = 0
    for fetch in fetches:
        parameter = MODEL[fetch.parameter]
        found.append(
            Slice(
                part=part_called(fetch.part, parts),
                name=parameter.name,
                dtype=parameter.dtype,
                start=list(fetch.start),
                size=list(fetch.size),
                offset=offset,
                num_bytes=fetch.num_bytes,
            )
        )
        offset += -(-fetch.num_bytes // 64) * 64
    return found


def check_slices(made: Plan, target: Sharding, ranks: set[int], got: memoryview) -> int:
    """Every target rank's bytes are what they are to be; returns how many are needed."""
    fetches = node_fetches(made, ranks)
    slices = slices_of(fetches, source_parts(made))
    expected = tensors(list(made.parameters), target)
    built = {key: np.zeros_like(each) for key, each in expected.items() if key[1] in ranks}
    written = {key: np.zeros(each.shape, np.uint8) for key, each in built.items()}
    for fetch, at in zip(fetches, slices, strict=True):
        content = got[at.offset : at.offset + at.num_bytes]
        for use in fetch.uses:
            key = (fetch.parameter, use.rank)
            box = tuple(slice(s, s + n) for s, n in zip(use.start, fetch.size, strict=True))
            dtype = built[key].dtype
            built[key][box] = np.frombuffer(content, dtype).reshape(fetch.size)
            written[key][box] += 1
    for key, each in built.items():
        assert np.array_equal(each, expected[key]), (made.parameters[key[0]], key)
        assert written[key].max(initial=0) <= 1
    return sum(fetch.num_bytes for fetch in fetches)
