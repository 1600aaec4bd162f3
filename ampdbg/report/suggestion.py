"""The page beside a patch: what it pins and why, its edits, the proof, other remedies, what to type next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ampdbg.quantities import counted
from ampdbg.record.run import Record

from . import bisection
from .pins import cost_sentence, pin_table, proof_table
from .view import Headline, NextCommand, Page, Paragraph, Section, Typed, line, ran_on


@dataclass(frozen=True)
class PatchEdit:
    """An edit of the patch in words; ``notes`` are why it is no narrower, and what else runs that code."""

    title: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PatchFacts:
    """What the page needs to know beside the record.

    Without any ``edits`` there is no patch, and ``refused`` says why no code could be edited,
    ``FILE:LINES: reason`` each. ``notes`` are remedies other than pins. ``is_by_name`` says that modules are
    pinned by name, in a file or a config, and no code is edited.
    """

    edits: tuple[PatchEdit, ...] = ()
    notes: tuple[str, ...] = ()
    next_command: NextCommand | None = None
    is_by_name: bool = False
    refused: tuple[str, ...] = ()


def page(record: Record, typed: Typed, patch: PatchFacts) -> Page:
    """What ``ampdbg suggest-fp32`` says beside the patch itself; without pins, how the search ended."""
    if not record.pins or record.search is None or record.interrupted:
        ended = bisection.page(record, typed)
        # A remedy that a finding shows already is not said twice.
        notes = tuple(note for note in patch.notes if not any(f.remedy and f.remedy in note for f in record.findings))
        return replace(ended, sections=(*ended.sections, *_remedies(notes)))
    return Page(
        headline(record, patch),
        tuple(_sections(record, patch)),
        tuple(ran_on(record)),
        typed.record_path,
        patch.next_command,
    )


def _sections(record: Record, patch: PatchFacts) -> Iterator[Section]:
    yield pin_table(record.pins, record.findings)
    if patch.edits:
        edits = (
            text
            for edit in patch.edits
            for text in (line(edit.title), *(line(note, tone="faint", depth=1) for note in edit.notes))
        )
        yield Paragraph(tuple(edits), "The patch")
    elif patch.refused and record.verification is None and not patch.is_by_name:
        yield Paragraph(tuple(map(line, patch.refused)), "Why ampdbg edits no code")
    if record.verification is not None:
        yield proof_table(record.verification)
    if record.search is not None and record.search.cost is not None:
        yield Paragraph((line(cost_sentence(record.search.cost)),))
    yield from _remedies(patch.notes)


def _remedies(notes: tuple[str, ...]) -> Iterator[Section]:
    if notes:
        yield Paragraph(tuple(map(line, notes)), "Other remedies")


def headline(record: Record, patch: PatchFacts) -> Headline:
    """What came of it, in a sentence."""
    proof, count = record.verification, len(record.pins)
    need, them = ("needs", "it") if count == 1 else ("need", "them")
    what = f"{counted(count, 'place')} {need} FP32"
    if proof is not None and not proof.passed:
        why = f": {proof.failure}" if proof.failure else ""
        return Headline("bad", f"{what}, but the patch for {them} failed its proof{why}. ampdbg does not suggest it.")
    if patch.is_by_name:
        return Headline("good", f"{what}; this pins {them} by name.")
    if not patch.edits:
        return Headline("bad", f"{what}, but ampdbg could not edit your code for {them}.")
    if proof is None:
        return Headline("stopped", f"{what}; the patch for {them} is not proven.")
    return Headline("good", f"{what}; the patch for {them} is proven on the failing step.")
