"""Findings about the order of calls: what a misuse does to training, and the order that is right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ampdbg.record.findings import Finding, Phase, Severity
from ampdbg.record.run import Misuse, Record

FEW_SKIPS = 0.05
"""A learning-rate schedule that is ahead by a smaller share of the steps is no more than information."""


@dataclass(frozen=True)
class Meaning:
    """What one code says: how bad it is, where it happens, what it does, and the order that is right."""

    severity: Severity
    phase: Phase
    message: str
    remedy: str


MEANINGS: Mapping[str, Meaning] = {
    "misuse-clip-scaled": Meaning(
        "error",
        "optimizer",
        "gradients are clipped while they still carry the loss scale, so far below the limit that is meant",
        "clip after unscaling: scaler.unscale_(optimizer), then clip_grad_norm_, then scaler.step(optimizer)",
    ),
    "misuse-bare-step": Meaning(
        "error",
        "optimizer",
        "optimizer.step() is called beside the scaler, which then neither unscales gradients nor withholds bad ones",
        "replace it by scaler.step(optimizer), followed by scaler.update()",
    ),
    "misuse-unscale-twice": Meaning(
        "error",
        "optimizer",
        "unscale_ is called on gradients that are unscaled already",
        "call scaler.unscale_(optimizer) once between backward() and scaler.step(optimizer), which unscales by itself",
    ),
    "misuse-no-update": Meaning(
        "error",
        "optimizer",
        "scaler.update() is missing after scaler.step(optimizer): the scale never adapts, and the next step is refused",
        "call scaler.update() once at the end of each iteration, after the steps of all optimizers",
    ),
    "misuse-accumulate": Meaning(
        "error",
        "optimizer",
        "unscale_ or update is called between micro-batches whose gradients add up: their sum mixes different scales",
        "call unscale_, clipping, step and update only after the last micro-batch of each step",
    ),
    "misuse-stale-gradients": Meaning(
        "error",
        "backward",
        "the gradients of a skipped step are not cleared: inf stays in them, and every later step is skipped too",
        "call optimizer.zero_grad() in every iteration, whether the scaler has skipped the step or not",
    ),
    "misuse-half-parameters": Meaning(
        "error",
        "optimizer",
        "the parameters are float16, and so are their gradients, which a scaler does not unscale",
        "keep the parameters in float32 (no model.half()) and let autocast lower the ops",
    ),
    "misuse-no-scaler": Meaning(
        "warning",
        "backward",
        "the loss is computed in float16 and goes backward unscaled: gradients below 3e-8 become zero",
        "scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update() with a torch.amp.GradScaler",
    ),
    "misuse-scaler-bfloat16": Meaning(
        "warning",
        "backward",
        "the loss is computed in bfloat16 and scaled all the same: it has the range of float32 and needs no loss scale",
        "leave the scaler out, or make it with enabled=False",
    ),
    "misuse-unused-optimizer": Meaning(
        "error",
        "optimizer",
        "scaler.step(optimizer) is called for an optimizer none of whose parameters has a gradient",
        "step only the optimizers that the backward pass of this iteration has reached",
    ),
    "misuse-many-updates": Meaning(
        "warning",
        "optimizer",
        "scaler.update() comes before the step of an optimizer, whose gradients are then unscaled by the new scale",
        "call scaler.update() once, after the steps of all optimizers",
    ),
    "misuse-scheduler-on-skip": Meaning(
        "warning",
        "optimizer",
        "the learning-rate scheduler moves on although the scaler has skipped the optimizer's step",
        "compare scaler.get_scale() before and after update(), and call scheduler.step() unless it fell",
    ),
    "misuse-custom-function": Meaning(
        "error",
        "backward",
        "an autograd.Function without custom_fwd and custom_bwd meets mixed dtypes under autocast",
        "decorate forward with torch.amp.custom_fwd(device_type=..., cast_inputs=torch.float32) and backward with "
        "torch.amp.custom_bwd(device_type=...)",
    ),
    "misuse-backward-in-autocast": Meaning(
        "warning",
        "backward",
        "backward() is called inside autocast, which is meant for the forward pass and the loss alone",
        "end the autocast block before backward(): each backward op runs in the dtype of its forward op",
    ),
    "misuse-bce": Meaning(
        "error",
        "forward",
        "binary_cross_entropy on probabilities is unsafe in float16, and autocast refuses it",
        "return logits and use torch.nn.BCEWithLogitsLoss, which is safe under autocast",
    ),
    "misuse-gradient-penalty": Meaning(
        "error",
        "backward",
        "a penalty is computed from gradients of the scaled loss, and nothing has divided them by the scale",
        "divide what torch.autograd.grad returns by scaler.get_scale() before the penalty, inside autocast",
    ),
}


def misuses(record: Record) -> Iterator[Finding]:
    """Misuses that corrupt the training: nothing that comes after them says anything about precision."""
    return (finding for finding in _findings(record) if finding.severity == "error")


def doubtful_misuses(record: Record) -> Iterator[Finding]:
    """Misuses that do little harm: they explain nothing else, and come last."""
    return (finding for finding in _findings(record) if finding.severity != "error")


def _findings(record: Record) -> Iterator[Finding]:
    # An error that ended the run is told as such, from the same line.
    told = record.autocast_error.code if record.autocast_error else ""
    for found in record.misuses:
        if found.code != told and found.code in MEANINGS:
            yield _finding(found, MEANINGS[found.code], len(record.steps))


def _finding(found: Misuse, meaning: Meaning, steps: int) -> Finding:
    times = f" ({found.count} times)" if found.count > 1 else ""
    refused = f"; torch says: {found.raised}" if found.raised else ""
    return Finding(
        code=found.code,
        severity=_severity(found, meaning, steps),
        step=found.step,
        phase=meaning.phase,
        message=f"{meaning.message}{times}{refused}",
        remedy=meaning.remedy,
        source=found.source,
        evidence={"count": found.count, "steps": steps},
    )


def _severity(found: Misuse, meaning: Meaning, steps: int) -> Severity:
    """What torch refuses ends the run; a schedule that is hardly ahead is nothing to act upon."""
    if found.raised:
        return "error"
    if found.code == "misuse-scheduler-on-skip" and found.count < FEW_SKIPS * steps:
        return "info"
    return meaning.severity
