"""A rank's share of its device: which cores its threads are on, and what it was told last."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from phaseloom.common.contract.specs import CommandId
from phaseloom.worker.rank.computeshare import ComputeShare, whole_device


@pytest.fixture(autouse=True)
def own_cores() -> Iterator[list[int]]:
    """The cores of this process, which it has again afterwards."""
    cores = os.sched_getaffinity(0)
    yield sorted(cores)
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


class Threads:
    def __init__(self) -> None:
        self.counts: list[int] = []

    def use(self, count: int) -> None:
        self.counts.append(count)


def command(sequence: int, index: int = 0) -> CommandId:
    return CommandId(sequence, index)


def share_of(threads: Threads, device: int = 0, num_units: int = 2) -> ComputeShare:
    return ComputeShare(device, num_units, threads.use)


def test_all_threads_are_kept_on_the_cores_of_the_share(own_cores: list[int]) -> None:
    share, may_end = share_of(Threads()), threading.Event()
    other = threading.Thread(target=may_end.wait)
    other.start()
    try:
        share.request([1], command(1))
        share.apply_request()
        expected = {own_cores[1 % len(own_cores)]}
        assert other.native_id is not None
        assert os.sched_getaffinity(other.native_id) == expected
        assert os.sched_getaffinity(0) == expected
    finally:
        may_end.set()
        other.join()


def test_threads_that_shared_a_core_do_not_go_on_together_on_it(own_cores: list[int]) -> None:
    """They would wait for one another at the end of every step."""
    if len(own_cores) < 2:
        pytest.skip("one core")
    share, may_end = share_of(Threads()), threading.Event()
    other = threading.Thread(target=may_end.wait)
    other.start()
    try:
        for sequence, units in enumerate(([0], [0, 1]), 1):
            share.request(units, command(sequence))
            share.apply_request()
        assert other.native_id is not None
        assert os.sched_getaffinity(other.native_id) == {own_cores[1]}
        assert os.sched_getaffinity(0) == set(own_cores[:2])
    finally:
        may_end.set()
        other.join()


def test_threads_are_as_many_as_cores(own_cores: list[int]) -> None:
    """Two threads on one core would wait for each other."""
    threads = Threads()
    share = share_of(threads)
    share.apply_request()
    share.request([0], command(1))
    share.apply_request()
    assert threads.counts == [min(2, len(own_cores)), 1]


def test_devices_have_cores_of_their_own_where_there_are_enough(own_cores: list[int]) -> None:
    if len(own_cores) < 2:
        pytest.skip("one core")
    found = []
    for device in range(2):
        share = share_of(Threads(), device, num_units=1)
        found.append(share._cores)
    assert found == [[own_cores[0]], [own_cores[1]]]


def test_what_an_older_command_says_is_void() -> None:
    share = share_of(Threads())
    share.request([0], command(7))
    share.request([], command(6, 5))
    share.apply_request()
    assert list(share.units) == [0]
    share.request([], command(7, 1))
    share.apply_request()
    assert list(share.units) == [0, 1]


async def test_is_confirmed_at_the_next_boundary_and_not_before() -> None:
    share = share_of(Threads())
    share.start_work()
    share.request([1], command(1))
    confirmed = asyncio.ensure_future(share.until_applied())
    await asyncio.sleep(0)
    assert not confirmed.done()
    assert list(share.units) == [0, 1]
    await asyncio.to_thread(share.apply_request)
    await confirmed
    assert list(share.units) == [1]


async def test_what_was_given_and_not_taken_yet_is_given_back_at_once() -> None:
    """The units that another has left are offered to who runs on. If they are wanted again before
    its next boundary, nobody waits for that."""
    share = share_of(Threads())
    share.request([0], command(1))
    share.start_work()
    share.request([], command(2))
    share.request([0], command(3))
    await asyncio.wait_for(share.until_applied(), 5)
    share.apply_request()
    assert list(share.units) == [0]
    share.request([], command(4))
    share.apply_request()
    share.request([0], command(5))
    confirmed = asyncio.ensure_future(share.until_applied())
    await asyncio.sleep(0)
    assert not confirmed.done()
    share.apply_request()
    await confirmed


async def test_a_device_of_one_unit_is_left_alone(own_cores: list[int]) -> None:
    share = whole_device()
    share.start_work()
    share.end_work()
    assert sorted(os.sched_getaffinity(0)) == own_cores
    confirmed = asyncio.ensure_future(share.until_applied())
    await asyncio.sleep(0)
    share.apply_request()
    await confirmed


def test_tells_how_long_it_used_what() -> None:
    told: list[tuple[float, float, tuple[int, ...]]] = []

    def tell(begin_s: float, end_s: float, units: Sequence[int]) -> None:
        told.append((begin_s, end_s, tuple(units)))

    share = ComputeShare(0, 2, lambda count: None, tell)
    share.start_work()
    began = threading.Event()
    began.wait(0.01)  # so long that it is worth telling
    share.request([0], command(1))
    share.apply_request()
    began.wait(0.01)
    share.end_work()
    assert [units for _, _, units in told] == [(0, 1), (0,)]
    assert told[0][1] == told[1][0]
