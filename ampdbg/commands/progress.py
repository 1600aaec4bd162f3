"""How a run is doing, on stderr: a live bar on a terminal, a line every tenth of the run elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ampdbg.record.run import Step
from ampdbg.report import quantities

from .terminal import is_rich_terminal, say

REFRESH_SECONDS = 0.1
PLAIN_LINES = 10


@dataclass(frozen=True)
class Progress:
    """What a run calls: ``on_start`` with the planned steps before anything is loaded, ``on_step`` after each step,
    ``on_replay`` before each replay of a step, with its number and what is about to run."""

    on_start: Callable[[int], None]
    on_step: Callable[[Step], None]
    on_replay: Callable[[int, str], None] = lambda step, doing: None


@contextlib.contextmanager
def shown(quiet: bool) -> Iterator[Progress]:
    """The progress display that fits stderr, removed at the end of the block."""
    if quiet:
        yield Progress(on_start=lambda total: None, on_step=lambda step: None)
    elif is_rich_terminal(sys.stderr):
        with _live() as progress:
            yield progress
    else:
        yield _plain()


def _plain() -> Progress:
    total = done = skipped = 0
    replayed: set[int] = set()

    def on_start(planned: int) -> None:
        nonlocal total
        total = planned
        say("loading model and data")

    def on_step(step: Step) -> None:
        nonlocal done, skipped
        done, skipped = done + 1, skipped + step.skipped
        every = max(1, total // PLAIN_LINES)
        if done == 1 or done % every == 0 or done == total:
            say(f"step {done}/{total}  {_state(step, skipped)}")

    def on_replay(step: int, doing: str) -> None:
        if step not in replayed:
            say(f"replaying step {step} in other precisions and scales, {doing} first")
        replayed.add(step)

    return Progress(on_start, on_step, on_replay)


@contextlib.contextmanager
def _live() -> Iterator[Progress]:
    """A rich bar without its refresh thread.

    The thread could hold the console's lock at the moment a DataLoader forks its workers, which then
    wait for it for ever when they print. Here a step redraws the bar, at most ten times a second.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(compact=True),
    )
    with Bar(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("loading model and data", total=None, state="")
        skipped, drawn = 0, 0.0

        def on_start(planned: int) -> None:
            bar.update(task, total=planned, refresh=True)

        def on_step(step: Step) -> None:
            nonlocal skipped, drawn
            skipped += step.skipped
            now = time.monotonic()
            due = now - drawn >= REFRESH_SECONDS
            drawn = now if due else drawn
            bar.update(task, advance=1, description="step", state=_state(step, skipped), refresh=due)

        def on_replay(step: int, doing: str) -> None:
            bar.update(task, description=f"replaying step {step}: {doing}", state="", refresh=True)

        yield Progress(on_start, on_step, on_replay)


def _state(step: Step, skipped: int) -> str:
    loss, scale = quantities.number(step.loss), quantities.scale(step.scale)
    return f"loss {loss}  scale {scale}  skipped {skipped}"
