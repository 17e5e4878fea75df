"""Keys and values of earlier prompts and samples, by the tokens that they belong to.

They lie in blocks of the rank's scratch memory, `BLOCK_TOKENS` tokens each, and never beyond it.
The blocks form a tree: a block's place in it names all tokens up to its own, so samples of one
prompt share the prompt's blocks. When all are taken, the one that was used longest ago goes.

Each tree is of one state of the weights, its *origin*, which counts how often they have changed. A
prompt gets keys and values of the present weights only. An update may keep the older trees: those
serve samples that it has stopped and that go on, and nobody else.

Shapes: B rows, S columns, L layers, C = 2 for keys and values, K key-value heads, D head size,
N blocks, T tokens of a block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.specs import DeploymentSpec
from phaseloom.worker.backends.model import TORCH_DTYPES, model_config, weights_dtype
from phaseloom.worker.backends.sampler.decoder import Cache, Decoder
from phaseloom.worker.state.devicememory import DeviceMemory, scratch_tensor

BLOCK_TOKENS = 16

_SEQUENCES = 8
"""The number of sequences of full length, about, that a deployment has room for by default."""

Tokens = tuple[int, ...]


class KvShape(NamedTuple):
    """Keys and values of one token."""

    num_layers: int
    num_heads: int
    size: int
    """The dimensions of a head."""
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.num_layers * 2 * self.num_heads * self.size * self.dtype.itemsize


class Prefix(NamedTuple):
    """The beginning of a prompt whose keys and values are kept."""

    origin: int
    """The state of the weights that the oldest of the keys and values belong to."""
    num_tokens: int = 0
    blocks: Sequence[int] = ()
    """The indices of the blocks that hold them; the last block may hold more."""


@dataclass(eq=False)
class _Block:
    parent: _Block | None
    tokens: Tokens
    """The block's own tokens: `BLOCK_TOKENS` of them, or fewer in a block without children."""
    index: int = -1
    """The block's place in the memory; -1: a root, which has none."""
    children: dict[Tokens, _Block] = field(default_factory=dict)


class PrefixCache:
    """A cache of keys and values; see the module. All calls come from the device thread."""

    def __init__(self, scratch: torch.Tensor, shape: KvShape) -> None:
        """Start empty. Raises: CallerError: the memory is too small for a block."""
        num_blocks = scratch.numel() // (BLOCK_TOKENS * shape.num_bytes)
        if not num_blocks:
            raise CallerError(
                f"{scratch.numel()} bytes of scratch memory are too few for a prefix cache: "
                f"{BLOCK_TOKENS} tokens take {BLOCK_TOKENS * shape.num_bytes}",
                code=Code.RESOURCE_EXHAUSTED,
                field="scratch_bytes",
                remedy="declare the deployment with more scratch_bytes, or 0",
            )
        used = scratch[: num_blocks * BLOCK_TOKENS * shape.num_bytes]
        self._kv_NLCKTD = used.view(shape.dtype).view(
            num_blocks, shape.num_layers, 2, shape.num_heads, BLOCK_TOKENS, shape.size
        )
        self._now = 0
        """The present state of the weights."""
        self._roots: dict[int, _Block] = {}
        """The roots by origin, oldest first. Origins below 0 are those of other adapters'
        versions."""
        self._versions: dict[str, int] = {}
        """The origins of other adapters' versions, which never change."""
        self._used: OrderedDict[_Block, None] = OrderedDict()
        """All blocks, the one used longest ago first. A block comes before its parent, so the
        first has no children."""
        self._free = [*range(num_blocks)]
        self.clear()

    @property
    def num_tokens(self) -> int:
        """The number of tokens whose keys and values are kept."""
        return sum(len(block.tokens) for block in self._used)

    def clear(self) -> None:
        """Drop everything, because the weights have changed or the memory was given back."""
        self._free += [block.index for block in self._used]
        self._used.clear()
        self._now += 1
        self._roots = {self._now: _Block(None, ())}

    def weights_updated(self) -> None:
        """Keep all keys and values for samples that the update has stopped."""
        self._now += 1
        self._roots = {origin: root for origin, root in self._roots.items() if root.children}
        self._roots[self._now] = _Block(None, ())

    def find(self, tokens: Sequence[int], num_generated: int, version: str = "") -> Prefix:
        """The kept beginning of a prompt. Its last token is never part of it: it must be run for
        its logits.

        Args: num_generated: the number of the prompt's last tokens that are an earlier answer's.
              version: the version of another adapter, where the prompt is run with one.
        """
        cacheable = tuple(tokens[:-1])
        if version:
            origins = [self._versions.setdefault(version, -1 - len(self._versions))]
            self._roots.setdefault(origins[0], _Block(None, ()))
        elif num_generated:
            origins = [past for past in reversed(self._roots) if past >= 0]
        else:
            origins = [self._now]
        matches = [(origin, *_match(self._roots[origin], cacheable)) for origin in origins]
        full_matches = [match for match in matches if match[1] == len(cacheable)]
        origin, num_tokens, path = (full_matches or matches)[0]
        self._touch(path)
        return Prefix(origin, num_tokens, [block.index for block in path])

    def read(self, prefixes: Sequence[Prefix]) -> torch.Tensor:
        """Keys and values (L, C, B, K, S, D) of prefixes, left-padded with zeroes."""
        columns = max(prefix.num_tokens for prefix in prefixes)
        _, num_layers, _, num_heads, _, size = self._kv_NLCKTD.shape
        shape = (num_layers, 2, len(prefixes), num_heads, columns, size)
        kv_LCBKSD = self._kv_NLCKTD.new_zeros(shape)
        for row, prefix in enumerate(prefixes):
            index_N = torch.tensor(prefix.blocks, device=kv_LCBKSD.device)
            blocks = self._kv_NLCKTD.index_select(0, index_N).permute(1, 2, 3, 0, 4, 5)
            prefix_kv = blocks.flatten(3, 4)[..., : prefix.num_tokens, :]
            kv_LCBKSD[:, :, row, :, columns - prefix.num_tokens :] = prefix_kv
        return kv_LCBKSD

    def store(self, tokens: Sequence[int], origin: int, cache: Cache, row: int) -> None:
        """Keep the keys and values of a row, as far as there is room.

        Args: tokens: the tokens of all columns of the row. origin: that of the prefix that it began
              with.
        """
        path, first = self._allocate(tuple(tokens), origin)
        new = path[first:]
        if not new:
            return
        start = int(cache.padding_B[row]) + first * BLOCK_TOKENS
        stop = min(cache.columns, start + len(new) * BLOCK_TOKENS)
        kv_LCKSD = torch.stack(
            [
                torch.stack([layer_kv[row, :, start:stop] for layer_kv in pair])
                for pair in cache.layers()
            ]
        )
        missing = len(new) * BLOCK_TOKENS - (stop - start)
        kv_LCKSD = torch.nn.functional.pad(kv_LCKSD, (0, 0, 0, missing))
        num_layers, _, num_heads, _, size = kv_LCKSD.shape
        kv_LCKNTD = kv_LCKSD.view(num_layers, 2, num_heads, len(new), BLOCK_TOKENS, size)
        blocks = kv_LCKNTD.permute(3, 0, 1, 2, 4, 5)
        index_N = torch.tensor([block.index for block in new], device=blocks.device)
        self._kv_NLCKTD.index_copy_(0, index_N, blocks)

    def _allocate(self, tokens: Tokens, origin: int) -> tuple[list[_Block], int]:
        """The blocks of these tokens, and how many of the tokens have their content already; the
        blocks are fewer where there is no room for all."""
        path, block = list[_Block](), self._roots[origin]
        chunks = [tokens[i : i + BLOCK_TOKENS] for i in range(0, len(tokens), BLOCK_TOKENS)]
        for chunk in chunks:
            child = _child_with(block, chunk)
            if child is None:
                break
            path.append(child)
            block = child
        self._touch(path)  # lest room for the others is made there
        num_kept = len(path)
        for chunk in chunks[num_kept:]:
            child = _child_within(block, chunk)
            if child is not None:
                del block.children[child.tokens]
                child.tokens = chunk
                self._touch([child])
            elif self._make_room(path):
                child = _Block(block, chunk, self._free.pop())
                self._used[child] = None
            else:
                break
            block.children[chunk] = child
            path.append(child)
            block = child
        self._touch(path)
        return path, num_kept

    def _make_room(self, path: Sequence[_Block]) -> bool:
        """Make room for a block; if need be the block used longest ago goes.

        Returns: False: all blocks are on the path, whose blocks were used just now.
        """
        if self._free:
            return True
        if len(self._used) == len(path):
            return False
        oldest = next(iter(self._used))
        assert not oldest.children
        assert oldest.parent is not None
        del oldest.parent.children[oldest.tokens]
        del self._used[oldest]
        self._free.append(oldest.index)
        return True

    def _touch(self, path: Sequence[_Block]) -> None:
        for block in reversed(path):
            self._used.move_to_end(block)


def _match(root: _Block, tokens: Tokens) -> tuple[int, list[_Block]]:
    """The number of the first tokens that are in a tree, and the blocks that have them."""
    block, path = root, list[_Block]()
    for start in range(0, len(tokens), BLOCK_TOKENS):
        chunk = tokens[start : start + BLOCK_TOKENS]
        child = block.children.get(chunk)
        if child is None:
            commons = {
                candidate: _common_length(candidate.tokens, chunk)
                for candidate in block.children.values()
            }
            child = max(commons, key=commons.__getitem__, default=None)
            if child is None or not commons[child]:
                return start, path
            return start + commons[child], [*path, child]
        path.append(child)
        block = child
    return len(tokens), path


def _common_length(first: Tokens, second: Tokens) -> int:
    """The number of first tokens that are the same."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _child_with(block: _Block, chunk: Tokens) -> _Block | None:
    """The child that has these tokens or, where they are fewer than a block's, begins with them."""
    if len(chunk) == BLOCK_TOKENS or chunk in block.children:
        return block.children.get(chunk)
    begun = (c for c in block.children.values() if c.tokens[: len(chunk)] == chunk)
    return next(begun, None)


def _child_within(block: _Block, chunk: Tokens) -> _Block | None:
    """The child whose tokens are the beginning of these."""
    begun = (c for c in block.children.values() if chunk[: len(c.tokens)] == c.tokens)
    return next(begun, None)


def kv_shape(decoder: Decoder[Any], device: torch.device) -> KvShape:
    """The keys and values that a decoder computes for a token; the same in every layer."""
    token, none = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with torch.inference_mode():
        layers = decoder.prefill(token.to(device), none.to(device), 1).cache.layers()
    kinds = {(tensor.shape[1], tensor.shape[3], tensor.dtype) for pair in layers for tensor in pair}
    assert len(kinds) == 1, kinds
    return KvShape(len(layers), *kinds.pop())


def planned_bytes(spec: DeploymentSpec) -> int:
    """Scratch memory of each rank for its prefix cache; 0: it has none."""
    if not spec.prefix_cache:
        return 0
    config: Any = model_config(spec.model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype = TORCH_DTYPES[weights_dtype(spec.model)]
    shape = KvShape(int(config.num_hidden_layers), int(heads), int(size), dtype)
    return spec.scratch_bytes or _SEQUENCES * config.max_position_embeddings * shape.num_bytes


def prefix_cache(
    spec: DeploymentSpec, memory: DeviceMemory, decoder: Decoder[Any]
) -> PrefixCache | None:
    """The prefix cache at the end of a rank's scratch memory; None: the deployment has none."""
    if not spec.prefix_cache:
        return None
    scratch = scratch_tensor(memory)[-planned_bytes(spec) :]
    return PrefixCache(scratch, kv_shape(decoder, scratch.device))
