"""The ranks that together hold one copy of the model, by tensor and pipeline parallelism.

Each rank has its own engine. All engines schedule the same requests and so take the same steps,
with vLLM's collectives inside each step. Only the replica's first rank hears when a request joins
or is cancelled. It tells the others once per step (`Agreed`), so that all know it before the same
step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from phaseloom.common.contract.codec import decode, encode
from phaseloom.common.contract.operations import DrawnTokens, Generate, GenerateResult
from phaseloom.common.contract.specs import Layout
from phaseloom.common.tensors.layouts import coordinates
from phaseloom.common.tensors.resharding import Holding
from phaseloom.worker.backends.base import RankGroup, Watch
from phaseloom.worker.backends.processgroup import join_process_group


@dataclass(frozen=True)
class Replica:
    """This rank's position in its replica, whose ranks are numbered by tp first, then pp."""

    layout: Layout
    rank: int
    """Index of the rank in the replica."""

    @property
    def size(self) -> int:
        return self.layout.tp * self.layout.pp

    def gathered(self, local_holding: Holding) -> list[Holding]:
        """Return the holdings of the replica's ranks, in order. Collective."""
        holdings = [local_holding] * self.size
        if self.size > 1:
            dist.all_gather_object(holdings, local_holding)
        return holdings

    def spread(self, holdings: Sequence[Holding]) -> list[Holding]:
        """Return the holdings of all ranks of the deployment. All replicas hold the same.

        Args: holdings: those of the ranks of one replica.
        """
        return [holdings[_place(rank, self.layout)] for rank in range(self.layout.num_ranks)]

    def broadcast(self, message: bytes) -> bytes:
        """Send the first rank's message to the whole replica. Returns: that message. Collective."""
        size = torch.tensor([len(message)])
        dist.broadcast(size, 0)
        if not size:
            return b""
        content = torch.frombuffer(bytearray(message or int(size)), dtype=torch.uint8)
        dist.broadcast(content, 0)
        return content.numpy().tobytes()


def _place(rank: int, layout: Layout) -> int:
    """Return the index of a rank of the deployment in its replica."""
    at = coordinates(rank, layout)
    return at.pp * layout.tp + at.tp


def join(layout: Layout, ranks: RankGroup) -> Replica:
    """Create the process group of this rank's replica, if the process has none yet.

    Raises: GroupBroken: the other ranks did not join.
    """
    replica = Replica(layout, _place(ranks.rank, layout))
    if dist.is_initialized():
        return replica
    if replica.size == 1:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    else:
        name = f"replica-{coordinates(ranks.rank, layout).dp}"
        place = RankGroup(replica.rank, replica.size, store_prefix=name)
        # The group lives as long as the process.
        join_process_group(ranks, "cpu", ExitStack(), place)
    return replica


class _News(msgspec.Struct):
    """News that all ranks of a replica need before the next step."""

    joined: list[Generate]
    cancelled: list[int]
    """Indices of requests that were cancelled."""
    stopped: list[int]
    """Indices of requests that end with the tokens they have."""


class Agreed:
    """The `Watch` of the replica's first rank, made visible to all of its ranks in the same
    step."""

    def __init__(self, watch: Watch, replica: Replica, num_requests: int) -> None:
        self._watch = watch
        self._replica = replica
        self._num_first = self._num_requests = num_requests
        self._cancelled: set[int] = set()
        self._stopped: set[int] = set()

    def joined(self) -> Sequence[Generate]:
        """Return the requests that joined, and update all other news. Collective, once per step."""
        message = b""
        if self._replica.rank == 0:
            new = _News(
                [*self._watch.joined()],
                self._new_requests(self._watch.is_cancelled, self._cancelled),
                self._new_requests(self._watch.is_stopped, self._stopped),
            )
            if new != _News([], [], []):
                message = encode(new)
        message = self._replica.broadcast(message)
        if not message:
            return ()
        update: _News = decode(message, _News)
        self._num_requests += len(update.joined)
        self._cancelled.update(update.cancelled)
        self._stopped.update(update.stopped)
        return update.joined

    def _new_requests(self, predicate: Callable[[int], bool], reported: set[int]) -> list[int]:
        return [i for i in range(self._num_requests) if i not in reported and predicate(i)]

    def adapter(self, i: int) -> None:
        """Return None: all requests use the deployment's own weights."""

    def is_cancelled(self, i: int) -> bool:
        return i in self._cancelled

    def is_stopped(self, i: int) -> bool:
        return i in self._stopped

    def progress(self, i: int, num_done: int, num_total: int) -> None:
        if self._is_known(i):
            self._watch.progress(i, num_done, num_total)

    def stepped(self, tokens: int) -> None:
        self._watch.stepped(tokens)

    def wants_tokens(self, i: int) -> bool:
        return self._replica.rank == 0 and self._watch.wants_tokens(i)

    def drawn(self, i: int, tokens: Sequence[DrawnTokens]) -> None:
        if self._replica.rank == 0:  # all ranks have the same tokens
            self._watch.drawn(i, tokens)

    def still_open(self, i: int, num_samples: int) -> None:
        if self._is_known(i):
            self._watch.still_open(i, num_samples)

    def ended(self, i: int, result: GenerateResult | None) -> None:
        if self._is_known(i):
            self._watch.ended(i, result)

    def _is_known(self, i: int) -> bool:
        """Return whether this rank's watch knows the request. Only the first rank's watch knows
        requests that joined later."""
        return self._replica.rank == 0 or i < self._num_first
