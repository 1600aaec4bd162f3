"""A search for pins as text: the verdict, the set and why, what it costs, the trials, the lines for the config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ampdbg.record.pins import Trial
from ampdbg.record.run import Record

from . import quantities
from .bisection_verdict import Ended, headline, next_step
from .drawing import draw
from .finding_text import findings_text
from .layout import INDENT, indented, table, title, verbatim
from .pin_text import NARROW, config_text, cost_text, set_text
from .proof_text import proof_text
from .quantities import counted
from .text import environment_facts, named_from, render_text
from .trial_text import pins_text, result_text

FIRST_TRIALS, LAST_TRIALS = 10, 8
"""Of a long search so many trials are listed."""

SHOWN_PINS = 2
LONG_NAME = 24

RAN_AS = {"float16": "as it was", "float32": "in FP32", "pinned": "with the set"}


def render_bisection(
    record: Record,
    *,
    width: int,
    color: bool,
    unicode: bool = True,
    config: str = "CONFIG",
    record_path: str = "",
    folder: str = "",
) -> str:
    """Renders the record of ``ampdbg bisect``, or of ``suggest-fp32``, for a terminal of ``width`` columns.

    Args:
        record: a diagnosed record; one that ended before its search is rendered like a scan's.
        width: columns.
        color: whether to use ANSI colours.
        unicode: without it, ASCII alone.
        config: how the config was given, for the commands that are suggested: a file or ``--module FILE``.
        record_path: where the record was written.
        folder: source files below it are named relative to it.
    """
    if record.search is None:
        return render_text(
            record, width=width, color=color, unicode=unicode, config=config, record_path=record_path, folder=folder
        )
    record = named_from(folder, record)
    assert record.search is not None
    ended = Ended(record, record.search, config, record_path)
    return draw(_sections(ended, width), width=width, color=color, unicode=unicode)


def _sections(ended: Ended, width: int) -> Iterator[RenderableType]:
    record, search = ended.record, ended.search
    first = headline(ended)
    yield Text(f"{first.mark} {first.sentence}", style=first.style)
    if search.message and not _is_told_below(ended):
        yield Text(_as_sentence(search.message))
    if record.pins:
        yield Group(*set_text(record.pins, record.findings, width))
    elif record.findings:
        yield Group(*findings_text(record.findings))
    facts = list(_about_the_set(ended))
    if facts:
        yield Group(*facts)
    yield from _experiments(ended, width)
    if ended.names and ended.holds:
        yield Group(*config_text(ended.names, record.config))
    yield Group(*_summary(ended))


def _experiments(ended: Ended, width: int) -> Iterator[RenderableType]:
    """What was run: the step in each precision, the trials, the proof."""
    record, search = ended.record, ended.search
    if search.losses or search.step_seconds:
        yield Group(*_ways(ended))
    if record.trials:
        yield Group(*_trials(record.trials, ended.names, is_narrow=width < NARROW))
    if record.verification is not None:
        yield Group(*proof_text(record.verification))


def _is_told_below(ended: Ended) -> bool:
    """Whether the headline says it; or a finding, which are listed where there is no set."""
    if ended.search.outcome in ("nothing-to-pin", "not-in-a-module"):
        return True
    findings = ended.record.findings
    by_finding = not ended.record.pins and bool(findings) and ended.search.message.startswith(findings[0].message)
    return by_finding or (ended.search.outcome == "not-reproduced" and ended.search.tried > 0)


def _as_sentence(message: str) -> str:
    """With a capital, unless a module's name stands first."""
    is_word = message.partition(" ")[0].isalpha()
    return (message[:1].upper() + message[1:] if is_word else message).rstrip(".") + "."


def _about_the_set(ended: Ended) -> Iterator[RenderableType]:
    search, count = ended.search, len(ended.names)
    if search.minimal and count:
        dropped = "without it" if count == 1 else "without any one of them"
        yield Text(f"Proven by experiment: {dropped} the step fails (the set is 1-minimal).")
    elif count:
        yield Text("Not shown to be minimal: a smaller set may do.", style="yellow")
    if 0 < search.failed < search.tried:
        runs = f"; each trial ran {search.repeats} times" if search.repeats > 1 else ""
        yield Text(f"The step fails only sometimes: in {search.failed} of {search.tried} replays{runs}.")
    yield from (Text(text) for text in _classes(ended))
    if search.cost is not None and count:
        yield Text(cost_text(search.cost))


def _classes(ended: Ended) -> Iterator[str]:
    for name, counts in ended.search.classes.items():
        if len(counts) == 2 and counts[1] > 1:
            yield _share_of_class(name, *counts)


def _share_of_class(name: str, pinned: int, every: int) -> str:
    if pinned < every:
        return f"{pinned} of the {every} instances of {name} {'is' if pinned == 1 else 'are'} in the set."
    return f"{'Both' if every == 2 else f'All {every}'} instances of {name} are in the set."


def _ways(ended: Ended) -> Iterator[RenderableType]:
    """The failing step as it was, in FP32 and with the set: its loss, and how long it takes."""
    losses = dict(ended.search.losses)
    for step in ended.record.steps:
        if step.step == ended.search.step:
            losses.setdefault("float16", step.loss)
    seconds = ended.search.step_seconds
    rows = table("", "loss", *(("time",) if seconds else ()))
    for way, text in RAN_AS.items():
        if way in losses or way in seconds:
            time = (step_time(seconds.get(way)),) if seconds else ()
            rows.add_row(text, quantities.number(losses.get(way)), *time)
    yield title("The failing step, forward and backward")
    yield indented(rows)
    if seconds and ended.record.environment.emulated:
        yield indented(Text("FP16 is emulated on this machine; a GPU takes other times", style="dim"))


def step_time(seconds: float | None) -> str:
    """``31 ms``, ``1.4 s``."""
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.3g} ms" if seconds < 1.0 else quantities.duration(seconds)


# The trials


def _trials(trials: Sequence[Trial], names: tuple[str, ...], *, is_narrow: bool) -> Iterator[RenderableType]:
    """The trials as a table; in a narrow terminal what each was for is left to the record."""
    lines = [_trial(number, trial, names) for number, trial in enumerate(trials, start=1)]
    is_long = len(trials) > FIRST_TRIALS + LAST_TRIALS + 1
    if is_long:
        more = Text(f"{len(trials) - FIRST_TRIALS - LAST_TRIALS} more", style="dim")
        lines[FIRST_TRIALS:-LAST_TRIALS] = [("…", more, more if is_narrow else "", "")]
    rows = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    rows.add_column("", justify="right", no_wrap=True)
    for heading in ("for", "in FP32", "result")[is_narrow:]:
        rows.add_column(heading, overflow="fold")
    for number, *cells in lines:
        rows.add_row(number, *cells[is_narrow:])
    yield title("The trials" + (" (all in the record)" if is_long else ""))
    yield indented(rows)


def _trial(number: int, trial: Trial, names: tuple[str, ...]) -> tuple[RenderableType, ...]:
    style = "green" if trial.healthy else "red"
    short = replace(trial, why=trial.why.partition(": ")[0])
    return str(number), trial.stage, _pinned(trial.pins, names), Text(result_text(short), style=style)


def _pinned(pins: tuple[str, ...], names: tuple[str, ...]) -> str:
    """The pins, or how they differ from the set that was found, whichever is shorter."""
    dropped = [name for name in names if name not in pins]
    if len(pins) > 1 and set(pins) == set(names):
        return "the set"
    if len(names) > 2 and len(dropped) == 1 and len(pins) == len(names) - 1 and set(pins) < set(names):
        return f"the set without {_short(dropped[0])}"
    return pins_text([_short(name) for name in pins], SHOWN_PINS)


def _short(name: str) -> str:
    """The last two parts of a long name."""
    return name if len(name) <= LONG_NAME else "…" + ".".join(name.split(".")[-2:])


# The end


def _summary(ended: Ended) -> Iterator[RenderableType]:
    record = ended.record
    yield Text(" · ".join(_facts(ended)), style="dim")
    yield Text(" · ".join(environment_facts(record)), style="dim")
    for note in (*record.environment.notes, *record.unseen.notes):
        yield Text(f"Note: {note}", style="dim")
    if ended.record_path:
        yield verbatim(f"Record: {ended.record_path}", "dim")
    step = next_step(ended)
    if step is not None:
        yield Text.assemble(("Next: ", "bold"), step.why)
        yield verbatim(step.command, "bold cyan", INDENT)


def _facts(ended: Ended) -> Iterator[str]:
    search = ended.search
    if search.step is not None:
        scale = f" at a loss scale of {quantities.scale(search.scale)}" if search.scale is not None else ""
        yield f"step {search.step}{scale}"
    if search.modules:
        yield counted(search.modules, "module")
    if search.candidates and search.strategy == "guided":
        yield counted(search.candidates, "candidate")
    if ended.record.trials:
        yield f"{counted(len(ended.record.trials), 'trial')} ({search.strategy})"
    yield quantities.duration(ended.record.elapsed)
