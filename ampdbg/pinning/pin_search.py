"""The search for the smallest set of pins of one failing step, from its preconditions to the proven set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ampdbg.agreement import is_finite
from ampdbg.config import Config
from ampdbg.observer import Observer
from ampdbg.pinning.candidates import proposed_by_shadow
from ampdbg.pinning.experiment import Case, Experiment
from ampdbg.pinning.set_found import (
    Contradiction,
    Setting,
    record_of_best,
    record_of_found,
    record_without_set,
)
from ampdbg.pinning.tying import tied_modules
from ampdbg.probes.coverage import coverage
from ampdbg.record.codes import CODES
from ampdbg.record.pins import Search, Strategy
from ampdbg.record.run import Record
from ampdbg.replay.investigation import PinnedReplays
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import FailingStep, weights_of
from ampdbg.search import Found, Seen, Trials, atom_tree, best_so_far, delta_debug, guided

TRIES = 10
"""A step that does not fail every time it is run is run so often to learn how often it does."""

DOUBT = 0.02
"""A trial of a step that fails sometimes is repeated until it would pass by chance less often than this."""

MOST_REPEATS = 20


def search_pins(
    run: Run,
    record: Record,
    failing: Sequence[FailingStep],
    *,
    strategy: Strategy,
    max_trials: int | None,
    observer: Observer,
) -> Record:
    """Searches on the first of the failing steps, whose weights the model must have; the set has to cure all of them.

    Returns:
        The record with ``search``, ``trials`` and, where a set was found, ``pins``.
    """
    first = failing[0]
    search = Search(strategy, "found", step=first.snapshot.step, scale=first.scale)
    case = _case(run, record, first)
    with coverage(run.workload.model) as covered:
        fp32 = case.replays.fp32.replay
    if not is_finite(fp32):
        why = fp32.error or f"the loss is {fp32.loss:g} in FP32 too"
        return replace(record, search=replace(search, outcome="fp32-fails", message=why))
    tree = atom_tree(covered.callable)
    observer.search(covered.callable)
    is_silent = CODES[record.findings[0].code].erases_itself
    experiment = Experiment(run, (case, *_others(run, record, failing[1:])), tree, is_silent=is_silent)
    search = _how_often(experiment, replace(search, modules=len(covered.callable)))
    if search.failed == 0:
        message = f"the step failed while it was trained, and in none of {search.tried} replays"
        return replace(record, search=replace(search, outcome="not-reproduced", message=message))
    return _searched(Asked(run, first, experiment, covered.callable, observer, max_trials), record, search)


@dataclass(frozen=True)
class Asked:
    """What is to be searched, however often that begins again; ``order`` as in :class:`Setting`."""

    run: Run
    failing: FailingStep
    experiment: Experiment
    order: tuple[str, ...]
    observer: Observer
    max_trials: int | None

    def setting(self, repeats: int) -> Setting:
        """A search that begins, with that many runs to a trial."""
        trials = Trials(
            _announced(self.experiment, self.observer),
            self.experiment.tree,
            max_trials=self.max_trials,
            repeats=repeats,
            on_trial=self.observer.trial,
            together=tied_modules(self.run.workload.model, self.experiment.tree),
        )
        return Setting(self.run, self.failing, self.experiment, trials, self.order, self.observer, repeats)


def _searched(asked: Asked, record: Record, search: Search) -> Record:
    """Searches; where the answers contradict each other, once more from the start, with repeats."""
    try:
        return _concluded(asked.setting(search.repeats), record, search)
    except Contradiction:
        asked.observer.search(asked.order)
        search = replace(_how_often(asked.experiment, search, TRIES), repeats=MOST_REPEATS)
        return _concluded(asked.setting(search.repeats), record, search)


def _case(run: Run, record: Record, failing: FailingStep) -> Case:
    return Case(failing, PinnedReplays(run, failing, keeps_scale=keeps_scale(run.config, record, failing)))


def keeps_scale(config: Config, record: Record, failing: FailingStep) -> bool:
    """Whether a step is to be cured at its own loss scale: a static one, or one that is all that is wrong with it."""
    codes = [CODES[finding.code] for finding in record.findings if finding.step == failing.snapshot.step]
    return isinstance(config.precision.loss_scale, float) or any(code.keeps_scale for code in codes)


def _others(run: Run, record: Record, failing: Sequence[FailingStep]) -> Iterator[Case]:
    """The further steps that are finite in FP32."""
    for case in (_case(run, record, other) for other in failing):
        with weights_of(run.workload.model, case.failing):
            if is_finite(case.replays.fp32.replay):
                yield case


def _concluded(setting: Setting, record: Record, search: Search) -> Record:
    """Searches, proves what was found and writes it down; after an interrupt it is the best so far, not proven.

    Raises:
        Contradiction: what was seen does not fit together, and it could be seen again.
    """
    try:
        found = STRATEGIES[search.strategy](setting)
        search = replace(search, candidates=len(setting.trials.made[0].pins) if setting.trials.made else 0)
        if not found.healthy:
            return record_without_set(setting, record, search, found)
        if not found.out_of_trials:
            return record_of_found(setting, record, search, found)
        interrupted = False
    except KeyboardInterrupt:
        found, interrupted = best_so_far(setting.trials, out_of_trials=True), True
    search = replace(search, outcome="out-of-trials")
    record = replace(record, interrupted=interrupted, search=search, trials=setting.trials.made)
    return record_of_best(setting, record, search, found) if found.healthy else record


def _candidates(setting: Setting) -> list[str]:
    """The atoms where a failing step goes beyond FP16, then those where only its shadow does."""
    tree = setting.trials.tree
    proposed = list(setting.experiment.seen_atoms)
    for case in setting.experiment.cases:
        scale = case.failing.scale if case.failing.made.why == "gradients" else None
        with weights_of(setting.run.workload.model, case.failing):
            shadow = proposed_by_shadow(setting.run, case.failing.snapshot, scale)
        proposed += [tree.own(name) for name in shadow if name in tree]
    return list(dict.fromkeys(proposed))


def _guided(setting: Setting) -> Found:
    """Guided; blind where that leads to no healthy set although every module in FP32 would be one."""
    found = guided(setting.trials, _candidates(setting))
    return found if found.healthy or found.out_of_trials else delta_debug(setting.trials)


STRATEGIES: dict[Strategy, Callable[[Setting], Found]] = {
    "guided": _guided,
    "ddmin": lambda setting: delta_debug(setting.trials),
}


def _announced(experiment: Experiment, observer: Observer) -> Callable[[tuple[str, ...]], Seen]:
    def run(pins: tuple[str, ...]) -> Seen:
        observer.trial_start(pins)
        return experiment.run(pins)

    return run


def _how_often(experiment: Experiment, search: Search, tries: int = 2) -> Search:
    """The search with how often the step fails without pins, in these tries and earlier ones, and how many repeats
    a trial needs for that."""
    seen = [experiment.run(()) for _ in range(tries)]
    if seen[0].healthy or (seen[0].why, seen[0].suspects) != (seen[1].why, seen[1].suspects):
        seen += [experiment.run(()) for _ in range(TRIES - len(seen))]
    failed, tried = search.failed + sum(not one.healthy for one in seen), search.tried + len(seen)
    return replace(search, failed=failed, tried=tried, repeats=_repeats(failed / tried))


def _repeats(rate: float) -> int:
    """So many runs of a step that fails with this rate are all healthy with a chance below ``DOUBT``."""
    if rate in (0.0, 1.0):
        return 1
    return min(MOST_REPEATS, math.ceil(math.log(DOUBT) / math.log(1.0 - rate)))
