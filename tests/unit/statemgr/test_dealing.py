"""Blocks of a version over a slow link: each to one of a group, whoever asks in whatever order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phaseloom.statemgr.core.dealing import Blocks, Deal, Fetcher

_FETCHERS = [Fetcher(f"node{i}:1", f"session {i}") for i in range(3)]


@given(st.integers(0, 20), st.lists(st.sampled_from(_FETCHERS), min_size=21, max_size=40))
def test_every_block_is_given_once_and_the_others_hear_of_it(
    num_blocks: int, order: list[Fetcher]
) -> None:
    deal = Deal(num_blocks)
    given_to: dict[int, Fetcher] = {}
    seen = dict.fromkeys(_FETCHERS, 0)
    heard: dict[Fetcher, dict[int, str]] = {fetcher: {} for fetcher in _FETCHERS}
    for fetcher in order:
        block = deal.take(fetcher)
        if block is not None:
            assert block not in given_to
            given_to[block] = fetcher
        seen[fetcher], news = deal.news(seen[fetcher], fetcher)
        heard[fetcher] |= dict(news)
    assert sorted(given_to) == list(range(num_blocks))
    for fetcher in _FETCHERS:
        heard[fetcher] |= dict(deal.news(seen[fetcher], fetcher)[1])
        others = {b: other.endpoint for b, other in given_to.items() if other != fetcher}
        assert heard[fetcher] == others


def test_a_block_whose_bringer_failed_is_given_once_more() -> None:
    """All that wait for it ask; one brings it, and the rest are sent there."""
    first, second, third = _FETCHERS
    deal = Deal(1)
    assert deal.take(first) == 0
    assert deal.again(0, first.endpoint, second) is None
    assert deal.again(0, first.endpoint, third) == second.endpoint
    assert deal.again(0, second.endpoint, third) is None
    assert deal.news(1, second) == (3, [(0, third.endpoint), (0, third.endpoint)])


def test_a_broken_stream_gets_its_own_block_again() -> None:
    (first, *_) = _FETCHERS
    deal = Deal(2)
    assert deal.take(first) == 0
    assert deal.again(0, first.endpoint, first) is None
    # Another life of the same daemon has nothing of what the one before was given.
    again = Fetcher(first.endpoint, "another session")
    assert deal.news(0, again)[1] == [(0, first.endpoint)] * 2
    assert deal.again(0, first.endpoint, again) is None


def test_a_block_by_number_is_not_given_by_turn() -> None:
    """Who resumes names what it misses; the others get what is left."""
    first, second, _ = _FETCHERS
    deal = Deal(3)
    assert deal.again(1, "", first) is None
    assert [deal.take(second) for _ in range(3)] == [0, 2, None]


@given(st.integers(0, 10**10))
def test_blocks_tile_a_version(num_bytes: int) -> None:
    blocks = Blocks(num_bytes)
    assert blocks.count * blocks.size >= num_bytes > (blocks.count - 1) * blocks.size
    assert blocks.size in range(65536, 4 * 2**20 + 1, 65536)
    if blocks.count:
        assert blocks.span(blocks.count - 1).stop == num_bytes
        assert blocks.span(0) == slice(0, min(num_bytes, blocks.size))
