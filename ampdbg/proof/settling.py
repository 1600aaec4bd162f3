"""How long the training run of a proof has to be for some of its steps to be taken: the loss scale settles first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampdbg.config import LossScale, Precision
from ampdbg.formats import FLOAT16
from ampdbg.proof.jobs import Job, Trained, Tried

SPARE = 2
"""A later batch may need a lower loss scale than the failing steps do: so many halvings are allowed for it."""

MOST_MORE = 64
"""A run is not made longer than by so many steps; float32 bears 64 halvings of 65536 and more."""


def steps_to_train(job: Job, tried: Sequence[Tried]) -> int:
    """The steps of the job's training runs, and more where the loss scale would take over half of them to settle.

    Args:
        job: the proof's.
        tried: the failing steps with the patch, each at a loss scale that its gradients bear.
    """
    skips = _skips(job.config.precision, tried)
    return job.train_steps if 2 * skips <= job.train_steps else job.train_steps + min(skips + SPARE, MOST_MORE)


def _skips(precision: Precision, tried: Sequence[Tried]) -> int:
    """So many skipped steps bring the loss scale from its first value to one at which the failing steps are healthy."""
    scale = precision.loss_scale
    if precision.format is not FLOAT16 or not isinstance(scale, LossScale):
        return 0
    # Less a rounding error: 64 is six halvings and no seventh.
    halvings = math.log(scale.init / min(one.scale for one in tried)) / -math.log(scale.backoff_factor)
    return max(0, math.ceil(halvings - 1e-9))


def why_nothing_was_trained(precision: Precision, trained: Trained, tried: Sequence[Tried]) -> str:
    """What is wrong with a run of which every step was skipped, and what to type; "" for any other run."""
    if not trained.losses or len(trained.skipped) < len(trained.losses):
        return ""
    at = f"every step was skipped, and nothing was trained: the loss scale of {trained.scale:g}"
    if isinstance(precision.loss_scale, LossScale):
        steps = len(trained.losses) + max(len(trained.losses), _skips(precision, tried) + SPARE)
        return f"{at} is still falling; give the run more steps: --set train.steps={steps}"
    lower = min(*(one.scale for one in tried), trained.scale / 4)
    return f"{at} is too large for the gradients: --set precision.loss_scale={lower:g}"
