"""The experiments of a proof, in a process that has the patched code: the failing steps, further batches, training."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pickle
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch

from ampdbg.config.schema import Config, LossScale
from ampdbg.costs.step import use_of_a_pass
from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.errors import AmpdbgError, WorkloadError, first_line, named_error
from ampdbg.files import replace_file
from ampdbg.formats import FLOAT16
from ampdbg.observer import Observer
from ampdbg.pinning.experiment import gradients_far, health_of, judged, on_further_batches
from ampdbg.precision.emulation import is_emulating
from ampdbg.proof.jobs import (
    CapturedStep,
    Job,
    Patched,
    Seen,
    StepUse,
    Trained,
    Tried,
    load_steps,
    overlaid,
    pinned_by,
    prepared_with,
)
from ampdbg.proof.processes import own_stdout
from ampdbg.record.codes import CODES
from ampdbg.record.findings import Finding
from ampdbg.record.run import Investigation, Producer, Record, Step
from ampdbg.replay.pinned_replays import PinnedReplays
from ampdbg.replay.replay import Manner, replay_step
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import FailingStep, rewound, weights_of
from ampdbg.script.capture import Capture, CaptureError
from ampdbg.script.restart import RestoredStep, restore_in_script
from ampdbg.training.fp32_twin import Losses, fp32_losses, last_quarter
from ampdbg.training.loop import train
from ampdbg.workload.losses import call_model


def main() -> None:
    """Takes a task and the path of the result from the command line; writes a line to stdout for each stage."""
    task, result = map(Path, sys.argv[1:3])
    stages = own_stdout()
    # The user's code is to find the command line that it has found before.
    job, steps, threads, sys.argv = pickle.loads(task.read_bytes())
    torch.set_num_threads(threads)

    def deliver(seen: Seen) -> None:
        replace_file(result, pickle.dumps(seen))

    if job.captured is None:
        deliver(perform(job, steps, _StagesTo(stages)))
    else:
        deliver(perform_in_script(job, job.captured, _StagesTo(stages), deliver, result.parent))


class _StagesTo(Observer):
    def __init__(self, stages: IO[str]) -> None:
        self._stages = stages

    def stage(self, doing: str) -> None:
        self._stages.write(f"{doing}\n")
        self._stages.flush()


def perform(job: Job, steps: Path, observer: Observer) -> Seen:
    """Runs the job with its files in the place of those on disk; ``steps`` is the file with the failing steps.

    Whatever the user's code or its patched form raises is the ``failure`` of what was seen.
    """
    with overlaid(job.patched.files) as taken:

        def seen() -> Seen:
            with prepared_with(job.patched, job.config) as run:
                seen = _seen(run, _fitting(load_steps(steps, run.workload), run), job, observer)
                begins_at = run.scaler().get_scale()
            # The training runs build a workload of their own.
            if seen.is_over:
                return seen
            if job.kind == "patched":
                runs = {"patched": trained_with_the_patch(job, seen.tried, observer, begins_at)}
            else:
                runs = reference_runs(job, seen.uses, observer)
            return replace(seen, runs=runs)

        return replace(_without_raising(seen), unused=_unused(job, taken))


def perform_in_script(
    job: Job, captured: CapturedStep, observer: Observer, deliver: Callable[[Seen], None], folder: Path
) -> Seen:
    """Runs the job in the script that its step was captured in, and hands what was seen to ``deliver``.

    The process ends then, in the middle of the script: nothing of it is to run on. Returns only where the script
    cannot be taken over, and why.
    """
    capture = Capture(captured.path, captured.script, is_patched=bool(job.patched.files))
    start = capture.start
    with overlaid(job.patched.files) as taken:
        script = None if start.is_module else os.path.realpath(start.name)
        own = next((path for path in job.patched.files if os.path.realpath(path) == script), None)

        def use(step: RestoredStep | CaptureError) -> None:
            def seen() -> Seen:
                if isinstance(step, CaptureError):
                    raise step
                with pinned_by(job.patched, step.run):
                    return _seen(step.run, (step.failing(captured.made),), job, observer)

            if own is not None:
                taken.add(own)
            deliver(replace(_without_raising(seen), unused=_unused(job, taken)))
            os._exit(0)

        def started() -> Seen:
            restore_in_script(capture, use, folder, job.patched.files[own] if own is not None else None)
            raise AssertionError("the process ends in the script")

        return _without_raising(started)


def _unused(job: Job, taken: set[Path]) -> tuple[str, ...]:
    return tuple(path.name for path in job.patched.files if path not in taken)


def _without_raising(see: Callable[[], Seen]) -> Seen:
    """What was seen, or as its ``failure`` what the user's code or its patched form has raised."""
    try:
        return see()
    except AmpdbgError as error:
        return Seen(failure=first_line(error))
    except Exception as error:  # noqa: BLE001 - a patched model may break what every other model keeps to
        return Seen(failure=named_error(error))


def _seen(run: Run, steps: Sequence[FailingStep], job: Job, observer: Observer) -> Seen:
    """The failing steps, and what is to be known of the first besides."""
    is_patched = job.kind == "patched"
    tried = tuple(_each_tried(run, steps, job))
    if job.kind == "dropped" or (is_patched and not tried[-1].healthy):
        return Seen(tried=tried, is_over=True)
    with weights_of(run.workload.model, steps[0]):
        further, further_failure = _further(run, steps[0], tried[0].scale, job, observer) if is_patched else ((), "")
        low = run.mode.format.name
        ways = {"patched": low} if is_patched else {"unpatched": low, "float32": "float32"}
        if steps[0].made.reach == "modules":  # nothing goes backward
            ways = {}
        uses = {way: use for way, dtype in ways.items() if (use := step_use(run, steps[0], dtype))}
        eval_failure = raised_in_eval_mode(run, steps[0])
    return Seen(tried=tried, further=further, further_failure=further_failure, eval_failure=eval_failure, uses=uses)


def _fitting(steps: Sequence[FailingStep], run: Run) -> Sequence[FailingStep]:
    shapes = [parameter.shape for parameter in run.workload.model.parameters()]
    if any([weight.shape for weight in step.snapshot.weights] != shapes for step in steps):
        raise WorkloadError("the model has other parameters than the failing step")
    return steps


def _each_tried(run: Run, steps: Sequence[FailingStep], job: Job) -> Iterator[Tried]:
    """Of each failing step the first of the job's repeats that is unhealthy, else the last.

    But for the reference, the first step that is unhealthy is enough.
    """
    for failing, scales in zip(steps, job.scales, strict=True):
        replays = PinnedReplays(run, failing, scales)
        with weights_of(run.workload.model, failing):
            for _ in range(job.repeats):
                tried = _tried(replays, job)
                if not tried.healthy:
                    break
        yield tried
        if not tried.healthy and job.kind != "reference":
            return


def _tried(replays: PinnedReplays, job: Job) -> Tried:
    _, made = judged(replays, (), "unhealthy" if job.kind == "patched" else "always", is_silent=job.is_silent)
    low, fp32 = made.low, made.fp32
    assert fp32 is not None
    health = health_of(on_disk(made, job.patched), is_silent=job.is_silent)
    # A constant that was moved is another number in half than in FP32: that it does no harm has to be seen.
    why = health.why or (gradients_far(made) if job.patched.moves_constants else "")
    return Tried(
        step=replays.failing.snapshot.step,
        healthy=not why,
        why=why,
        loss=low.loss,
        scale=replays.scale,
        fp32_loss=fp32.loss,
        fp32_grad_norm=fp32.grad_norm,
        reach=made.reach,
        unreached=low.unreached,
    )


def on_disk(made: Investigation, patched: Patched) -> Investigation:
    """The investigation of a patched step with the lines of its first replay as the user's files have them."""
    line_of = functools.cache(patched.line_on_disk)  # many ops have one line

    def moved(one: Producer) -> Producer:
        at = one.source
        return one if at is None else replace(one, source=replace(at, line=line_of(at.file, at.line)))

    return replace(made, low=replace(made.low, producers=tuple(map(moved, made.low.producers))))


def _further(
    run: Run, failing: FailingStep, scale: float, job: Job, observer: Observer
) -> tuple[tuple[Tried, ...], str]:
    """The step on the batches that come after its own, where FP32 is finite on them; and why there were no more."""
    if job.captured is not None:
        return (), "a capture holds the batch of its own step alone"
    observer.stage("further batches with the patch")
    seen: list[Tried] = []
    try:
        for replays in on_further_batches(run, replace(failing, scale=scale), job.scales[0]):
            seen.append(_tried(replays, job))  # noqa: PERF401 - what was seen before an error stays
    except AmpdbgError as error:
        return tuple(seen), first_line(error)
    return tuple(seen), ""


# The forward pass in eval mode: the user's code may take other branches there, and raise in them


def raised_in_eval_mode(run: Run, failing: FailingStep) -> str:
    """What one forward pass in eval mode raises, in a line; "" where it runs.

    It is that of the step's first batch, under the run's autocast and without a graph. All that the model holds is put
    back, its mode too; it must have the step's weights.
    """
    model, user, is_training = run.workload.model, run.workload.user, run.workload.model.training
    try:
        with (
            rewound(model, failing.snapshot),
            user.running(type(model).__name__),
            torch.no_grad(),
            run.mode.forward(),
        ):
            try:
                model.eval()
                _forward(run, failing.snapshot.batches[0])
            finally:
                # A method of the user's own may do more than to set the mode, and undo that here.
                model.train(is_training)
    except AmpdbgError as error:
        return first_line(error)
    return ""


def _forward(run: Run, batch: Any) -> None:
    """The model alone where the loss comes after it: in eval mode its output may be none that the loss takes."""
    if run.config.step is None and run.config.loss is not None:
        call_model(run.workload.model, batch)
    else:
        run.workload.step.call(batch, 0)


# What one step takes on this machine: its time, what it keeps for the backward pass, the GPU's peak memory

TIMED_STEPS = 3
"""The median of so many steps is the time of one; an untimed one goes before them."""


def step_use(run: Run, failing: FailingStep, dtype: str) -> StepUse | None:
    """Measures the step in ``dtype``; the model must have its weights. None where the step raises."""
    manner = Manner(dtype, failing.scale, is_lifted=False)
    saved = _saved_bytes(run, failing, manner)
    if saved is None:
        return None
    return StepUse(_seconds(run, failing, manner), saved, _peak_bytes(run, failing, manner), is_emulating())


def _seconds(run: Run, failing: FailingStep, manner: Manner) -> float:
    seconds = [replay_step(run, failing.snapshot, manner).seconds for _ in range(1 + TIMED_STEPS)]
    return round(statistics.median(seconds[1:]), 4)


def _saved_bytes(run: Run, failing: FailingStep, manner: Manner) -> int | None:
    """Of several micro-batches the first's. None where the step raises."""
    forward = run.mode.forward if manner.dtype == run.mode.format.name else contextlib.nullcontext
    with contextlib.suppress(AmpdbgError), rewound(run.workload.model, failing.snapshot):
        use = use_of_a_pass(run.workload, failing.snapshot.batches[0], forward)
        return use.activations + use.casts
    return None


def _peak_bytes(run: Run, failing: FailingStep, manner: Manner) -> int | None:
    if run.device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(run.device)
    replay_step(run, failing.snapshot, manner)
    return torch.cuda.max_memory_allocated(run.device)


REPLAYED_STEPS = 2
"""At most so many unhealthy steps of each kind are replayed in the run with the patch."""

LONGEST_EXTRA_RUN = 120.0
"""Seconds that the training run may take which shows how far apart two runs in FP32 are."""


def trained_with_the_patch(
    job: Job, tried: Sequence[Tried], observer: Observer, begins_at: float | None = None
) -> Trained:
    """Its dynamic loss scale begins no higher than where it would settle: skipped steps prove nothing.

    Args:
        job: the proof's.
        tried: the failing steps with the patch, each at a loss scale that its gradients bear.
        observer: sees that it begins.
        begins_at: the loss scale that it would begin with, where a checkpoint has another than the config.
    """
    observer.stage(f"{job.train_steps} steps with the patch")
    precision, borne = job.config.precision, min(one.scale for one in tried)
    scale = precision.loss_scale
    if precision.format is not FLOAT16 or not isinstance(scale, LossScale) or (begins_at or scale.init) <= borne:
        return _trained(job)
    settled = precision.model_copy(update={"loss_scale": scale.model_copy(update={"init": borne})})
    changed = job.config.model_copy(update={"precision": settled, "continues_scale": False})
    trained = _trained(replace(job, config=changed))
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
    findings = diagnose(record).faults
    return Trained(
        steps=job.train_steps,
        losses=tuple(losses.seen),
        skipped=losses.skipped,
        scale=record.steps[-1].scale if record.steps else 1.0,
        faults=tuple(f"{finding.code}: {finding.message}" for finding in findings if disproves(finding, record.steps)),
        beside=tuple(finding.code for finding in findings if not disproves(finding, record.steps)),
        failure=failure,
    )


def _longer(job: Job) -> Config:
    steps = job.config.train.model_copy(update={"steps": job.train_steps})
    return job.config.model_copy(update={"train": steps})
