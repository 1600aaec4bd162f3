"""The page of a search for pins: its outcome, the set and the reasons, the cost, the trials, the lines to paste."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ampdbg.levels import format_of_config
from ampdbg.quantities import counted, duration, listed, number, scale
from ampdbg.record.codes import catalogued
from ampdbg.record.findings import place_of
from ampdbg.record.pins import EVERYTHING, Outcome, Search, root_of, within
from ampdbg.record.run import SUM, Record

from . import pins, scan, view
from .view import line, lines, ran_on, with_option

MOST_FACTS, MOST_TO_PASTE = 1, 3
"""The most facts about the set, and lines for the config, in a story (the brief form of a page)."""

RAN_AS = {"float16": "as it ran", "float32": "in FP32", "pinned": "with the set"}

FURTHER = "further batch "
"""The prefix of a trial's stage on another batch than the failing step's."""


@dataclass(frozen=True)
class EndedSearch:
    """A record with an ended search, that search, and what was typed."""

    record: Record
    search: Search
    typed: view.CommandContext

    @property
    def again(self) -> str:
        """The command that repeats the search."""
        name = self.record.command if self.record.command in scan.SEARCHES else "bisect"
        return f"ampdbg {name} {self.typed.config}{chosen_strategy(self.search)}"

    @property
    def names(self) -> tuple[str, ...]:
        return self.record.pin_names

    @property
    def set_size_text(self) -> str:
        """The number of modules in the set, and of all modules."""
        return f"{len(self.names)} of {counted(self.search.modules, 'module')}"

    @property
    def step(self) -> str:
        """The failing step, within a sentence."""
        steps = (self.search.step, *(finding.step for finding in self.record.findings[:1]))
        return next((f"step {step}" for step in steps if step is not None), "the failing step")

    @property
    def why_no_pin(self) -> str:
        """Why FP32 does not help, by the code of the cause."""
        code = catalogued(self.record.findings[0].code if self.record.findings else "")
        return code.why_no_pin.format(step=self.step)

    @property
    def holds(self) -> bool:
        """True unless the last trial of the whole set on the failing step itself failed."""
        own = (trial for trial in reversed(self.record.trials) if not trial.stage.startswith(FURTHER))
        last = next((trial for trial in own if set(trial.pins) == set(self.names)), None)
        return last is None or last.healthy


def chosen_strategy(search: Search | None) -> str:
    """Return the option that repeats the search with its strategy, to append to a command."""
    return f" --strategy {search.strategy}" if search is not None and search.strategy != "guided" else ""


def page(record: Record, typed: view.CommandContext) -> view.Page:
    """Return the page of ``ampdbg bisect``; a run that ended before its search has the page of a scan."""
    if record.search is None:
        return scan.page(record, typed)
    ended = EndedSearch(record, record.search, typed)
    message, about = view.Paragraph(lines(*_message(ended))), tuple(_about_the_set(ended))
    findings, to_paste = record.findings * (not record.pins), _to_paste(ended)
    sections = view.filled(
        message,
        pins.pin_table(record),
        view.Findings(findings),
        view.Paragraph(lines(*pins.about_roots(record))),
        view.Paragraph(about),
        _loss_table(ended),
        pins.trial_table(record),
        pins.proof_table(record.verification),
        to_paste,
    )
    story = view.filled(
        message,
        pins.pin_lines(record),
        view.Findings(findings, is_brief=True),
        view.Paragraph(about[:MOST_FACTS]),
        *[to_paste] * (len(ended.names) <= MOST_TO_PASTE),
    )
    facts = (" · ".join((*_facts(ended), duration(record.elapsed))), *ran_on(record))
    return view.Page(headline(ended), sections, facts, typed.record_path, next_command(ended), story)


def _to_paste(ended: EndedSearch) -> view.Snippet:
    """Return the lines that pin the set, in the script or in the config; none if the set does not hold."""
    if not (ended.names and ended.holds):
        return view.Snippet("", ())
    if ended.record.script is None:
        return view.Snippet("In the config", tuple(pins.pins_yaml(ended.names, ended.record.config)))
    calls = [_pinning("model", ended.names)] * (not ended.record.roots)
    for root in ended.record.roots:
        own = [within(root.name, name) for name in ended.names if root_of(name) == root.name]
        calls.append(_pinning(root.name, own) if root.is_global else f"{_pinning('...', own)}  # ...: {root.what}")
    return view.Snippet("In the script", tuple(calls))


def _pinning(model: str, names: Sequence[str]) -> str:
    return f"ampdbg.pin_fp32({model}, {json.dumps([name or EVERYTHING for name in names])})"


def _message(ended: EndedSearch) -> Iterator[str]:
    """Yield the message of the search as a sentence, with a capital unless it begins with a module's name.

    Yield nothing if the headline or a finding says the same. Findings are listed only without a set.
    """
    message, outcome, findings = ended.search.message, ended.search.outcome, ended.record.findings
    by_headline = outcome in ("nothing-to-pin", "not-in-a-module") or (
        outcome == "not-reproduced" and ended.search.tried
    )
    by_finding = any(message.startswith(one.message) for one in findings[:1]) and not ended.record.pins
    if message and not by_headline and not by_finding:
        capital = message[:1].upper() if message.partition(" ")[0].isalpha() else message[:1]
        yield f"{capital}{message[1:]}".rstrip(".") + "."


def _about_the_set(ended: EndedSearch) -> Iterator[view.StyledLine]:
    search, count = ended.search, len(ended.names)
    dropped = "drop it" if count == 1 else "drop any one of them"
    runs = f", so each trial ran {search.repeats} times" * (search.repeats > 1)
    said = scale(search.set_scale or 0.0)
    of = "The step fails intermittently, in {} of {} replays{}."
    minimal = line(f"Proven by experiment: {dropped} and the step fails (the set is 1-minimal).")
    lowered = line(f"The set needs a loss scale of {said}: gradients overflow above it, and none is lost at it.")
    yield from view.every(
        (count and search.minimal, minimal),
        (count and not search.minimal, line("Not shown to be minimal: a smaller set may suffice.", tone="doubtful")),
        (0 < search.failed < search.tried, line(of.format(search.failed, search.tried, runs))),
        (count and search.set_scale is not None, lowered),
    )
    for name, counts in search.classes.items():
        if len(counts) == 2:
            pinned, every = counts
            all_of_them = "Both" if every == 2 else f"All {every}"
            some = f"{pinned} of the {every} instances of {name} {'is' if pinned == 1 else 'are'} in the set."
            yield line(some if pinned < every else f"{all_of_them} instances of {name} are in the set.")
    if search.cost is not None and count:
        yield line(pins.cost_sentence(search.cost, format_of_config(ended.record.config)))


def _loss_table(ended: EndedSearch) -> view.Table:
    """Return the loss of the failing step, or its substitute: as it ran, in FP32 and with the set."""
    losses, what = dict(ended.search.losses), "loss"
    for step in (one for one in ended.record.steps if one.step == ended.search.step):
        if scan.is_own_loss(step, ended.record):
            losses.setdefault("float16", step.loss)
        else:
            what = SUM
    rows = tuple((text, number(losses[way])) for way, text in RAN_AS.items() if way in losses)
    rows *= bool(ended.search.losses)
    return view.Table("The failing step", (view.Column(), view.Column(what, "number")), rows)


def headline(ended: EndedSearch) -> view.Headline:
    """Return how the search ended, in one or two sentences."""
    ending, is_found = ENDINGS[ended.search.outcome], ended.search.outcome == "found"
    sentence, trials = ending.sentence(ended), counted(len(ended.record.trials), "trial")
    return view.first(
        (ended.record.interrupted, view.Headline("warning", f"Interrupted after {trials}. {sentence}")),
        (is_found and not ended.holds, view.Headline("doubtful", sentence)),
        (ending.tone == "good" and scan.only_settles(ended.record), view.Headline("doubtful", sentence)),
        (True, view.Headline(ending.tone, sentence)),
    )


def _found(ended: EndedSearch) -> str:
    step, healthy = ended.step.capitalize(), _healthy(ended.search)
    need, them = ("needs", "it") if len(ended.names) == 1 else ("need", "them")
    own = sum(pin.own for pin in ended.record.pins)
    some, whose = f" {own} of them" * (own < len(ended.names)), "its" if own == 1 else "their"
    own_lines = f",{some} in {whose} own lines only" * bool(own)
    return view.first(
        (not ended.names, f"{step} fails intermittently and did not fail in any trial, so no module can be blamed."),
        (
            not ended.holds,
            f"{ended.set_size_text} in FP32 made the failing step healthy once, but not in a second replay.",
        ),
        (not ended.search.minimal, f"With {ended.set_size_text} in FP32, {healthy}."),
        (True, f"{ended.set_size_text} {need} FP32{own_lines}. With {them} pinned, {healthy}."),
    )


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
    but = f"; {skipped:,} of {of} were skipped while the loss scale settles" * bool(skipped)
    if scan.only_settles(ended.record):
        return f"Nothing to pin yet: {but.removeprefix('; ')}."
    return f"Nothing to pin: no step failed{but}."


def _not_in_a_module(ended: EndedSearch) -> str:
    places = listed(place_of(pin.source) for pin in ended.record.pins if pin.source)
    where = f", at {places}" * bool(places)
    if not any(finding.module for finding in ended.record.findings[:1]):
        return f"No module needs FP32: the step function or the loss fails{where}."
    return (
        f"Pinning modules is not enough: the step fails even with the whole model in FP32{where}. Work that "
        "the loss adds, such as gradients of gradients, runs outside the modules."
    )


def _not_reproduced(ended: EndedSearch) -> str:
    search, step = ended.search, ended.step.capitalize()
    if not search.tried:
        return f"{step} failed in training, and ampdbg could not keep it for a replay."
    replays = f"{search.failed or 'none'} of {counted(search.tried, 'replay')}"
    return f"{step} failed in training, and {replays} reproduced the failure."


def _out_of_trials(ended: EndedSearch) -> str:
    healthy = f"with {ended.set_size_text} in FP32 the failing step is healthy; a smaller set may suffice."
    sentence = healthy if ended.record.pins else "ampdbg found no healthy set yet."
    within_limit = f"After {counted(len(ended.record.trials), 'trial')}, the most allowed: {sentence}"
    return sentence[:1].upper() + sentence[1:] if ended.record.interrupted else within_limit


def next_command(ended: EndedSearch) -> view.NextCommand | None:
    """Return what to type next; None if no command helps."""
    record, typed, ending = ended.record, ended.typed, ENDINGS[ended.search.outcome]
    # Lines outside of the modules have no names, and no trial pinned them.
    is_set = ending.has_patch and record.pins and (ended.holds or not ended.names)
    longer = with_option(ended.again, "--steps", 10 * max(record.planned_steps, 1))
    trials = f"ampdbg report {typed.record_path} --format json"
    # From the record, or from the config if none was written; suggest-fp32 does not take a module file.
    given, them = typed.record_path or typed.config, "it" if len(record.pins) == 1 else "them"
    make = f"make the patch that pins {them}, proven on the failing step" * (not given.startswith("--module"))
    return view.next_of(
        (record.interrupted, "search again", ended.again),
        (is_set, make, f"ampdbg suggest-fp32 {given}"),
        (ending.has_longer_run and record.script is None, ending.why, longer),
        (ending.why and not ending.has_longer_run, ending.why, ended.again),
        (record.trials and ending.tone != "good" and typed.record_path, "read why each trial failed", trials),
    )


@dataclass(frozen=True)
class Ending:
    """The report of an outcome: the tone of its headline, its sentence, and what to do next.

    ``why`` is the reason to search again, with more steps if ``has_longer_run``. If it is empty, the trials explain
    most. ``has_patch`` means that the next command makes the patch, if there is a set.
    """

    tone: view.Tone
    sentence: Callable[[EndedSearch], str]
    why: str = ""
    has_longer_run: bool = False
    has_patch: bool = False


ANOTHER = "run more steps: another failing step may be reproducible"

ENDINGS: Mapping[Outcome, Ending] = {
    "found": Ending("bad", _found, ANOTHER, has_longer_run=True, has_patch=True),
    "nothing-to-pin": Ending("good", _nothing_to_pin, "run more steps", has_longer_run=True),
    "fp32-fails": Ending("bad", lambda ended: f"No pin helps: {ended.step} fails in FP32 too.", scan.REPAIRED),
    "fp32-raises": Ending(
        "doubtful",
        lambda ended: f"ampdbg tried no pin: the replay of {ended.step} in FP32 raised an error.",
        scan.REPAIRED,
    ),
    "no-pin-helps": Ending("bad", lambda ended: ended.why_no_pin, scan.REPAIRED),
    "not-in-a-module": Ending("bad", _not_in_a_module, has_patch=True),
    "not-reproduced": Ending("doubtful", _not_reproduced, ANOTHER, has_longer_run=True),
    "no-set-helps": Ending(
        "bad",
        lambda ended: f"No pin of modules cures {ended.step}, though all of it in FP32 is finite.",
        has_patch=True,
    ),
    "out-of-trials": Ending("warning", _out_of_trials, "search without that limit"),
}


def _facts(ended: EndedSearch) -> Iterator[str]:
    search, trials = ended.search, len(ended.record.trials)
    at = "" if search.scale is None else f" at a loss scale of {scale(search.scale)}"
    return view.every(
        (search.step is not None, f"step {search.step}{at}"),
        (search.modules, counted(search.modules, "module")),
        (search.candidates and search.strategy == "guided", counted(search.candidates, "candidate")),
        (trials, f"{counted(trials, 'trial')} ({search.strategy})"),
    )
