"""A suggestion as text: what it pins and why, the proof, other remedies, what to type next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.text import Text

from ampdbg.record.run import Record

from .bisection import render_bisection
from .drawing import draw
from .layout import INDENT, indented, title, verbatim
from .pin_text import cost_text, set_text
from .proof_text import FAILED, proof_text
from .quantities import counted
from .text import environment_facts, named_from
from .verdict import Headline, NextStep


@dataclass(frozen=True)
class EditMade:
    """An edit of the patch in words; ``notes`` are why it is no narrower, and what else runs that code."""

    title: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suggested:
    """What the report needs to know beside the record.

    ``units`` are the edits of the patch; without any there is no patch, and ``refused`` says why no code could be
    edited, ``FILE:LINES: reason`` each. ``notes`` are remedies other than pins. ``is_by_name`` says that modules are
    pinned by name, in a file or a config, and no code is edited.
    """

    units: tuple[EditMade, ...] = ()
    notes: tuple[str, ...] = ()
    next_step: NextStep | None = None
    is_by_name: bool = False
    refused: tuple[str, ...] = ()


def render_suggestion(
    record: Record,
    suggested: Suggested,
    *,
    width: int,
    color: bool,
    unicode: bool = True,
    config: str = "CONFIG",
    record_path: str = "",
    folder: str = "",
) -> str:
    """Renders what ``ampdbg suggest-fp32`` says beside the patch itself, for a terminal of ``width`` columns.

    Args:
        record: the diagnosed record, with ``pins``, ``search`` and ``verification``.
        suggested: the edits, the notes and the next command.
        width: columns.
        color: whether to use ANSI colours.
        unicode: without it, ASCII alone.
        config: how the config was given, for the commands that are suggested.
        record_path: where the record was written.
        folder: source files below it are named relative to it.
    """
    notes = tuple(_shortened(note, folder) for note in suggested.notes)
    if not record.pins or record.search is None or record.interrupted:
        ended = render_bisection(
            record, width=width, color=color, unicode=unicode, config=config, record_path=record_path, folder=folder
        )
        # Its findings are told with their remedies.
        notes = tuple(note for note in notes if not any(f.remedy and f.remedy in note for f in record.findings))
        others = draw(_notes(notes), width=width, color=color, unicode=unicode) if notes else ""
        return f"{ended}\n{others}" if others else ended
    record = named_from(folder, record)
    refused = tuple(_shortened(reason, folder) for reason in suggested.refused)
    sections = _sections(record, replace(suggested, notes=notes, refused=refused), record_path, width)
    return draw(sections, width=width, color=color, unicode=unicode)


def _shortened(note: str, folder: str) -> str:
    start = folder.rstrip("/\\")
    return note[len(start) + 1 :] if start and note.startswith((start + "/", start + "\\")) else note


def _sections(record: Record, suggested: Suggested, record_path: str, width: int) -> Iterator[RenderableType]:
    first = headline(record, suggested)
    yield Text(f"{first.mark} {first.sentence}", style=first.style)
    yield Group(*set_text(record.pins, record.findings, width))
    if suggested.units:
        yield Group(title("The patch"), *(line for unit in suggested.units for line in _edit(unit)))
    elif suggested.refused and record.verification is None and not suggested.is_by_name:
        yield Group(title("Why no code is edited"), *(indented(Text(reason)) for reason in suggested.refused))
    if record.verification is not None:
        yield Group(*proof_text(record.verification))
    if record.search is not None and record.search.cost is not None:
        yield Text(cost_text(record.search.cost))
    if suggested.notes:
        yield Group(*_notes(suggested.notes))
    yield Group(*_summary(record, suggested.next_step, record_path))


def _edit(unit: EditMade) -> Iterator[RenderableType]:
    yield indented(Text(unit.title))
    yield from (indented(indented(Text(note, style="dim"))) for note in unit.notes)


def headline(record: Record, suggested: Suggested) -> Headline:
    """What came of it, in a sentence."""
    proof, count = record.verification, len(record.pins)
    them = "it" if count == 1 else "them"
    what = f"{counted(count, 'place')} must run in FP32"
    if proof is not None and not proof.passed:
        why = f": {proof.failure}" if proof.failure else ""
        return Headline("✗", FAILED, f"{what}, and the patch for {them} failed its proof{why}. It is not suggested.")
    if suggested.is_by_name:
        return Headline("✓", "bold green", f"{what}; here {'it is' if count == 1 else 'they are'} by name.")
    if not suggested.units:
        return Headline("✗", FAILED, f"{what}, and no code of yours could be edited for {them}.")
    if proof is None:
        return Headline("!", "bold yellow", f"{what}; the patch for {them} was not proven.")
    return Headline("✓", "bold green", f"{what}; the patch for {them} is proven on the failing step.")


def _notes(notes: Sequence[str]) -> Iterator[RenderableType]:
    yield Group(title("Other remedies"), *(indented(Text(note)) for note in notes))


def _summary(record: Record, step: NextStep | None, record_path: str) -> Iterator[RenderableType]:
    yield Text(" · ".join(environment_facts(record)), style="dim")
    if record_path:
        yield verbatim(f"Record: {record_path}", "dim")
    if step is not None:
        yield Text.assemble(("Next: ", "bold"), step.why)
        yield verbatim(step.command, "bold cyan", INDENT)
