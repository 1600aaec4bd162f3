"""The failing step's forward pass in eval mode: code of the user's may take other branches there, and raise in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ampdbg.errors import AmpdbgError
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import FailingStep, rewound
from ampdbg.workload.losses import call_model


def raised_in_eval_mode(run: Run, failing: FailingStep) -> str:
    """What one forward pass in eval mode raises, in a line; "" where it runs.

    It is that of the step's first batch, under the run's autocast and without a graph. Mode, buffers and random state
    are put back; the model must have the step's weights.
    """
    model, user = run.workload.model, run.workload.user
    try:
        with (
            rewound(model, failing.snapshot),
            user.running(type(model).__name__),
            _in_eval_mode(model),
            torch.no_grad(),
            run.mode.forward(),
        ):
            _forward(run, failing.snapshot.batches[0])
    except AmpdbgError as error:
        return str(error).partition("\n")[0]
    return ""


def _forward(run: Run, batch: Any) -> None:
    """The model alone where the loss comes after it: in eval mode its output may be none that the loss takes."""
    if run.config.step is None and run.config.loss is not None:
        call_model(run.workload.model, batch)
    else:
        run.workload.step.call(batch, 0)


@contextlib.contextmanager
def _in_eval_mode(model: torch.nn.Module) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    is_training = model.training
    try:
        model.eval()
        yield
    finally:
        # A method of the user's own may do more than to set the mode, and undo that in the same way.
        model.train(is_training)
        for module, mode in before:
            module.training = mode
