"""The result of a search: a healthy set, replayed again, described and costed, or the reason for having none."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch

from ampdbg.costs.step import step_costs
from ampdbg.observer import Observer
from ampdbg.pinning.experiment import Experiment, on_further_batches
from ampdbg.probes.makings import roots_of
from ampdbg.probes.source_lines import source_of
from ampdbg.record.findings import Finding
from ampdbg.record.pins import OWN, Pin, Search, Trial, is_line
from ampdbg.record.run import Record
from ampdbg.replay.run import Run, name_of_line
from ampdbg.search import OutOfTrials, Result, Trials, max_single_drops, trial_of
from ampdbg.source.ownership import is_library_class, is_users_file

AGAIN = "the whole set once more"

Item = TypeVar("Item", bound=Hashable)


class Contradiction(Exception):  # noqa: N818 - not an error: the search begins again
    """A step that seemed to fail in every replay does not. The search starts again, with repeats."""


@dataclass(frozen=True)
class Setting:
    """The inputs of every part of one search; ``order`` lists the modules in order of their first calls."""

    run: Run
    experiment: Experiment
    order: tuple[str, ...]
    observer: Observer
    max_trials: int | None
    repeats: int

    @cached_property
    def trials(self) -> Trials:
        """The search's trials. ``dataclasses.replace`` discards them."""
        return Trials(
            self._try,
            self.experiment.tree,
            max_trials=self.max_trials,
            repeats=self.repeats,
            on_trial=self.observer.trial,
            together=tied_together(self.experiment.tree.atoms, self.run.workload.model),
        )

    def _try(self, pins: tuple[str, ...]) -> Trial:
        """Run a trial, which should pass until a set is healthy, and fail once pins are dropped. With very many pins it
        does not name the failing ops, since they only describe the dropped pins."""
        if self.trials.best is None:
            return self.experiment.run(pins, "unhealthy")
        return self.experiment.run(pins, "never" if len(pins) > max_single_drops(self.experiment.tree) else "always")


def record_of_found(setting: Setting, record: Record, search: Search, result: Result) -> Record:
    """Return the record of a healthy set: replayed once more, tried on further batches, and costed.

    After an interrupt, the record has the trials made so far, and the search's result stands.

    Raises:
        Contradiction: the set is unhealthy in another replay, or the step is healthy without pins.
    """
    if not result.pins and setting.repeats == 1:
        raise Contradiction
    pins, made = result.pins, list[Trial]()
    try:
        pins = _library_modules_whole(setting, pins)
        for trial in _closing_trials(setting, pins):
            made.append(trial)
            setting.observer.trial(trial)
            if not made[0].healthy and setting.repeats == 1:
                raise Contradiction
    except KeyboardInterrupt:
        record = replace(record, interrupted=True)
    again, further = made[:1], made[1:]
    bad = next((trial.why for trial in again if not trial.healthy), None)
    losses = {"float32": setting.experiment.cases[0].fp32.replay.loss}
    if again:
        losses["pinned"] = math.nan if again[0].loss is None else again[0].loss
    search = replace(
        search,
        message="" if bad is None else f"with the set, a second replay failed: {bad}",
        minimal=result.minimal and bad is None,
        further=len(further),
        further_healthy=sum(trial.healthy for trial in further),
        losses=losses,
        set_scale=_set_scale(setting),
    )
    record = record_of_best(setting, record, search, replace(result, pins=pins))
    return replace(record, trials=(*record.trials, *made))


def _closing_trials(setting: Setting, pins: tuple[str, ...]) -> Iterator[Trial]:
    """Yield extra trials of the set outside of the search, each repeated as often as the search's trials."""
    experiment, first = setting.experiment, setting.experiment.cases[0]
    yield trial_of(AGAIN, [experiment.run(pins, "unhealthy") for _ in range(setting.repeats)])
    further = on_further_batches(setting.run, replace(first.failing, scale=first.scale), first.scales)
    for number, case in enumerate(further, start=1):
        other = Experiment(setting.run, (case,), experiment.tree, is_silent=experiment.is_silent)
        yield trial_of(f"further batch {number}", [other.run(pins, "unhealthy") for _ in range(setting.repeats)])


def _set_scale(setting: Setting) -> float | None:
    """Return the lowest loss scale that cured a step whose gradients overflow at its own scale, or None."""
    cases = [case for case in setting.experiment.cases if case.scales.is_lossless]
    lowered = [case.scale for case in cases if case.scale < case.failing.scale]
    return min(lowered, default=None)


def record_without_set(setting: Setting, record: Record, search: Search) -> Record:
    """Return the record if no set is healthy: the failure is outside of all modules, or has no known place."""
    outside, trials = setting.experiment.outside, setting.trials.made
    if not outside:
        message = f"pins do not reach all of the step; with every module pinned, it fails: {trials[-1].why}"
        return replace(record, search=replace(search, outcome="no-set-helps", message=message), trials=trials)
    lines = {site.source: site for site in outside if site.source is not None}
    pins = tuple(Pin("", source=source, sites=(site,), reason=0) for source, site in lines.items())
    first = outside[0]
    where = f"line {first.source.line} of {Path(first.source.file).name}" if first.source else first.op
    message = (
        f"{where} fails even with every module in FP32: it is part of the step function or the loss, "
        f"or it casts to half itself"
    )
    search = replace(search, outcome="not-in-a-module", message=message, sources=digests(pins))
    return replace(record, search=search, trials=trials, pins=pins)


def record_of_best(setting: Setting, record: Record, search: Search, result: Result) -> Record:
    """Return the record of a healthy set: what each pin cures and costs, and the effect of dropping it.

    Another interrupt omits the costs.
    """
    model, tree = setting.run.workload.model, setting.experiment.tree
    try:
        costs = step_costs(setting.run, setting.experiment.cases[0].failing)
    except KeyboardInterrupt:
        costs, record = None, replace(record, interrupted=True)
    dropped = {pin: trial.why for pin, trial in result.dropped.items()}
    tied = {name: part for part in tied_together(result.pins, model) for name in part}
    pins = [
        replace(
            _pin(setting, name, record.findings),
            tied=tuple(other for other in tied[name] if other != name),
            without=dropped.get(name) or dropped.get(name + OWN, ""),
            cost=costs.of(tree.under(name)) if costs is not None else None,
        )
        for name in result.pins
    ]
    search = replace(
        search,
        cost=costs.of(tree.expand(result.pins)) if costs is not None else None,
        classes=classes_of(model, result.pins, setting.order),
        roots=roots_of(model, result.pins, setting.run.makings),
        sources=digests(pins),
    )
    return replace(record, search=search, trials=setting.trials.made, pins=tuple(pins))


def _pin(setting: Setting, name: str, findings: Sequence[Finding]) -> Pin:
    """Return the pin of this name with its overflow sites. Its reason is the finding there, or the root finding."""
    if is_line(name):
        line, sites = setting.run.tail.lines[name][0], setting.experiment.sites([name])
        at = (
            n for n, one in enumerate(findings) if one.source and name_of_line(one.source.file, one.source.line) == name
        )
        return Pin("", source=source_of(line), reason=next(at, 0 if findings else None), sites=sites)
    module = name.removesuffix(OWN)
    same = (index for index, finding in enumerate(findings) if finding.op and finding.module == module)
    return Pin(
        module,
        own=name.endswith(OWN),
        reason=next(same, 0 if findings else None),
        sites=setting.experiment.sites(setting.experiment.tree.under(name)),
        class_name=type(setting.run.workload.model.get_submodule(module)).__name__,
    )


def _library_modules_whole(setting: Setting, pins: tuple[str, ...]) -> tuple[str, ...]:
    """Replace own-line pins of library modules, which no patch can edit, by whole modules if that is healthy."""
    modules = dict(setting.run.workload.model.named_modules())
    classes = {pin: type(modules.get(pin.removesuffix(OWN))) for pin in pins}
    whole = [pin.removesuffix(OWN) if is_library_class(classes[pin]) else pin for pin in pins]
    # A whole module may contain others of the set.
    larger = setting.experiment.tree.compress(setting.experiment.tree.expand(whole))
    with contextlib.suppress(OutOfTrials):  # the set found before stays
        if larger != pins and setting.trials.test(larger, "whole library modules").healthy:
            return larger
    return pins


def classes_of(model: torch.nn.Module, pins: Iterable[str], ran: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return the numbers of pinned and of run instances of each pinned class with several instances."""
    every = Counter(type(model.get_submodule(name)).__name__ for name in ran if not is_line(name))
    named = (pin.removesuffix(OWN) for pin in pins if not is_line(pin))
    pinned = Counter(type(model.get_submodule(name)).__name__ for name in named)
    return {name: (count, every[name]) for name, count in pinned.items() if every[name] > 1}


def digests(pins: Iterable[Pin]) -> dict[str, str]:
    """Return the SHA-256 of each user file with a line of the pins."""
    files = {site.source.file for pin in pins for site in pin.sites if site.source is not None}
    return {file: digest(file) for file in sorted(files) if is_users_file(file)}


def digest(file: str) -> str:
    """Return the SHA-256 of a file, or "" if it cannot be read."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""


def tied_together(names: Sequence[str], model: torch.nn.Module) -> tuple[tuple[str, ...], ...]:
    """Group the pins into parts: pins that share a parameter are in one part."""

    def parameters(pin: str) -> Iterator[int]:
        if is_line(pin):
            return iter(())
        module = model.get_submodule(pin.removesuffix(OWN))
        return map(id, module.parameters(recurse=not pin.endswith(OWN)))

    return grouped_by_shared_key(names, parameters)


def grouped_by_shared_key(
    items: Iterable[Item], held: Callable[[Item], Iterable[Hashable]]
) -> tuple[tuple[Item, ...], ...]:
    """Group the items into parts: items for which ``held`` lists a common key are in one part."""
    holder: dict[Hashable, Item] = {}
    part = {item: [item] for item in items}
    for item in list(part):
        for key in held(item):
            mine, other = part[item], part[holder.setdefault(key, item)]
            if mine is not other:
                other += mine
                part.update(dict.fromkeys(mine, other))
    return tuple(dict.fromkeys(tuple(same) for same in part.values()))
