"""A search for pins on stderr: the module tree as it clears up, on a terminal; a line for most trials elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ampdbg.record.pins import Trial
from ampdbg.report import quantities
from ampdbg.report.search_tree import (
    SearchTree,
    State,
    counts_text,
    rows,
    search_tree,
    smallest_healthy,
    states,
    trying,
)
from ampdbg.report.trial_text import pins_text, result_text

from . import progress
from .progress import REFRESH_SECONDS
from .terminal import is_rich_terminal, say

if TYPE_CHECKING:
    from rich.console import RenderableType

STYLES: dict[State | None, str] = {
    "proven": "bold red",
    "pinned": "cyan",
    "suspected": "yellow",
    "cleared": "green",
    "unknown": "dim",
    None: "dim",
}

MOST_ROWS = 24
"""A tree of more lines than this is no longer taken in at a glance, however high the terminal is."""

EVERY_LINE = 20
"""Without a terminal the first trials have a line each, later ones every tenth, then every hundredth."""


@dataclass(frozen=True)
class SearchView:
    """What a search calls: ``training`` while it looks for the failing step, ``on_search`` with the names of the
    modules that ran, ``on_trial_start`` with a trial's pins, ``on_trial`` with the trial."""

    training: progress.Progress
    on_search: Callable[[tuple[str, ...]], None]
    on_trial_start: Callable[[tuple[str, ...]], None]
    on_trial: Callable[[Trial], None]


@contextlib.contextmanager
def shown(quiet: bool, max_trials: int | None = None) -> Iterator[SearchView]:
    """The display that fits stderr, removed at the end of the block; of the trials at most ``max_trials`` are made."""
    with contextlib.ExitStack() as training:
        bar = training.enter_context(progress.shown(quiet))
        if quiet:
            yield SearchView(bar, lambda names: None, lambda pins: None, lambda trial: None)
        elif is_rich_terminal(sys.stderr):
            with _live(bar, training, max_trials) as view:
                yield view
        else:
            yield _plain(bar)


def _plain(bar: progress.Progress) -> SearchView:
    done = 0

    def on_search(names: tuple[str, ...]) -> None:
        nonlocal done
        done = 0
        say(f"searching {quantities.counted(len(names), 'module')} for the smallest set that must run in FP32")

    def on_trial(trial: Trial) -> None:
        nonlocal done
        done += 1
        if is_told(done):
            stage = f"{trial.stage}: " if trial.stage else ""
            say(f"trial {done}: {stage}{pins_text(trial.pins)} in FP32: {result_text(trial)}")

    return SearchView(bar, on_search, lambda pins: None, on_trial)


def is_told(number: int) -> bool:
    """Whether the trial of this number, counted from 1, has a line of its own."""
    every = 1 if number <= EVERY_LINE else 10 if number <= 100 else 100 if number <= 1000 else 1000
    return number % every == 0


@dataclass
class Searched:
    """What the display knows of a search."""

    tree: SearchTree
    max_trials: int | None
    trials: list[Trial] = field(default_factory=list)
    current: tuple[str, ...] = ()


@contextlib.contextmanager
def _live(bar: progress.Progress, training: contextlib.ExitStack, max_trials: int | None) -> Iterator[SearchView]:
    """A rich display without its refresh thread, for the reason that ``progress`` has: each trial redraws it."""
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    search = Searched(search_tree(()), max_trials)
    drawn = 0.0
    with contextlib.ExitStack() as display:

        def on_search(names: tuple[str, ...]) -> None:
            training.close()  # two displays at once would overwrite each other
            search.tree = search_tree(names)
            search.trials.clear()  # of a search that begins again
            if not live.is_started:
                display.callback(live.stop)
                live.start()
            on_trial_start(())

        def on_trial_start(pins: tuple[str, ...]) -> None:
            nonlocal drawn
            search.current = pins
            if live.is_started and time.monotonic() - drawn >= REFRESH_SECONDS:
                drawn = time.monotonic()
                live.update(drawing(search, console.width, console.height), refresh=True)

        live = Live(console=console, auto_refresh=False, transient=True)
        yield SearchView(bar, on_search, on_trial_start, search.trials.append)


def drawing(search: Searched, width: int, height: int) -> RenderableType:
    """The search as a terminal of ``width`` by ``height`` characters shows it; every line fits."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    known = states(search.tree, search.trials, search.current)
    head = [
        Text.assemble(("bisect ", "bold"), _done_and_left(search, known), no_wrap=True, overflow="crop"),
        Text(f"  {trying(search.tree, search.trials, search.current)}", no_wrap=True, overflow="crop"),
        Text(f"  {counts_text(Counter(known.values()))}", style="dim", no_wrap=True, overflow="crop"),
    ]
    tree = Table.grid(padding=(0, 2, 0, 0))
    tree.add_column(no_wrap=True, overflow="crop", max_width=width - 28)
    tree.add_column(no_wrap=True)
    tree.add_column(justify="right", no_wrap=True, style="dim")
    for row in rows(search.tree, known, max(2, min(MOST_ROWS, height - len(head) - 1))):
        count = quantities.counted(row.modules, "module") if row.modules > 1 and row.state else ""
        tree.add_row("  " * (row.depth + 1) + row.label, Text(row.state or "", style=STYLES[row.state]), count)
    return Group(*head, tree)


def _done_and_left(search: Searched, known: Mapping[str, State]) -> str:
    done = f"trial {len(search.trials) + 1}"
    if search.max_trials is not None:
        return f"{done} of at most {search.max_trials}"
    if smallest_healthy(search.tree, search.trials) is None:
        return done
    left = sum(state in ("suspected", "pinned") for state in known.values())
    return f"{done}, {quantities.counted(left, 'module')} left" if left else f"{done}, the set is proven"
