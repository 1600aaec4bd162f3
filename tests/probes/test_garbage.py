"""Tests of garbage collection around replays: after each replay, seldom through all objects, then as before."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from ampdbg.probes.garbage import seldom_collected, uncollected


class Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.enable()
    yield
    gc.enable()
    assert gc.get_threshold() == thresholds


def cycles() -> list[weakref.ref[Cycle]]:
    return [weakref.ref(Cycle()) for _ in range(2 * gc.get_threshold()[0])]


def test_garbage_of_a_replay_is_collected_after_the_replay() -> None:
    with seldom_collected():
        for _ in range(3):
            with uncollected():
                left = cycles()
                assert all(one() is not None for one in left)
            _ = [[] for _ in range(gc.get_threshold()[0])]  # as the next line of any code does
            assert all(one() is None for one in left)
    assert gc.isenabled()


def looks_through_all_while_much_is_kept() -> int:
    before, kept = gc.get_stats()[2]["collections"], list[object]()
    for _ in range(60):
        kept += [[] for _ in range(10_000)]
    return int(gc.get_stats()[2]["collections"] - before)


def test_full_collections_are_seldom_while_a_search_keeps_many_objects() -> None:
    often = looks_through_all_while_much_is_kept()
    with seldom_collected():
        assert looks_through_all_while_much_is_kept() < often / 4


@pytest.mark.parametrize("raises", [False, True])
def test_garbage_collection_that_the_user_disabled_stays_disabled(raises: bool) -> None:
    gc.disable()
    left = weakref.ref(Cycle())
    try:
        with seldom_collected(), uncollected():
            assert not raises or 1 / 0
    except ZeroDivisionError:
        pass
    assert not gc.isenabled()
    assert left() is not None


def test_garbage_collection_is_restored_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), seldom_collected(), seldom_collected(), uncollected():
        raise ZeroDivisionError
    assert gc.isenabled()
