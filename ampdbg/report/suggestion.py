"""A suggestion: its page, and what is handed over: a diff, a Python file of pins, lines of a config, JSON."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ampdbg.escapes import printable
from ampdbg.levels import format_of_config
from ampdbg.ops import CASTS, base_name
from ampdbg.quantities import counted, listed, share
from ampdbg.record.file import to_json
from ampdbg.record.findings import place_of
from ampdbg.record.pins import Form, Handover, Proof, call_of_pins, in_words
from ampdbg.record.run import Record, Updates

from . import bisection
from .pins import (
    about_roots,
    cost_sentence,
    pin_lines,
    pin_table,
    pins_yaml,
    proof_in_brief,
    proof_table,
    roots_of,
    roots_paragraph,
)
from .view import Findings, Headline, NextCommand, Page, Paragraph, Section, Snippet, Typed, line, more, ran_on

FORMAT, VERSION = "ampdbg.patch", 1

OF_THE_PATCH = "ampdbg did not measure the cost of the patch itself, which may be more or less."

MOST_IN_BRIEF = 3
"""So many of the patch's places, and of other remedies, are in a story."""

BY_HAND = (
    "By hand: put {} and the lines that make its inputs under torch.autocast(device_type=..., enabled=False). Cast "
    "what these lines read with .float(), and remove their own casts to half."
)

TOGETHER = "FP32 throughout makes the step healthy: disable autocast around the model and the loss together."

OWN_CAST = (
    "FP32 throughout makes the step healthy. If {} casts to half itself, remove that cast, because disabling "
    "autocast does not. Otherwise disable autocast around the model and the loss together."
)

EDITS = "The patch"
"""The title of what is edited, in words."""

MANY = 6
"""Beyond so many pins the comments count them."""


def page(record: Record, typed: Typed) -> Page:
    """What ``ampdbg suggest-fp32`` says beside the patch itself; without pins, how the search ended."""
    handed = record.handover
    if handed is None and record.updates is not None and not record.faults:
        return replace(bisection.page(record, typed), headline=_harmless(record, record.updates))
    if handed is None:  # as in records of before
        return bisection.page(record, typed)
    if record.interrupted or not (record.pins or handed.files):
        ended = bisection.page(record, typed)
        # A remedy that a finding shows already is not said twice.
        notes = tuple(note for note in handed.notes if not any(f.remedy and f.remedy in note for f in record.findings))
        # The patch of a proof that was interrupted, to be read: what is handed over, is proven.
        unproven = (Snippet("The patch, not proven", tuple(file.diff.splitlines())) for file in handed.files)
        shown = replace(
            ended,
            sections=(*ended.sections, *unproven, *_remedies(notes)),
            story=(*ended.story, *_remedies(notes[:MOST_IN_BRIEF])),
        )
        if not handed.files:
            return shown
        head = headline(record, handed)
        return replace(shown, headline=replace(head, sentence=f"Interrupted during the proof. {head.sentence}"))
    return Page(
        headline(record, handed),
        tuple(_sections(record, handed)),
        tuple(ran_on(record)),
        typed.record_path,
        next_command(record, handed, typed),
        story=tuple(_story(record, handed)),
    )


def _story(record: Record, handed: Handover) -> Iterator[Section]:
    yield Findings(record.findings, is_brief=True) if handed.pins_nothing else pin_lines(record)
    if _is_by_name(record, handed):
        yield from roots_paragraph(record)
    if handed.units:
        units = [line(unit.title) for unit in handed.units]
        yield Paragraph((*units[:MOST_IN_BRIEF], *more(len(units) - MOST_IN_BRIEF)), _about_units(handed))
    elif handed.refused and record.verification is None and not _is_by_name(record, handed):
        yield Paragraph(tuple(map(line, handed.refused[:MOST_IN_BRIEF])), "Why ampdbg edits no code")
    if record.verification is not None:
        yield Paragraph(proof_in_brief(record.verification), "The proof")
    yield from _remedies((*handed.notes, *_together(record))[:MOST_IN_BRIEF], _about_notes(record))


def _sections(record: Record, handed: Handover) -> Iterator[Section]:
    yield Findings(record.findings) if handed.pins_nothing else pin_table(record)
    yield from roots_paragraph(record)
    if handed.units:
        edits = (
            text
            for unit in handed.units
            for text in (line(unit.title), *(line(note, tone="faint", depth=1) for note in unit.notes))
        )
        yield Paragraph(tuple(edits), _about_units(handed))
    elif handed.refused and record.verification is None and not _is_by_name(record, handed):
        yield Paragraph(tuple(map(line, handed.refused)), "Why ampdbg edits no code")
    if record.verification is not None:
        yield proof_table(record.verification)
    if handed.pins_nothing:
        names = [in_words(name) for name in handed.names]
        instead = (f"FP32 for {listed(names)} cures it too: --format yaml prints the pins.",) if names else ()
        yield from _remedies((*instead, *handed.notes * (record.search is None)), _about_notes(record))
        return
    if record.search is not None and record.search.cost is not None:
        low, of_patch = format_of_config(record.config), handed.files and handed.form in ("diff", "json")
        said = cost_sentence(record.search.cost, low, "Pinned by name, the set" if of_patch else "The set")
        yield Paragraph((line(f"{said} {OF_THE_PATCH}" if of_patch else said),))
    yield from _remedies((*handed.notes, *_together(record)))


def _together(record: Record) -> tuple[str, ...]:
    """What is left where neither pins of modules nor an edit of the lines outside of them is enough."""
    root = next(iter(record.findings), None)
    if not _is_past_search(record):
        has_failed = record.verification is not None and not record.verification.passed
        return (BY_HAND.format(place_of(root.source)),) if has_failed and root is not None and root.source else ()
    casts = root is not None and root.phase == "forward" and base_name(root.op) in CASTS
    if root is not None and casts and root.source is not None:
        return (OWN_CAST.format(place_of(root.source)),)
    return (TOGETHER,)


def _is_past_search(record: Record) -> bool:
    """Every known way was tried: no set of modules cures the step, nor does the patch of other lines."""
    outcome = record.search.outcome if record.search is not None else ""
    has_failed = record.verification is not None and not record.verification.passed
    return has_failed and outcome in ("not-in-a-module", "no-set-helps")


def _is_by_name(record: Record, handed: Handover) -> bool:
    return handed.form in ("module", "yaml") and content(record) is not None


def _about_units(handed: Handover) -> str:
    return EDITS if handed.files else "Patches that failed their proofs"


def _about_notes(record: Record) -> str:
    return ("Other remedies", "In memory")[record.search is None]


def _remedies(notes: tuple[str, ...], title: str = "Other remedies") -> Iterator[Section]:
    if notes:
        yield Paragraph(tuple(map(line, notes)), title)


def headline(record: Record, handed: Handover) -> Headline:
    """What came of it, in a sentence."""
    proof, count = record.verification, len(record.pins)
    if record.search is None:
        return _of_half_weights(record, proof)
    if handed.pins_nothing:
        what = "No module needs FP32: the patch keeps a constant within the range of half precision"
        if proof is None:
            return Headline("warning", f"{what}; it is not proven.")
        return Headline("good", f"{what}, and is proven on {_where(record)}.")
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
        return Headline("warning", f"{what}; the patch for {them} is not proven.")
    return Headline("good", f"{what}; the patch for {them} is proven on {_where(record)}.")


def _of_half_weights(record: Record, proof: Proof | None) -> Headline:
    what = f"The weights are stored in {' and '.join(record.half_weights)} and lose part of their updates"
    if proof is None or proof.unproven:
        return Headline("warning", f"{what}; the patch is not proven.")
    if proof.passed:
        return Headline("good", f"{what}; the patch is proven by a short run of the script before and after.")
    return Headline("bad", f"{what}, but the patch failed its proof: {proof.failure}. ampdbg does not suggest it.")


def _harmless(record: Record, seen: Updates) -> Headline:
    lost = f"{share(seen.lost or 0.0)} of the way of float32 weights is lost in {counted(seen.steps, 'sampled step')}"
    stored = " and ".join(record.half_weights)
    return Headline("good", f"The {stored} weights do no harm here: {lost}. There is nothing to edit.")


def _where(record: Record) -> str:
    """What the patch was proven on: of a step that ended before its loss, nothing shows what becomes of that."""
    are_modules = any(made.reach == "modules" for made in record.investigations)
    return "the modules of the failing step, without its loss" if are_modules else "the failing step"


def next_command(record: Record, handover: Handover, typed: Typed) -> NextCommand | None:
    """What to type next."""
    proof, search = record.verification, record.search
    strategy = f" --strategy {search.strategy}" if search is not None and search.strategy != "guided" else ""
    again = f"ampdbg suggest-fp32 {typed.config}{strategy}"
    if proof is not None and not proof.passed:
        if handover.form == "diff" and handover.names and handover.refused:  # the set may do, with all of its edits
            return NextCommand("pin the same modules by name", f"{again} --format module")
        if (_is_past_search(record) or record.search is None) and record.findings:
            return NextCommand("read what it means, and what cures it", f"ampdbg explain {record.findings[0].code}")
        return NextCommand("search again, ignoring what overflows", f"ampdbg bisect {typed.config} --strategy ddmin")
    if content(record) is None:
        if not handover.names and not handover.files:
            return None
        if handover.form == "diff":
            return NextCommand("write the pins into a separate file", f"{again} --format module")
        return NextCommand("make a patch: lines outside of any module have no name", again)
    if typed.is_applied:
        script = record.script
        started = f"ampdbg scan {typed.config}" if script is None else script.again(record.environment)
        return NextCommand("rerun with the patch", started)
    return _use_of(record, handover, typed, again) if typed.handed_over else None


def _use_of(record: Record, handover: Handover, typed: Typed, again: str) -> NextCommand:
    roots = roots_of(record)
    if handover.form == "diff":
        return NextCommand("apply the patch", applying(handover, typed.handed_over))
    if handover.form == "module":
        given = f"with {listed(root.what for root in roots)}" if roots else "where the model is made"
        what = f"save it beside your code as ampdbg_pins.py, and call it {given}"
        return NextCommand(what, f"from ampdbg_pins import pin_fp32; {call_of_pins(roots)}")
    if handover.form == "json":
        return NextCommand("make a patch of it", again)
    if record.script is not None:
        return NextCommand(
            "a script has no config: write the pins into a file that it can call", f"{again} --format module"
        )
    if roots:
        return NextCommand("put these lines into a config whose model contains these models", "")
    if typed.is_record:  # it does not know the name of its config's file
        return NextCommand("put these lines into the config of that run", "")
    return NextCommand("put these lines into the config, and rerun", f"ampdbg scan {typed.config}")


def content(record: Record) -> bytes | None:
    """The suggestion in its form; None where there is none: of a patch that failed its proof there is no form."""
    handover, proof = record.handover, record.verification
    if handover is None or record.interrupted or (proof is not None and not proof.passed):
        return None
    is_by_name = bool(handover.names) and all(pin.source is None for pin in record.pins)
    # JSON holds a patch or names.
    if (handover.form != "diff" and is_by_name) or (handover.form in ("diff", "json") and handover.files):
        return FORMS[handover.form][1](record, handover)
    return None


def suffix(form: Form) -> str:
    """The end of the name of a file in that form; the record beside it ends in ``.json``."""
    return FORMS[form][0]


def applying(handover: Handover, file: str = "") -> str:
    """The command that applies a diff from here: the patch of that name, else what is piped into it.

    git, typed below the root of a repository, silently passes over files outside of this folder.
    """
    here = Path.cwd().resolve()
    elsewhere = "" if here == Path(handover.folder) else f" {shlex.quote(os.path.relpath(handover.folder, here))}"
    if not handover.is_git:
        return f"patch -p1{elsewhere and f' -d{elsewhere}'}" + (f" < {shlex.quote(file)}" if file else "")
    applied = f" {shlex.quote(os.path.relpath(file, handover.folder))}" if file else ""
    return f"git{elsewhere and f' -C{elsewhere}'} apply{applied}"


def warning_of_piping(handover: Handover | None) -> str | None:
    """That ``git apply`` in this folder may leave files as they are, with the diff piped into it; None where not."""
    if handover is None or handover.form != "diff" or Path(handover.folder) == Path.cwd().resolve():
        return None
    return f"warning: the paths of this diff start at {handover.folder}; type ... | {applying(handover)}"


def diff(record: Record, handover: Handover) -> bytes:
    """A unified diff with the proof as comments above it, as ``git apply`` and ``patch -p1`` take the whole of it."""
    comments = _commented(
        [*_kept_in_fp32(record, handover), *_units(handover), *_proof(record), *_taken(record, handover)]
    )
    return comments.encode() + b"".join(file.diff.encode(file.encoding) for file in handover.files)


def _taken(record: Record, handover: Handover) -> Iterator[str]:
    """What float32 weights take, and what else there is."""
    if record.search is None:
        yield f"{_about_notes(record)}:"
        yield from (f"  - {note}" for note in handover.notes)


def module(record: Record, handover: Handover) -> bytes:
    """A Python file of its own, with ``pin_fp32(model)``, for code that cannot be edited."""
    return f"{_comments_by_name(record, handover)}\n{handover.helper}".encode()


def config_lines(record: Record, handover: Handover) -> bytes:
    """The pins as the config takes them, in YAML."""
    lines = "\n".join(pins_yaml(handover.names, record.config))
    return f"{_comments_by_name(record, handover)}{_commented([*about_roots(record)])}{lines}\n".encode()


def as_json(record: Record, handover: Handover) -> bytes:
    """One JSON object: pins, files with their diffs, proof and notes, as the record has them."""
    of_record = json.loads(to_json(record))
    handed = of_record["handover"]
    keys = ("folder", "names", "files", "units", "notes", "refused")
    text: dict[str, object] = {"format": FORMAT, "version": VERSION}
    text |= {"pins": of_record["pins"], "proof": of_record["verification"]} | {key: handed[key] for key in keys}
    text |= {"roots": of_record["search"]["roots"]} if roots_of(record) else {}
    return (json.dumps(text, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _comments_by_name(record: Record, handover: Handover) -> str:
    return _commented([*_kept_in_fp32(record, handover), *_proof(record)])


def _commented(lines: Sequence[str]) -> str:
    """Each line behind a ``#``: neither git nor patch takes such a line for a part of the diff."""
    return "".join(f"# {printable(part)}".rstrip() + "\n" for line in lines for part in line.splitlines() or [""])


def _kept_in_fp32(record: Record, handover: Handover) -> Iterator[str]:
    """The pins that the patch covers: what is only tied to one of them it may leave as it is."""
    if record.search is None:
        yield f"The script's {' and '.join(record.half_weights)} weights lose part of their updates, which this cures:"
        return
    if handover.pins_nothing:
        yield "Keeps constants within the range of half precision; no module needs FP32:"
        return
    covered = {name for unit in handover.units for name in unit.pins} if handover.files else handover.names
    root = next((pin.class_name for pin in record.pins if pin.class_name and not pin.module), "the model")
    names = [in_words(name, root) for name in handover.names if name in covered]
    shown = ", ".join(names) if len(names) <= MANY else f"{len(names)} modules, {names[0]} to {names[-1]}"
    yield f"Keeps in FP32 under autocast: {shown}." if names else "Keeps in FP32 under autocast:"


def _units(handover: Handover) -> Iterator[str]:
    for unit in handover.units:
        yield f"  - {unit.title}"
        yield from (f"    {note}" for note in unit.notes)


def _proof(record: Record) -> Iterator[str]:
    proof, ran = record.verification, record.environment
    if proof is None:
        yield "Not proven: with --no-verify, ampdbg ran nothing with this patch."
        return
    if proof.unproven:
        yield f"Not proven: {proof.unproven}."
        return
    emulated = ", CUDA's autocast emulated" if ran.emulated else ""
    device = ran.device if ran.device == "cpu" else f"{ran.device}: {ran.device_name}"
    yield f"Proven by ampdbg {ran.ampdbg} (torch {ran.torch}, {device}{emulated}):"
    for step in proof.steps:
        yield f"  - {step.name}: {step.detail}" if step.detail else f"  - {step.name}"


FORMS: Mapping[Form, tuple[str, Callable[[Record, Handover], bytes]]] = {
    "diff": (".patch", diff),
    "module": (".py", module),
    "yaml": (".yaml", config_lines),
    "json": (".patch.json", as_json),
}
"""The end of the name of a file in each form, and its text."""
