"""The process group of a WPG's ranks: joining it, and recognizing errors caused by its loss."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from phaseloom.worker.backends.base import GroupBroken, RankGroup


class Member:
    """A backend with collective calls. They can fail because of its process group."""

    _is_broken = False


P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=Member)


def collective(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """Convert errors of a broken process group into `GroupBroken`.

    The first such error names gloo or NCCL, but later ones may not, and torch has no class for
    them. So once the group is broken, every later `RuntimeError` counts as `GroupBroken`.
    """

    @functools.wraps(method)
    def checked(backend: M, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(backend, *args, **kwargs)
        except RuntimeError as error:
            backend._is_broken |= "gloo" in str(error) or "NCCL" in str(error)
            if not backend._is_broken:
                raise
            raise GroupBroken(
                f"another rank is gone or did not join a collective: {error}"
            ) from error

    return checked


def join_process_group(
    ranks: RankGroup, device_type: str, joined: ExitStack, replica: RankGroup | None = None
) -> None:
    """Create the process's default group if there is none yet.

    The ranks meet at a file, which needs no port that could collide. Ranks on several nodes use a
    port that is open already.

    Args: joined: cleans up everything that is created here.
          replica: for a group of only some ranks: the position among them. Its `store_prefix` names
              the group.
    Raises: GroupBroken: the other ranks did not join.
    """
    group = replica or ranks
    if group.world_size == 1 and dist.is_initialized():
        return
    try:
        store = _store(ranks, joined)
        dist.init_process_group(
            "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:nccl",
            store=PrefixStore(replica.store_prefix, store) if replica else store,
            rank=group.rank,
            world_size=group.world_size,
            timeout=timedelta(seconds=ranks.timeout_s),
        )
    except RuntimeError as error:
        # Errors of the store, of gloo and of the rendezvous share no class of their own.
        raise GroupBroken(f"not all {group.world_size} ranks joined the group: {error}") from error
    joined.callback(dist.destroy_process_group)


def largest(value: int, ranks: RankGroup) -> int:
    """Return the largest of all ranks' values. Collective."""
    if ranks.world_size == 1:
        return int(value)
    maximum = torch.tensor(int(value))
    dist.all_reduce(maximum, dist.ReduceOp.MAX)
    return int(maximum)


def _store(ranks: RankGroup, joined: ExitStack) -> Store:
    """Return the store where the ranks meet. Raises: RuntimeError: rank 0's node is unreachable."""
    if ranks.store_address:
        host, _, port = ranks.store_address.rpartition(":")
        is_served = ranks.rank == 0
        store = TCPStore(
            host,
            int(port),
            is_master=is_served,
            timeout=timedelta(seconds=ranks.timeout_s),
            wait_for_workers=False,
            master_listen_fd=ranks.store_fd if is_served else None,
        )
        # Ranks of another incarnation may reach this port. They use another prefix.
        return PrefixStore(ranks.store_prefix, store)
    if ranks.world_size == 1:
        directory = joined.enter_context(tempfile.TemporaryDirectory(prefix="phaseloom-store-"))
        return FileStore(str(Path(directory) / "store"), 1)
    return FileStore(str(Path(ranks.store_path).absolute()), ranks.world_size)
