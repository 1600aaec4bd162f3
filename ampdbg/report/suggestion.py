"""The page beside a patch: what it pins and why, its edits, the proof, other remedies, what to type next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampdbg.levels import format_of_config
from ampdbg.quantities import counted, listed
from ampdbg.record.pins import Handover, in_words
from ampdbg.record.run import Record

from . import bisection, handover
from .pins import cost_sentence, pin_table, proof_table
from .view import Findings, Headline, Page, Paragraph, Section, Typed, line, ran_on


def page(record: Record, typed: Typed) -> Page:
    """What ``ampdbg suggest-fp32`` says beside the patch itself; without pins, how the search ended."""
    handed = record.handover
    if handed is None:  # as in records of before
        return bisection.page(record, typed)
    if record.search is None or record.interrupted or not (record.pins or handed.files):
        ended = bisection.page(record, typed)
        # A remedy that a finding shows already is not said twice.
        notes = tuple(note for note in handed.notes if not any(f.remedy and f.remedy in note for f in record.findings))
        return replace(ended, sections=(*ended.sections, *_remedies(notes)))
    return Page(
        headline(record, handed),
        tuple(_sections(record, handed)),
        tuple(ran_on(record)),
        typed.record_path,
        handover.next_command(record, handed, typed),
    )


def _sections(record: Record, handed: Handover) -> Iterator[Section]:
    yield Findings(record.findings) if handed.pins_nothing else pin_table(record)
    if handed.files:
        edits = (
            text
            for unit in handed.units
            for text in (line(unit.title), *(line(note, tone="faint", depth=1) for note in unit.notes))
        )
        yield Paragraph(tuple(edits), "The patch")
    elif handed.refused and record.verification is None and not _is_by_name(record, handed):
        yield Paragraph(tuple(map(line, handed.refused)), "Why ampdbg edits no code")
    if record.verification is not None:
        yield proof_table(record.verification)
    if handed.pins_nothing:
        names = [in_words(name) for name in handed.names]
        instead = (f"FP32 for {listed(names)} cures it too: --format yaml prints the pins.",) if names else ()
        yield from _remedies(instead)
        return
    if record.search is not None and record.search.cost is not None:
        yield Paragraph((line(cost_sentence(record.search.cost, format_of_config(record.config))),))
    yield from _remedies(handed.notes)


def _is_by_name(record: Record, handed: Handover) -> bool:
    return handed.form in ("module", "yaml") and handover.content(record) is not None


def _remedies(notes: tuple[str, ...]) -> Iterator[Section]:
    if notes:
        yield Paragraph(tuple(map(line, notes)), "Other remedies")


def headline(record: Record, handed: Handover) -> Headline:
    """What came of it, in a sentence."""
    proof, count = record.verification, len(record.pins)
    if handed.pins_nothing:
        what = "No module needs FP32: the patch keeps a constant within the range of half precision"
        if proof is None:
            return Headline("stopped", f"{what}; it is not proven.")
        return Headline("good", f"{what}, and is proven on the failing step.")
    need, them = ("needs", "it") if count == 1 else ("need", "them")
    what = f"{counted(count, 'place')} {need} FP32"
    if proof is not None and not proof.passed:
        why = f": {proof.failure}" if proof.failure else ""
        return Headline("bad", f"{what}, but the patch for {them} failed its proof{why}. ampdbg does not suggest it.")
    if _is_by_name(record, handed):
        return Headline("good", f"{what}; this pins {them} by name.")
    if not handed.files:
        return Headline("bad", f"{what}, but ampdbg could not edit your code for {them}.")
    if proof is None:
        return Headline("stopped", f"{what}; the patch for {them} is not proven.")
    return Headline("good", f"{what}; the patch for {them} is proven on the failing step.")
