"""A rank's share of a pass under context parallelism: some columns of each row, and their mask.

Columns are cut into 2 · cp chunks. Each rank gets one chunk from the front and one from the back,
so that causal attention costs the same on all ranks. Keys and values are gathered in rank order
(`stage.CoreAttention`), and the mask's columns have that order. Rows are padded so that all chunks
are equal, and so that tensor-parallel ranks can split a share's columns evenly between layers
(sequence parallelism). Without these axes the share is the whole pass. Pure; no torch.

Shapes: B rows, T columns of the share, S columns of all shares, N requested positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from phaseloom.worker.backends.batch import Floats, Ints
from phaseloom.worker.backends.packing import Pass


@dataclass(frozen=True)
class Share:
    """A pass, or a rank's columns of one. For the arrays see `Pass`."""

    tokens_BT: Ints
    positions_BT: Ints
    visible_BTS: npt.NDArray[np.bool_] | None
    """True where a column sees another one; None stands for plain causal attention."""
    index_N: Ints
    source_N: Ints
    targets_N: Ints
    q_N: Floats
    coefficient_N: Floats


def share_of(packed: Pass, cp: int, rank: int, tp: int = 1) -> Share:
    """Return the share of context-parallel rank `rank` of `cp`. Its columns are a multiple of
    tp."""
    if cp * tp == 1:
        return Share(
            packed.tokens_BT,
            packed.positions_BT,
            packed.visible_BTT,
            packed.index_N,
            packed.source_N,
            packed.targets_N,
            packed.q_N,
            packed.coefficient_N,
        )
    num_columns = packed.tokens_BT.shape[1]
    padded = _padded(packed, -num_columns % (2 * cp * tp if cp > 1 else tp))
    length = padded.tokens_BT.shape[1]
    local_columns = columns(length, cp, rank)
    order = np.concatenate([columns(length, cp, peer) for peer in range(cp)])
    visible_BSS = padded.visible_BTT
    if visible_BSS is None and cp > 1:
        visible_BSS = np.tri(length, dtype=np.bool_)[None]
    # Column → its index among this rank's columns; -1 if another rank has it.
    local_index = np.full(length, -1)
    local_index[local_columns] = np.arange(local_columns.size)
    row, column = np.divmod(packed.index_N, num_columns)
    is_local = local_index[column] >= 0
    return Share(
        padded.tokens_BT[:, local_columns],
        padded.positions_BT[:, local_columns],
        None if visible_BSS is None else visible_BSS[:, local_columns][:, :, order],
        (row * local_columns.size + local_index[column])[is_local],
        packed.source_N[is_local],
        packed.targets_N[is_local],
        packed.q_N[is_local],
        packed.coefficient_N[is_local],
    )


def columns(length: int, cp: int, rank: int) -> Ints:
    """Return a rank's columns of rows whose length is a multiple of 2 · cp; all columns if cp is
    1."""
    if cp == 1:
        return np.arange(length)
    chunks = np.arange(length).reshape(2 * cp, -1)
    return np.concatenate([chunks[rank], chunks[2 * cp - 1 - rank]])


def _padded(packed: Pass, num_columns: int) -> Pass:
    def pad(array_BT: Ints, value: int) -> Ints:
        return np.pad(array_BT, ((0, 0), (0, num_columns)), constant_values=value)

    return replace(
        packed,
        tokens_BT=pad(packed.tokens_BT, 0),
        positions_BT=pad(packed.positions_BT, 0),
        branches_BT=pad(packed.branches_BT, -1),
    )
