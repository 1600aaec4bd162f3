"""A comparison of the precision levels: each trains the same workload from the same start and is measured."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree

from ampdbg.config.schema import Config, LossScale, Precision
from ampdbg.costs.step import PassUse, bytes_of, use_of_a_pass
from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.errors import AmpdbgError, first_line
from ampdbg.levels import LEVELS
from ampdbg.observer import Observer
from ampdbg.record.run import BatchFit, Costs, LevelCost, Record, StepMemory
from ampdbg.replay.copies import altered_batch
from ampdbg.replay.run import Run, prepared, run_pass
from ampdbg.training.fp32_twin import Losses, distance, fp32_losses
from ampdbg.training.loop import batches_of_steps, train_prepared, update_weights
from ampdbg.workload.batches import tensor_leaves

REPLAYS = 1
"""This many unhealthy steps of each kind are replayed. One is enough to show if the level trains."""

WARM_UP, TIMED = 3, 10
"""Steps on a GPU. The step time is the median of the timed steps."""

FUSED = "a GPU's fused kernels may keep less than the CPU's: dropout keeps a mask of one byte per element"

SKIPPED = "to compare losses, ampdbg also trained FP32 without the updates that a loss scale skipped"


def compare(config: Config, pins: tuple[str, ...], memory: int | None, observer: Observer) -> Record:
    """Train ``train.steps`` steps at each level and measure the cost of one step.

    Args:
        pins: names to run in FP32 in addition to the config's pins.
        memory: a memory budget in bytes; if given, also find the largest batch that fits.
        observer: sees the start of each level and its steps.

    Returns:
        A record with ``costs``. After an interrupt, it omits unfinished levels.

    Raises:
        WorkloadError, UserCodeError: no level could run; the error is the first level's.
    """
    started, interrupted, made = time.monotonic(), False, _Comparison(memory, observer)
    try:
        for name, at in levels_of(config, (*config.precision.pins, *pins)):
            made.run(name, at)
            gc.collect()  # frees a GPU's memory for the next level
        made.against_fp32(config)
    except KeyboardInterrupt:
        interrupted = True
    if not made.records:
        raise made.failures[0] if made.failures else KeyboardInterrupt
    ran_on = next((record for record in made.records if record.environment.emulated), made.records[0])
    return Record(
        command="cost",
        created=ran_on.created,
        environment=ran_on.environment,
        config=config.resolved(),
        config_folder=config.folder_from_start(),
        verdict="inconclusive",
        planned_steps=config.train.steps,
        costs=Costs(tuple(made.levels), made.batch, memory, tuple(made.notes)),
        interrupted=interrupted,
        elapsed=round(time.monotonic() - started, 3),
    )


def levels_of(config: Config, pins: tuple[str, ...]) -> Iterator[tuple[str, Config]]:
    """Yield the levels' names and configs; O1 with pins only if there are any."""
    yield "FP32", _at(config, "O0")
    yield "O1", _at(config, "O1")
    if pins:
        yield "O1 with pins", _at(config, "O1", pins=pins)
    yield "O2", _at(config, "O2")
    yield "O3", _at(config, "O3")
    yield "bfloat16", _at(config, "O1", dtype="bfloat16")


def _at(config: Config, level: str, dtype: str = "float16", pins: tuple[str, ...] = ()) -> Config:
    """Return the config at a level, as ``--set precision.level`` would; its own loss scale settings are kept."""
    own, scale = config.precision, config.precision.loss_scale
    given: dict[str, Any] = {"level": level, "dtype": dtype, "policy": own.policy, "pins": pins}
    if scale != Precision.model_validate({"level": own.level}).loss_scale:
        given["loss_scale"] = scale.model_dump(exclude_defaults=True) if isinstance(scale, LossScale) else scale
    if own.has_half_weights and LEVELS[level].has_half_weights:
        given |= {"keep_norms_fp32": own.keep_norms_fp32, "master_weights": own.master_weights}
    return config.model_copy(update={"precision": Precision.model_validate(given)})


class _Comparison:
    """The results of the levels so far, with notes; each level prepares its own workload."""

    def __init__(self, budget: int | None, observer: Observer) -> None:
        self._budget = budget
        self._observer = observer
        self._losses: dict[str, Losses] = {}
        self.levels: list[LevelCost] = []
        self.records: list[Record] = []
        self.failures: list[AmpdbgError] = []
        self.notes: dict[str, None] = {}
        self.batch: int | None = None

    def run(self, name: str, config: Config) -> None:
        """Train a level as ``ampdbg scan`` does and measure a step. An error in user code ends this level only."""
        self._observer.level(name)
        precision, losses = config.precision, Losses(self._observer)
        cost = LevelCost(name, precision.level, precision.format.name, precision.pins)
        try:
            with prepared(config) as run:
                record = diagnose(train_prepared(run, observer=losses, command="cost", replays=REPLAYS))
                if record.interrupted:
                    raise KeyboardInterrupt
                cost = _with_training(cost, record)
                if not cost.error:
                    cost = self._with_use(cost, run)
            self.records.append(record)
        except AmpdbgError as error:
            cost = replace(cost, error=_in_a_line(str(error)))
            error.__cause__ = error.__context__ = None  # frames would keep this level's model alive
            self.failures.append(error.with_traceback(None))
        self.levels.append(cost)
        self._losses[name] = losses

    def _with_use(self, cost: LevelCost, run: Run) -> LevelCost:
        """Return the cost with a step's measurements. The run must not be used afterward."""
        try:
            batch = next(batches_of_steps(run))[0]
            seconds, peak = _timed(run) if run.device.type == "cuda" else (None, None)
            use = _pass(run, batch)
            memory = _memory(run, use)
            cost = replace(cost, seconds=seconds, peak=peak, memory=memory, flops=dict(use.flops))
            if self._budget is not None:
                room = self._budget - (memory.total - memory.activations)
                fit = largest_batch(batch, room, memory.activations, lambda other: _pass(run, other).activations)
                cost = replace(cost, fit=fit)
        except AmpdbgError as error:
            self.notes[f"{cost.name} could not be measured: {first_line(error)}"] = None
            return cost
        self.batch = (shared_dimension(batch) or (0, None))[1]
        self.notes |= dict.fromkeys([FUSED] if run.device.type == "cpu" else [])
        return cost

    def against_fp32(self, config: Config) -> None:
        """Add the distance of each level's losses from FP32's, and of FP32 from itself with rounded initial weights."""
        if not self.levels[0].trains:
            return
        noises: dict[str, float | None] = {}
        twins: dict[tuple[int, ...], Sequence[float] | None] = {(): self._losses["FP32"].seen}
        for number, one in enumerate(self.levels[1:], start=1):
            if not one.trains:
                continue
            at, losses = _at(config, "O1", one.dtype), self._losses[one.name]
            if one.dtype not in noises:
                rounded = self._fp32(f"from weights rounded to {one.dtype}", at, is_rounded=True)
                noises[one.dtype] = None if rounded is None else distance(rounded, self._losses["FP32"].seen)
            if losses.skipped not in twins:
                twins[losses.skipped] = self._fp32(f"without the steps that {one.name} skipped", at, losses.skipped)
            twin = twins[losses.skipped]
            apart = None if twin is None else distance(losses.seen, twin, losses.skipped)
            self.levels[number] = replace(one, apart=apart, noise=noises[one.dtype])
            if losses.skipped and twin is not None:
                self.notes[SKIPPED] = None

    def _fp32(
        self, how: str, config: Config, withheld: Sequence[int] = (), *, is_rounded: bool = False
    ) -> Sequence[float] | None:
        """Return FP32's losses in another run, or None if it raises."""
        self._observer.stage(f"FP32 {how}")
        with contextlib.suppress(AmpdbgError):
            return fp32_losses(config, withheld=withheld, is_rounded=is_rounded)
        return None


def _with_training(cost: LevelCost, record: Record) -> LevelCost:
    return replace(
        cost,
        verdict=record.verdict,
        finding=next(iter(record.faults), None),
        error=_in_a_line(record.autocast_error.message) if record.autocast_error else "",
        steps=record.steps_run,
        skipped=record.steps_skipped,
        loss=record.steps[-1].loss if record.steps else None,
    )


def _in_a_line(text: str) -> str:
    return "; ".join(filter(None, map(str.strip, text.splitlines())))


def _pass(run: Run, batch: Any) -> PassUse:
    run.workload.clear_gradients()
    return use_of_a_pass(run.workload, batch, run.mode.forward)


def _memory(run: Run, use: PassUse) -> StepMemory:
    """Return a step's memory. It takes a step on zero gradients, since skipped steps create no optimizer state."""
    model, optimizers = run.workload.model, run.workload.optimizers
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    size = bytes_of(gradients)
    for gradient in gradients:
        gradient.zero_()
    update_weights(run, torch.amp.GradScaler(run.device.type, enabled=False))
    return StepMemory(
        parameters=bytes_of([*model.parameters(), *model.buffers()]),
        masters=bytes_of(run.mode.master_weights()),
        gradients=size,
        optimizer=bytes_of(_pytree.tree_leaves([list(optimizer.state.values()) for optimizer in optimizers])),
        casts=use.casts,
        activations=use.activations,
    )


def _timed(run: Run) -> tuple[float, int]:
    """Return the median seconds of a step on a GPU and its peak memory. An emulated step has neither."""
    scaler, every, seconds = run.scaler(), batches_of_steps(run), []
    for number, batches in zip(range(WARM_UP + TIMED), every, strict=False):
        if number == WARM_UP:
            torch.cuda.reset_peak_memory_stats(run.device)
        torch.cuda.synchronize(run.device)
        started = time.perf_counter()
        run.workload.clear_gradients()
        run_pass(run.workload, batches, run.mode.forward, scaled=scaler.scale)
        update_weights(run, scaler)
        torch.cuda.synchronize(run.device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[WARM_UP:]), torch.cuda.max_memory_allocated(run.device)


# The largest batch: the config's batch is doubled, and its saved bytes are measured again


MOST_TIMES = 16
"""The largest multiple to measure if memory does not grow in proportion."""

MOST_DOUBLINGS = 20

IN_PROPORTION = 0.01
"""Two doublings with growth within this relative tolerance are extrapolated."""


def shared_dimension(batch: Any) -> tuple[int, int] | None:
    """Return the first dimension with one size in all tensors of a batch, and that size, or None."""
    leaves = [leaf for _, leaf in tensor_leaves(batch)]
    if any(leaf.is_nested for leaf in leaves):  # nested tensors have several sizes
        return None
    shapes = [leaf.shape for leaf in leaves if leaf.ndim]
    sizes = [set(each) for each in zip(*shapes, strict=False)]
    return next(((d, int(*each)) for d, each in enumerate(sizes) if len(each) == 1), None)


def enlarged(batch: Any, times: int, dimension: int) -> Any:
    """Return the batch repeated along the dimension. Scalars are unchanged."""
    return altered_batch(batch, lambda leaf: torch.cat([leaf] * times, dimension) if leaf.ndim else leaf)


def largest_batch(batch: Any, room: int, activations: int, activations_of: Callable[[Any], int]) -> BatchFit:
    """Find how many times the batch fits by doubling: measure until growth is proportional, then extrapolate.

    Args:
        batch: a batch of the config.
        room: the bytes available for activations.
        activations: the bytes of the batch's own activations.
        activations_of: returns the activation bytes of another batch.
    """
    shared, measured = shared_dimension(batch), [activations]
    while measured[-1] <= room:
        times = 2 ** (len(measured) - 1)
        if shared is None:
            return BatchFit(times, tuple(measured), why="its tensors share no dimension that could be doubled")
        if _in_proportion(measured):
            each = (measured[-1] - measured[-2]) * 2 / times
            fitting = (2**n for n in range(MOST_DOUBLINGS + 1) if activations + each * (2**n - 1) <= room)
            return BatchFit(max(fitting), tuple(measured), is_reckoned=True)
        if times == MOST_TIMES:
            return BatchFit(
                times, tuple(measured), why="memory does not grow in proportion, so ampdbg tried no larger batch"
            )
        try:
            larger = enlarged(batch, 2 * times, shared[0])
        except Exception as error:  # noqa: BLE001 - raised by a tensor subclass or an allocator
            return BatchFit(times, tuple(measured), why=f"torch cannot double the batch: {first_line(error)}")
        try:
            measured.append(activations_of(larger))
        except AmpdbgError as error:
            return BatchFit(times, tuple(measured), why=f"{2 * times} times: {first_line(error)}")
    return BatchFit(2 ** (len(measured) - 1) // 2, tuple(measured))


def _in_proportion(measured: Sequence[int]) -> bool:
    one, two, four = measured[-3:] if len(measured) > 2 else (0, 0, 0)
    return two > one and math.isclose(four - two, 2 * (two - one), rel_tol=IN_PROPORTION)
