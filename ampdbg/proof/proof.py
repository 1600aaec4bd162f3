"""The proof of a patch before it is shown: its claims are tested in the failing run and in a fresh process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ampdbg.agreement import AGREEMENT, NOISE_FLOORS
from ampdbg.config.schema import LossScale, Precision
from ampdbg.observer import Observer
from ampdbg.patch.file_edits import Patched
from ampdbg.precision.emulation import is_emulating
from ampdbg.proof.jobs import (
    Job,
    JobResult,
    JobStarter,
    StepUse,
    Trained,
    Tried,
    run_in_live_workload,
    run_in_rebuilt_workload,
    see_in_script,
    train_alone,
    trained_in_fp32,
)
from ampdbg.proof.swap import CannotSwapError
from ampdbg.quantities import byte_size, counted, duration, listed, percent, scale
from ampdbg.record.pins import Proof, ProofStep, call_of_pins
from ampdbg.record.run import SUM, what_of
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import FailingStep
from ampdbg.training.fp32_twin import distance, last_quarter, taken

SAME_FUNCTION = 1e-3
"""The relative change of loss and gradients in FP32 that a patch of precision alone may cause."""


def prove(
    job: Job,
    run: Run,
    failing: Sequence[FailingStep],
    without: Mapping[str, Patched],
    observer: Observer,
    start: JobStarter,
) -> Proof:
    """Run the failing steps, further batches and a training run with the patch, and compare them with FP32.

    The patched files are not written. The patch is put in force in the ``run`` and then removed. A fresh process
    imports the patched files and trains with them. If a running model cannot take the patch, the files are imported
    again or the script restarts. The proof ends at the first failing step that the patch does not cure.

    ``without`` has the patch without each part that can be omitted, by the part's title.
    """
    return _Proving(job, run, failing, observer, start).proof(without)


NOT_TRAINED = "a script has its own loop; train it with the patch under ampdbg run"


@dataclass(frozen=True)
class _Proving:
    job: Job
    run: Run
    failing: Sequence[FailingStep]
    observer: Observer
    start: JobStarter

    def proof(self, without: Mapping[str, Patched]) -> Proof:
        self.observer.stage("the failing step with the patch")
        patched = self.seen(self.job)
        shown = list(with_the_patch(patched, self.job.patched))
        if not all(step.passed for step in shown):
            return Proof(False, tuple(shown))
        scale = min(one.scale for one in patched.tried)
        job = replace(self.job, begins_at=self.run.scaler().get_scale(), survived_scale=scale)
        # On a GPU, concurrent runs would distort memory and time.
        at_once = is_emulating() and self.job.captured is None
        training = self.start(train_alone, job) if at_once else None
        dropped = dict[str, JobResult]()
        # Last part first, so that of two equivalent parts the first is kept.
        for title, rest in reversed([*without.items()]):
            if rest.changes_nothing:
                continue  # the reference run covers it
            self.observer.stage(f"the failing step without {title}")
            dropped[title] = self.seen(replace(self.job, kind="dropped", patched=rest))
            if not (without_a_unit(title, dropped[title]).passed or at_once):  # the next proof omits this part
                return Proof(False, (*shown, *map(without_a_unit, dropped, dropped.values())))
        self.observer.stage("the failing step without the patch")
        reference = self.seen(replace(self.job, kind="reference", patched=Patched()))
        if not (at_once or self.job.captured):
            training = self.start(train_alone, job)
        float32 = trained_in_fp32(self.job, (), self.observer) if at_once else None
        if training is not None:
            alone = training(self.observer)
            patched = replace(patched, trained=alone.trained, failure=alone.failure, unused=alone.unused)
        # FP32 losses of the steps' second replay, from the investigation.
        recorded = [step.made.reference.loss for step in self.failing]
        shown = [*with_the_patch(patched, self.job.patched), same_in_fp32(patched, reference, recorded)]
        shown += [without_a_unit(title, dropped.get(title, reference)) for title in without or ["the patch"]]
        shown += [further_batches(patched), in_eval_mode(patched, reference), *self.training(patched, float32)]
        shown += use_of_a_step({**patched.uses, **reference.uses})
        return Proof(all(step.passed for step in shown), tuple(shown))

    def seen(self, job: Job) -> JobResult:
        """Return the results of a job in the existing run, or in another if the patch cannot be swapped in."""
        try:
            standing = replace(job, patched=job.patched.for_live_model or job.patched)
            return run_in_live_workload(self.run, self.failing, standing, self.observer)
        except CannotSwapError as why:
            if job.captured is not None:
                seen = self.start(see_in_script, job)(self.observer)
            else:
                seen = run_in_rebuilt_workload(self.failing, job, self.observer)
            return replace(seen, reimport_reason=str(why))

    def training(self, patched: JobResult, float32: Trained | None) -> Iterator[ProofStep]:
        """Yield the checks of the training run and its losses, compared with FP32 losses.

        Two FP32 runs are compared only where their distance decides the verdict. ``float32`` is a run of all steps.
        """
        trained = patched.trained
        if self.job.captured is not None:
            yield not_run("training", NOT_TRAINED)
        if trained is None:
            return
        yield training_run(trained, why_nothing_was_trained(self.job.config.precision, trained, patched.tried))
        if float32 is None or trained.skipped:
            float32 = trained_in_fp32(self.job, trained.skipped, self.observer)
        is_whole = len(trained.losses) == len(float32.losses)
        is_far = is_whole and distance(trained.losses, float32.losses, trained.skipped) > AGREEMENT
        rounded = trained_in_fp32(self.job, trained.skipped, self.observer, is_rounded=True) if is_far else None
        yield losses_as_in_fp32(trained, float32, rounded)


# The checks of a proof, passed or not


def not_run(name: str, why: str) -> ProofStep:
    """Return a check that could not run, and says nothing about the patch."""
    return ProofStep(name, True, f"not run: {why}", ran=False)


def with_the_patch(seen: JobResult, patched: Patched) -> Iterator[ProofStep]:
    """Yield the checks that the patch takes effect and makes each failing step healthy."""
    what, done = _in_force(patched, seen)
    if seen.failure:
        yield ProofStep(what, False, seen.failure)
        return
    if seen.unused:
        yield ProofStep(what, False, f"the run does not import {', '.join(seen.unused)}")
        return
    yield ProofStep(what, True, done)
    for one in seen.tried:
        yield ProofStep(f"the failing step ({one.made.step})", one.healthy, _state(one))
        if one.healthy and (unreached := one.made.low.unreached):
            # Half chose another branch, or rounded to a flat part of a function.
            have = "has" if len(unreached) == 1 else "have"
            missing = f"{listed(unreached)} {have} no gradient at any loss scale, and {have} one in FP32"
            yield ProofStep(f"the gradients of step {one.made.step}", True, missing, warns=True)


def _in_force(patched: Patched, seen: JobResult) -> tuple[str, str]:
    """Name the object of the proof, and how it was put in force."""
    if patched.pins_file is not None:
        given = listed(root.what for root in patched.roots) or "the model"
        return "this file", f"imported, and called with {given}: {patched.pins_file.stem}.{call_of_pins(patched.roots)}"
    if patched.pins:
        return "these pins", "in force in the running model"
    if seen.reimport_reason:
        return "the patched code", f"imported, with the model rebuilt, for {seen.reimport_reason}"
    done = "in force in the running model"
    return "the patched code", f"{done}, and imported by a fresh process" if seen.trained else done


WITHOUT, NOT_NEEDED = "without ", "not needed: "


def unneeded_unit(proof: Proof) -> str:
    """Return the title of the last part that the failing step does not need, or ""."""
    needless = (step.name for step in reversed(proof.steps) if not step.passed and step.detail.startswith(NOT_NEEDED))
    return next(needless, "").removeprefix(WITHOUT)


def needed_units(proof: Proof) -> set[str]:
    """Return the titles of the parts without which the failing step failed."""
    return {step.name.removeprefix(WITHOUT) for step in proof.steps if step.passed and step.name.startswith(WITHOUT)}


def without_a_unit(title: str, seen: JobResult) -> ProofStep:
    """Return the check that the failing step fails without this part, which is otherwise not needed."""
    name = WITHOUT + title
    if seen.failure:
        return ProofStep(name, False, f"could not be run: {seen.failure}")
    bad = next((one for one in seen.tried if not one.healthy), None)
    if bad is None:
        return ProofStep(name, False, NOT_NEEDED + _state(seen.tried[0]) if seen.tried else "not run")
    return ProofStep(name, True, f"step {bad.made.step} fails: {bad.why}")


def same_in_fp32(patched: JobResult, reference: JobResult, recorded: Sequence[float]) -> ProofStep:
    """Return the check that the model computes the same in FP32; ``recorded`` are the recorded run's FP32 losses.

    Another process computed the recorded losses. Their distance from this process's losses is the code's own noise.
    """
    name = "the model's function"
    if reference.failure:
        return ProofStep(name, False, f"could not be compared: {reference.failure}")
    steps = [one.made for one in patched.tried]
    for now, other, loss in zip(steps, reference.tried, recorded, strict=True):
        fp32, before = now.reference, other.made.reference
        apart = abs(before.loss - loss)
        share = max(SAME_FUNCTION, NOISE_FLOORS * apart / abs(before.loss)) if before.loss else SAME_FUNCTION
        for what, one, old in (
            (now.what.removeprefix("the "), fp32.loss, before.loss),
            ("gradients' norm", fp32.grad_norm, before.grad_norm),
        ):
            if not math.isclose(one, old, rel_tol=share):
                why = f"changed: in FP32 the {what} of step {now.step} is {_number(one)}, {_number(old)} without it"
                return ProofStep(name, False, why)
    losses = " and ".join(_number(made.reference.loss) for made in steps)
    what = what_of(next((made.reach for made in steps if made.reach == "modules"), "whole"))
    return ProofStep(name, True, f"unchanged: in FP32 {what} is {losses} with and without the patch")


def further_batches(seen: JobResult) -> ProofStep:
    """Return the check that the patch also holds on later batches."""
    healthy = sum(one.healthy for one in seen.further)
    bad = next((one for one in seen.further if not one.healthy), None)
    if not seen.further:
        return not_run("further batches", seen.further_failure or "FP32 fails on them")
    why = f"; {bad.why}" if bad else ""
    return ProofStep("further batches", bad is None, f"{healthy} of {len(seen.further)} healthy{why}")


def in_eval_mode(patched: JobResult, reference: JobResult) -> ProofStep:
    """Return the check that the patched model runs in eval mode, where code may take other branches."""
    name = "in eval mode"
    if not patched.eval_failure:
        return ProofStep(name, True, "the failing step's batch runs through")
    if reference.eval_failure:
        return not_run(name, f"the unpatched model raises too ({reference.eval_failure})")
    return ProofStep(name, False, f"{patched.eval_failure}; without the patch it does not")


def why_nothing_was_trained(precision: Precision, trained: Trained, tried: Sequence[Tried]) -> str:
    """Describe a run in which every step was skipped, with an option to set; return "" for any other run."""
    if not trained.losses or len(trained.skipped) < len(trained.losses):
        return ""
    key = "precision.loss_scale.init" if isinstance(precision.loss_scale, LossScale) else "precision.loss_scale"
    lower = min(*(one.scale for one in tried), trained.scale / 4)
    return (
        f"every step was skipped, so nothing was trained: the loss scale of {trained.scale:g} is too large for "
        f"the gradients: --set {key}={lower:g}"
    )


def training_run(trained: Trained, nothing_trained: str = "") -> ProofStep:
    """Return the check that the run has no precision finding; ``nothing_trained`` is why no step was taken."""
    name = f"training {counted(trained.steps, 'step')}"
    wrong = trained.failure or next(iter(trained.faults), nothing_trained)
    if wrong:
        return ProofStep(name, False, wrong)
    begun = f"; started at {scale(trained.begun_at)}, a scale that suits the failing step" if trained.begun_at else ""
    beside = f", except for {', '.join(dict.fromkeys(trained.beside))}" if trained.beside else ""
    skipped = counted(len(trained.skipped), "skipped step")
    return ProofStep(name, True, f"healthy{beside}; loss scale {scale(trained.scale)}, {skipped}{begun}")


def losses_as_in_fp32(trained: Trained, float32: Trained, rounded: Trained | None) -> ProofStep:
    """Return the check that the losses are close to FP32's, compared with the distance of two FP32 runs.

    The FP32 runs differ by rounding. Losses of skipped steps do not count, since early weights are untrained.
    """
    name = "its losses"
    if float32.failure or not _finite(float32):
        return not_run(name, f"FP32 {float32.failure or 'does not stay finite'}")
    if len(trained.losses) < len(float32.losses):
        return ProofStep(name, False, f"the run ended after {counted(len(trained.losses), 'step')}")
    compared = last_quarter(taken(trained.losses, trained.skipped))
    if not compared:
        return not_run(name, "no step was taken")
    apart = distance(trained.losses, float32.losses, trained.skipped)
    if math.isnan(apart):
        return ProofStep(name, False, f"not finite: the last is {_number(compared[-1])}")
    were_taken = " taken" if trained.skipped else ""
    over = f"the last step{were_taken}"
    if len(compared) > 1:
        over = f"median of the last {len(compared)} steps{were_taken}"
    said = f"{percent(apart)} from FP32's ({over})"
    if rounded is None or not _finite(rounded):
        return ProofStep(name, True, said)
    noise = distance(rounded.losses, float32.losses, trained.skipped)
    said += f"; FP32's own, from weights rounded to half: {percent(noise)}"
    return ProofStep(name, apart <= max(AGREEMENT, NOISE_FLOORS * noise), said)


def use_of_a_step(uses: Mapping[str, StepUse]) -> Iterator[ProofStep]:
    """Yield one line with a step's time and memory with the patch and without, for information only.

    With an emulated CUDA it omits the time, since a CPU's time says nothing about a GPU.
    """
    if "patched" not in uses:
        return
    costs: list[str] = []
    for shown, word in _USES:
        values = {name: shown(use) for name, use in uses.items()}
        others = ", ".join(f"{_WAYS[name]} {value}" for name, value in values.items() if name in _WAYS and value)
        if values["patched"]:
            costs.append(f"{values['patched']}{word}" + (f" ({others})" if others else ""))
    name = "memory of a step" if uses["patched"].seconds is None else "time and memory of a step"
    yield ProofStep(name, True, "; ".join(costs))


_WAYS = {"unpatched": "unpatched", "float32": "FP32"}

_USES: tuple[tuple[Callable[[StepUse], str], str], ...] = (
    (lambda use: "" if use.seconds is None else duration(use.seconds), ""),
    (lambda use: byte_size(use.saved_bytes), " kept for the backward pass"),
    (lambda use: "" if use.peak_bytes is None else byte_size(use.peak_bytes), " at the peak"),
)


def _state(one: Tried) -> str:
    if not one.healthy:
        return one.why
    what = f"{SUM}:" if one.made.reach == "modules" else "loss"
    return f"healthy; {what} {_number(one.made.low.loss)}, {_number(one.made.reference.loss)} in FP32"


def _finite(run: Trained) -> bool:
    return bool(run.losses) and all(map(math.isfinite, run.losses))


def _number(value: float) -> str:
    """Format with enough digits to show the rounding of half."""
    return f"{value:.4f}" if 0.1 <= abs(value) < 1e4 else f"{value:.5g}"
