"""The training runs of a proof, with the patch and in FP32."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ampdbg.config.schema import Config, LossScale
from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.errors import AmpdbgError, first_line
from ampdbg.formats import FLOAT16
from ampdbg.observer import Observer
from ampdbg.proof.jobs import Job, StepUse, Trained, Tried, prepared_with
from ampdbg.record.codes import CODES
from ampdbg.record.findings import Finding
from ampdbg.record.run import Record, Step
from ampdbg.training.fp32_twin import Losses, fp32_losses, last_quarter
from ampdbg.training.loop import train

REPLAYED_STEPS = 2
"""At most so many unhealthy steps of each kind are replayed in the run with the patch."""

LONGEST_EXTRA_RUN = 120.0
"""Seconds that the training run may take which shows how far apart two runs in FP32 are."""


def trained_with_the_patch(job: Job, tried: Sequence[Tried], observer: Observer) -> Trained:
    """Its dynamic loss scale begins no higher than where it would settle: skipped steps prove nothing.

    Args:
        job: the proof's.
        tried: the failing steps with the patch, each at a loss scale that its gradients bear.
        observer: sees that it begins.
    """
    observer.stage(f"{job.train_steps} steps with the patch")
    precision, borne = job.config.precision, min(one.scale for one in tried)
    scale = precision.loss_scale
    if precision.format is not FLOAT16 or not isinstance(scale, LossScale) or scale.init <= borne:
        return _trained(job)
    settled = precision.model_copy(update={"loss_scale": scale.model_copy(update={"init": borne})})
    trained = _trained(replace(job, config=job.config.model_copy(update={"precision": settled})))
    return replace(trained, begun_at=borne)


def reference_runs(job: Job, uses: Mapping[str, StepUse], observer: Observer) -> dict[str, Trained]:
    """The runs without the patch: in FP32, and in FP32 from rounded weights unless that takes long."""
    observer.stage(f"{job.train_steps} steps in FP32")
    runs = {"float32": _trained_in_fp32(job)}
    if "float32" in uses and uses["float32"].seconds * job.train_steps < LONGEST_EXTRA_RUN:
        observer.stage(f"{job.train_steps} steps in FP32 from rounded weights")
        runs["rounded"] = _trained_in_fp32(job, is_rounded=True)
    return runs


def _trained_in_fp32(job: Job, *, is_rounded: bool = False) -> Trained:
    try:
        losses = fp32_losses(_longer(job), withheld=job.withheld, is_rounded=is_rounded)
    except AmpdbgError as error:
        return Trained(steps=job.train_steps, failure=first_line(error))
    return Trained(steps=job.train_steps, losses=losses)


def disproves(finding: Finding, steps: Sequence[Step]) -> bool:
    """Whether a finding in the run with the patch disproves the patch; ``steps`` are those of the run.

    A warning does not: its step agrees with FP32. Neither does what the loss scale went through in a run whose last
    steps were taken: gradients that grow take a few skips, and one of 1e-15 is lost at any scale.
    """
    code = CODES[finding.code]
    if finding.severity != "error" or not code.counts_against_a_patch:
        return False
    end = last_quarter(steps)
    goes_on = bool(end) and all(math.isfinite(step.loss) and not step.skipped for step in end)
    return not (code.passes and goes_on)


def _trained(job: Job) -> Trained:
    """Trained as ``ampdbg scan`` does, and diagnosed as far as its replays allow."""
    losses, failure = Losses(), ""
    try:
        record = train(
            _longer(job),
            observer=losses,
            prepare=functools.partial(prepared_with, job.patched),
            replays=REPLAYED_STEPS,
        )
    except AmpdbgError as error:
        if not isinstance(error.record, Record):
            return Trained(steps=job.train_steps, failure=first_line(error))
        record, failure = error.record, first_line(error)
    if record.interrupted:
        raise KeyboardInterrupt
    findings = [finding for finding in diagnose(record).findings if finding.severity != "info"]
    return Trained(
        steps=job.train_steps,
        losses=tuple(losses.seen),
        skipped=tuple(step.step for step in record.steps if step.skipped),
        scale=record.steps[-1].scale if record.steps else 1.0,
        faults=tuple(f"{finding.code}: {finding.message}" for finding in findings if disproves(finding, record.steps)),
        beside=tuple(finding.code for finding in findings if not disproves(finding, record.steps)),
        failure=failure,
    )


def _longer(job: Job) -> Config:
    """The config with the number of steps of the job's training runs."""
    steps = job.config.train.model_copy(update={"steps": job.train_steps})
    return job.config.model_copy(update={"train": steps})
