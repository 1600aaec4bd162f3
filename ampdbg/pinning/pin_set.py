"""The set of pins that a search ends with: run again, described and costed for the record, or why there is none."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from ampdbg.agreement import is_finite
from ampdbg.observer import Observer
from ampdbg.pinning.costs import step_costs, step_seconds
from ampdbg.pinning.experiment import Case, Experiment
from ampdbg.pinning.ties import tied_modules, tied_together
from ampdbg.record.findings import Finding
from ampdbg.record.pins import OWN, Pin, PinSite, Search, Trial
from ampdbg.record.run import Record
from ampdbg.replay.investigation import PinnedReplays
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import FailingStep, further_steps
from ampdbg.search import Answer, AtomTree, OutOfTrials, Result, Trials
from ampdbg.search.reduction import most_dropped
from ampdbg.search.trials import trial_of
from ampdbg.source.ownership import is_library_class, is_users_file

FURTHER_BATCHES = 3
"""The set that was found is tried on so many more batches."""

AGAIN = "the whole set once more"


class Contradiction(Exception):  # noqa: N818 - not an error: the search begins again
    """A step that seemed to fail every time does not: the search begins again, with repeats."""


@dataclass(frozen=True)
class Setting:
    """What every part of one search needs; ``order`` are the modules in order of their first calls."""

    run: Run
    experiment: Experiment
    order: tuple[str, ...]
    observer: Observer
    max_trials: int | None
    repeats: int

    @property
    def failing(self) -> FailingStep:
        """The step that the search is about."""
        return self.experiment.cases[0].failing

    @cached_property
    def trials(self) -> Trials:
        """Its trials; ``replace`` begins them anew."""
        return Trials(
            self._try,
            self.experiment.tree,
            max_trials=self.max_trials,
            repeats=self.repeats,
            on_trial=self.observer.trial,
            together=tied_modules(self.run.workload.model, self.experiment.tree),
        )

    def _try(self, pins: tuple[str, ...]) -> Answer:
        """Once a set is healthy, suspects only describe its pins, and of very many pins nobody reads that."""
        is_brief = self.trials.best is not None and len(pins) > most_dropped(self.experiment.tree)
        return self.experiment.run(pins, is_brief=is_brief)


def record_of_found(setting: Setting, record: Record, search: Search, result: Result) -> Record:
    """A set that is healthy and was searched to the end: run once more, on further batches too, and costed.

    What an interrupt leaves of that is in the record, and what the search has proven stands.

    Raises:
        Contradiction: the set is not healthy when it is run once more, or the step is without pins.
    """
    closing = Closing(result.pins)
    try:
        _close(setting, closing)
    except KeyboardInterrupt:
        record = replace(record, interrupted=True)
    again, further = closing.made[:1], closing.made[1:]
    bad = next((trial.why for trial in again if not trial.healthy), None)
    search = replace(
        search,
        message="" if bad is None else f"with the set the step failed when it ran again: {bad}",
        minimal=result.minimal and bad is None,
        further=len(further),
        further_healthy=sum(trial.healthy for trial in further),
        losses=_losses(setting, again),
        set_scale=_set_scale(setting),
        step_seconds=closing.step_seconds,
    )
    record = record_of_best(setting, record, search, replace(result, pins=closing.pins))
    return replace(record, trials=(*record.trials, *closing.made))


@dataclass
class Closing:
    """How far the end of a search has come: the set, the trials beside the search, a step's time by what ran."""

    pins: tuple[str, ...]
    made: list[Trial] = field(default_factory=list)
    step_seconds: Mapping[str, float] = field(default_factory=dict)


def _close(setting: Setting, closing: Closing) -> None:
    if not closing.pins and setting.repeats == 1:
        raise Contradiction
    closing.pins = _library_modules_whole(setting, closing.pins)
    _run_beside(setting, setting.experiment, AGAIN, closing)
    if not closing.made[0].healthy and setting.repeats == 1:
        raise Contradiction
    for number, experiment in enumerate(_on_further_batches(setting), start=1):
        _run_beside(setting, experiment, f"further batch {number}", closing)
    closing.step_seconds = step_seconds(setting.run, setting.failing, closing.pins)


def _losses(setting: Setting, again: Sequence[Trial]) -> dict[str, float]:
    fp32 = {"float32": setting.experiment.cases[0].replays.fp32.replay.loss}
    if not again:
        return fp32
    return fp32 | {"pinned": math.nan if again[0].loss is None else again[0].loss}


def _set_scale(setting: Setting) -> float | None:
    """The lowest loss scale that a step was cured at whose gradients overflow at its own; None where there is none."""
    cases = [case for case in setting.experiment.cases if case.replays.scales.is_lossless]
    lowered = [case.replays.scale for case in cases if case.replays.scale < case.failing.scale]
    return min(lowered, default=None)


def record_without_set(setting: Setting, record: Record, search: Search, result: Result) -> Record:
    """No set is healthy: for want of trials, or because what goes wrong is in no module."""
    outside = setting.experiment.outside
    if result.out_of_trials:
        return replace(record, search=replace(search, outcome="out-of-trials"), trials=setting.trials.made)
    if not outside:
        last = setting.trials.made[-1].why if setting.trials.made else ""
        search = replace(
            search, outcome="no-set-helps", message=f"with every module in FP32 the step still fails: {last}"
        )
        return replace(record, search=search, trials=setting.trials.made)
    pins = statements(outside)
    message = _no_module_cures(outside[0])
    search = replace(search, outcome="not-in-a-module", message=message, sources=digests(pins))
    return replace(record, search=search, trials=setting.trials.made, pins=pins)


def _no_module_cures(site: PinSite) -> str:
    where = f"line {site.source.line} of {Path(site.source.file).name}" if site.source else site.op
    return (
        f"{where} fails even with every module in FP32: it is part of the step function or the loss, "
        f"or it casts to half itself"
    )


def record_of_best(setting: Setting, record: Record, search: Search, result: Result) -> Record:
    """The record with a set that is healthy: what each pin cures, what dropping it does, what it costs.

    Another interrupt leaves out the costs.
    """
    try:
        costs = step_costs(setting.run, setting.failing)
    except KeyboardInterrupt:
        costs, record = None, replace(record, interrupted=True)
    dropped = {pin: trial.why for pin, trial in result.dropped.items()}
    tied = {name: part for part in tied_together(result.pins, setting.run.workload.model) for name in part}
    pins = [described(setting.run.workload.model, name, setting.experiment.tree) for name in result.pins]
    pins = [
        replace(
            pin,
            reason=reason_of(pin, record.findings),
            sites=setting.experiment.sites(setting.experiment.tree.under(pin.name)),
            tied=tuple(other for other in tied[pin.name] if other != pin.name),
            without=dropped.get(pin.name) or dropped.get(pin.module + OWN, ""),
            cost=costs.of(setting.experiment.tree.under(pin.name)) if costs is not None else None,
        )
        for pin in pins
    ]
    search = replace(
        search,
        cost=costs.of(setting.experiment.tree.expand(result.pins)) if costs is not None else None,
        classes=classes_of(setting.run.workload.model, result.pins, setting.order),
        sources=digests(pins),
    )
    return replace(record, search=search, trials=setting.trials.made, pins=tuple(pins))


def _library_modules_whole(setting: Setting, pins: tuple[str, ...]) -> tuple[str, ...]:
    """A line inside a library cannot be patched: where the whole module is healthy too, it is the pin to take."""
    modules = dict(setting.run.workload.model.named_modules())
    whole = [pin.removesuffix(OWN) if is_library_class(type(modules[pin.removesuffix(OWN)])) else pin for pin in pins]
    # A module that is whole now may hold others of the set.
    larger = setting.experiment.tree.compress(setting.experiment.tree.expand(whole))
    with contextlib.suppress(OutOfTrials):  # what was found stands without it
        if larger != pins and setting.trials.test(larger, "library modules whole").healthy:
            return larger
    return pins


def _run_beside(setting: Setting, experiment: Experiment, stage: str, closing: Closing) -> None:
    """One more run of the set that is no part of the search; as often as each trial of it was repeated."""
    trial = trial_of(closing.pins, stage, [experiment.run(closing.pins) for _ in range(setting.repeats)])
    closing.made.append(trial)
    setting.observer.trial(trial)


def _on_further_batches(setting: Setting) -> Iterator[Experiment]:
    """The step on the batches that come after its own, where FP32 is finite on them."""
    first = setting.experiment.cases[0]
    for snapshot in further_steps(setting.run, setting.failing, FURTHER_BATCHES):
        further = replace(setting.failing, snapshot=snapshot, scale=first.replays.scale)
        replays = PinnedReplays(setting.run, further, first.replays.scales)
        if is_finite(replays.fp32.replay):
            case = Case(further, replays)
            yield Experiment(setting.run, (case,), setting.experiment.tree, is_silent=setting.experiment.is_silent)


def described(model: torch.nn.Module, name: str, tree: AtomTree) -> Pin:
    """The pin of this name, with its module's class."""
    module = name.removesuffix(OWN)
    kind = type(model.get_submodule(module))
    return Pin(module, own=name.endswith(OWN), class_name=kind.__name__)


def statements(sites: Iterable[PinSite]) -> tuple[Pin, ...]:
    """Pins of the lines that belong to no module, each once."""
    lines = {site.source: site for site in sites if site.source is not None}
    return tuple(Pin("", source=source, sites=(site,), reason=0) for source, site in lines.items())


def reason_of(pin: Pin, findings: Sequence[Finding]) -> int | None:
    """The index of the finding in the pin's module, or of the root finding."""
    same = (index for index, finding in enumerate(findings) if finding.op and finding.module == pin.module)
    return next(same, 0 if findings else None)


def classes_of(model: torch.nn.Module, pins: Iterable[str], ran: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """How many instances of each pinned class are pinned, and how many ran, where there are several."""
    every = Counter(type(model.get_submodule(name)).__name__ for name in ran)
    pinned = Counter(type(model.get_submodule(pin.removesuffix(OWN))).__name__ for pin in pins)
    return {name: (count, every[name]) for name, count in pinned.items() if every[name] > 1}


def digests(pins: Iterable[Pin]) -> dict[str, str]:
    """The SHA-256 of each of the user's files that a line of the pins stands in."""
    files = {site.source.file for pin in pins for site in pin.sites if site.source is not None}
    return {file: digest(file) for file in sorted(files) if is_users_file(file)}


def digest(file: str) -> str:
    """The SHA-256 of a file; "" where it cannot be read."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""
