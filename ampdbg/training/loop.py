"""The watched training loop, in the reference order: autocast, scale, backward, unscale_, clip, step, update.

Its failing steps are replayed while it waits.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from ampdbg.agreement import is_same_run
from ampdbg.config.schema import Config
from ampdbg.diagnosis.cause import SKIPS_IN_A_ROW
from ampdbg.diagnosis.scale import is_nan_alone
from ampdbg.environment import describe_environment
from ampdbg.errors import AmpdbgError
from ampdbg.observer import UNOBSERVED, Observer
from ampdbg.precision.modes import skips_overflows
from ampdbg.probes.module_calls import compiled_notes, module_paths
from ampdbg.probes.tensors import are_weights_spoilt, float_values, nonfinite, nonfinite_in_batch, to_host
from ampdbg.probes.torch_errors import autocast_error, explained
from ampdbg.probes.watch import Watch, watch
from ampdbg.quantities import number
from ampdbg.record.run import AutocastError, Investigation, Record, Step, Unseen
from ampdbg.replay.investigation import Why, investigate, is_blamed
from ampdbg.replay.range_profile import RangeProfile, profile_of
from ampdbg.replay.run import Run, prepared, run_pass
from ampdbg.replay.snapshot import ModelState, Snapshot, take_snapshot
from ampdbg.replay.state import notes_on

OnInvestigated = Callable[[Snapshot, float, Investigation], None]
"""Called with a replayed step, its loss scale and its investigation, while the model still has the step's weights."""


def train(
    config: Config,
    *,
    observer: Observer = UNOBSERVED,
    replays: int = 2,
    prepare: Callable[[Config], AbstractContextManager[Run]] = prepared,
) -> Record:
    """Train the workload of ``config`` at its configured precision and watch every step.

    Args:
        observer: notified of each optimizer step, and of each replay before it runs.
        replays: the most unhealthy steps of each kind to replay; 0 for none.
        prepare: builds the workload.

    Returns:
        The record, not yet diagnosed. An interrupt ends the run early (``interrupted``), and so does an error
        in the user's code that autocast causes (``autocast_error``).

    Raises:
        WorkloadError: a target cannot be used, or the device is not available.
        UserCodeError: the user's code raised, and would have raised in FP32 too.
            Both errors carry the completed steps as their ``record``.
    """
    with prepare(config) as run:
        return train_prepared(run, observer=observer, command="scan", replays=replays)


def train_prepared(
    run: Run,
    *,
    observer: Observer,
    command: str,
    replays: int,
    on_investigated: OnInvestigated | None = None,
) -> Record:
    """Like :func:`train`, for a run that is already prepared and stays in use afterwards.

    ``on_investigated`` is called while the model still has the weights of the investigated step.
    """
    model, unseen = run.workload.model, Unseen()
    with watch(model, run.workload.optimizers, observer.step) as watcher:
        investigator = Investigator(run, watcher, replays, observer, on_investigated)
        with _noted(run, watcher, watcher.calls.explains) as ending:
            for unseen in _steps(run, watcher, investigator):  # noqa: B007 - the last value remains after an interrupt
                pass
        with _kept_if_interrupted(watcher, ending):
            if ending.autocast_error is not None:
                investigator.raised(is_told=True)
            elif ending.may_be_of_half and investigator.raised(is_told=False):
                ending.error, ending.failure = str(ending.failure), None
                watcher.log.end_without_backward(math.nan)
    notes = (*compiled_notes(model), *notes_on(model)) if investigator.found else ()
    return _record(
        run,
        command,
        watcher,
        ending,
        unseen=replace(unseen, notes=(*unseen.notes, *run.workload.notes, *notes, *watcher.notes, *investigator.notes)),
        investigations=tuple(investigator.found),
    )


@dataclass
class RunEnd:
    """How a run ended.

    ``failure`` is an error that no finding explains. ``may_be_of_half`` is True if replays might explain it.
    ``error`` is the text of an error that replays did explain.
    """

    interrupted: bool = False
    autocast_error: AutocastError | None = None
    failure: AmpdbgError | None = None
    may_be_of_half: bool = False
    error: str = ""


@contextlib.contextmanager
def _noted(run: Run, watcher: Watch, explains: Callable[[BaseException | None], bool]) -> Iterator[RunEnd]:
    """Record an early end of the run. An error that ``explains`` accepts is a misuse that the watcher reports."""
    ending = RunEnd()
    try:
        with _kept_if_interrupted(watcher, ending), run.workload.user.reading("training"):
            yield ending
    except AmpdbgError as raised:
        ending.autocast_error = autocast_error(raised.__cause__, watcher.log.closed(), run.workload.model.named_modules)
        if ending.autocast_error is None and not explains(raised.__cause__):
            ending.failure = raised
            has_half_weights = run.config.precision.has_half_weights
            ending.may_be_of_half = run.mode.dtype is not torch.float32 and not explained(
                raised, has_half_weights=has_half_weights
            )


@contextlib.contextmanager
def _kept_if_interrupted(watcher: Watch, ending: RunEnd) -> Iterator[None]:
    """Stop the work inside this context at an interrupt, and keep the observations so far."""
    try:
        yield
    except KeyboardInterrupt:
        ending.interrupted = True
        watcher.log.stop_callbacks()


def _record(run: Run, command: str, watcher: Watch, ending: RunEnd, **seen: Any) -> Record:
    """Return the record of a run that has ended, or raise its failure with the record of any completed steps."""
    record = replace(
        watcher.record(),
        command=command,
        environment=describe_environment(run.config, run.device),
        config=run.config.resolved(),
        config_folder=run.config.folder_from_start(),
        planned_steps=run.config.train.steps,
        interrupted=ending.interrupted,
        error=str(ending.failure or ending.error),
        autocast_error=ending.autocast_error,
        elapsed=run.elapsed,
        **seen,
    )
    if ending.failure is not None:
        ending.failure.record = record if record.steps else None
        raise ending.failure
    return record


def batches_of_steps(run: Run) -> Iterator[tuple[Any, ...]]:
    """Yield the micro-batches of one step after another, endlessly."""
    batches = run.workload.batches()
    while True:
        yield tuple(next(batches) for _ in range(run.config.train.accumulate))


def _steps(run: Run, watcher: Watch, investigator: Investigator) -> Iterator[Unseen]:
    """Train the steps. After each one, yield the modules and parameters that the first step did not use."""
    scaler = run.scaler()
    unseen = Unseen()
    for step, batches in zip(range(run.config.train.steps), batches_of_steps(run), strict=False):
        snapshot = investigator.snapshot(batches)
        with module_paths(run.workload.model) if step == 0 else nullcontext() as paths:
            losses = accumulate_gradients(run, watcher, scaler, batches)
            unseen = paths.unseen() if paths else unseen
        gradients = [] if skips_overflows(scaler) else [_largest_gradient(run)]
        finite = [math.isfinite(value) for value in to_host([*losses, *gradients])]
        of_losses, of_gradients = finite[: len(losses)], finite[len(losses) :]
        investigator.before_update(snapshot, all(of_losses), all(of_gradients), scaler.get_scale())
        take_step(run, scaler)
        watcher.check()
        investigator.after_update(snapshot, watcher.log.latest())
        yield unseen


def accumulate_gradients(
    run: Run, watcher: Watch, scaler: torch.amp.GradScaler, batches: tuple[Any, ...]
) -> list[torch.Tensor]:
    """Accumulate the gradients of one step's micro-batches, and return every loss, each of shape ()."""
    run.workload.clear_gradients()
    for batch in batches:
        watcher.log.batch.extend(nonfinite_in_batch(batch))
    losses = run_pass(run.workload, batches, run.mode.forward, scaled=scaler.scale, seen=watcher.log.add_losses)
    return [loss for each in losses for loss in each.values()]


def _largest_gradient(run: Run) -> torch.Tensor:
    """Return the largest gradient magnitude, of shape (). It squares no half gradient, so it cannot overflow."""
    gradients = (value.grad for value in run.workload.model.parameters() if value.grad is not None)
    values = [value for value in map(float_values, gradients) if value is not None]
    return torch.nn.utils.get_total_norm(values, norm_type=math.inf).abs()


def update_weights(run: Run, scaler: torch.amp.GradScaler) -> None:
    """Unscale and clip as configured, then let the scaler step or skip."""
    with run.workload.user.running("the optimizer's step"):
        run.mode.step(scaler, run.workload.optimizers, run.config.train.clip_grad_norm)


def take_step(run: Run, scaler: torch.amp.GradScaler) -> None:
    """Like :func:`update_weights`, then advance the learning-rate schedules if a step was taken."""
    with run.workload.scheduled():
        update_weights(run, scaler)


def profile_ranges(config: Config, *, observer: Observer = UNOBSERVED) -> Record:
    """Train ``train.steps - 1`` steps as configured and measure the value ranges of the next one.

    Returns:
        A record with ``sites``, not yet diagnosed. It has no sites after an interrupt or an error that autocast causes.

    Raises: as :func:`train`.
    """
    profile = RangeProfile()
    with prepared(config) as run:
        with (
            watch(run.workload.model, run.workload.optimizers, observer.step) as watcher,
            _noted(run, watcher, lambda error: False) as ending,
        ):
            snapshot = _up_to_last_step(run, watcher)
            with watcher.paused():
                profile = profile_of(run, snapshot)
            unseen = replace(profile.unseen, notes=(*profile.unseen.notes, *run.workload.notes))
            profile = replace(profile, unseen=unseen)
        return _record(run, "ranges", watcher, ending, **vars(profile))


def _up_to_last_step(run: Run, watcher: Watch) -> Snapshot:
    """Train all steps but the last, and return a snapshot from before the last one."""
    scaler, last = run.scaler(), run.config.train.steps - 1
    every = batches_of_steps(run)
    for _ in range(last):
        accumulate_gradients(run, watcher, scaler, next(every))
        take_step(run, scaler)
        watcher.check()
    return take_snapshot(run.workload.model, last, next(every), run.workload.step.of)


# Which steps are replayed


class Investigator:
    """Replays steps of one run, at most ``limit`` for each reason."""

    def __init__(
        self, run: Run, watcher: Watch, limit: int, observer: Observer, on_investigated: OnInvestigated | None
    ) -> None:
        self.found: list[Investigation] = []
        self._run = run
        self._watcher = watcher
        self._limit = limit
        self._observer = observer
        self._on_investigated = on_investigated
        self._is_low = run.mode.dtype is not torch.float32
        self._first = ModelState.now(run.workload.model)
        self._tried: Counter[Why] = Counter()
        self._skips_in_a_row = 0
        self._lowest_that_worked = math.inf
        self._latest: Snapshot | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """A note on each step that looks healthy but has another loss in its replay: it was not compared with FP32."""
        others = [made for made in self.found if made.why == "end" and math.isfinite(made.low.loss)]
        return tuple(
            f"step {made.step} was not compared with FP32: its replay has a loss of {number(made.low.loss)} "
            f"instead of {number(made.loss)}, as where a step draws its own random numbers"
            for made in others
            if not is_same_run(made)
        )

    def snapshot(self, batches: tuple[Any, ...]) -> Snapshot:
        """Return the step that is about to run, with copies of its batches if it may be replayed."""
        kept = batches if self._limit else ()
        workload = self._run.workload
        self._latest = take_snapshot(workload.model, self._watcher.log.closed(), kept, workload.step.of)
        return self._latest

    def before_update(self, snapshot: Snapshot, loss_is_finite: bool, gradients_are_finite: bool, scale: float) -> None:
        """Investigate, if necessary, between the backward pass and the optimizer: the last moment with these weights.

        A scaler's gradients may count as finite here, because a step that it withholds keeps its weights.
        """
        is_last = snapshot.step + 1 == self._run.config.train.steps
        if not loss_is_finite:
            self._investigate(snapshot, "loss", scale)
        elif not gradients_are_finite:
            self._investigate(snapshot, "gradients", scale)
        elif (
            is_last
            and self._is_low
            and (self._skips_in_a_row == 0 or not self._withholds())
            and not any(made.why == "loss" for made in self.found)
        ):
            self._investigate(snapshot, "end", scale)

    def _withholds(self) -> bool:
        """True if the scaler will withhold the step. This is checked only after a withheld step."""
        parameters = self._run.workload.model.named_parameters()
        return any(nonfinite((name, value.grad) for name, value in parameters if value.grad is not None))

    def raised(self, *, is_told: bool) -> bool:
        """Replay the latest step after the user's code raised an error in it.

        Args:
            is_told: the error already shows that autocast is its cause, so no replay is needed to show it.

        Returns:
            True if replays show that half precision causes it: FP32 is finite. ``found`` then has the investigation.
        """
        if self._latest is None or not self._limit or not self._is_low or (is_told and self._on_investigated is None):
            return False
        if torch.is_inference_mode_enabled():  # the user's code left this mode on: no backward pass can run
            return False
        steps = self._watcher.steps
        scale = steps[-1].scale if steps else self._run.scaler().get_scale()
        with self._watcher.paused():
            made = self._replayed(self._latest, "loss", scale, steps)
            is_shown = is_blamed(made)
            if self._on_investigated is not None and (is_told or is_shown):
                self._on_investigated(self._latest, scale, made)
        if is_shown and not is_told:
            self.found.append(made)
        return is_shown

    def after_update(self, snapshot: Snapshot, step: Step) -> None:
        """Investigate, if necessary, after the update: a step that the scaler withheld still has its weights."""
        if not step.skipped:
            self._skips_in_a_row = 0
            self._lowest_that_worked = min(self._lowest_that_worked, step.scale)
        else:
            self._skips_in_a_row += 1
            # A skip right after growth is normal. A skip at a scale that has worked is investigated.
            is_new_low = self._skips_in_a_row == 1 and step.scale <= self._lowest_that_worked < math.inf
            # NaN alone may not depend on the scale. Then the scale at which the scaler settles explains nothing.
            is_new_low |= step.step == 0 and is_nan_alone(step.groups)
            # If no step was ever taken, the last step shows if a lower scale would do.
            is_last = step.step + 1 == self._run.config.train.steps and self._lowest_that_worked == math.inf
            if math.isfinite(step.loss) and (is_new_low or is_last or self._skips_in_a_row == SKIPS_IN_A_ROW):
                self._investigate(snapshot, "gradients", step.scale)
        if self.found and self.found[-1].step == step.step:
            self.found[-1] = replace(self.found[-1], loss=step.loss)

    def _investigate(self, snapshot: Snapshot, why: Why, scale: float) -> None:
        # Weights that are not finite are the fault themselves, and no replay shows more.
        if self._tried[why] >= self._limit or are_weights_spoilt(self._run.workload.model):
            return
        # If an earlier step put inf or NaN into the state, replays from the first state show how that happens.
        is_spoilt = snapshot.state.held.bad > self._first.held.bad
        begun = replace(snapshot, state=self._first) if is_spoilt else snapshot
        self._tried[why] += 1
        steps = tuple(step for step in self._watcher.steps if step.step < snapshot.step)
        with self._watcher.paused():
            made = self._replayed(begun, why, scale, steps)
            if made.reproduced == 0 and is_spoilt and self.found:
                return  # values left by the first step found caused this failure
            if self._on_investigated is not None:
                self._on_investigated(begun, scale, made)
        self.found.append(made)

    def _replayed(self, snapshot: Snapshot, why: Why, scale: float, before: Sequence[Step]) -> Investigation:
        made = investigate(self._run, snapshot, why, scale, before=before, observer=self._observer)
        self._watcher.left_by_replays |= snapshot.left
        return replace(made, weights_grew=self._watcher.optimizers.weights_grew)
