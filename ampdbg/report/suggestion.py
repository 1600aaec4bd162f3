"""A suggestion: its page, and the files it hands over: a diff, a Python file of pins, lines of a config, JSON."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ampdbg.escapes import printable
from ampdbg.levels import format_of_config
from ampdbg.ops import CASTS, base_name
from ampdbg.quantities import counted, listed, share
from ampdbg.record.codes import catalogued
from ampdbg.record.file import to_json
from ampdbg.record.findings import place_of
from ampdbg.record.pins import Form, Handover, call_of_pins, in_words
from ampdbg.record.run import Record, Updates

from . import bisection, pins, view
from .view import filled, first, line, lines, more, next_of, ran_on

FORMAT, VERSION = "ampdbg.patch", 1

OF_THE_PATCH = "ampdbg did not measure the cost of the patch itself, which may be more or less."

MOST_IN_BRIEF = 3
"""The most places of the patch, and other remedies, in a story (the brief form of a page)."""

BY_HAND = (
    "By hand: put {} and the lines that make its inputs under torch.autocast(device_type=..., enabled=False). Cast "
    "what these lines read with .float(), and remove their own casts to half."
)

TOGETHER = "FP32 throughout makes the step healthy: disable autocast around the model and the loss together."

OWN_CAST = (
    "FP32 throughout makes the step healthy. If {} casts to half itself, remove that cast, because disabling "
    "autocast does not. Otherwise disable autocast around the model and the loss together."
)

FAILED = "Patches that failed their proofs"
REFUSED = "Why ampdbg edits no code"

MANY = 6
"""With more pins than this the comments only count them."""


def page(record: Record, typed: view.CommandContext) -> view.Page:
    """Return the page of ``ampdbg suggest-fp32``, without the patch itself; without pins, how the search ended."""
    handed = record.handover
    if handed is None:
        ended = bisection.page(record, typed)
        if record.updates is not None and not record.faults:
            return replace(ended, headline=_harmless(record, record.updates))
        return ended
    if record.interrupted or not (record.pins or handed.files):
        return _without_patch(record, handed, typed)
    sections, story = _sections(record, handed), _story(record, handed)
    next_ = next_command(record, handed, typed)
    return view.Page(headline(record, handed), sections, tuple(ran_on(record)), typed.record_path, next_, story)


def _without_patch(record: Record, handed: Handover, typed: view.CommandContext) -> view.Page:
    """Return the page of a search that was interrupted, or found no patch: how it ended, and its results so far."""
    ended = bisection.page(record, typed)
    # A remedy that a finding already shows is not repeated.
    notes = tuple(note for note in handed.notes if not any(f.remedy and f.remedy in note for f in record.findings))
    # The patch of an interrupted proof is only shown: a patch that is handed over is proven.
    unproven = (view.Snippet("The patch, not proven", tuple(file.diff.splitlines())) for file in handed.files)
    head = replace(sentence := headline(record, handed), sentence=f"Interrupted during the proof. {sentence.sentence}")
    return replace(
        ended,
        headline=head if handed.files else ended.headline,
        sections=filled(*ended.sections, *unproven, _remedies(notes)),
        story=filled(*ended.story, _remedies(notes[:MOST_IN_BRIEF])),
    )


def _sections(record: Record, handed: Handover) -> tuple[view.Section, ...]:
    """Return everything about the patch: each of its places with its notes."""
    edits = []
    for unit in handed.units:
        edits += [line(unit.title), *(line(note, tone="faint", depth=1) for note in unit.notes)]
    parts = (
        view.Paragraph(lines(*pins.about_roots(record))),
        view.Paragraph(tuple(edits), _of_edits(handed)),
        view.Paragraph(lines(*_refused(record, handed)), REFUSED),
        pins.proof_table(record.verification),
    )
    if handed.pins_nothing:
        names = listed(map(in_words, handed.names))
        instead = f"FP32 for {names} cures it too: --format yaml prints the pins." * bool(names)
        notes = (instead, *handed.notes * (record.search is None))
        return filled(view.Findings(record.findings), *parts, _remedies(notes, _about_notes(record)))
    notes = (*handed.notes, *_last_advice(record))
    return filled(pins.pin_table(record), *parts, view.Paragraph(lines(_cost(record, handed))), _remedies(notes))


def _story(record: Record, handed: Handover) -> tuple[view.Section, ...]:
    """Return the brief form: the first places of the patch, without their notes, and the first other remedies."""
    proof, units = record.verification, handed.units
    edits = (line(unit.title) for unit in units[:MOST_IN_BRIEF])
    return filled(
        view.Findings(record.findings, is_brief=True) if handed.pins_nothing else pins.pin_lines(record),
        view.Paragraph(lines(*pins.about_roots(record)) * _is_by_name(record, handed)),
        view.Paragraph((*edits, *more(len(units) - MOST_IN_BRIEF)), _of_edits(handed)),
        view.Paragraph(lines(*_refused(record, handed)[:MOST_IN_BRIEF]), REFUSED),
        view.Paragraph(pins.proof_in_brief(proof) if proof else (), "The proof"),
        _remedies((*handed.notes, *_last_advice(record))[:MOST_IN_BRIEF], _about_notes(record)),
    )


def _of_edits(handed: Handover) -> str:
    return "The patch" if handed.files else FAILED


def _refused(record: Record, handed: Handover) -> tuple[str, ...]:
    """Return why no code could be edited, unless there is a patch, a proof or a list of pins."""
    return handed.refused * (not (handed.units or record.verification or _is_by_name(record, handed)))


def _cost(record: Record, handed: Handover) -> str:
    """Return the cost of the set; "" if it was not measured."""
    if record.search is None or record.search.cost is None:
        return ""
    cost, low = record.search.cost, format_of_config(record.config)
    if handed.files and handed.form in ("diff", "json"):
        return f"{pins.cost_sentence(cost, low, 'Pinned by name, the set')} {OF_THE_PATCH}"
    return pins.cost_sentence(cost, low)


def _last_advice(record: Record) -> tuple[str, ...]:
    """Return the remaining advice if neither pins of modules nor edits of the lines outside of them suffice."""
    root = next(iter(record.findings), None)
    place = place_of(root.source) if root is not None else ""
    if not _is_past_search(record):
        return (BY_HAND.format(place),) if has_failed(record) and place else ()
    casts = root is not None and root.phase == "forward" and base_name(root.op) in CASTS
    return (OWN_CAST.format(place) if casts and place else TOGETHER,)


def has_failed(record: Record) -> bool:
    """True if there is a patch, and its proof failed."""
    return record.verification is not None and not record.verification.passed


def _is_past_search(record: Record) -> bool:
    """True if every known way has failed: neither a set of modules nor the patch of other lines cures the step."""
    outcome = record.search.outcome if record.search is not None else ""
    return has_failed(record) and outcome in ("not-in-a-module", "no-set-helps")


def _is_by_name(record: Record, handed: Handover) -> bool:
    return handed.form in ("module", "yaml") and content(record) is not None


def _about_notes(record: Record) -> str:
    return ("Other remedies", "In memory")[record.search is None]


def _remedies(notes: tuple[str, ...], title: str = "Other remedies") -> view.Paragraph:
    return view.Paragraph(lines(*notes), title)


def headline(record: Record, handed: Handover) -> view.Headline:
    """Return the result in a sentence."""
    proof, count = record.verification, len(record.pins)
    need, them = ("needs", "it") if count == 1 else ("need", "them")
    pinned, patched = f"{counted(count, 'place')} {need} FP32", f"the patch for {them}"
    why = proof.failure if proof else ""
    of_constants = "No module needs FP32: the patch keeps a constant within the range of half precision"
    of_weights = _about_weights(record)
    no_suggestion = "ampdbg does not suggest it."
    failed = f"{patched} failed its proof{f': {why}' * bool(why)}"
    by_run = "the patch is proven by a short run of the script before and after"
    rows: tuple[tuple[object, view.Tone, str], ...] = (
        (proof is None or proof.unproven, "warning", f"{of_weights}; the patch is not proven."),
        (has_failed(record), "bad", f"{of_weights}, but the patch failed its proof: {why}. {no_suggestion}"),
        (True, "good", f"{of_weights}; {by_run}."),
    )
    if record.search is not None:
        rows = (
            (handed.pins_nothing and proof is None, "warning", f"{of_constants}; it is not proven."),
            (handed.pins_nothing, "good", f"{of_constants}, and is proven on {_where(record)}."),
            (has_failed(record), "bad", f"{pinned}, but {failed}. {no_suggestion}"),
            (_is_by_name(record, handed), "good", f"{pinned}; this pins {them} by name."),
            (not handed.files, "bad", f"{pinned}, but ampdbg could not edit your code for {them}."),
            (proof is None, "warning", f"{pinned}; {patched} is not proven."),
            (True, "good", f"{pinned}; {patched} is proven on {_where(record)}."),
        )
    return first(*((holds, view.Headline(tone, sentence)) for holds, tone, sentence in rows))


def _about_weights(record: Record) -> str:
    """Return what is wrong with the weights, as far as it was measured."""
    stored = f"The weights are stored in {' and '.join(record.half_weights)}"
    return stored + (" and do not get the optimizer's updates" if record.updates is not None else "")


def _harmless(record: Record, seen: Updates) -> view.Headline:
    lost = f"{share(seen.lost or 0.0)} of the way of float32 weights is lost in {counted(seen.steps, 'sampled step')}"
    stored = " and ".join(record.half_weights)
    if seen.unjudged:
        what = f"{seen.unjudged} of {counted(seen.half, 'half parameter')}"
        unknown = f"ampdbg cannot compare the updates of {what} with float32's"
        return view.Headline(
            "doubtful", f"Nothing to edit was found; what {stored} weights lose is not known: {unknown}."
        )
    return view.Headline("good", f"The {stored} weights do no harm here: {lost}. There is nothing to edit.")


def _where(record: Record) -> str:
    """Return what the patch was proven on; if the step ended before its loss, its modules alone."""
    are_modules = any(made.reach == "modules" for made in record.investigations)
    return "the modules of the failing step, without its loss" if are_modules else "the failing step"


def next_command(record: Record, handover: Handover, typed: view.CommandContext) -> view.NextCommand | None:
    """Return what to type next."""
    script, form, roots = record.script, handover.form, record.roots
    again = f"ampdbg suggest-fp32 {typed.config}{bisection.chosen_strategy(record.search)}"
    by_name, scan = f"{again} --format module", f"ampdbg scan {typed.config}"
    codes = [
        catalogued(one.code).name for one in record.findings[:1] if _is_past_search(record) or record.search is None
    ]
    if has_failed(record):
        is_refused = form == "diff" and handover.names and handover.refused  # the set may suffice with all of its edits
        return next_of(
            (is_refused, "pin the same modules by name", by_name),
            (codes, "read what it means, and what cures it", f"ampdbg explain {''.join(codes)}"),
            (True, "search again, ignoring what overflows", f"ampdbg bisect {typed.config} --strategy ddmin"),
        )
    if content(record) is None:
        return next_of(
            (not handover.names and not handover.files, "", ""),
            (form == "diff", "write the pins into a separate file", by_name),
            (True, "make a patch: lines outside of any module have no name", again),
        )
    given = f"with {listed(root.what for root in roots)}" if roots else "where the model is made"
    call = f"from ampdbg_pins import pin_fp32; {call_of_pins(roots)}"
    return next_of(
        (typed.is_applied, "rerun with the patch", script.again(record.environment) if script else scan),
        (not typed.handed_over, "", ""),
        (form == "diff", "apply the patch", applying(handover, typed.handed_over) if form == "diff" else ""),
        (form == "module", f"save it beside your code as ampdbg_pins.py, and call it {given}", call),
        (form == "json", "make a patch of it", again),
        (script, "a script has no config: write the pins into a file that it can call", by_name),
        (roots, "put these lines into a config whose model contains these models", ""),
        (typed.is_record, "put these lines into the config of that run", ""),  # its file name is not known
        (True, "put these lines into the config, and rerun", scan),
    )


def content(record: Record) -> bytes | None:
    """Return the suggestion in its form; None if there is none. A patch that failed its proof has no form."""
    handover = record.handover
    if handover is None or record.interrupted or has_failed(record):
        return None
    is_by_name = bool(handover.names) and all(pin.source is None for pin in record.pins)
    # JSON holds a patch or names.
    if (handover.form != "diff" and is_by_name) or (handover.form in ("diff", "json") and handover.files):
        return FORMS[handover.form].text(record, handover)
    return None


def applying(handover: Handover, file: str = "") -> str:
    """Return the command that applies a diff from here: the patch in ``file``, else the patch piped into it.

    Below the root of a repository, git silently skips files outside of the working folder.
    """
    here, quoted = Path.cwd().resolve(), shlex.quote(file)
    folder = Path(handover.folder)  # an unnamed folder is the working folder
    elsewhere = "" if here == folder.resolve() else shlex.quote(os.path.relpath(folder, here))
    if not handover.is_git:
        return f"patch -p1{f' -d {elsewhere}' * bool(elsewhere)}{f' < {quoted}' * bool(file)}"
    applied = f" {shlex.quote(os.path.relpath(file, folder))}" if file else ""
    return f"git{f' -C {elsewhere}' * bool(elsewhere)} apply{applied}"


def warning_of_piping(handover: Handover | None) -> str | None:
    """Return a warning if the diff, piped into ``git apply`` in this folder, may silently change nothing; else None."""
    if handover is None or handover.form != "diff" or Path(handover.folder) == Path.cwd().resolve():
        return None
    return f"warning: the paths of this diff start at {handover.folder}; type ... | {applying(handover)}"


def diff(record: Record, handover: Handover) -> bytes:
    """Return a unified diff with the proof as comments above it; ``git apply`` and ``patch -p1`` take it whole."""
    comments = [*_kept_in_fp32(record, handover)]
    comments += [
        part for unit in handover.units for part in (f"  - {unit.title}", *(f"    {note}" for note in unit.notes))
    ]
    comments += _proof(record)
    if record.search is None:  # the cost of float32 weights, and the other remedies
        comments += [f"{_about_notes(record)}:", *(f"  - {note}" for note in handover.notes)]
    return _commented(comments).encode() + b"".join(file.diff.encode(file.encoding) for file in handover.files)


def module(record: Record, handover: Handover) -> bytes:
    """Return a separate Python file with ``pin_fp32(model)``, for code that cannot be edited."""
    comments = _commented([*_kept_in_fp32(record, handover), *_proof(record)])
    return f"{comments}\n{handover.helper}".encode()


def config_lines(record: Record, handover: Handover) -> bytes:
    """Return the pins as the config takes them, in YAML."""
    comments = _commented([*_kept_in_fp32(record, handover), *_proof(record), *pins.about_roots(record)])
    text = "\n".join(pins.pins_yaml(handover.names, record.config))
    return f"{comments}{text}\n".encode()


def as_json(record: Record, handover: Handover) -> bytes:
    """Return one JSON object: pins, files with their diffs, proof and notes, as the record has them."""
    of_record = json.loads(to_json(record))
    handed = of_record["handover"]
    keys = ("folder", "names", "files", "units", "notes", "refused")
    text: dict[str, object] = {"format": FORMAT, "version": VERSION}
    text |= {"pins": of_record["pins"], "proof": of_record["verification"]} | {key: handed[key] for key in keys}
    text |= {"roots": of_record["search"]["roots"]} if record.roots else {}
    return (json.dumps(text, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _commented(lines: Sequence[str]) -> str:
    """Put each line after a ``#``: neither git nor patch takes such a line as part of the diff."""
    return "".join(f"# {printable(part)}".rstrip() + "\n" for line in lines for part in line.splitlines() or [""])


def _kept_in_fp32(record: Record, handover: Handover) -> Iterator[str]:
    """Yield the pins that the patch covers; it may leave out a pin that is only tied to another."""
    covered = {name for unit in handover.units for name in unit.pins} if handover.files else handover.names
    root = next((pin.class_name for pin in record.pins if pin.class_name and not pin.module), "the model")
    names = [in_words(name, root) for name in handover.names if name in covered]
    shown = ", ".join(names) if len(names) <= MANY else f"{len(names)} modules, {names[0]} to {names[-1]}"
    yield first(
        (record.search is None, f"{_about_weights(record)}, which this cures:"),
        (handover.pins_nothing, "Keeps constants within the range of half precision; no module needs FP32:"),
        (names, f"Keeps in FP32 under autocast: {shown}."),
        (True, "Keeps in FP32 under autocast:"),
    )


def _proof(record: Record) -> Iterator[str]:
    proof, ran = record.verification, record.environment
    unproven = proof.unproven if proof else "with --no-verify, ampdbg ran nothing with this patch"
    if proof is None or unproven:
        yield f"Not proven: {unproven}."
        return
    emulated = ", CUDA's autocast emulated" * ran.emulated
    device = ran.device if ran.device == "cpu" else f"{ran.device}: {ran.device_name}"
    yield f"Proven by ampdbg {ran.ampdbg} (torch {ran.torch}, {device}{emulated}):"
    yield from ("  - " + ": ".join(filter(None, (step.name, step.detail))) for step in proof.steps)


class FormOfSuggestion(NamedTuple):
    """A form's file suffix, its name, and the function that makes its text."""

    suffix: str
    called: str
    text: Callable[[Record, Handover], bytes]


FORMS: Mapping[Form, FormOfSuggestion] = {
    "diff": FormOfSuggestion(".patch", "The diff", diff),
    "module": FormOfSuggestion(".py", "The Python file", module),
    "yaml": FormOfSuggestion(".yaml", "The lines for the config", config_lines),
    "json": FormOfSuggestion(".patch.json", "The patch as JSON", as_json),
}
