"""The display of a search: a tree on a terminal, lines elsewhere, nothing when quiet."""

from __future__ import annotations

import contextlib
import io
import re
import threading
import time
from collections.abc import Iterator

import pytest
from rich.console import Console

from ampdbg.commands import live_tree
from ampdbg.commands.live_tree import Searched, SearchView, drawing, is_told
from ampdbg.record.pins import Trial
from ampdbg.report.search_tree import search_tree
from tests.commands.test_progress import shown_on
from tests.commands.test_terminal import Terminal
from tests.report.records import healthy_step

NAMES = ("", "embed", "block", "block.attn", "block.mlp", "head")
FAILED = Trial((), healthy=False, why="loss NaN", stage="candidates", suspects=("block.attn",))
HEALTHY = Trial(("block.attn", "head"), healthy=True, why="", stage="suspects")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal; ``watching`` makes it stderr, which pytest sets anew after every fixture."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(live_tree, "REFRESH_SECONDS", 0.0)
    return Terminal()


@contextlib.contextmanager
def watching(stream: io.TextIOBase, **options: int) -> Iterator[SearchView]:
    with contextlib.redirect_stderr(stream), live_tree.shown(quiet=False, **options) as view:
        yield view


def without_codes(terminal: Terminal) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown_on(terminal))


def test_a_terminal_sees_the_bar_and_then_the_tree(terminal: Terminal) -> None:
    with watching(terminal) as view:
        view.training.on_start(3)
        view.training.on_step(healthy_step(0))
        assert "1/3" in without_codes(terminal)
        view.on_search(NAMES)
        assert "trial 1" in without_codes(terminal)
        view.on_trial_start(("block.attn", "head"))
        view.on_trial(HEALTHY)
        view.on_trial_start(("head",))
        assert "trial 2, 2 modules left" in without_codes(terminal)
        assert "the set without block.attn" in without_codes(terminal)
        view.training.on_step(healthy_step(1))
        view.training.on_replay(1, "FP32")


def test_a_set_that_is_proven_is_told(terminal: Terminal) -> None:
    with watching(terminal) as view:
        view.on_search(NAMES)
        for trial in (FAILED, Trial(("head",), healthy=True, why="")):
            view.on_trial(trial)
        view.on_trial_start(("head",))
    assert "trial 3, the set is proven" in without_codes(terminal)
    assert "the set in FP32" in without_codes(terminal)


def test_a_search_that_begins_again_counts_anew(terminal: Terminal) -> None:
    with watching(terminal) as view:
        view.on_search(NAMES)
        view.on_trial(FAILED)
        view.on_search(NAMES)
        view.on_trial_start(())
    assert "trial 2" not in without_codes(terminal)


def test_the_limit_on_trials_is_shown(terminal: Terminal) -> None:
    with watching(terminal, max_trials=40) as view:
        view.on_search(NAMES)
    assert "trial 1 of at most 40" in without_codes(terminal)


def test_no_thread_is_left_running_that_a_forked_worker_could_wait_for(terminal: Terminal) -> None:
    before = threading.active_count()
    with watching(terminal) as view:
        view.on_search(NAMES)
        view.on_trial_start(("head",))
        assert threading.active_count() == before


def test_the_cursor_comes_back_when_the_search_raises(terminal: Terminal) -> None:
    def search() -> None:
        with watching(terminal) as view:
            view.on_search(NAMES)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search()
    assert shown_on(terminal).rstrip("\r\n").rfind("\x1b[?25h") > shown_on(terminal).rfind("\x1b[?25l")


def test_it_is_drawn_ten_times_a_second_however_fast_the_trials(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(live_tree, "REFRESH_SECONDS", 0.1)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with watching(terminal) as view:
        view.on_search(NAMES)
        for number in range(1000):
            now = 100.0 + number / 1000
            view.on_trial_start(("head",))
        assert 9 <= without_codes(terminal).count("head in FP32") <= 11


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("blocks", [2, 12, 500])
def test_every_line_fits_the_terminal(blocks: int, width: int) -> None:
    parts = ("", ".self_attention", ".self_attention.query_key_value", ".mlp")
    names = ("", *(f"model.decoder.layers.{number}{part}" for number in range(blocks) for part in parts))
    chosen = names[3::97]
    search = Searched(search_tree(names), None, [Trial(chosen, healthy=True, why="")], current=chosen[1:])
    console = Console(file=io.StringIO(), width=width, height=30)
    with console.capture() as capture:
        console.print(drawing(search, width, 30))
    lines = capture.get().splitlines()
    assert len(lines) <= 28
    assert max(map(len, lines)) <= width
    assert any("suspected" in line or "pinned" in line for line in lines[3:])


def test_without_a_terminal_each_trial_is_a_line() -> None:
    stream = io.StringIO()
    with watching(stream) as view:
        view.on_search(NAMES)
        view.on_trial_start(())
        view.on_trial(FAILED)
        view.on_trial(HEALTHY)
    assert stream.getvalue().splitlines() == [
        "searching 6 modules for the smallest set that must run in FP32",
        "trial 1: candidates: nothing in FP32: fails: loss NaN",
        "trial 2: suspects: block.attn and head in FP32: healthy",
    ]


def test_a_thousand_trials_are_told_in_forty_lines() -> None:
    assert sum(map(is_told, range(1, 1001))) == 37
    assert all(map(is_told, range(1, 21)))


def test_quiet_shows_nothing(terminal: Terminal) -> None:
    with contextlib.redirect_stderr(terminal), live_tree.shown(quiet=True) as view:
        view.training.on_start(5)
        view.on_search(NAMES)
        view.on_trial_start(("head",))
        view.on_trial(HEALTHY)
    assert shown_on(terminal) == ""
