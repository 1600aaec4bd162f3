"""Runs the experiments of a proof, in whatever process it is called, and returns what was seen."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from ampdbg.agreement import is_finite
from ampdbg.config import Config
from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.errors import AmpdbgError, WorkloadError
from ampdbg.observer import Observer
from ampdbg.pinning.health import health_of
from ampdbg.proof.eval_mode import raised_in_eval_mode
from ampdbg.proof.fp32_twin import fp32_losses
from ampdbg.proof.jobs import Job, Seen, Trained, Tried
from ampdbg.proof.overlay import overlaid
from ampdbg.proof.saved_steps import Uncarried
from ampdbg.proof.settling import steps_to_train
from ampdbg.proof.step_use import StepUse, step_use
from ampdbg.record.codes import CODES
from ampdbg.record.findings import Finding
from ampdbg.record.run import Record, Step
from ampdbg.replay.investigation import PinnedReplays
from ampdbg.replay.run import Run, prepared
from ampdbg.replay.snapshot import FailingStep, further_steps, weights_of
from ampdbg.training.loop import train

Load = Callable[[Run], Sequence[FailingStep]]
"""The failing steps; called once the workload is built, whose classes a batch may need."""

FURTHER_BATCHES = 3
"""The patch is tried on so many batches besides those of the failing steps."""

REPLAYED_STEPS = 2
"""At most so many unhealthy steps of each kind are replayed in the run with the patch."""

LONGEST_EXTRA_RUN = 120.0
"""Seconds that a training run may take which only adds a figure."""


def perform(job: Job, load: Load, observer: Observer) -> Seen:
    """Runs the job with its files in the place of those on disk.

    Whatever the user's code or its patched form raises is the ``failure`` of what was seen.

    Raises:
        Uncarried: the failing steps cannot be loaded in this process.
        BrokenPipeError: the observer has gone.
    """
    with overlaid(job.patched.files) as taken:
        try:
            seen = KINDS[job.kind](job, load, observer)
        except (Uncarried, BrokenPipeError):
            raise
        except AmpdbgError as error:
            return Seen(failure=_first_line(error))
        except Exception as error:  # noqa: BLE001 - a patched model may break what every other model keeps to
            return Seen(failure=f"{type(error).__name__}: {_first_line(error)}")
        unused = tuple(path.name for path in job.patched.files if path not in taken)
    return seen.model_copy(update={"unused": unused})


def _patched(job: Job, load: Load, observer: Observer) -> Seen:
    observer.stage("building the workload with the patch")
    with _prepared(job, job.config) as run:
        steps = _fitting(load(run), run)
        observer.stage("the failing step with the patch")
        tried = tuple(_try(run, *each, job) for each in zip(steps, job.keeps_scale, strict=True))
        if not all(one.healthy for one in tried):
            return Seen(tried=tried)
        observer.stage("further batches with the patch")
        with weights_of(run.workload.model, steps[0]):
            further, failure = _further(run, steps[0], tried[0].scale, job)
            use = step_use(run, steps[0])
            raised = raised_in_eval_mode(run, steps[0])
    return Seen(
        tried=tried,
        further=further,
        further_failure=failure,
        eval_failure=raised,
        runs={"patched": _trained_with_the_patch(job, tried, observer)},
        uses={"patched": use} if use else {},
    )


def _trained_with_the_patch(job: Job, tried: Sequence[Tried], observer: Observer) -> Trained:
    """Longer than asked where the loss scale would take most of it; the data may not have so many batches."""
    for steps in dict.fromkeys((steps_to_train(job, tried), job.train_steps)):
        observer.stage(f"{steps} steps with the patch")
        trained = _trained(replace(job, train_steps=steps), REPLAYED_STEPS, observer)
        if not trained.failure:
            break
    return trained


def _dropped(job: Job, load: Load, observer: Observer) -> Seen:
    """Ends at the first step that is unhealthy: that one is enough."""
    with _prepared(job, job.config) as run:
        tried: list[Tried] = []
        for each in zip(_fitting(load(run), run), job.keeps_scale, strict=True):
            tried.append(_try(run, *each, job))
            if not tried[-1].healthy:
                break
    return Seen(tried=tuple(tried))


def _reference(job: Job, load: Load, observer: Observer) -> Seen:
    observer.stage("the failing step without the patch")
    with _prepared(job, job.config) as run:
        steps = _fitting(load(run), run)
        tried = tuple(_try(run, *each, job) for each in zip(steps, job.keeps_scale, strict=True))
        with weights_of(run.workload.model, steps[0]):
            ways = {"unpatched": step_use(run, steps[0]), "float32": step_use(run, steps[0], in_fp32=True)}
            raised = raised_in_eval_mode(run, steps[0])
    uses = {name: use for name, use in ways.items() if use is not None}
    return Seen(tried=tried, eval_failure=raised, runs=_reference_runs(job, uses, observer), uses=uses)


KINDS: dict[str, Callable[[Job, Load, Observer], Seen]] = {
    "patched": _patched,
    "dropped": _dropped,
    "reference": _reference,
}


@contextlib.contextmanager
def _prepared(job: Job, config: Config) -> Iterator[Run]:
    """The workload with the pins of the job in force."""
    with prepared(job.patched.config_of(config)) as run:
        if job.patched.pins_file is not None:
            _imported(job.patched.pins_file).pin_fp32(run.workload.model)
        yield run


def _imported(file: Path) -> ModuleType:
    """The file as a module that no other import meets."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _fitting(steps: Sequence[FailingStep], run: Run) -> Sequence[FailingStep]:
    shapes = [parameter.shape for parameter in run.workload.model.parameters()]
    if any([weight.shape for weight in step.snapshot.weights] != shapes for step in steps):
        raise WorkloadError("the model has other parameters than the failing step")
    return steps


def _try(run: Run, failing: FailingStep, keeps_scale: bool, job: Job) -> Tried:
    """The first of the job's repeats that is unhealthy, else the last."""
    replays = PinnedReplays(run, failing, keeps_scale=keeps_scale)
    with weights_of(run.workload.model, failing):
        for _ in range(job.repeats):
            tried = _tried(replays, failing, job)
            if not tried.healthy:
                break
    return tried


def _tried(replays: PinnedReplays, failing: FailingStep, job: Job) -> Tried:
    made = replays.with_pins(())
    health = health_of(made, is_silent=job.is_silent)
    low, fp32 = made.replays[:2]
    return Tried(
        step=failing.snapshot.step,
        healthy=health.healthy,
        why=health.why,
        loss=low.loss,
        scale=replays.scale,
        fp32_loss=fp32.loss,
        fp32_grad_norm=fp32.grad_norm,
    )


def _further(run: Run, failing: FailingStep, scale: float, job: Job) -> tuple[tuple[Tried, ...], str]:
    """The step on the batches that come after its own, where FP32 is finite on them; and why there were no more."""
    seen: list[Tried] = []
    try:
        for snapshot in further_steps(run, failing, FURTHER_BATCHES):
            further = replace(failing, snapshot=snapshot, scale=scale)
            replays = PinnedReplays(run, further, keeps_scale=job.keeps_scale[0])
            if is_finite(replays.fp32.replay):
                seen.append(_tried(replays, further, job))
    except AmpdbgError as error:
        return tuple(seen), _first_line(error)
    return tuple(seen), ""


def _reference_runs(job: Job, uses: dict[str, StepUse], observer: Observer) -> dict[str, Trained]:
    def is_short(way: str) -> bool:
        return way in uses and uses[way].seconds * job.train_steps < LONGEST_EXTRA_RUN

    observer.stage(f"{job.train_steps} steps in FP32")
    runs = {"float32": _trained_in_fp32(job, observer, is_rounded=False)}
    if is_short("float32"):
        observer.stage(f"{job.train_steps} steps in FP32 from rounded weights")
        runs["rounded"] = _trained_in_fp32(job, observer, is_rounded=True)
    if is_short("unpatched"):
        observer.stage(f"{job.train_steps} steps without the patch")
        runs["unpatched"] = _trained(job, 0, observer)
    return runs


def _trained_in_fp32(job: Job, observer: Observer, *, is_rounded: bool) -> Trained:
    try:
        losses = fp32_losses(_longer(job), withheld=job.withheld, is_rounded=is_rounded, observer=observer)
    except AmpdbgError as error:
        return Trained(steps=job.train_steps, failure=_first_line(error))
    return Trained(steps=job.train_steps, losses=losses)


class _SignsOfLife(Observer):
    """Of a training run within a proof only that it goes on is passed on."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def step(self, step: Step) -> None:
        self._observer.stage("")

    def replay(self, step: int, doing: str) -> None:
        self._observer.stage("")


def _trained(job: Job, replays: int, observer: Observer) -> Trained:
    """Trained as ``ampdbg scan`` does, and diagnosed as far as its replays allow."""
    failure = ""
    try:
        record = train(
            _longer(job),
            prepare=functools.partial(_prepared, job),
            observer=_SignsOfLife(observer),
            replays=replays,
        )
    except AmpdbgError as error:
        if not isinstance(error.record, Record):
            return Trained(steps=job.train_steps, failure=_first_line(error))
        record, failure = error.record, _first_line(error)
    if record.interrupted:
        raise KeyboardInterrupt
    findings = [finding for finding in diagnose(record).findings if finding.severity != "info"]
    return Trained(
        steps=job.train_steps,
        losses=tuple(step.loss for step in record.steps),
        skipped=tuple(step.step for step in record.steps if step.skipped),
        scale=record.steps[-1].scale if record.steps else 1.0,
        faults=tuple(_faults(findings)),
        beside=tuple(finding.code for finding in findings if not CODES[finding.code].counts_against_a_patch),
        failure=failure,
    )


def _faults(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings:
        if CODES[finding.code].counts_against_a_patch:
            yield f"{finding.code}: {finding.message}"


def _longer(job: Job) -> Config:
    """The config with the number of steps of the job's training runs."""
    steps = job.config.train.model_copy(update={"steps": job.train_steps})
    return job.config.model_copy(update={"train": steps})


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
