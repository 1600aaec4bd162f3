"""The training loop: the reference order of autocast, scale, backward, unscale_, clip, step, update, watched.

Updates of half parameters are each held against the same optimizer step on float32 copies: lost, or not finite.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, NamedTuple

import torch

from ampdbg.config.schema import Config
from ampdbg.environment import describe_environment
from ampdbg.errors import AmpdbgError, UserCodeError
from ampdbg.observer import UNOBSERVED, Observer
from ampdbg.precision.widening import LIFTS, widened
from ampdbg.probes.module_calls import compiled_notes, module_paths
from ampdbg.probes.shadow_trace import sites_of
from ampdbg.probes.tensors import HALVES, is_finite, nonfinite, nonfinite_in_batch
from ampdbg.probes.torch_errors import autocast_error
from ampdbg.probes.watch import Watch, watch
from ampdbg.record.run import FrozenParameter, HalfUpdates, Record, Unseen
from ampdbg.replay.comparison import MOST_OF_IT
from ampdbg.replay.investigation import Investigator, OnInvestigated
from ampdbg.replay.replay import shadow_step
from ampdbg.replay.run import Run, prepared, run_pass
from ampdbg.replay.snapshot import Snapshot, take_snapshot
from ampdbg.replay.state import Held, RandomState, held_by, notes_on


def train(
    config: Config,
    *,
    observer: Observer = UNOBSERVED,
    command: str = "scan",
    replays: int = 2,
    prepare: Callable[[Config], AbstractContextManager[Run]] = prepared,
) -> Record:
    """Trains the workload of ``config`` under its precision policy and watches every step.

    Args:
        config: a checked config.
        observer: sees each optimizer step, and each replay before it runs.
        command: the name that the record carries.
        replays: at most so many unhealthy steps of each kind are replayed; 0 for none.
        prepare: builds the workload.

    Returns:
        What was seen, not yet diagnosed. An interrupt ends the run early (``interrupted``), and so does an
        error of the user's code that autocast causes (``autocast_error``).

    Raises:
        WorkloadError: a target cannot be used, or the device is not there.
        UserCodeError: the user's code raised, and would have raised in FP32 too.
            Either has the steps that had ended by then as its ``record``.
    """
    started = time.monotonic()
    with prepare(config) as run:
        record = train_prepared(run, observer=observer, command=command, replays=replays)
    return replace(record, elapsed=round(time.monotonic() - started, 3))


def train_prepared(
    run: Run,
    *,
    observer: Observer,
    command: str,
    replays: int,
    on_investigated: OnInvestigated | None = None,
) -> Record:
    """As :func:`train`, on a run that is prepared already and goes on to be used; says nothing of the time it took.

    ``on_investigated`` is called while the weights are still those of the step.
    """
    record = new_record(run, command)
    started = time.monotonic()
    error, failure, interrupted, unseen = None, None, False, Unseen()
    with watch(run.workload.model, run.workload.optimizers, observer.step) as watcher:
        investigator = Investigator(run, watcher, replays, observer, on_investigated)
        updates = ComparedUpdates(run)
        try:
            with run.workload.user.reading("training"):
                for unseen in _steps(run, watcher, investigator, updates):  # noqa: B007 - the last one stays after an interrupt
                    pass
        except KeyboardInterrupt:
            interrupted = True
        except AmpdbgError as raised:
            error = autocast_error(raised, len(watcher.steps), run.workload.model)
            failure = None if error or watcher.calls.explains(raised.__cause__) else raised
            if error is not None:
                investigator.raised()
    model = run.workload.model
    notes = (*compiled_notes(model), *notes_on(model)) if investigator.found else ()
    record = replace(
        record,
        environment=describe_environment(run.config, run.device),
        steps=watcher.steps,
        groups=watcher.groups,
        misuses=watcher.misuses,
        unseen=replace(unseen, notes=(*unseen.notes, *notes, *watcher.notes)),
        interrupted=interrupted,
        error=str(failure or ""),
        autocast_error=error,
        investigations=tuple(investigator.found),
        half_updates=updates.seen,
        elapsed=round(time.monotonic() - started, 3),
    )
    if failure is not None:
        failure.record = record if record.steps else None
        raise failure
    return record


def new_record(run: Run, command: str) -> Record:
    """The record of a run that is about to begin."""
    return Record(
        command=command,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        environment=describe_environment(run.config, run.device),
        config=run.config.resolved(),
        config_folder=run.config.folder_from_start(),
        verdict="inconclusive",
        planned_steps=run.config.train.steps,
    )


def batches_of_steps(run: Run) -> Iterator[tuple[Any, ...]]:
    """The micro-batches of one step after another, without end."""
    batches = run.workload.batches()
    while True:
        yield tuple(next(batches) for _ in range(run.config.train.accumulate))


def _steps(run: Run, watcher: Watch, investigator: Investigator, updates: ComparedUpdates) -> Iterator[Unseen]:
    """Trains the steps; yields what the first one left untouched, after each."""
    scaler = run.mode.scaler()
    unseen = Unseen()
    for number, batches in zip(range(run.config.train.steps), batches_of_steps(run), strict=False):
        snapshot = investigator.snapshot(batches)
        with module_paths(run.workload.model) if number == 0 else nullcontext() as paths:
            loss_is_finite = accumulate_gradients(run, watcher, scaler, batches)
            unseen = paths.unseen() if paths else unseen
        investigator.before_update(snapshot, loss_is_finite, scaler.get_scale())
        updates.before_update()
        update_weights(run, scaler)
        with watcher.paused():
            updates.after_update(number)
        investigator.after_update(snapshot, watcher.steps[-1])
        yield unseen


def accumulate_gradients(run: Run, watcher: Watch, scaler: torch.amp.GradScaler, batches: tuple[Any, ...]) -> bool:
    """Adds up the gradients of one step's micro-batches; returns whether every loss was finite: the one sync a step."""
    for optimizer in run.workload.optimizers:
        optimizer.zero_grad(set_to_none=True)
    for batch in batches:
        watcher.log.batch.extend(nonfinite_in_batch(batch))
    cast = [run.mode.cast(batch) for batch in batches]
    losses = run_pass(run.workload, cast, run.mode.forward, scaled=scaler.scale, seen=watcher.log.add_losses)
    return is_finite(torch.stack([loss for each in losses for loss in each.values()]))


def update_weights(run: Run, scaler: torch.amp.GradScaler) -> None:
    """Unscales and clips where asked, then lets the scaler step or skip."""
    with run.workload.user.running("the optimizer's step"):
        run.mode.step(scaler, run.workload.optimizers, run.config.train.clip_grad_norm)


def profile_ranges(config: Config, *, observer: Observer = UNOBSERVED) -> Record:
    """Trains ``train.steps - 1`` steps as configured and measures the ranges of the next.

    Args:
        config: a checked config.
        observer: sees each optimizer step.

    Returns:
        A record with ``sites``, not yet diagnosed; after an interrupt without them.

    Raises:
        WorkloadError: a target cannot be used, or the device is not there.
        UserCodeError: the user's code raised, and would have raised in FP32 too.
    """
    started = time.monotonic()
    with prepared(config) as run:
        record = new_record(run, "ranges")
        with watch(run.workload.model, run.workload.optimizers, observer.step) as watcher:
            seen = _ranges_of_last_step(run, watcher)
        record = replace(record, steps=watcher.steps, groups=watcher.groups, **seen)
    return replace(record, elapsed=round(time.monotonic() - started, 3))


def _ranges_of_last_step(run: Run, watcher: Watch) -> dict[str, Any]:
    """The record's keys that the step, or what kept it from ending, has to fill."""
    try:
        snapshot = _up_to_last_step(run, watcher)
        with watcher.paused():
            ranges, unseen = shadow_step(run, snapshot)
    except KeyboardInterrupt:
        return {"interrupted": True}
    except UserCodeError as raised:
        error = autocast_error(raised, len(watcher.steps), run.workload.model)
        if error is None:
            raise
        return {"autocast_error": error}
    return {"sites": sites_of(ranges), "unseen": unseen}


def _up_to_last_step(run: Run, watcher: Watch) -> Snapshot:
    """Trains all steps but the last, which is about to run then."""
    scaler, last = run.mode.scaler(), run.config.train.steps - 1
    every = batches_of_steps(run)
    for _ in range(last):
        accumulate_gradients(run, watcher, scaler, next(every))
        update_weights(run, scaler)
    return take_snapshot(run.workload.model, last, next(every))


class ComparedUpdates:
    """Compares every update of a run's half parameters, until one of them is no longer finite.

    It does nothing where there are none, and where the loss is scaled: a scaler refuses float16 gradients. Nor with an
    optimizer that is not torch's own: that may round stochastically, compensate, or keep float32 copies of its own.
    """

    def __init__(self, run: Run) -> None:
        are_known = all(type(each).step.__module__.startswith("torch.") for each in run.workload.optimizers)
        is_compared = are_known and run.mode.dtype is not torch.float16
        named = run.workload.model.named_parameters() if is_compared else ()
        self._half = {name: value for name, value in named if value.dtype in HALVES and value.requires_grad}
        self._run = run
        self._before: Held | None = None
        self._start: dict[str, torch.Tensor] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._steps = 0
        self._spoilt: tuple[int, tuple[str, ...]] | None = None

    def before_update(self) -> None:
        """To be called right before the optimizers' step."""
        wanted = bool(self._half) and self._spoilt is None
        self._before = held_by(self._run.workload.optimizers) if wanted else None
        self._start = {name: value.detach().clone() for name, value in self._half.items()} if wanted else {}

    def after_update(self, step: int) -> None:
        """To be called right after it, while the gradients are still there; leaves everything as it is."""
        before, self._before = self._before, None
        gradients = ((name, value.grad) for name, value in self._half.items() if value.grad is not None)
        if before is None or nonfinite(gradients):
            return
        wide = _float32_update(self._run, before, self._half)
        if not wide or nonfinite(wide.items()):
            return
        self._steps += 1
        spoilt = tuple(name for name, _ in nonfinite(self._half.items()))
        if spoilt:
            self._spoilt = step, spoilt
            return
        decays = dict(_decoupled_decays(self._run))
        for name, parameter in self._half.items():
            sums = _sums_of_update(self._start[name], wide[name], parameter.detach(), decays.get(parameter, 0.0))
            self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    @property
    def seen(self) -> HalfUpdates | None:
        """What came of the comparisons; None where none was made."""
        if not self._steps:
            return None
        by_name = {name: UpdateSums(*sums.tolist()) for name, sums in self._sums.items()}
        total = UpdateSums(*map(sum, zip(*by_name.values(), strict=True))) if by_name else UpdateSums()
        is_float16 = {name: parameter.dtype is torch.float16 for name, parameter in self._half.items()}
        lost = [name for name, sums in by_name.items() if sums.lost > MOST_OF_IT * sums.energy]
        step, names = self._spoilt or (None, ())
        return HalfUpdates(
            steps=self._steps,
            lost_energy=total.lost / total.energy if total.energy else None,
            lost_gradient=total.lost_gradient / total.gradient if total.decay and total.gradient else None,
            lost_decay=total.lost_decay / total.decay if total.decay else None,
            lost=tuple(name for name in lost if is_float16[name]),
            frozen=tuple(
                FrozenParameter(name, int(sums.still), round(sums.unmoved / self._steps, 4))
                for name, sums in by_name.items()
                if name in lost and not is_float16[name]
            ),
            vanishing_eps=_vanishing_eps(self._run) if any(is_float16.values()) else None,
            spoilt_step=step,
            spoilt=names,
        )


class UpdateSums(NamedTuple):
    """Sums over the updates of a parameter: of squares, all and those of entries that did not move.

    ``still`` counts updates that moved no entry, ``unmoved`` adds up the share of entries that each did not move.
    """

    energy: float = 0.0
    lost: float = 0.0
    gradient: float = 0.0
    lost_gradient: float = 0.0
    decay: float = 0.0
    lost_decay: float = 0.0
    still: float = 0.0
    unmoved: float = 0.0


def _sums_of_update(start: torch.Tensor, wide: torch.Tensor, now: torch.Tensor, decay: float) -> torch.Tensor:
    """The ``UpdateSums`` of one update, as a tensor, so that a GPU need not be waited for."""
    before, unmoved = start.double(), now == start
    update = wide.double() - before
    by_decay = -decay * before
    parts = [part.square() for part in (update, update - by_decay, by_decay)]
    sums = [each for squares in parts for each in (squares.sum(), (squares * unmoved).sum())]
    return torch.stack([*sums, unmoved.all().double(), unmoved.double().mean()])


def _decoupled_decays(run: Run) -> Iterator[tuple[torch.nn.Parameter, float]]:
    """What share of each parameter an update takes off by itself."""
    for optimizer in run.workload.optimizers:
        for group in optimizer.param_groups:
            if group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)):
                yield from ((parameter, group["lr"] * group.get("weight_decay", 0.0)) for parameter in group["params"])


def _float32_update(run: Run, before: Held, half: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """The half parameters as an update in float32 leaves them; none where the optimizer cannot make it."""
    after, random_state = held_by(run.workload.optimizers), RandomState.now()
    try:
        before.restore()
        for tensor in before.tensors:
            _widen(tensor)
        with run.workload.user.running("the optimizer's step"):
            for optimizer in run.workload.optimizers:
                optimizer.step()
        return {name: parameter.data for name, parameter in half.items()}
    except AmpdbgError:
        return {}
    finally:
        after.restore()
        random_state.restore()


def _widen(tensor: torch.Tensor) -> None:
    """Gives a half parameter or a half tensor of an optimizer's state, and its gradient, memory in float32."""
    gradient, tensor.grad = tensor.grad, None
    tensor.data = widened(tensor.data, LIFTS["float32"])
    tensor.grad = None if gradient is None else widened(gradient, LIFTS["float32"])


def _vanishing_eps(run: Run) -> float | None:
    """The optimizers' eps, where float16 rounds it to zero."""
    groups = (group for optimizer in run.workload.optimizers for group in optimizer.param_groups)
    constants = (float(group["eps"]) for group in groups if isinstance(group.get("eps"), (int, float)))
    return next((eps for eps in constants if eps and not torch.tensor(eps, dtype=torch.float16).item()), None)
