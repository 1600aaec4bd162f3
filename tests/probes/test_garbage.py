"""Python looks for garbage behind a replay, seldom through all that there is, and afterwards as before."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from ampdbg.probes import garbage
from ampdbg.probes.garbage import seldom_collected, uncollected


class Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_garbage_of_a_replay_goes_behind_it_and_collecting_goes_on_afterwards() -> None:
    with seldom_collected():
        for _ in range(3):
            with uncollected():
                left = weakref.ref(Cycle())
                assert left() is not None
            assert left() is None
            assert not gc.isenabled()
    assert gc.isenabled()
    assert garbage._sweeping == []


def test_all_objects_are_looked_through_for_a_small_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = [100.0], list[int]()

    def collect(generation: int) -> None:
        asked.append(generation)
        clock[0] += 1.0 if generation == garbage.ALL else 0.01

    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("gc.collect", collect)
    with seldom_collected():
        for _ in range(100):
            clock[0] += 0.99
            with uncollected():
                pass
    assert asked.count(garbage.ALL) == pytest.approx(100 / garbage.SHARE, abs=1)
    assert asked[0] == garbage.ALL


@pytest.mark.parametrize("raises", [False, True])
def test_who_collects_nothing_goes_on_doing_so(raises: bool) -> None:
    gc.disable()
    left = weakref.ref(Cycle())
    try:
        with seldom_collected(), uncollected():
            assert not raises or 1 / 0
    except ZeroDivisionError:
        pass
    assert not gc.isenabled()
    assert left() is not None


def test_an_error_within_leaves_it_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError), seldom_collected(), seldom_collected(), uncollected():
        raise ZeroDivisionError
    assert gc.isenabled()
    assert garbage._sweeping == []
