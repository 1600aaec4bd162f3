"""Show the progress of a run on stderr: a live bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampdbg import quantities
from ampdbg.escapes import printable
from ampdbg.observer import Observer
from ampdbg.record.pins import Trial, is_line
from ampdbg.record.run import Step

from .interrupts import raise_if_interrupted
from .streams import is_rich_terminal, say

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

REFRESH_SECONDS = 0.1
PLAIN_LINES = 10

EVERY_LINE = 20
"""Without a terminal this many first trials have a line each, then every tenth, then every hundredth."""


@contextlib.contextmanager
def shown(quiet: bool, max_trials: int | None = None) -> Iterator[Observer]:
    """Yield the display that fits stderr, and remove it afterwards; a search runs at most ``max_trials``.

    The user's code may change the working folder in the block; it is restored afterwards.
    """
    folder = os.getcwd()
    try:
        if quiet:
            yield Quiet()
        elif is_rich_terminal(sys.stderr):
            with _bar() as bar:
                yield LiveBar(bar, max_trials)
        else:
            yield Lines()
    finally:
        with contextlib.suppress(OSError):  # it may be gone
            os.chdir(folder)


class Quiet(Observer):
    """Shows nothing."""

    def step(self, step: Step) -> None:
        raise_if_interrupted()


class Lines(Observer):
    """A line for every tenth of the run, for each replayed step, and for most trials."""

    def __init__(self) -> None:
        self._planned = self._steps = self._skipped = self._trials = 0
        self._replayed: set[int] = set()

    def start(self, planned: int) -> None:
        self._planned = planned
        say("loading model and data")

    def level(self, name: str) -> None:
        self._steps = self._skipped = 0
        self._replayed.clear()
        say(f"{name}: {quantities.counted(self._planned, 'step')}")

    def step(self, step: Step) -> None:
        raise_if_interrupted()
        self._steps, self._skipped = self._steps + 1, self._skipped + step.skipped
        every = max(1, self._planned // PLAIN_LINES)
        if self._steps == 1 or self._steps % every == 0 or self._steps == self._planned:
            say(f"step {self._steps}/{self._planned}  {_state(step, self._skipped)}")

    def replay(self, step: int, doing: str) -> None:
        if step not in self._replayed:
            say(f"replaying step {step} in other precisions and at other loss scales")
        self._replayed.add(step)

    def search(self, modules: tuple[str, ...]) -> None:
        self._trials = 0
        say(_searching(modules))

    def trial(self, trial: Trial) -> None:
        self._trials += 1
        if has_a_line(self._trials):
            say(_trial_line(self._trials, trial))

    def stage(self, doing: str) -> None:
        say(doing)


class LiveBar(Observer):
    """A bar over the steps, then over the trials of a search; the stages of a proof are lines."""

    def __init__(self, bar: Progress, max_trials: int | None) -> None:
        self._bar = bar
        self._task: TaskID = bar.add_task("loading model and data", total=None, state="")
        self._max_trials = max_trials
        self._skipped = self._trials = 0
        self._stepping = "step"
        self._drawn = 0.0

    def start(self, planned: int) -> None:
        self._bar.update(self._task, total=planned, refresh=True)

    def level(self, name: str) -> None:
        self._skipped, self._stepping = 0, f"{name}: step"
        self._bar.reset(self._task, description=name)

    def step(self, step: Step) -> None:
        raise_if_interrupted()
        self._skipped += step.skipped
        state = _state(step, self._skipped)
        self._bar.update(self._task, advance=1, description=self._stepping, state=state, refresh=self._is_due())

    def replay(self, step: int, doing: str) -> None:
        self._bar.update(self._task, description=f"replaying step {step}: {doing}", state="", refresh=True)

    def search(self, modules: tuple[str, ...]) -> None:
        self._trials = 0
        self._bar.remove_task(self._task)
        self._task = self._bar.add_task(_searching(modules), total=self._max_trials, state="")
        self._bar.refresh()

    def trial(self, trial: Trial) -> None:
        self._trials += 1
        line = _trial_line(self._trials, trial)
        self._bar.update(self._task, advance=1, description=line, refresh=self._is_due())

    def stage(self, doing: str) -> None:
        self._bar.stop()
        say(doing)

    def _is_due(self) -> bool:
        now = time.monotonic()
        due = now - self._drawn >= REFRESH_SECONDS
        self._drawn = now if due else self._drawn
        return due


@contextlib.contextmanager
def _bar() -> Iterator[Progress]:
    """Yield a rich bar without its refresh thread.

    The thread could hold the console's lock while a DataLoader forks its workers. They would then wait without end when
    they print. Here a step redraws the bar, at most ten times a second.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
        yield bar


def has_a_line(trial: int) -> bool:
    """True if the trial of this number, counted from 1, gets its own line."""
    every = 1 if trial <= EVERY_LINE else 10 if trial <= 100 else 100 if trial <= 1000 else 1000
    return trial % every == 0


def _searching(modules: tuple[str, ...]) -> str:
    lines = sum(map(is_line, modules))
    places = [quantities.counted(len(modules) - lines, "module"), *[quantities.counted(lines, "line")] * bool(lines)]
    return f"searching {' and '.join(places)} for the smallest set that must run in FP32"


def _trial_line(number: int, trial: Trial) -> str:
    from ampdbg.report.pins import pins_text, result_text  # `ampdbg --help` does not need the pages

    stage = f"{trial.stage}: " if trial.stage else ""
    pins = pins_text(trial.pins)
    return printable(f"trial {number}: {stage}{pins} in FP32: {result_text(trial)}")


def _state(step: Step, skipped: int) -> str:
    loss, scale = quantities.number(step.loss), quantities.scale(step.scale)
    return f"loss {loss}  scale {scale}  skipped {skipped}"
