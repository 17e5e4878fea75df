"""Samples packed into the passes of a model, each shared prefix once.

The samples of a group continue one prompt. Samples that follow one another and begin alike become
one row: the prefix, then one branch a sample, which sees the prefix and itself. A row of 16 short
continuations so costs a third of 16 rows, with the same result. Rows of similar length form a pass;
padding is on the right, where no real position sees it. How a batch is packed depends on its tokens
alone, so the same operation always computes the same way. Pure; no torch.

Shapes: B rows, T columns, N positions that are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phaseloom.worker.backends.batch import Floats, Ints, Sample

ROW_TOKENS = 256
"""Longest row that another branch is added to: attention computes all pairs within a row."""

PASS_TOKENS = 4096
"""Most tokens in a pass, padding included: bounds activation memory. One row may exceed it."""

PASS_OVERHEAD_TOKENS = 96
"""What one more pass costs, in tokens of padding: measured on a 0.8 M model on a CPU thread."""


@dataclass(frozen=True)
class Row:
    """Samples `members` with their first `prefix` tokens in common; a lone one is all prefix."""

    members: list[int]
    prefix: int
    length: int


@dataclass(frozen=True)
class Pass:
    """One forward of the model, and which of its positions predict what."""

    tokens_BT: Ints
    positions_BT: Ints
    branches_BT: Ints
    """0: prefix, then 1, 2, …; -1: padding."""
    index_N: Ints
    """row × T + column"""
    targets_N: Ints
    q_N: Floats
    coefficient_N: Floats
    members: list[tuple[int, int]]
    """(sample, how many of the N positions are its), in order."""

    @property
    def visible_BTT(self) -> npt.NDArray[np.bool_] | None:
        """What position i may see at j; None where that is plain causal attention."""
        if not (self.branches_BT > 0).any():
            return None
        of_i_BT1, of_j_B1T = self.branches_BT[:, :, None], self.branches_BT[:, None, :]
        causal_TT = np.tri(self.branches_BT.shape[1], dtype=np.bool_)
        visible: npt.NDArray[np.bool_] = causal_TT & ((of_j_B1T == 0) | (of_i_BT1 == of_j_B1T))
        return visible


def passes(samples: Sequence[Sample], *, only_used: bool) -> Iterator[Pass]:
    """Args: only_used: ask only for positions with a nonzero coefficient."""
    for rows in _passes_of_rows(_rows(samples)):
        packed = _pack(rows, samples, only_used=only_used)
        if packed.index_N.size:
            yield packed


def _common_prefix(a_T: Ints, b_T: Ints) -> int:
    length = min(a_T.size, b_T.size)
    differing = np.flatnonzero(a_T[:length] != b_T[:length])
    return int(differing[0]) if differing.size else length


def _rows(samples: Sequence[Sample]) -> list[Row]:
    """Greedy: a sample joins the row before it where that takes no more tokens than its own row."""
    rows: list[Row] = []
    for i, sample in enumerate(samples):
        joined = _joined(rows[-1], i, samples) if rows else None
        if joined:
            rows[-1] = joined
        else:
            rows.append(Row([i], sample.tokens_T.size, sample.tokens_T.size))
    return rows


def _joined(row: Row, i: int, samples: Sequence[Sample]) -> Row | None:
    """The row with sample i in it, unless that costs tokens or makes it too long."""
    tokens_T = samples[i].tokens_T
    prefix = min(row.prefix, _common_prefix(samples[row.members[0]].tokens_T, tokens_T))
    count = len(row.members)
    length = row.length + (row.prefix - prefix) * (count - 1) + tokens_T.size - prefix
    saves = prefix > 0 and length <= row.length + tokens_T.size
    return Row([*row.members, i], prefix, length) if saves and length <= ROW_TOKENS else None


def _passes_of_rows(rows: list[Row]) -> list[list[Row]]:
    """Rows sorted by length, cut where padding would cost more than another pass."""
    groups: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row.length):
        if groups and _fits(groups[-1], row):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _fits(group: list[Row], row: Row) -> bool:
    extra_padding = (row.length - group[-1].length) * len(group)
    return extra_padding <= PASS_OVERHEAD_TOKENS and row.length * (len(group) + 1) <= PASS_TOKENS


def _pack(rows: list[Row], samples: Sequence[Sample], *, only_used: bool) -> Pass:
    shape = (len(rows), rows[-1].length)
    tokens_BT = np.zeros(shape, dtype=np.int64)
    positions_BT = np.zeros(shape, dtype=np.int64)
    branches_BT = np.full(shape, -1, dtype=np.int64)
    index: list[Ints] = []
    used: list[tuple[int, Ints]] = []
    for b, row in enumerate(rows):
        prefix_T = np.arange(row.prefix)
        tokens_BT[b, : row.prefix] = samples[row.members[0]].tokens_T[: row.prefix]
        positions_BT[b, : row.prefix] = prefix_T
        branches_BT[b, : row.prefix] = 0
        start = row.prefix
        for branch, i in enumerate(row.members, 1):
            sample = samples[i]
            stop = start + sample.tokens_T.size - row.prefix
            tokens_BT[b, start:stop] = sample.tokens_T[row.prefix :]
            positions_BT[b, start:stop] = np.arange(row.prefix, sample.tokens_T.size)
            branches_BT[b, start:stop] = branch
            columns_T = np.concatenate((prefix_T, np.arange(start, stop)))
            asked_T = _asked(sample, only_used=only_used)
            index.append(b * shape[1] + columns_T[asked_T])
            used.append((i, asked_T))
            start = stop
    return Pass(
        tokens_BT,
        positions_BT,
        branches_BT,
        np.concatenate(index),
        np.concatenate([samples[i].targets_T[asked_T] for i, asked_T in used]),
        np.concatenate([samples[i].q_T[asked_T] for i, asked_T in used]),
        np.concatenate([samples[i].coefficient_T[asked_T] for i, asked_T in used]),
        [(i, asked_T.size) for i, asked_T in used],
    )


def _asked(sample: Sample, *, only_used: bool) -> Ints:
    return np.flatnonzero(sample.coefficient_T) if only_used else np.arange(sample.tokens_T.size)
