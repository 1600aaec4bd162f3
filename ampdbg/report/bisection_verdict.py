"""What a search for pins came to, in a sentence, and the next command to type: one for each outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ampdbg.record.codes import catalogued
from ampdbg.record.pins import Outcome, Search, Trial
from ampdbg.record.run import Record

from . import quantities
from .next_command import with_option
from .quantities import counted
from .verdict import SEARCHES, Headline, NextStep

FURTHER = "further batch "
"""How the stage of a trial on another batch than the failing step's begins."""


@dataclass(frozen=True)
class Ended:
    """A record whose search has ended: ``search`` is the record's own; ``config`` is how the command was given it,
    with the options that change the run."""

    record: Record
    search: Search
    config: str = "CONFIG"
    record_path: str = ""

    @property
    def again(self) -> str:
        """The command that searches once more."""
        name = self.record.command if self.record.command in SEARCHES else "bisect"
        strategy = f" --strategy {self.search.strategy}" if self.search.strategy != "guided" else ""
        return f"ampdbg {name} {self.config}{strategy}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the set, as the config takes them."""
        return tuple(pin.name for pin in self.record.pins if pin.source is None)

    @property
    def holds(self) -> bool:
        """Whether the last trial of the whole set, on the failing step itself, was healthy."""
        last = next((trial for trial in reversed(self.record.trials) if _is_of_the_set(trial, self.names)), None)
        return last is None or last.healthy


@dataclass(frozen=True)
class Told:
    """How an outcome is reported: its mark and style, its sentence, and what to do next."""

    mark: str
    style: str
    sentence: Callable[[Ended], str]
    next_step: Callable[[Ended], NextStep | None]


def headline(ended: Ended) -> Headline:
    """The verdict in a sentence."""
    told = OUTCOMES[ended.search.outcome]
    if ended.record.interrupted:
        trials = counted(len(ended.record.trials), "trial")
        return Headline("!", "bold yellow", f"Interrupted after {trials}. {told.sentence(ended)}")
    if ended.search.outcome == "found" and not ended.holds:
        return Headline("?", "bold yellow", told.sentence(ended))
    return Headline(told.mark, told.style, told.sentence(ended))


def next_step(ended: Ended) -> NextStep | None:
    """What to type next; None where no command helps."""
    if ended.record.interrupted:
        return NextStep("to search again", ended.again)
    return OUTCOMES[ended.search.outcome].next_step(ended)


# The sentences


def _found(ended: Ended) -> str:
    count, some = len(ended.names), f"{len(ended.names)} of {counted(ended.search.modules, 'module')}"
    if not count:
        return f"{_step(ended)} fails now and then, and in no trial: nothing was found that must run in FP32."
    them = "it" if count == 1 else "them"
    if not ended.holds:
        return f"{some} in FP32 made the failing step healthy once, but not when it was run again."
    healthy = f"with {them} the failing step is healthy{_further(ended.search)}"
    return f"{some} must run in FP32{_own_lines(ended)}; {healthy}."


def _own_lines(ended: Ended) -> str:
    own = sum(pin.own for pin in ended.record.pins)
    if not own:
        return ""
    if own < len(ended.names):
        return f", {own} of them in {'its' if own == 1 else 'their'} own lines alone"
    return f", in {'its' if own == 1 else 'their'} own lines alone"


def _further(search: Search) -> str:
    if not search.further:
        return ""
    batches = f"{counted(search.further, 'further batch').replace('batchs', 'batches')}"
    if not search.further_healthy:
        return f", but not on {'any of ' if search.further > 1 else ''}{batches}"
    return f", and so {'is' if search.further_healthy == 1 else 'are'} {search.further_healthy} of {batches}"


def _is_of_the_set(trial: Trial, names: tuple[str, ...]) -> bool:
    return set(trial.pins) == set(names) and not trial.stage.startswith(FURTHER)


def _nothing_to_pin(ended: Ended) -> str:
    steps, skipped = ended.record.steps, sum(step.skipped for step in ended.record.steps)
    but = f", but for {skipped} skipped while the loss scale settles" if skipped else ""
    return f"Nothing to pin: no step of {len(steps)} failed{but}."


def _fp32_fails(ended: Ended) -> str:
    return f"No pin helps: {_step(ended).lower()} goes wrong in FP32 too."


def _fp32_raises(ended: Ended) -> str:
    return f"No pin was tried: {_step(ended).lower()} raised an error when it was replayed in FP32."


def _no_pin_helps(ended: Ended) -> str:
    code = catalogued(ended.record.findings[0].code if ended.record.findings else "")
    return code.why_no_pin.format(step=_step(ended).lower())


def _not_in_a_module(ended: Ended) -> str:
    lines = tuple(f"{pin.source.file}:{pin.source.line}" for pin in ended.record.pins if pin.source is not None)
    where = f": {quantities.listed(lines)}" if lines else ""
    return f"No module is to be pinned; what goes wrong is in the step function or the loss{where}."


def _not_reproduced(ended: Ended) -> str:
    search = ended.search
    if not search.tried:
        return f"{_step(ended)} failed in training, and could not be kept to be run again."
    replays = counted(search.tried, "replay")
    return f"{_step(ended)} failed in training, and in {search.failed or 'none'} of {replays}."


def _no_set_helps(ended: Ended) -> str:
    return f"No set of modules makes {_step(ended).lower()} healthy, although FP32 throughout does."


def _out_of_trials(ended: Ended) -> str:
    count, modules = len(ended.names), counted(ended.search.modules, "module")
    end = "" if ended.record.interrupted else f"After {counted(len(ended.record.trials), 'trial')}, the most allowed: "
    if not ended.record.pins:
        sentence = "No healthy set was found yet."
    else:
        sentence = f"With {count} of {modules} in FP32 the failing step is healthy; a smaller set may do."
    return end + (sentence if not end else sentence[:1].lower() + sentence[1:])


def _step(ended: Ended) -> str:
    """The failing step, at the start of a sentence."""
    findings = ended.record.findings
    step = ended.search.step if ended.search.step is not None else findings[0].step if findings else None
    return "The failing step" if step is None else f"Step {step}"


# What to type next


def _patch(ended: Ended) -> NextStep | None:
    """From the record, or where none was written from the config; a module file is not taken."""
    given = ended.record_path or ended.config
    if given.startswith("--module"):
        return None
    what = "the patch that pins it" if len(ended.record.pins) == 1 else "the patch that pins them"
    return NextStep(f"{what}, proven on the failing step", f"ampdbg suggest-fp32 {given}")


def _longer(ended: Ended) -> NextStep:
    return NextStep("a longer run", _with_more_steps(ended))


def _with_more_steps(ended: Ended) -> str:
    return with_option(ended.again, "--steps", 10 * max(ended.record.planned_steps, 1))


def _repaired(ended: Ended) -> NextStep | None:
    """A loop that was watched has no config, and is not ours to run again."""
    return NextStep("once that is repaired", ended.again) if ended.record.config else None


def _another_run(ended: Ended) -> NextStep:
    why = "a longer run, which may fail at a step that fails again when replayed"
    return NextStep(why, _with_more_steps(ended))


def _every_trial(ended: Ended) -> NextStep | None:
    counts = f"ampdbg report {ended.record_path} --format json"
    return NextStep("what went wrong in each trial", counts) if ended.record_path else None


def _more_trials(ended: Ended) -> NextStep:
    return NextStep("to search without that limit", ended.again)


def _patch_of_lines(ended: Ended) -> NextStep | None:
    """Lines outside of the modules are pinned by a patch; where none is known, the trials tell the most."""
    return _patch(ended) if ended.record.pins else _every_trial(ended)


def _found_next(ended: Ended) -> NextStep | None:
    return _patch(ended) if ended.record.pins and ended.holds else _another_run(ended)


BAD, GOOD, DOUBTFUL = "bold red", "bold green", "bold yellow"

OUTCOMES: Mapping[Outcome, Told] = {
    "found": Told("✗", BAD, _found, _found_next),
    "nothing-to-pin": Told("✓", GOOD, _nothing_to_pin, _longer),
    "fp32-fails": Told("✗", BAD, _fp32_fails, _repaired),
    "fp32-raises": Told("?", DOUBTFUL, _fp32_raises, _repaired),
    "no-pin-helps": Told("✗", BAD, _no_pin_helps, _repaired),
    "not-in-a-module": Told("✗", BAD, _not_in_a_module, _patch_of_lines),
    "not-reproduced": Told("?", DOUBTFUL, _not_reproduced, _another_run),
    "no-set-helps": Told("✗", BAD, _no_set_helps, _patch_of_lines),
    "out-of-trials": Told("!", DOUBTFUL, _out_of_trials, _more_trials),
}
