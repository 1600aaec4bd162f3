"""The failing steps of a proof in a file: written where they were found, read in each process that tries a patch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ampdbg.errors import AmpdbgError, UserCodeError, first_line
from ampdbg.replay.snapshot import FailingStep
from ampdbg.workload.build import Workload


def save_steps(steps: Sequence[FailingStep], path: Path) -> None:
    """Writes the steps with their batches, random states, buffers, attributes and weights.

    Raises:
        AmpdbgError: a batch holds what cannot be pickled, or the disk is full; the message is one line.
    """
    try:
        torch.save([_compact(step) for step in steps], path)
    except Exception as error:
        # Pickling runs the code of whatever a batch holds, which may raise anything.
        raise AmpdbgError(first_line(error)) from error


def load_steps(path: Path, workload: Workload) -> tuple[FailingStep, ...]:
    """Reads what :func:`save_steps` wrote, tensors on the devices that they were on.

    Args:
        path: a file that this ampdbg has written itself, a moment ago: only so may all of pickle be allowed in it
            (``weights_only=False``), which a batch of any class needs.
        workload: it is built, so that the modules that define those classes can be found.

    Raises:
        AmpdbgError: a class of a batch is not to be found in this process.
    """
    try:
        with workload.user.running("reading the failing steps"):
            steps: list[FailingStep] = torch.load(path, weights_only=False)
    except UserCodeError as error:
        raise AmpdbgError(first_line(error.__cause__ or error)) from error
    return tuple(replace(step, snapshot=replace(step.snapshot, beside=(workload.step.of,))) for step in steps)


def _compact(step: FailingStep) -> FailingStep:
    # What is beside the model is code of this process, and the patched one has its own.
    snapshot = replace(step.snapshot, state=step.snapshot.state.for_another_model(), beside=())
    return replace(step, snapshot=snapshot)
