"""Keys and values of earlier prompts and samples, found by their tokens.

They are stored in blocks of `BLOCK_TOKENS` tokens in the rank's scratch memory and never use more.
The blocks form trees: the path to a block spells all tokens up to and including its own, so samples
of one prompt share the prompt's blocks. When all blocks are in use, the least recently used one is
evicted.

Each tree belongs to one state of the weights, its *origin*. Origins count the changes of the
weights. A new prompt gets keys and values of the current weights only. After an update, older trees
may be kept for samples that the update interrupted; nothing else uses them.

Shapes: B rows, S columns, L layers, C = 2 for keys and values, K key-value heads, D head size, N
blocks, T tokens of a block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.specs import DeploymentSpec
from phaseloom.worker.backends.architectures import has_dynamic_rope
from phaseloom.worker.backends.model import TORCH_DTYPES, max_positions, model_config, weights_dtype
from phaseloom.worker.backends.sampler.decoder import Cache, Decoder
from phaseloom.worker.state.devicememory import DeviceMemory, scratch_tensor

BLOCK_TOKENS = 16

_SEQUENCES = 8
"""Approximate number of full-length sequences that a deployment has room for by default."""

Tokens = tuple[int, ...]


class KvShape(NamedTuple):
    """Size of the keys and values of one token."""

    num_layers: int
    num_heads: int
    size: int
    """Dimensions of a head."""
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.num_layers * 2 * self.num_heads * self.size * self.dtype.itemsize


class Prefix(NamedTuple):
    """The beginning of a prompt whose keys and values are cached."""

    origin: int
    """The state of the weights that the oldest of the keys and values belong to."""
    num_tokens: int = 0
    blocks: Sequence[int] = ()
    """Indices of the blocks that hold them. The last block may hold more tokens."""


@dataclass(eq=False)
class _Block:
    parent: _Block | None
    tokens: Tokens
    """The block's own tokens: `BLOCK_TOKENS` of them, or fewer in a block without children."""
    index: int = -1
    """Index of the block in memory; -1 for a root, which holds nothing."""
    children: dict[Tokens, _Block] = field(default_factory=dict)


class PrefixCache:
    """A cache of keys and values. Call it from the device thread only."""

    def __init__(self, scratch: torch.Tensor, shape: KvShape) -> None:
        """Start empty. Raises: CallerError: the memory is too small for one block."""
        num_blocks = scratch.numel() // (BLOCK_TOKENS * shape.num_bytes)
        if not num_blocks:
            raise CallerError(
                f"a prefix cache needs at least {BLOCK_TOKENS * shape.num_bytes} bytes of scratch "
                f"memory ({BLOCK_TOKENS} tokens), got {scratch.numel()}",
                code=Code.RESOURCE_EXHAUSTED,
                field="scratch_bytes",
                remedy="raise the deployment's scratch_bytes, or use 0 for the default",
            )
        used = scratch[: num_blocks * BLOCK_TOKENS * shape.num_bytes]
        self._kv_NLCKTD = used.view(shape.dtype).view(
            num_blocks, shape.num_layers, 2, shape.num_heads, BLOCK_TOKENS, shape.size
        )
        self._now = 0
        """The current state of the weights."""
        self._roots: dict[int, _Block] = {}
        """Roots by origin, oldest first. Origins below 0 belong to versions of other adapters."""
        self._versions: dict[str, int] = {}
        """Origins of versions of other adapters, which never change."""
        self._used: OrderedDict[_Block, None] = OrderedDict()
        """All blocks, least recently used first. Children come before their parents, so the first
        block is always a leaf."""
        self._free = [*range(num_blocks)]
        self.clear()

    @property
    def num_tokens(self) -> int:
        """The number of cached tokens."""
        return sum(len(block.tokens) for block in self._used)

    def clear(self) -> None:
        """Drop everything, because the weights have changed or the memory was given back."""
        self._free += [block.index for block in self._used]
        self._used.clear()
        self._now += 1
        self._roots = {self._now: _Block(None, ())}

    def weights_updated(self) -> None:
        """Start a new origin, but keep older keys and values for samples that the update
        interrupted."""
        self._now += 1
        self._roots = {origin: root for origin, root in self._roots.items() if root.children}
        self._roots[self._now] = _Block(None, ())

    def find(self, tokens: Sequence[int], num_generated: int, version: str = "") -> Prefix:
        """Return the cached beginning of a prompt. It never includes the last token, which must be
        run for its logits.

        Args: num_generated: how many of the prompt's last tokens belong to an earlier answer.
              version: the version of another adapter, if the prompt runs with one.
        """
        cacheable = tuple(tokens[:-1])
        if version:
            origins = [self._versions.setdefault(version, -1 - len(self._versions))]
            self._roots.setdefault(origins[0], _Block(None, ()))
        elif num_generated:
            # Only a continued sample may use older weights' keys and values. Newest first.
            origins = [past for past in reversed(self._roots) if past >= 0]
        else:
            origins = [self._now]
        matches = [(origin, *_match(self._roots[origin], cacheable)) for origin in origins]
        full_matches = [match for match in matches if match[1] == len(cacheable)]
        # The newest tree with the whole prompt, otherwise the newest tree.
        origin, num_tokens, path = (full_matches or matches)[0]
        self._touch(path)
        return Prefix(origin, num_tokens, [block.index for block in path])

    def read(self, prefixes: Sequence[Prefix]) -> torch.Tensor:
        """Return keys and values (L, C, B, K, S, D) of prefixes, left-padded with zeros."""
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
        """Cache the keys and values of a row, or as many as there is room for.

        Args: tokens: the tokens of all columns of the row.
              origin: origin of the prefix that the row started from.
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
        """Return blocks for these tokens, and how many of the blocks are filled already. There are
        fewer blocks if there is no room for all."""
        path, block = list[_Block](), self._roots[origin]
        chunks = [tokens[i : i + BLOCK_TOKENS] for i in range(0, len(tokens), BLOCK_TOKENS)]
        for chunk in chunks:
            child = _child_with(block, chunk)
            if child is None:
                break
            path.append(child)
            block = child
        self._touch(path)  # touched first, so that making room does not evict them
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
        """Make room for a block, by evicting the least recently used one if necessary.

        Returns: False if every block is on the path, whose blocks are in use.
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
        # From the leaf up, so that a block is always evicted before its parent.
        for block in reversed(path):
            self._used.move_to_end(block)


def _match(root: _Block, tokens: Tokens) -> tuple[int, list[_Block]]:
    """Return the number of leading tokens that are in a tree, and the blocks that hold them."""
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
    """Return the number of leading tokens that are equal."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _child_with(block: _Block, chunk: Tokens) -> _Block | None:
    """Return the child with these tokens. Fewer tokens than a block's match a child that begins
    with them."""
    if len(chunk) == BLOCK_TOKENS or chunk in block.children:
        return block.children.get(chunk)
    begun = (c for c in block.children.values() if c.tokens[: len(chunk)] == chunk)
    return next(begun, None)


def _child_within(block: _Block, chunk: Tokens) -> _Block | None:
    """Return the child whose tokens are a prefix of these."""
    begun = (c for c in block.children.values() if chunk[: len(c.tokens)] == c.tokens)
    return next(begun, None)


def kv_shape(decoder: Decoder[Any], device: torch.device) -> KvShape:
    """Return the shape of the keys and values of a token, which is the same in every layer."""
    token, none = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with torch.inference_mode():
        layers = decoder.prefill(token.to(device), none.to(device), 1).cache.layers()
    kinds = {(tensor.shape[1], tensor.shape[3], tensor.dtype) for pair in layers for tensor in pair}
    assert len(kinds) == 1, kinds
    return KvShape(len(layers), *kinds.pop())


def planned_bytes(spec: DeploymentSpec) -> int:
    """Return each rank's scratch bytes for its prefix cache; 0 if it has none.

    Raises: CallerError: the model cannot have one.
    """
    if not spec.prefix_cache:
        return 0
    config: Any = model_config(spec.model)
    if has_dynamic_rope(config):
        raise CallerError(
            "rope_type dynamic cannot have a prefix cache: keys depend on the sequence's length",
            code=Code.FAILED_PRECONDITION,
            field="prefix_cache",
            remedy="omit prefix_cache, or use another rope_type such as yarn",
        )
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype = TORCH_DTYPES[weights_dtype(spec.model)]
    shape = KvShape(int(config.num_hidden_layers), int(heads), int(size), dtype)
    return spec.scratch_bytes or _SEQUENCES * max_positions(config) * shape.num_bytes


def prefix_cache(
    spec: DeploymentSpec, memory: DeviceMemory, decoder: Decoder[Any]
) -> PrefixCache | None:
    """Create the prefix cache at the end of a rank's scratch memory; None if the deployment has
    none."""
    if not spec.prefix_cache:
        return None
    scratch = scratch_tensor(memory)[-planned_bytes(spec) :]
    return PrefixCache(scratch, kv_shape(decoder, scratch.device))
