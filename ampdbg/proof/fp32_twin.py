"""The FP32 twin of a training run: the same batches from the same weights, and how far two runs' losses are apart."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Sequence
from typing import TypeVar

import torch

from ampdbg.config import Config
from ampdbg.observer import UNOBSERVED, Observer
from ampdbg.precision.modes import DTYPES
from ampdbg.precision.widening import rounding_to
from ampdbg.replay.passes import loss_of, run_pass
from ampdbg.replay.run import Run, prepared
from ampdbg.training.loop import update_weights

OfAStep = TypeVar("OfAStep")


def fp32_losses(
    config: Config,
    *,
    withheld: Collection[int] = (),
    is_rounded: bool = False,
    observer: Observer = UNOBSERVED,
) -> tuple[float, ...]:
    """Trains the workload of ``config`` in FP32 and returns the loss of each of its ``train.steps`` steps.

    Args:
        config: a checked config; only its level is another.
        withheld: steps whose update is not made, as a loss scaler's skipped steps are not: only a twin that has made
            the same updates is comparable.
        is_rounded: the weights that it starts from are rounded to the run's half dtype, which makes the smallest
            difference that training in that dtype could make.
        observer: gets a sign of life after each step.

    Raises:
        WorkloadError: a target cannot be used, or the device is not there.
        UserCodeError: the user's code raised.
    """
    low = DTYPES[config.precision.format.name]
    level = config.precision.model_copy(update={"level": "O0"})
    with prepared(config.model_copy(update={"precision": level})) as run:
        if is_rounded:
            _round_weights(run.workload.model, low)
        without_scale = run.mode.scaler()
        batches, losses = run.workload.batches(), []
        for number in range(config.train.steps):
            losses.append(_accumulated(run, tuple(itertools.islice(batches, config.train.accumulate))))
            if number not in withheld:
                update_weights(run, without_scale)
            observer.stage("")
    return tuple(losses)


def distance(losses: Sequence[float], others: Sequence[float], skipped: Collection[int] = ()) -> float:
    """How far two runs of one length are apart: the median relative difference over the last quarter of their steps.

    What was ``skipped`` does not count. NaN where a loss is not finite, or no step is left.
    """
    pairs = last_quarter(taken(list(zip(losses, others, strict=True)), skipped))
    if not pairs or not all(math.isfinite(value) for pair in pairs for value in pair):
        return math.nan
    return statistics.median(abs(one - other) / max(abs(other), 1e-12) for one, other in pairs)


def last_quarter(steps: Sequence[OfAStep]) -> Sequence[OfAStep]:
    """What there is of the last quarter of the steps, rounded up."""
    return steps[len(steps) * 3 // 4 :]


def taken(steps: Sequence[OfAStep], skipped: Collection[int]) -> Sequence[OfAStep]:
    """What there is of the steps whose update was made."""
    return [one for number, one in enumerate(steps) if number not in skipped]


def _round_weights(model: torch.nn.Module, dtype: torch.dtype) -> None:
    rounded = rounding_to(dtype)
    for parameter in model.parameters():
        parameter.data.copy_(rounded(parameter.data))


def _accumulated(run: Run, batches: tuple[object, ...]) -> float:
    for optimizer in run.workload.optimizers:
        optimizer.zero_grad(set_to_none=True)
    return loss_of(run_pass(run.workload, batches, run.mode.forward))
