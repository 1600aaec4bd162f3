"""A set of pins on a page: what each cures and costs, the lines to paste, the proof of a patch, the trials."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

from ampdbg.diagnosis.producers import NEAR, limit_of, op_name
from ampdbg.formats import FloatFormat
from ampdbg.levels import format_of_config, precision_of
from ampdbg.quantities import byte_size, counted, listed, module_name, number, share
from ampdbg.record.findings import place_of
from ampdbg.record.pins import EVERYTHING, OWN, Pin, PinCost, PinSite, Proof, ProofStep, Trial, in_words
from ampdbg.record.run import Record

from . import view
from .view import Column, Paragraph, StyledLine, Table, Words, line, lines, more

MAX_PINS = 16
"""The most pins that are explained; all pins are among the lines for the config."""

PIN_COLUMNS = (
    Column("pin", most=28),
    Column("why"),
    Column("FLOPs", "number", is_spare=True),
    Column("activations", "number", is_spare=True),
)

MOST_IN_BRIEF = 4
"""The most pins with a line in a story (the brief form of a page)."""

PLAIN_YAML = re.compile(r"[A-Za-z_][\w.]*(:own)?|:own", re.ASCII)
"""Names that YAML reads unquoted, unlike ``"*"`` and numbers. PyYAML reads YAML 1.1 and would leave some text unquoted
that a config reads as a number (``1e5``)."""

YAML_WORDS = frozenset("y n yes no on off true false null".split())

PROOF_COLUMNS = (Column(kind="sign"), Column(), Column())


def pin_table(record: Record) -> Table:
    """Return the table of the set, which has at least one pin."""
    rows = []
    shown: set[object] = set()
    for pin in record.pins[:MAX_PINS]:
        # The same op of a line fails alike in many instances of a class.
        places = {(pin.reason, site.phase, site.op, site.source) for site in pin.sites[:1]}
        costs = (share(pin.cost.flops), share(pin.cost.activations)) if pin.cost is not None else ("-", "-")
        rows.append((_pin(pin), _why(pin, record, is_repeated=bool(places & shown)), *costs))
        shown |= places
    return Table(_title(record), PIN_COLUMNS, tuple(rows), below=more(len(record.pins) - MAX_PINS))


def pin_lines(record: Record) -> Paragraph:
    """Return a line for each pin: its name, and the first op that it cures."""
    low = format_of_config(record.config)
    briefs: list[StyledLine] = []
    for pin in record.pins[:MOST_IN_BRIEF]:
        why = [part for site in pin.sites[:1] for part in (op_name(site.op), PurePath(place_of(site.source)).name)]
        why += [part for site in pin.sites[:1] for part in _against_half(site, low)[:1]]
        said = " · ".join(filter(None, (*why, _what_goes_wrong(pin, record))))
        briefs.append(line(_pin(pin)[0].words[0], f"  {said}" * bool(said)))
    return Paragraph((*briefs, *more(len(record.pins) - MOST_IN_BRIEF)), _title(record))


def _what_goes_wrong(pin: Pin, record: Record) -> str:
    """Return the code of the pin's finding; if the pin's own op fails in the other pass, name that pass."""
    if pin.reason is None or pin.reason >= len(record.findings):
        return ""
    finding = record.findings[pin.reason]
    phases = [site.phase for site in pin.sites]
    is_of_its_pass = "forward" in phases or finding.phase != "forward" or not phases
    return finding.code if is_of_its_pass else f"in the {phases[0]} pass"


def _title(record: Record) -> str:
    return "The set" if record.pin_names else "The lines"


def _pin(pin: Pin) -> tuple[StyledLine, ...]:
    name = place_of(pin.source) or pin.name or "the whole model"
    if pin.source is None and pin.name == OWN:
        return (line(in_words(OWN, pin.class_name or "the model"), tone="name"),)
    kind = " of ".join(filter(None, ("own lines" * pin.own, pin.class_name)))
    return (line(name, tone="name"), *lines(kind, tone="faint"))


def _why(pin: Pin, record: Record, *, is_repeated: bool) -> tuple[StyledLine, ...]:
    if not pin.sites:
        tied = f"tied to {listed(pin.tied)}, and pinned with it"
        none = (line("no op of its own fails", tone="faint"), *_without(pin.without))
        return (line(tied, tone="faint"),) if pin.tied else none
    site, *others = pin.sites
    if is_repeated:
        beside = ", ".join(_against_half(site, format_of_config(record.config)))
        return (line(": ".join(filter(None, ("the same line", beside)))), *_without(pin.without.partition(": ")[0]))
    named = (f"{op_name(one.op)}{f':{one.source.line}' if one.source else ''}" for one in others)
    ops = f"and {counted(len(others), 'more op')}: {listed(dict.fromkeys(named))}" * bool(others)
    where = (
        "backward" * (site.phase == "backward"),
        site.module * (site.module != pin.module),
        f"call {site.call}" * bool(site.call),
        op_name(site.op),
        place_of(site.source),
    )
    return (
        *lines(_what_goes_wrong(pin, record), tone="bad"),
        line(" · ".join(filter(None, where))),
        *lines(site.source.text.strip() if site.source else "", tone="strong", is_code=True),
        *lines(", ".join(_against_half(site, format_of_config(record.config)))),
        *lines(ops, tone="faint"),
        *_without(pin.without),
    )


def _without(what: str) -> tuple[StyledLine, ...]:
    return (line(Words("without it: ", "doubtful"), what),) if what else ()


def _against_half(site: PinSite, low: FloatFormat) -> tuple[str, ...]:
    """Return a value in FP32, and the limit of the run's format that it breaks, if it does.

    Return nothing if the value is not why the op fails: a division by a value that half rounds to zero is an example.
    """
    size, said = abs(site.value or 0.0), f"{number(site.value)} in FP32"
    return view.first(
        (size >= low.overflow_threshold, (said, f"above {limit_of(low)}")),
        (0.0 < size < low.smallest_subnormal, (said, f"below {low.short}'s {number(low.smallest_subnormal)}")),
        (size >= NEAR * low.overflow_threshold, (said,)),
        (True, ()),
    )


def cost_sentence(cost: PinCost, low: FloatFormat, of: str = "The set") -> str:
    """Return what share of the run's format the whole set moves to FP32."""
    return (
        f"{of} moves {share(cost.flops)} of the forward pass's FLOPs and {share(cost.activations)} of its "
        f"{low.short} activations ({byte_size(cost.activation_bytes)}) to FP32."
    )


def about_roots(record: Record) -> Iterator[str]:
    """Yield what the names of the set begin with, if the script has several models."""
    if record.roots:
        said = "; ".join(f"{root.name} is {root.what}" for root in record.roots)
        yield f"The script has several models; a module's name starts with that of its model: {said}."


def pins_yaml(names: Sequence[str], config: Mapping[str, object]) -> list[str]:
    """Return the lines of a config that pin ``names``, together with the pins that ``config`` already has.

    The whole model has no name, so it is the pattern that matches every name.
    """
    already = precision_of(config).get("pins")
    given = [str(name) for name in already] if isinstance(already, (list, tuple)) else []
    every = dict.fromkeys([*given, *(name or EVERYTHING for name in names)])
    plain = {name for name in every if PLAIN_YAML.fullmatch(name) and name.casefold() not in YAML_WORDS}
    return ["precision:", "  pins:", *(f"    - {name if name in plain else json.dumps(name)}" for name in every)]


def proof_in_brief(proof: Proof) -> tuple[StyledLine, ...]:
    """Return the proof in a line, with the failed checks if any, and a line for each check that warns."""
    warned = (line(_sign_of(step), f" {step.name}: {step.detail}") for step in proof.steps if step.warns)
    ran = [step for step in proof.steps if step.ran]
    failed = [step for step in ran if not step.passed]
    all_of_them = counted(len(ran), "check")
    said = "; ".join(": ".join(filter(None, (step.name, step.detail))) for step in failed)
    left_out = listed(step.name for step in proof.steps if not step.ran)
    besides = f"; not run: {left_out}" * bool(left_out)
    passed = f"{all_of_them} passed: {listed([step.name for step in ran], 3)}{besides}"
    whole = view.first(
        (proof.unproven, line(Words("- ", "faint"), f"not proven: {proof.unproven}")),
        (failed, line(Words("✗ ", "bad"), f"{len(ran) - len(failed)} of {all_of_them} passed; {said}")),
        (True, line(Words("✓ ", "good"), passed)),
    )
    return (whole, *warned)


def proof_table(proof: Proof | None) -> Table:
    """Return each check of the proof and its result; no rows if there was nothing to prove."""
    rows = tuple((line(_sign_of(step)), step.name, step.detail) for step in (proof.steps if proof else ()))
    return Table("The proof", PROOF_COLUMNS, rows)


def _sign_of(step: ProofStep) -> Words:
    return view.first(
        (not step.ran, Words("-", "faint")),
        (step.warns, Words("!", "doubtful")),
        (step.passed, Words("✓", "good")),
        (True, Words("✗", "bad")),
    )


FIRST_TRIALS, LAST_TRIALS = 10, 8
"""The most trials listed from the beginning and from the end of a long search."""

SHOWN_PINS = 2
LONG_NAME = 24

TRIAL_COLUMNS = (
    view.Column("", "number"),
    view.Column("for", is_spare=True),
    view.Column("in FP32"),
    view.Column("result"),
)


def pins_text(pins: Sequence[str], most: int = 3) -> str:
    """Return ``blocks.2.attn and head``; beyond ``most`` names the rest is counted."""
    names = [in_words(OWN) if name == OWN else module_name(name, "the whole model") for name in pins]
    return listed(names, most) or "nothing"


def result_text(trial: Trial) -> str:
    """Return ``healthy`` or ``fails: the loss is NaN``, with the count of runs if the trial ran several times."""
    is_several, bad = trial.runs > 1, trial.runs - trial.healthy_runs
    failed = f"fails{f', {bad} of {trial.runs} runs' * is_several}{f': {trial.why}' * bool(trial.why)}"
    return f"healthy{f', {trial.runs} of {trial.runs} runs' * is_several}" if trial.healthy else failed


def trial_table(record: Record, first: int = FIRST_TRIALS) -> view.Table:
    """Return the table of the ``first`` and the last trials. A narrow terminal leaves out what each was for."""
    trials, names = record.trials, record.pin_names
    rows: list[tuple[view.Cell, ...]] = []
    for trial in trials:
        result = result_text(replace(trial, why=trial.why.partition(": ")[0]))
        said = line(result, tone="good" if trial.healthy else "bad")
        rows.append((str(len(rows) + 1), trial.stage, _pinned(trial.pins, names), said))
    is_long = len(trials) > first + LAST_TRIALS + 1
    if is_long:
        left = line(f"{len(trials) - first - LAST_TRIALS:,} more", tone="faint")
        rows[first:-LAST_TRIALS] = [("…", "", left, "")]
    return view.Table("The trials" + " (all in the record)" * is_long, TRIAL_COLUMNS, tuple(rows))


def _pinned(pins: tuple[str, ...], names: tuple[str, ...]) -> str:
    """Return the pins, or their difference from the set that was found if that is shorter."""
    dropped, added = set(names) - set(pins), set(pins) - set(names)
    without = f"the set without {_short(min(dropped, default=''))}"
    return view.first(
        (len(pins) > 1 and not dropped and not added, "the set"),
        (len(names) > 2 and len(dropped) == 1 and not added, without),
        (True, pins_text([_short(name) for name in pins], SHOWN_PINS)),
    )


def _short(name: str) -> str:
    return name if len(name) <= LONG_NAME else "…" + ".".join(name.split(".")[-2:])
