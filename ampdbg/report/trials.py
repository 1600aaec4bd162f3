"""The trials of a search: one in a line, or all of them in a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ampdbg.quantities import listed
from ampdbg.record.pins import OWN, Trial, in_words
from ampdbg.record.run import Record

from . import view
from .view import line

FIRST_TRIALS, LAST_TRIALS = 10, 8
"""Of a long search so many trials are listed."""

SHOWN_PINS = 2
LONG_NAME = 24

TRIAL_COLUMNS = (
    view.Column("", "number"),
    view.Column("for", is_spare=True),
    view.Column("in FP32"),
    view.Column("result"),
)


def names_of(record: Record) -> tuple[str, ...]:
    """The names of the record's set, as the config takes them."""
    return tuple(pin.name for pin in record.pins if pin.source is None)


def pins_text(pins: Sequence[str], most: int = 3) -> str:
    """``blocks.2.attn and head``; above ``most`` names the rest is counted."""
    return listed([in_words(OWN) if name == OWN else name or "the whole model" for name in pins], most) or "nothing"


def result_text(trial: Trial) -> str:
    """``healthy``, ``fails: the loss is NaN``, or of how many runs it was healthy where it ran several times."""
    if trial.healthy:
        return f"healthy, {trial.runs} of {trial.runs} runs" if trial.runs > 1 else "healthy"
    failed = f"fails, {trial.runs - trial.healthy_runs} of {trial.runs} runs" if trial.runs > 1 else "fails"
    return f"{failed}: {trial.why}" if trial.why else failed


def trial_table(record: Record, first: int = FIRST_TRIALS) -> view.Table:
    """The trials: ``first`` of them and the last; in a narrow terminal what each was for is left to the record."""
    trials, names = record.trials, names_of(record)
    rows = [_trial(number, trial, names) for number, trial in enumerate(trials, start=1)]
    is_long = len(trials) > first + LAST_TRIALS + 1
    if is_long:
        left = line(f"{len(trials) - first - LAST_TRIALS:,} more", tone="faint")
        rows[first:-LAST_TRIALS] = [("…", "", left, "")]
    return view.Table("The trials" + (" (all in the record)" if is_long else ""), TRIAL_COLUMNS, tuple(rows))


def _trial(number: int, trial: Trial, names: tuple[str, ...]) -> tuple[view.Cell, ...]:
    result = result_text(replace(trial, why=trial.why.partition(": ")[0]))
    return str(number), trial.stage, _pinned(trial.pins, names), line(result, tone="good" if trial.healthy else "bad")


def _pinned(pins: tuple[str, ...], names: tuple[str, ...]) -> str:
    """The pins, or how they differ from the set that was found, whichever is shorter."""
    dropped, added = set(names) - set(pins), set(pins) - set(names)
    if len(pins) > 1 and not dropped and not added:
        return "the set"
    if len(names) > 2 and len(dropped) == 1 and not added:
        return f"the set without {_short(dropped.pop())}"
    return pins_text([_short(name) for name in pins], SHOWN_PINS)


def _short(name: str) -> str:
    """The last two parts of a long name."""
    return name if len(name) <= LONG_NAME else "…" + ".".join(name.split(".")[-2:])
