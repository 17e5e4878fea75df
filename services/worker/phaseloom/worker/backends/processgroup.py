"""torch's process group of a rank: where its ranks meet, and how one that breaks is told."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from phaseloom.worker.backends.base import GroupBroken, RankGroup


def join(
    ranks: RankGroup,
    device_type: str,
    joined: ExitStack,
    *,
    rank: int,
    world_size: int,
    name: str = "",
) -> None:
    """Make the process's group; `joined` ends what this makes.

    A store in a file needs no port that could collide; ranks on several nodes have a port that is
    open already.

    Args:   rank, world_size: place in the group, and its size; it may be a part of `ranks`.
            name: of that part, where there are several.
    Raises: GroupBroken: the other ranks did not come.
    """
    try:
        met = store(ranks, joined)
        dist.init_process_group(
            "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:nccl",
            store=PrefixStore(name, met) if name else met,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=ranks.timeout_s),
        )
    except RuntimeError as error:
        # Errors of the store, of gloo and of the rendezvous have no class in common.
        raise GroupBroken(f"not all {world_size} ranks came: {error}") from error
    joined.callback(dist.destroy_process_group)


def store(ranks: RankGroup, joined: ExitStack) -> Store:
    """The store where the ranks meet. Raises: RuntimeError: rank 0's node cannot be reached."""
    if ranks.store_address:
        host, _, port = ranks.store_address.rpartition(":")
        is_served = ranks.rank == 0
        served = TCPStore(
            host,
            int(port),
            is_master=is_served,
            timeout=timedelta(seconds=ranks.timeout_s),
            wait_for_workers=False,
            master_listen_fd=ranks.store_fd if is_served else None,
        )
        # Ranks of another incarnation that come to this port use other names.
        return PrefixStore(ranks.store_prefix, served)
    if ranks.world_size == 1:
        directory = joined.enter_context(tempfile.TemporaryDirectory(prefix="phaseloom-store-"))
        return FileStore(str(Path(directory) / "store"), 1)
    return FileStore(str(Path(ranks.store_path).absolute()), ranks.world_size)


def is_broken(error: BaseException) -> bool:
    """Whether an error says that another rank is gone or late.

    The first error of a broken group names gloo or NCCL; those that follow may not, and none has a
    class.
    """
    return "gloo" in str(error) or "NCCL" in str(error)
