"""The process group of a WPG's ranks: how they meet, and how its end is told from other errors."""

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
    """A backend with collective calls, which its process group may fail."""

    _is_broken = False


P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=Member)


def collective(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """Distinguish the error of a broken group from an operation's own errors.

    The first error of a broken group names gloo or NCCL; those that follow may not, and none has a
    class of its own.
    """

    @functools.wraps(method)
    def checked(backend: M, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(backend, *args, **kwargs)
        except RuntimeError as error:
            backend._is_broken |= "gloo" in str(error) or "NCCL" in str(error)
            if not backend._is_broken:
                raise
            raise GroupBroken(f"another rank is gone or late: {error}") from error

    return checked


def join_process_group(
    ranks: RankGroup, device_type: str, joined: ExitStack, replica: RankGroup | None = None
) -> None:
    """Make the process's group if there is none yet. `joined` ends everything that is made here.

    A store in a file needs no port that could collide; ranks on several nodes have a port that is
    open already.

    Args:   replica: where the group is of a part of the ranks: the place among them, and their name
            as `store_prefix`.
    Raises: GroupBroken: the other ranks did not come.
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
        # Errors of the store, of gloo and of the rendezvous have no class in common.
        raise GroupBroken(f"not all {group.world_size} ranks came: {error}") from error
    joined.callback(dist.destroy_process_group)


def largest(value: int, ranks: RankGroup) -> int:
    """The largest of all ranks' values. Collective."""
    if ranks.world_size == 1:
        return int(value)
    maximum = torch.tensor(int(value))
    dist.all_reduce(maximum, dist.ReduceOp.MAX)
    return int(maximum)


def _store(ranks: RankGroup, joined: ExitStack) -> Store:
    """The store where the ranks meet. Raises: RuntimeError: rank 0's node cannot be reached."""
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
        # Ranks of another incarnation that come to this port use other names.
        return PrefixStore(ranks.store_prefix, store)
    if ranks.world_size == 1:
        directory = joined.enter_context(tempfile.TemporaryDirectory(prefix="phaseloom-store-"))
        return FileStore(str(Path(directory) / "store"), 1)
    return FileStore(str(Path(ranks.store_path).absolute()), ranks.world_size)
