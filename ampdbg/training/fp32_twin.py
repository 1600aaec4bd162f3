"""An FP32 twin of a training run, with the same batches and initial weights, and the distance of their losses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import TypeVar

from ampdbg.config.schema import Config
from ampdbg.observer import UNOBSERVED, Observer
from ampdbg.precision.modes import DTYPES
from ampdbg.precision.widening import lifted, rounded
from ampdbg.probes.draws import Draws, same_random_numbers
from ampdbg.record.run import Step
from ampdbg.replay.run import loss_of, prepared, run_pass
from ampdbg.training.loop import batches_of_steps, take_step

OfAStep = TypeVar("OfAStep")


class Losses(Observer):
    """Collects every loss and the skipped steps, which the record of a long run omits. Forwards all events."""

    def __init__(self, observer: Observer = UNOBSERVED) -> None:
        self._observer = observer
        self.seen: list[float] = []
        self.skipped: tuple[int, ...] = ()

    def step(self, step: Step) -> None:
        self.skipped += (step.step,) if step.skipped else ()
        self.seen.append(step.loss)
        self._observer.step(step)

    def replay(self, step: int, doing: str) -> None:
        self._observer.replay(step, doing)


def fp32_losses(
    config: Config,
    *,
    withheld: Collection[int] = (),
    is_rounded: bool = False,
) -> tuple[float, ...]:
    """Train the workload of ``config`` in FP32, and return the loss of each of its ``train.steps`` steps.

    Half regions that the model opens itself are FP32 too, as in every replay in FP32.

    Args:
        config: a checked config. Only its precision level is changed.
        withheld: steps to train without an update, such as a loss scaler's skipped steps. Only a twin with the same
            updates is comparable.
        is_rounded: round the initial weights to the run's half dtype. On a GPU, also draw dropout as in that dtype.
            This makes the smallest difference that training in that dtype could make.

    Raises:
        WorkloadError: a target cannot be used, or the device is not available.
        UserCodeError: the user's code raised.
    """
    low = DTYPES[config.precision.format.name]
    level = config.precision.model_copy(update={"level": "O0"})
    with prepared(config.model_copy(update={"precision": level})) as run:
        if is_rounded:
            for parameter in run.workload.model.parameters():
                parameter.data.copy_(rounded(parameter.data, low))
        without_scale = run.scaler()
        losses = []
        for number, batches in zip(range(config.train.steps), batches_of_steps(run), strict=False):
            run.workload.clear_gradients()
            drawn = same_random_numbers(Draws(every=low), notes=False) if is_rounded else nullcontext()
            with lifted("float32"), drawn:  # the model may enter autocast itself
                losses.append(loss_of(run_pass(run.workload, batches, run.mode.forward)))
            if number not in withheld:
                take_step(run, without_scale)
    return tuple(losses)


def last_quarter(steps: Sequence[OfAStep]) -> Sequence[OfAStep]:
    """Return the last quarter of the steps, rounded up."""
    return steps[len(steps) * 3 // 4 :]


def distance(losses: Sequence[float], others: Sequence[float], skipped: Collection[int] = ()) -> float:
    """Return the median relative difference of two equally long loss curves over the last quarter of their steps.

    Steps in ``skipped`` do not count. Return NaN if a loss is not finite or no step remains.
    """
    pairs = last_quarter(taken(list(zip(losses, others, strict=True)), skipped))
    if not pairs or not all(math.isfinite(value) for pair in pairs for value in pair):
        return math.nan
    return statistics.median(abs(one - other) / max(abs(other), 1e-12) for one, other in pairs)


def taken(steps: Sequence[OfAStep], skipped: Collection[int]) -> Sequence[OfAStep]:
    """Return the steps that made an update."""
    return [one for number, one in enumerate(steps) if number not in skipped]
