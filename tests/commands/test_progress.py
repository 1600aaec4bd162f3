"""The progress display: a live bar on a terminal, at no cost to a step, and plain lines elsewhere."""

import contextlib
import io
import re
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from ampdbg.commands import progress
from ampdbg.commands.progress import has_a_line
from ampdbg.observer import Observer
from ampdbg.record.pins import Trial
from tests.commands.test_output import Terminal
from tests.report.records import healthy_step, overflow, skipped_step


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal; ``watching`` makes it stderr, because pytest replaces stderr after every fixture."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    return Terminal()


@contextlib.contextmanager
def watching(terminal: Terminal, **options: int) -> Iterator[Observer]:
    with contextlib.redirect_stderr(terminal), progress.shown(quiet=False, **options) as watcher:
        yield watcher


def shown_on(terminal: Terminal) -> str:
    terminal.flush()
    return terminal.buffer.getvalue().decode()  # type: ignore[attr-defined]


def without_codes(terminal: Terminal) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown_on(terminal))


def test_a_terminal_shows_loading_then_step_loss_scale_and_skips(terminal: Terminal) -> None:
    with watching(terminal) as watcher:
        watcher.start(50)
        assert "loading model and data" in shown_on(terminal)
        watcher.step(skipped_step(0, 65536.0, overflow(0)))
    assert re.search(r"step .* 1/50 .*loss 2\.5  scale 65,536  skipped 1", without_codes(terminal))


def test_the_bar_restarts_for_each_level_of_a_comparison(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.0)
    with watching(terminal) as watcher:
        watcher.start(2)
        for name in ("O1", "O2"):
            watcher.level(name)
            watcher.step(skipped_step(0, 65536.0, overflow(0)))
            watcher.replay(0, "FP32")
            watcher.step(healthy_step(1))
    drawn = re.findall(r"(O\d: step) .*? (\d/2) .*?(skipped \d)", without_codes(terminal))
    assert list(dict.fromkeys(drawn)) == [
        (f"{name}: step", f"{done}/2", "skipped 1") for name in ("O1", "O2") for done in (1, 2)
    ]


def test_fast_steps_draw_the_bar_only_ten_times_a_second(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with watching(terminal) as watcher:
        watcher.start(1000)
        for number in range(1000):
            now = 100.0 + number / 1000
            watcher.step(healthy_step(number))
        drawn = shown_on(terminal).count("skipped 0")
    assert 9 <= drawn <= 11


def test_the_bar_starts_no_thread_that_a_forked_worker_could_wait_for(terminal: Terminal) -> None:
    before = threading.active_count()
    with watching(terminal) as watcher:
        watcher.start(5)
        assert threading.active_count() == before


def test_user_output_during_the_run_is_not_lost(terminal: Terminal) -> None:
    with watching(terminal) as watcher:
        watcher.start(5)
        sys.stderr.write("from the user\n")
        watcher.step(healthy_step(0))
    assert "from the user" in shown_on(terminal)


def test_stderr_is_restored_if_the_run_raises(terminal: Terminal) -> None:
    with contextlib.redirect_stderr(terminal):
        with pytest.raises(ValueError, match="inside"), progress.shown(quiet=False):
            raise ValueError("inside")
        assert sys.stderr is terminal


NAMES = ("", "embed", "block", "block.attn", "block.mlp", "head")
FAILED = Trial((), healthy=False, why="loss NaN", stage="candidates", suspects=("block.attn",))
HEALTHY = Trial(("block.attn", "head"), healthy=True, why="", stage="suspects")


def test_a_terminal_shows_a_bar_over_steps_and_then_over_trials(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.0)
    with watching(terminal, max_trials=40) as watcher:
        watcher.start(3)
        watcher.step(healthy_step(0))
        assert "1/3" in without_codes(terminal)
        watcher.search(NAMES)
        assert "0/40" in without_codes(terminal)
        watcher.trial(HEALTHY)
        assert "trial 1: suspects: block.attn and head" in without_codes(terminal)
        assert "1/40" in without_codes(terminal)
        watcher.stage("planning the patch")
        assert without_codes(terminal).endswith("planning the patch\n")


def test_the_cursor_is_shown_again_if_the_search_raises(terminal: Terminal) -> None:
    def search() -> None:
        with watching(terminal) as watcher:
            watcher.search(NAMES)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search()
    assert shown_on(terminal).rstrip("\r\n").rfind("\x1b[?25h") > shown_on(terminal).rfind("\x1b[?25l")


def test_each_trial_prints_one_line_without_a_terminal() -> None:
    stream = io.StringIO()
    with contextlib.redirect_stderr(stream), progress.shown(quiet=False) as watcher:
        watcher.search(NAMES)
        watcher.trial(FAILED)
        watcher.trial(HEALTHY)
        watcher.stage("planning the patch")
    assert stream.getvalue().splitlines() == [
        "searching 6 modules for the smallest set that must run in FP32",
        "trial 1: candidates: nothing in FP32: fails: loss NaN",
        "trial 2: suspects: block.attn and head in FP32: healthy",
        "planning the patch",
    ]


def test_a_thousand_trials_print_37_lines_and_each_of_the_first_20_prints_one() -> None:
    assert sum(map(has_a_line, range(1, 1001))) == 37
    assert all(map(has_a_line, range(1, 21)))
