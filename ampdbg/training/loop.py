"""The training loop: the reference order of autocast, scale, backward, unscale_, clip, step, update, watched."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import torch

from ampdbg.config import Config
from ampdbg.errors import UserCodeError
from ampdbg.precision.levels import autocast_region, loss_scaler
from ampdbg.probes.coverage import coverage
from ampdbg.probes.nonfinite import nonfinite_in_batch
from ampdbg.probes.watch import Watch, watch
from ampdbg.record import Record, Step, Unseen
from ampdbg.training.autocast_error import autocast_error
from ampdbg.training.environment import describe_environment
from ampdbg.training.run import Run, prepared


def train(config: Config, *, on_step: Callable[[Step], None] = lambda step: None, command: str = "scan") -> Record:
    """Trains the workload of ``config`` under its precision policy and watches every step.

    Args:
        config: a checked config.
        on_step: called after each optimizer step.
        command: the name that the record carries.

    Returns:
        What was seen, not yet diagnosed. An interrupt ends the run early (``interrupted``), and so does an
        error of the user's code that autocast causes (``autocast_error``).

    Raises:
        WorkloadError: a target cannot be used, or the device is not there.
        UserCodeError: the user's code raised, and would have raised in FP32 too.
    """
    started = time.monotonic()
    with prepared(config) as run:
        record = Record(
            command=command,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            environment=describe_environment(config, run.device),
            config=config.resolved(),
            verdict="inconclusive",
            planned_steps=config.train.steps,
        )
        record = _watched(run, record, on_step)
    return replace(record, elapsed=round(time.monotonic() - started, 3))


def _watched(run: Run, record: Record, on_step: Callable[[Step], None]) -> Record:
    error, interrupted, unseen = None, False, Unseen()
    with watch(run.workload.model, run.workload.optimizers, on_step) as watcher:
        try:
            for unseen in _steps(run, watcher):  # noqa: B007 - the last one stays when the loop is interrupted
                pass
        except KeyboardInterrupt:
            interrupted = True
        except UserCodeError as raised:
            error = autocast_error(raised, step=len(watcher.steps))
            if error is None:
                raise
    return replace(
        record,
        steps=watcher.steps,
        groups=watcher.groups,
        unseen=unseen,
        interrupted=interrupted,
        autocast_error=error,
    )


def _steps(run: Run, watcher: Watch) -> Iterator[Unseen]:
    """Trains the steps; yields what the first one left untouched, after each."""
    scaler = loss_scaler(run.config.precision, run.device)
    batches = run.workload.batches()
    with coverage(run.workload.model) as covered:
        _accumulate(run, watcher, scaler, batches)
        unseen = covered.unseen()
    _apply(run, scaler)
    yield unseen
    for _ in range(1, run.config.train.steps):
        _accumulate(run, watcher, scaler, batches)
        _apply(run, scaler)
        yield unseen


def _accumulate(run: Run, watcher: Watch, scaler: torch.amp.GradScaler, batches: Iterator[Any]) -> None:
    """Adds up the gradients of one step's micro-batches; several losses go backward one after another."""
    for optimizer in run.workload.optimizers:
        optimizer.zero_grad(set_to_none=True)
    share = 1.0 / run.config.train.accumulate
    for _ in range(run.config.train.accumulate):
        batch = next(batches)
        watcher.see_batch(nonfinite_in_batch(batch))
        with autocast_region(run.config.precision, run.device):
            losses = run.workload.losses(batch)
        watcher.see_losses(losses, share)
        for position, loss in enumerate(losses.values(), start=1):
            more_to_come = position < len(losses)
            with run.workload.user.running("the backward pass"):
                scaler.scale(loss * share if share != 1.0 else loss).backward(retain_graph=more_to_come)


def _apply(run: Run, scaler: torch.amp.GradScaler) -> None:
    """Unscales and clips where asked, then lets the scaler step or skip."""
    limit = run.config.train.clip_grad_norm
    with run.workload.user.running("the optimizer's step"):
        for optimizer in run.workload.optimizers:
            if limit is not None:
                scaler.unscale_(optimizer)
                parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                torch.nn.utils.clip_grad_norm_(parameters, limit)
            scaler.step(optimizer)
        scaler.update()
