"""The progress display: a live bar on a terminal that costs a step nothing, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from ampdbg.commands import progress
from tests.commands.test_terminal import Terminal
from tests.report.records import healthy_step, overflow, skipped_step


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal; ``watching`` makes it stderr, which pytest sets anew after every fixture."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    return Terminal()


@contextlib.contextmanager
def watching(terminal: Terminal) -> Iterator[progress.Progress]:
    with contextlib.redirect_stderr(terminal), progress.shown(quiet=False) as watcher:
        yield watcher


def shown_on(terminal: Terminal) -> str:
    terminal.flush()
    return terminal.buffer.getvalue().decode()  # type: ignore[attr-defined]


def test_a_terminal_sees_loading_then_step_loss_scale_and_skips(terminal: Terminal) -> None:
    with watching(terminal) as watcher:
        watcher.on_start(50)
        assert "loading model and data" in shown_on(terminal)
        watcher.on_step(skipped_step(0, 65536.0, overflow(0)))
    assert re.search(
        r"step .* 1/50 .*loss 2\.5  scale 65536  skipped 1", re.sub(r"\x1b\[[0-9;]*m", "", shown_on(terminal))
    )


def test_the_bar_is_drawn_ten_times_a_second_however_fast_the_steps(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with watching(terminal) as watcher:
        watcher.on_start(1000)
        for number in range(1000):
            now = 100.0 + number / 1000
            watcher.on_step(healthy_step(number))
        drawn = shown_on(terminal).count("skipped 0")
    assert 9 <= drawn <= 11


def test_no_thread_is_left_running_that_a_forked_worker_could_wait_for(terminal: Terminal) -> None:
    before = threading.active_count()
    with watching(terminal) as watcher:
        watcher.on_start(5)
        assert threading.active_count() == before


def test_what_is_printed_meanwhile_is_not_lost(terminal: Terminal) -> None:
    with watching(terminal) as watcher:
        watcher.on_start(5)
        sys.stderr.write("from the user\n")
        watcher.on_step(healthy_step(0))
    assert "from the user" in shown_on(terminal)


def test_stderr_is_given_back_when_the_run_raises(terminal: Terminal) -> None:
    with contextlib.redirect_stderr(terminal):
        with pytest.raises(ValueError, match="inside"), progress.shown(quiet=False):
            raise ValueError("inside")
        assert sys.stderr is terminal


def test_quiet_shows_nothing(terminal: Terminal) -> None:
    with contextlib.redirect_stderr(terminal), progress.shown(quiet=True) as watcher:
        watcher.on_start(5)
        watcher.on_step(healthy_step(0))
    assert shown_on(terminal) == ""
