"""Pages are never lost, never given twice, and free only when every owner let go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import PagePoolError
from engine.page_pool import PagePool


def test_pages_go_out_as_neighbours_and_come_back():
    pool = PagePool(8)
    first, second = pool.allocate(3), pool.allocate(2)
    assert (first, second) == ([0, 1, 2], [3, 4])
    assert repr(pool) == "<PagePool 3 free, 5 held>"
    pool.release(first)
    assert pool.allocate(3) == [0, 1, 2]


def test_too_many_pages_is_not_now():
    pool = PagePool(2)
    assert pool.allocate(3) is None
    assert pool.allocate(0) == []
    assert pool.num_free == 2


def test_a_page_being_read_by_a_transfer_is_not_free():
    pool = PagePool(2)
    pages = pool.allocate(2)
    pool.pin(pages)
    pool.release(pages)
    assert repr(pool) == "<PagePool 0 free, 0 held, 2 pinned>"
    assert pool.allocate(1) is None
    pool.unpin(pages)
    assert pool.num_free == 2


def test_a_page_open_to_a_writer_is_quarantined_until_it_lets_go():
    pool = PagePool(2)
    pages = pool.allocate(2)
    pool.open_to_writer(pages)
    pool.release(pages)
    assert pool.counts().quarantined == 2
    assert pool.allocate(1) is None
    pool.close_to_writer(pages)
    assert pool.num_free == 2


@pytest.mark.parametrize("action", ["release", "unpin", "close_to_writer"])
def test_giving_back_what_one_does_not_own_is_a_defect(action):
    pool = PagePool(1)
    with pytest.raises(PagePoolError, match="page 0"):
        getattr(pool, action)([0])


@pytest.mark.parametrize("action", ["pin", "open_to_writer"])
def test_transfers_can_only_use_held_pages(action):
    with pytest.raises(PagePoolError, match="nobody holds it"):
        getattr(PagePool(1), action)([0])


@given(st.lists(st.tuples(st.sampled_from("ahrpuow"), st.integers(0, 7)), max_size=80))
def test_pages_always_add_up(actions):
    """Random owners come and go; counts agree with a plain model and with the pool's size after every step."""
    pool = PagePool(8)
    held, pinned, open_to_writer = [], [], []
    for action, number in actions:
        if action == "a" and (pages := pool.allocate(number % 4)) is not None:
            held.append(pages)
        elif action == "r" and held:
            pool.release(held.pop(number % len(held)))
        elif action == "p" and held:
            pinned.append(held[number % len(held)])
            pool.pin(pinned[-1])
        elif action == "u" and pinned:
            pool.unpin(pinned.pop(number % len(pinned)))
        elif action == "o" and held:
            open_to_writer.append(held[number % len(held)])
            pool.open_to_writer(open_to_writer[-1])
        elif action == "w" and open_to_writer:
            pool.close_to_writer(open_to_writer.pop(number % len(open_to_writer)))
        counts = pool.counts()
        assert counts.total == 8
        owned = {page for pages in held for page in pages}
        foreign = {page for pages in open_to_writer for page in pages} - owned
        ours = {page for pages in pinned for page in pages} - owned - foreign
        assert (counts.held, counts.quarantined, counts.pinned) == (len(owned), len(foreign), len(ours))
