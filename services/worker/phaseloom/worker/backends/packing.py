"""Packs samples into passes of a model, with each shared prefix computed once.

The samples of a group continue the same prompt. Consecutive samples with a common beginning become
one row: the prefix, then one branch per sample. A branch sees the prefix and itself. A row of 16
short continuations then costs a third of 16 rows, with the same result. Rows of similar length form
a pass. They are padded on the right, where no real position sees the padding. Packing depends only
on the batch's tokens, so the same operation always computes the same way. Pure; no torch.

Shapes: B rows, T columns, N requested positions. With several targets per position, targets and
coefficients are (N, K).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from phaseloom.worker.backends.batch import Batch, Floats, Ints

ROW_TOKENS = 256
"""Longest row that may get another branch. Attention computes all pairs of positions within a
row."""

PASS_TOKENS = 4096
"""Most tokens in a pass, padding included. Bounds activation memory; a single row may exceed it."""

PASS_OVERHEAD_TOKENS = 96
"""Cost of one more pass, in tokens of padding. Measured on a model of 0.8 M parameters on one CPU
thread."""


@dataclass(frozen=True)
class Row:
    """Samples `members` that share their first `prefix` tokens. A row of one sample is all
    prefix."""

    members: list[int]
    prefix: int
    length: int


@dataclass(frozen=True)
class Pass:
    """One forward pass of the model, and the positions whose targets it predicts."""

    tokens_BT: Ints
    positions_BT: Ints
    branches_BT: Ints
    """The branch of each token: 0 for the prefix, then 1, 2, …; -1 for padding."""
    index_N: Ints
    """Index of each requested position in the flattened pass: row × T + column."""
    source_N: Ints
    """Index of each requested position in the batch's arrays."""
    targets_N: Ints
    q_N: Floats
    coefficient_N: Floats

    @property
    def visible_BTT(self) -> npt.NDArray[np.bool_] | None:
        """True where position i may see position j; None stands for plain causal attention."""
        if not (self.branches_BT > 0).any():
            return None
        of_i_BT1, of_j_B1T = self.branches_BT[:, :, None], self.branches_BT[:, None, :]
        causal_TT = np.tri(self.branches_BT.shape[1], dtype=np.bool_)
        visible: npt.NDArray[np.bool_] = causal_TT & ((of_j_B1T == 0) | (of_i_BT1 == of_j_B1T))
        return visible


def idle_pass() -> Pass:
    """Return a pass over one token without targets. It has no loss, and its gradients are exactly
    0."""
    token_BT = np.zeros((1, 1), dtype=np.int64)
    none_N = np.zeros(0, dtype=np.int64)
    zero_N = np.zeros(0, dtype=np.float32)
    return Pass(token_BT, token_BT, token_BT, none_N, none_N, none_N, zero_N, zero_N)


def passes(
    batch: Batch, *, only_used: bool, columns: int = 1, shares: bool = True
) -> Iterator[Pass]:
    """Pack a batch into passes.

    Args: only_used: request only positions that count in the loss.
          columns: pad each pass to a multiple of this many columns.
          shares: whether samples with a common beginning may become one row.
    """
    for rows in _grouped(_rows(batch, shares=shares)):
        packed = _pack(rows, batch, only_used=only_used, columns=columns)
        if packed.index_N.size:
            yield packed


def _rows(batch: Batch, *, shares: bool) -> list[Row]:
    """Merge samples into rows. Greedy: a sample joins the previous row unless that costs more
    tokens."""
    starts: list[int] = batch.starts.tolist()
    rows: list[Row] = []
    for i, (start, stop) in enumerate(pairwise(starts)):
        tokens_T = batch.tokens_N[start:stop]
        joined = None
        if rows and shares:
            first = starts[rows[-1].members[0]]
            joined = _joined(rows[-1], i, batch.tokens_N[first : first + rows[-1].prefix], tokens_T)
        if joined:
            rows[-1] = joined
        else:
            rows.append(Row([i], tokens_T.size, tokens_T.size))
    return rows


def _joined(row: Row, i: int, prefix_T: Ints, tokens_T: Ints) -> Row | None:
    """Return the row with sample i added; None if that costs tokens or makes the row too long."""
    prefix = _common_prefix(prefix_T, tokens_T)
    count = len(row.members)
    # If the common prefix gets shorter, each branch must repeat the difference.
    length = row.length + (row.prefix - prefix) * (count - 1) + tokens_T.size - prefix
    saves = prefix > 0 and length <= row.length + tokens_T.size
    return Row([*row.members, i], prefix, length) if saves and length <= ROW_TOKENS else None


def _common_prefix(a_T: Ints, b_T: Ints) -> int:
    length = min(a_T.size, b_T.size)
    differing_T = a_T[:length] != b_T[:length]
    first = int(differing_T.argmax())
    return first if differing_T[first] else length


def _grouped(rows: list[Row]) -> list[list[Row]]:
    """Sort rows by length, and start a new pass where padding would cost more than one."""
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


def _pack(rows: list[Row], batch: Batch, *, only_used: bool, columns: int) -> Pass:
    """Write the positions of all samples at once. Every member writes the shared prefix again."""
    members = np.array([i for row in rows for i in row.members])
    counts = [len(row.members) for row in rows]
    lengths = batch.lengths_S[members]
    row_of = np.repeat(np.arange(len(rows)), counts)
    prefix_of = np.repeat([row.prefix for row in rows], counts)
    branch_of = np.concatenate([np.arange(1, count + 1) for count in counts])
    # Branches follow the prefix one after another; the first one of a row starts at its end.
    ends = np.cumsum(lengths - prefix_of)
    before_row = np.repeat(np.concatenate(([0], ends))[np.cumsum([0, *counts[:-1]])], counts)
    branch_start_of = ends - (lengths - prefix_of) - before_row + prefix_of

    def each(values: npt.NDArray[np.int64]) -> Ints:
        return np.repeat(values, lengths)

    position = np.arange(lengths.sum()) - each(np.cumsum(lengths) - lengths)
    source = position + each(batch.starts[members])
    is_prefix = position < each(prefix_of)
    column = np.where(is_prefix, position, position + each(branch_start_of - prefix_of))
    row = each(row_of)

    longest = max(row.length for row in rows)
    shape = (len(rows), -(-longest // columns) * columns)
    tokens_BT = np.zeros(shape, dtype=np.int64)
    positions_BT = np.zeros(shape, dtype=np.int64)
    branches_BT = np.full(shape, -1, dtype=np.int64)
    tokens_BT[row, column] = batch.tokens_N[source]
    positions_BT[row, column] = position
    branches_BT[row, column] = np.where(is_prefix, 0, each(branch_of))

    index = row * shape[1] + column
    if only_used:
        used = batch.is_used_N[source]
        index, source = index[used], source[used]
    return Pass(
        tokens_BT,
        positions_BT,
        branches_BT,
        index,
        source,
        batch.targets_N[source],
        batch.q_N[source],
        batch.coefficient_N[source],
    )
