"""The search for the smallest set of pins: train until a step fails, then replay that step with sets of pins.

The guided search uses the shadow, a replay in the wider bfloat16 that shows where FP16 would overflow. The search works
on atoms, the smallest units to pin: a module's own lines, or a line of the script.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ampdbg.agreement import is_finite, keeps_its_gradients
from ampdbg.config.schema import Config
from ampdbg.diagnosis.cause import WEIGHTS_GREW
from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.diagnosis.producers import survivor
from ampdbg.errors import UserCodeError, WorkloadError
from ampdbg.formats import FloatFormat
from ampdbg.observer import UNOBSERVED, Observer
from ampdbg.pinning.experiment import Experiment
from ampdbg.pinning.pin_set import Contradiction, Setting, record_of_best, record_of_found, record_without_set
from ampdbg.probes.garbage import seldom_collected
from ampdbg.probes.module_calls import module_paths
from ampdbg.probes.op_trace import OpPlace
from ampdbg.probes.shadow_trace import RangeSeen
from ampdbg.quantities import counted, number
from ampdbg.record.codes import catalogued
from ampdbg.record.findings import Finding
from ampdbg.record.pins import OWN, Outcome, Search, Strategy
from ampdbg.record.run import Investigation, Record
from ampdbg.replay.pinned_replays import LOWEST_SCALE, PinnedReplays, ScaleRange
from ampdbg.replay.replay import shadow_step
from ampdbg.replay.run import Run, prepared
from ampdbg.replay.snapshot import FailingStep, Snapshot, failing_step, weights_of
from ampdbg.search import OutOfTrials, Result, atom_tree, best_so_far, delta_debug, guided_search
from ampdbg.training.loop import train_prepared

REPLAYED_STEPS = 2
"""Up to this many unhealthy steps of each kind are replayed, and kept, during training."""

TRIES = 10
"""The number of replays that measure the failure rate of a step that does not always fail."""

DOUBT = 0.02
"""A trial of a step that fails sometimes is repeated until it passes by chance with less than this probability."""

MOST_REPEATS = 20

Kept = dict[tuple[int, str], FailingStep]


@dataclass(frozen=True)
class Bisected:
    """A finished search with its prepared run; ``failing`` are the steps that the set must cure."""

    run: Run
    record: Record
    failing: tuple[FailingStep, ...]


def bisect_run(
    config: Config,
    *,
    strategy: Strategy = "guided",
    max_trials: int | None = None,
    observer: Observer = UNOBSERVED,
) -> Record:
    """Train the workload of ``config``, and find the smallest set of modules that cures the failing steps.

    The ``strategy`` is ``guided`` by overflows in a wider format, or ``ddmin``, blind over the module tree. After an
    interrupt, the diagnosed record has the best set so far.

    Raises:
        WorkloadError: a target cannot be used, or the device is missing.
        UserCodeError: the user's code raised, and would also raise in FP32.
    """
    with bisected(config, strategy, max_trials, observer) as ended:
        return ended.record


@contextlib.contextmanager
def bisected(
    config: Config,
    strategy: Strategy,
    max_trials: int | None,
    observer: Observer,
) -> Iterator[Bisected]:
    """Yield the finished search of :func:`bisect_run` while its run is still prepared."""
    kept: Kept = {}
    with prepared(config) as run:

        def keep(snapshot: Snapshot, scale: float, made: Investigation) -> None:
            kept[made.step, made.why] = failing_step(run.workload.model, snapshot, scale, made)

        trained = train_prepared(run, observer=observer, command="bisect", replays=REPLAYED_STEPS, on_investigated=keep)
        yield search(run, diagnose(trained), kept, strategy, max_trials, observer)


def search(
    run: Run,
    record: Record,
    kept: Kept,
    strategy: Strategy,
    max_trials: int | None,
    observer: Observer,
) -> Bisected:
    """Find the set that cures the ``kept`` steps of the findings in the ``record``."""
    failing = _failing_steps(record, kept)
    if not record.interrupted:
        needless = _without_a_search(record, failing, strategy)
        record = replace(record, search=needless)
        if needless is None:
            _refuse_names(name for name, _ in run.workload.model.named_modules())
            try:
                with seldom_collected(), weights_of(run.workload.model, failing[0]):
                    record = _searched(run, record, failing, strategy, max_trials, observer)
            except KeyboardInterrupt:  # before the end of the first trial
                record = replace(record, interrupted=True)
    return Bisected(run, replace(record, elapsed=run.elapsed), tuple(failing))


def _refuse_names(modules: Iterable[str]) -> None:
    for name in modules:
        if name.endswith(OWN):
            raise WorkloadError(
                f"a module is named {name!r}; allowed: a name that does not end in {OWN!r}, which in a pin means a "
                "module's own lines. Rename the module"
            )


def _failing_steps(record: Record, kept: Mapping[tuple[int, str], FailingStep]) -> list[FailingStep]:
    """Return the kept steps with a finding that a pin helps, the root finding's step first."""
    located = [finding for finding in record.findings if finding.op or finding is record.findings[0]]
    steps = dict.fromkeys(finding.replayed_step for finding in located if catalogued(finding.code).pin_helps)
    return [failing for step in steps for (number, _), failing in kept.items() if number == step]


def _without_a_search(record: Record, failing: Sequence[FailingStep], strategy: Strategy) -> Search | None:
    """Return the search result if no trial is needed, else None."""
    root = next(iter(record.faults), None)
    if root is None:
        return Search(strategy, "nothing-to-pin", f"none of {counted(record.steps_run, 'step')} failed")
    if catalogued(root.code).fails_in_fp32:
        return _because_of(strategy, "fp32-fails", root)
    if not catalogued(root.code).pin_helps or WEIGHTS_GREW in root.evidence:
        return _because_of(strategy, "no-pin-helps", root)
    return None if failing else _because_of(strategy, "not-reproduced", root)


def _because_of(strategy: Strategy, outcome: Outcome, root: Finding) -> Search:
    return Search(strategy, outcome, f"{root.message}; {root.remedy}" if root.remedy else root.message)


def _searched(
    run: Run,
    record: Record,
    failing: Sequence[FailingStep],
    strategy: Strategy,
    max_trials: int | None,
    observer: Observer,
) -> Record:
    """Search on the first failing step, with the model's weights restored to it. The set must cure all steps."""
    first = failing[0]
    search = Search(strategy, "found", step=first.snapshot.step, scale=first.scale)
    case, *others = (PinnedReplays(run, one, scales_of(run.config, record, one)) for one in failing)
    with module_paths(run.workload.model) as paths:
        fp32 = case.fp32.replay
    if fp32.error:
        return replace(record, search=replace(search, outcome="fp32-raises", message=fp32.error))
    if not is_finite(fp32):
        message = f"the loss is {number(fp32.loss)} in FP32 too"
        return replace(record, search=replace(search, outcome="fp32-fails", message=message))
    atoms = (*paths.callable, *run.tail.lines)
    observer.search(atoms)
    is_silent = catalogued(record.findings[0].code).erases_itself
    cases = (case, *_finite_in_fp32(run, others))
    raises = (record.autocast_error.module,) if record.autocast_error is not None else ()
    experiment = Experiment(run, cases, atom_tree(atoms), is_silent=is_silent, suspected=raises)
    search = _how_often(experiment, replace(search, modules=len(paths.callable)))
    if search.failed == 0:
        message = f"none of {search.tried} replays reproduced the failure"
        return replace(record, search=replace(search, outcome="not-reproduced", message=message))
    setting = Setting(run, experiment, atoms, observer, max_trials, search.repeats)
    try:
        return _concluded(setting, record, search)
    except Contradiction:  # search again, with repeats
        observer.search(atoms)
        search = replace(_how_often(experiment, search, TRIES), repeats=MOST_REPEATS)
        return _concluded(replace(setting, repeats=MOST_REPEATS), record, search)


def scales_of(config: Config, record: Record, failing: FailingStep) -> ScaleRange:
    """Return the loss scales at which a step may be cured.

    A static scale is kept. If gradients overflow at a scale that must stay usable, a set may use a lower one. That
    scale must lose no gradients and must not cure the step by itself.
    """
    if isinstance(config.precision.loss_scale, float):
        return ScaleRange(failing.scale)
    codes = {finding.code for finding in record.findings if finding.replayed_step == failing.snapshot.step}
    if not any(catalogued(code).keeps_scale for code in codes):
        return ScaleRange()
    unpinned = survivor(failing.made)
    if unpinned is None or not keeps_its_gradients(unpinned):
        return ScaleRange(is_lossless=True)
    return ScaleRange(min(failing.scale, 4.0 * unpinned.scale), is_lossless=True)


def _finite_in_fp32(run: Run, cases: Iterable[PinnedReplays]) -> Iterator[PinnedReplays]:
    for case in cases:
        with weights_of(run.workload.model, case.failing):
            if is_finite(case.fp32.replay):
                yield case


def _how_often(experiment: Experiment, search: Search, tries: int = 2) -> Search:
    """Measure how often the step fails without pins, including earlier tries, and derive the repeats for each trial."""
    answers = [experiment.run(()) for _ in range(tries)]
    if answers[0].healthy or (answers[0].why, answers[0].suspects) != (answers[1].why, answers[1].suspects):
        answers += [experiment.run(()) for _ in range(TRIES - len(answers))]
    failed, tried = search.failed + sum(not one.healthy for one in answers), search.tried + len(answers)
    return replace(search, failed=failed, tried=tried, repeats=_repeats(failed / tried))


def _repeats(rate: float) -> int:
    """Return how many runs of a step with this failure rate all pass with a probability below ``DOUBT``."""
    if rate in (0.0, 1.0):
        return 1
    return min(MOST_REPEATS, math.ceil(math.log(DOUBT) / math.log(1.0 - rate)))


def _concluded(setting: Setting, record: Record, search: Search) -> Record:
    """Search, verify the result and record it; after an interrupt, record the best set so far, unverified."""
    trials = setting.trials
    try:
        result = STRATEGIES[search.strategy](setting)
        search = replace(search, candidates=len(trials.made[0].pins))
        if result.healthy:
            return record_of_found(setting, record, search, result)
        return record_without_set(setting, record, search)
    except (OutOfTrials, KeyboardInterrupt) as end:
        search = replace(search, outcome="out-of-trials", candidates=len(trials.made[0].pins) if trials.made else 0)
        record = replace(record, interrupted=isinstance(end, KeyboardInterrupt), search=search, trials=trials.made)
    best = best_so_far(trials)
    return record_of_best(setting, record, search, best) if best.healthy else record


def _guided(setting: Setting) -> Result:
    """Run the guided search, and fall back to ``ddmin`` if it finds no healthy set."""
    propose = functools.partial(_proposed, setting)
    # Actual overflows come first, then overflows of the shadow alone.
    candidates = list(dict.fromkeys([*setting.experiment.seen_atoms, *propose(())]))
    result = guided_search(setting.trials, candidates, propose, setting.experiment.fails_without)
    return result if result.healthy else delta_debug(setting.trials)


STRATEGIES: dict[Strategy, Callable[[Setting], Result]] = {
    "guided": _guided,
    "ddmin": lambda setting: delta_debug(setting.trials),
}


def _proposed(setting: Setting, pins: Sequence[str]) -> list[str]:
    """Return the atoms that overflow in the shadow of a failing step with the pins, in order of execution.

    Gradients count at the step's loss scale if they overflow. A step whose hard-coded dtypes prevent a bfloat16 run has
    none.
    """
    run, experiment = setting.run, setting.experiment
    places: list[OpPlace] = []
    for case in experiment.cases:
        failing = case.failing
        scale = failing.scale if failing.made.why == "gradients" else LOWEST_SCALE
        with contextlib.suppress(UserCodeError), weights_of(run.workload.model, failing), run.pinned(pins):
            places += _overflowing(shadow_step(run, failing.snapshot).ranges, scale, run.mode.format)
    proposed = (experiment.atom_at(place.module, *(place.line or ())[:2]) for place in places)
    return [atom for atom in proposed if experiment.tree.has_run(atom)]


def _overflowing(ranges: Iterable[RangeSeen], scale: float, low: FloatFormat) -> Iterator[OpPlace]:
    for seen in ranges:
        if seen.place.phase == "forward":
            beyond = seen.overflow == "starts"
        else:
            beyond = seen.overflow != "carried" and seen.output.largest * scale >= low.overflow_threshold
        if beyond:
            yield from seen.made_half or (seen.place,)
