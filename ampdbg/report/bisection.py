"""The page of a search for pins: how it ended, the set and why, what it costs, the trials, the lines for the config."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ampdbg.levels import format_of_config
from ampdbg.quantities import counted, duration, listed, number, scale
from ampdbg.record.codes import catalogued
from ampdbg.record.findings import place_of
from ampdbg.record.pins import EVERYTHING, Outcome, Search, root_of, within
from ampdbg.record.run import SUM, Record

from . import scan, view
from .pins import (
    cost_sentence,
    names_of,
    pin_lines,
    pin_table,
    pins_yaml,
    proof_table,
    roots_of,
    roots_paragraph,
    trial_table,
)
from .view import line, ran_on, with_option

MOST_FACTS, MOST_TO_PASTE = 1, 3
"""So many facts of the set, and lines for the config, are in a story."""

RAN_AS = {"float16": "as it ran", "float32": "in FP32", "pinned": "with the set"}

FURTHER = "further batch "
"""How the stage of a trial on another batch than the failing step's begins."""


@dataclass(frozen=True)
class EndedSearch:
    """A record whose search has ended, ``search`` being the record's own, and what was typed."""

    record: Record
    search: Search
    typed: view.Typed

    @property
    def again(self) -> str:
        """The command that searches once more."""
        name = self.record.command if self.record.command in scan.SEARCHES else "bisect"
        strategy = f" --strategy {self.search.strategy}" if self.search.strategy != "guided" else ""
        return f"ampdbg {name} {self.typed.config}{strategy}"

    @property
    def names(self) -> tuple[str, ...]:
        return names_of(self.record)

    @property
    def some(self) -> str:
        """How many of the modules are in the set."""
        return f"{len(self.names)} of {counted(self.search.modules, 'module')}"

    @property
    def step(self) -> str:
        """The failing step, within a sentence."""
        steps = (self.search.step, *(finding.step for finding in self.record.findings[:1]))
        return next((f"step {step}" for step in steps if step is not None), "the failing step")

    @property
    def holds(self) -> bool:
        """The last trial of the whole set, on the failing step itself, was healthy."""
        own = (trial for trial in reversed(self.record.trials) if not trial.stage.startswith(FURTHER))
        last = next((trial for trial in own if set(trial.pins) == set(self.names)), None)
        return last is None or last.healthy


def page(record: Record, typed: view.Typed) -> view.Page:
    """What ``ampdbg bisect`` says; a run that ended before its search has the page of a scan."""
    if record.search is None:
        return scan.page(record, typed)
    ended = EndedSearch(record, record.search, typed)
    return view.Page(
        headline(ended),
        tuple(_sections(ended)),
        (" · ".join(_facts(ended)), *ran_on(record)),
        typed.record_path,
        next_command(ended),
        story=tuple(_sections(ended, is_brief=True)),
    )


def _sections(ended: EndedSearch, *, is_brief: bool = False) -> Iterator[view.Section]:
    """All of them, or the story."""
    record, search = ended.record, ended.search
    if search.message and not _is_said_elsewhere(ended):
        yield view.Paragraph((line(_as_sentence(search.message)),))
    if record.pins:
        yield pin_lines(record) if is_brief else pin_table(record)
    elif record.findings:
        yield view.Findings(record.findings, is_brief=is_brief)
    if not is_brief:
        yield from roots_paragraph(record)
    facts = tuple(_about_the_set(ended))[: MOST_FACTS if is_brief else None]
    if facts:
        yield view.Paragraph(facts)
    if not is_brief:
        yield from _experiments(ended)
    if ended.names and ended.holds and not (is_brief and len(ended.names) > MOST_TO_PASTE):
        yield _snippet(ended)


def _snippet(ended: EndedSearch) -> view.Section:
    if ended.record.script is not None:
        return view.Snippet("In the script", tuple(_pinning(ended)))
    return view.Snippet("In the config", tuple(pins_yaml(ended.names, ended.record.config)))


def _pinning(ended: EndedSearch) -> Iterator[str]:
    roots = roots_of(ended.record)
    if not roots:
        yield f"ampdbg.pin_fp32(model, {_as_patterns(ended.names)})"
    for root in roots:
        own = (within(root.name, name) for name in ended.names if root_of(name) == root.name)
        model, comment = (root.name, "") if root.is_global else ("...", f"  # ...: {root.what}")
        yield f"ampdbg.pin_fp32({model}, {_as_patterns(own)}){comment}"


def _as_patterns(names: Iterable[str]) -> str:
    return json.dumps([name or EVERYTHING for name in names])


def _experiments(ended: EndedSearch) -> Iterator[view.Section]:
    record, search = ended.record, ended.search
    if search.losses:
        yield _loss_table(ended)
    if record.trials:
        yield trial_table(record)
    if record.verification is not None:
        yield proof_table(record.verification)


def _is_said_elsewhere(ended: EndedSearch) -> bool:
    """The headline says it, or a finding does; findings are listed where there is no set."""
    if ended.search.outcome in ("nothing-to-pin", "not-in-a-module"):
        return True
    findings = ended.record.findings
    by_finding = not ended.record.pins and bool(findings) and ended.search.message.startswith(findings[0].message)
    return by_finding or (ended.search.outcome == "not-reproduced" and ended.search.tried > 0)


def _as_sentence(message: str) -> str:
    """With a capital, unless a module's name stands first."""
    is_word = message.partition(" ")[0].isalpha()
    return (message[:1].upper() + message[1:] if is_word else message).rstrip(".") + "."


def _about_the_set(ended: EndedSearch) -> Iterator[view.StyledLine]:
    search, count = ended.search, len(ended.names)
    if search.minimal and count:
        dropped = "drop it" if count == 1 else "drop any one of them"
        yield line(f"Proven by experiment: {dropped} and the step fails (the set is 1-minimal).")
    elif count:
        yield line("Not shown to be minimal: a smaller set may suffice.", tone="doubtful")
    if 0 < search.failed < search.tried:
        runs = f", so each trial ran {search.repeats} times" if search.repeats > 1 else ""
        yield line(f"The step fails intermittently, in {search.failed} of {search.tried} replays{runs}.")
    if search.set_scale is not None and count:
        yield line(
            f"The set needs a loss scale of {scale(search.set_scale)}: gradients overflow above it, and none is "
            "lost at it."
        )
    for name, counts in search.classes.items():
        if len(counts) == 2 and counts[1] > 1:
            yield line(_share_of_class(name, *counts))
    if search.cost is not None and count:
        yield line(cost_sentence(search.cost, format_of_config(ended.record.config)))


def _share_of_class(name: str, pinned: int, every: int) -> str:
    if pinned < every:
        return f"{pinned} of the {every} instances of {name} {'is' if pinned == 1 else 'are'} in the set."
    return f"{'Both' if every == 2 else f'All {every}'} instances of {name} are in the set."


def _loss_table(ended: EndedSearch) -> view.Table:
    """The loss of the failing step as it was, in FP32 and with the set, or its substitute."""
    losses, what = dict(ended.search.losses), "loss"
    for step in ended.record.steps:
        if step.step == ended.search.step and scan.is_own_loss(step, ended.record):
            losses.setdefault("float16", step.loss)
        elif step.step == ended.search.step:
            what = SUM
    rows = tuple((text, number(losses[way])) for way, text in RAN_AS.items() if way in losses)
    return view.Table("The failing step", (view.Column(), view.Column(what, "number")), rows)


def headline(ended: EndedSearch) -> view.Headline:
    """How the search ended, in a sentence or two."""
    ending, is_found = ENDINGS[ended.search.outcome], ended.search.outcome == "found"
    sentence, trials = ending.sentence(ended), counted(len(ended.record.trials), "trial")
    return view.first(
        (ended.record.interrupted, view.Headline("warning", f"Interrupted after {trials}. {sentence}")),
        (is_found and not ended.holds, view.Headline("doubtful", sentence)),
        (True, view.Headline(ending.tone, sentence)),
    )


def _found(ended: EndedSearch) -> str:
    step, healthy = ended.step.capitalize(), _healthy(ended.search)
    need, them = ("needs", "it") if len(ended.names) == 1 else ("need", "them")
    return view.first(
        (
            not ended.names,
            f"{step} fails intermittently and did not fail in any trial, so no module can be blamed.",
        ),
        (not ended.holds, f"{ended.some} in FP32 made the failing step healthy once, but not in a second replay."),
        (not ended.search.minimal, f"With {ended.some} in FP32, {healthy}."),
        (True, f"{ended.some} {need} FP32{_own_lines(ended)}. With {them} pinned, {healthy}."),
    )


def _own_lines(ended: EndedSearch) -> str:
    own = sum(pin.own for pin in ended.record.pins)
    whose = "its own lines only" if own == 1 else "their own lines only"
    rows = ((not own, ""), (own < len(ended.names), f", {own} of them in {whose}"), (True, f", in {whose}"))
    return view.first(*rows)


def _healthy(search: Search) -> str:
    batches = counted(search.further, "further batch")
    return view.first(
        (not search.further, "the failing step is healthy"),
        (search.further_healthy, f"the failing step and {search.further_healthy} of {batches} are healthy"),
        (search.further == 1, f"the failing step is healthy, but not {batches}"),
        (True, f"the failing step is healthy, but none of {batches}"),
    )


def _nothing_to_pin(ended: EndedSearch) -> str:
    skipped, of = ended.record.steps_skipped, counted(ended.record.steps_run, "step")
    but = f"; {skipped:,} of {of} were skipped while the loss scale settles" if skipped else ""
    return f"Nothing to pin: no step failed{but}."


def _no_pin_helps(ended: EndedSearch) -> str:
    code = catalogued(ended.record.findings[0].code if ended.record.findings else "")
    return code.why_no_pin.format(step=ended.step)


def _not_in_a_module(ended: EndedSearch) -> str:
    lines = list(filter(None, (place_of(pin.source) for pin in ended.record.pins)))
    where = f", at {listed(lines)}" if lines else ""
    if ended.record.findings and ended.record.findings[0].module:
        return (
            f"Pinning modules is not enough: the step fails even with the whole model in FP32{where}. Work that "
            "the loss adds, such as gradients of gradients, runs outside the modules."
        )
    return f"No module needs FP32: the step function or the loss fails{where}."


def _not_reproduced(ended: EndedSearch) -> str:
    search, step = ended.search, ended.step.capitalize()
    if not search.tried:
        return f"{step} failed in training, and ampdbg could not keep it for a replay."
    replays = f"{search.failed or 'none'} of {counted(search.tried, 'replay')}"
    return f"{step} failed in training, and {replays} reproduced the failure."


def _out_of_trials(ended: EndedSearch) -> str:
    healthy = f"with {ended.some} in FP32 the failing step is healthy; a smaller set may suffice."
    sentence = healthy if ended.record.pins else "ampdbg found no healthy set yet."
    if ended.record.interrupted:
        return sentence[:1].upper() + sentence[1:]
    return f"After {counted(len(ended.record.trials), 'trial')}, the most allowed: {sentence}"


def next_command(ended: EndedSearch) -> view.NextCommand | None:
    """What to type next; None where no command helps."""
    record, typed, ending = ended.record, ended.typed, ENDINGS[ended.search.outcome]
    # Lines outside of the modules have no names, and no trial pinned them.
    is_set = ending.has_patch and record.pins and (ended.holds or not ended.names)
    longer = with_option(ended.again, "--steps", 10 * max(record.planned_steps, 1))
    trials = f"ampdbg report {typed.record_path} --format json"
    return view.first(
        (record.interrupted, view.NextCommand("search again", ended.again)),
        (is_set, _patch(ended)),
        (ending.has_longer_run and record.script is None, view.NextCommand(ending.why, longer)),
        (ending.why and not ending.has_longer_run, view.NextCommand(ending.why, ended.again)),
        (not record.trials or ending.tone == "good" or not typed.record_path, None),
        (True, view.NextCommand("read why each trial failed", trials)),
    )


def _patch(ended: EndedSearch) -> view.NextCommand | None:
    """From the record, or where none was written from the config; a module file is not taken."""
    given = ended.typed.record_path or ended.typed.config
    them = "it" if len(ended.record.pins) == 1 else "them"
    command = f"ampdbg suggest-fp32 {given}"
    made = view.NextCommand(f"make the patch that pins {them}, proven on the failing step", command)
    return None if given.startswith("--module") else made


@dataclass(frozen=True)
class Ending:
    """How an outcome is reported: the tone of its headline, its sentence, and what to do next.

    ``why`` is why to search again, with more steps where ``has_longer_run``; where it is empty the trials say most.
    ``has_patch`` says that a set, where there is one, is what comes next.
    """

    tone: view.Tone
    sentence: Callable[[EndedSearch], str]
    why: str = ""
    has_longer_run: bool = False
    has_patch: bool = False


REPAIRED = "rerun once this is repaired"
ANOTHER = "run more steps: another failing step may be reproducible"

ENDINGS: Mapping[Outcome, Ending] = {
    "found": Ending("bad", _found, ANOTHER, has_longer_run=True, has_patch=True),
    "nothing-to-pin": Ending("good", _nothing_to_pin, "run more steps", has_longer_run=True),
    "fp32-fails": Ending("bad", lambda ended: f"No pin helps: {ended.step} fails in FP32 too.", REPAIRED),
    "fp32-raises": Ending(
        "doubtful", lambda ended: f"ampdbg tried no pin: the replay of {ended.step} in FP32 raised an error.", REPAIRED
    ),
    "no-pin-helps": Ending("bad", _no_pin_helps, REPAIRED),
    "not-in-a-module": Ending("bad", _not_in_a_module, has_patch=True),
    "not-reproduced": Ending("doubtful", _not_reproduced, ANOTHER, has_longer_run=True),
    "no-set-helps": Ending(
        "bad",
        lambda ended: f"No set of modules makes {ended.step} healthy, but FP32 throughout does.",
        has_patch=True,
    ),
    "out-of-trials": Ending("warning", _out_of_trials, "search without that limit"),
}


def _facts(ended: EndedSearch) -> Iterator[str]:
    search = ended.search
    if search.step is not None:
        at = f" at a loss scale of {scale(search.scale)}" if search.scale is not None else ""
        yield f"step {search.step}{at}"
    if search.modules:
        yield counted(search.modules, "module")
    if search.candidates and search.strategy == "guided":
        yield counted(search.candidates, "candidate")
    if ended.record.trials:
        yield f"{counted(len(ended.record.trials), 'trial')} ({search.strategy})"
    yield duration(ended.record.elapsed)
