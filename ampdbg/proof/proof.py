"""Proof before print: a patch is applied to a copy, and everything that is claimed of it is run in fresh processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ampdbg.agreement import AGREEMENT, NOISE_FLOORS
from ampdbg.config.schema import LossScale, Precision
from ampdbg.errors import AmpdbgError
from ampdbg.files import temporary_folder
from ampdbg.observer import Observer
from ampdbg.proof.jobs import Job, Patched, Seen, StepUse, Trained, Tried, save_steps
from ampdbg.proof.processes import JobRunner, fresh_processes
from ampdbg.quantities import byte_size, counted, duration, listed, percent, scale
from ampdbg.record.pins import Proof, ProofStep, call_of_pins
from ampdbg.record.run import SUM, what_of
from ampdbg.replay.snapshot import FailingStep
from ampdbg.training.fp32_twin import distance, last_quarter, taken

SAME_FUNCTION = 1e-3
"""In FP32 a patch that only changes precision leaves loss and gradients as they are, within this share."""


def prove(job: Job, failing: Sequence[FailingStep], without: Mapping[str, Patched], observer: Observer) -> Proof:
    """Runs the failing steps, further batches and a training run with the patch, and holds them against FP32.

    Nothing is written to the files that are patched. Each experiment has a process of its own, in which the
    user's code is imported with the patched bytes.

    Args:
        job: the patch, and what is to be shown of it.
        failing: the steps that the patch cures, at least one.
        without: for each part that can be left out, by its title, the patch without it.
        observer: sees what is about to run.

    Returns:
        The proof. It ends at the first failing step that the patch does not cure.

    Raises:
        KeyboardInterrupt: the process that was under way has been ended.
    """
    with temporary_folder() as folder:
        steps = folder / "steps.pt"
        try:
            if job.captured is None:
                save_steps(failing, steps)
        except AmpdbgError as why:
            told = f"the failing step cannot be written to a file for it: {why}; --no-verify prints the patch unproven"
            return Proof(False, (ProofStep("a fresh process", False, told),))
        # What FP32 made of the steps when they were investigated, in their second replay.
        recorded = [math.nan if step.made.fp32 is None else step.made.fp32.loss for step in failing]
        with fresh_processes(job.config.start) as run:
            proof = _proof(job, steps, recorded, without, run, observer)
    return proof


NOT_TRAINED = "a script is its own loop; train it with the patch under ampdbg run"


def _proof(
    job: Job,
    steps: Path,
    recorded: Sequence[float],
    without: Mapping[str, Patched],
    run: JobRunner,
    observer: Observer,
) -> Proof:
    observer.stage("the failing step with the patch")
    patched = run(job, steps, observer)
    cured = tuple(with_the_patch(patched, job.patched))
    if not all(step.passed for step in cured):
        return Proof(False, cured)
    trained = patched.runs.get("patched")
    dropped = {}
    for title, rest in without.items():
        if not rest.changes_nothing:  # what the reference shows needs no process of its own
            observer.stage(f"the failing step without {title}")
            dropped[title] = run(replace(job, kind="dropped", patched=rest), steps, observer)
    observer.stage("the failing step without the patch")
    job = replace(job, withheld=frozenset(trained.skipped if trained else ()))
    reference = run(replace(job, kind="reference", patched=Patched()), steps, observer)
    shown = [*cured, same_in_fp32(patched, reference, recorded)]
    shown += [without_a_unit(title, dropped.get(title, reference)) for title in without or ["the patch"]]
    shown += [further_batches(patched), in_eval_mode(patched, reference)]
    if trained is None:
        shown.append(not_run("training", NOT_TRAINED))
    else:
        shown.append(training_run(trained, why_nothing_was_trained(job.config.precision, trained, patched.tried)))
    if trained is not None and "float32" in reference.runs:
        shown.append(losses_as_in_fp32(trained, reference.runs["float32"], reference.runs.get("rounded")))
    shown += use_of_a_step({**patched.uses, **reference.uses})
    return Proof(all(step.passed for step in shown), tuple(shown))


# What the experiments say about the patch: each a step of the proof, passed or not


def not_run(name: str, why: str) -> ProofStep:
    """What could not be run, and says nothing of the patch."""
    return ProofStep(name, True, f"not run: {why}", ran=False)


def with_the_patch(seen: Seen, patched: Patched) -> Iterator[ProofStep]:
    """Whether it can be imported, is imported, and makes each failing step healthy."""
    what, done = _in_force(patched)
    if seen.failure:
        yield ProofStep(what, False, seen.failure)
        return
    if seen.unused:
        yield ProofStep(what, False, f"the run does not import {', '.join(seen.unused)}")
        return
    yield ProofStep(what, True, done)
    for one in seen.tried:
        yield ProofStep(f"the failing step ({one.step})", one.healthy, _state(one))
        if one.healthy and one.unreached:
            yield ProofStep(f"the gradients of step {one.step}", True, _missing(one), warns=True)


def _in_force(patched: Patched) -> tuple[str, str]:
    """What is proven, and how it came into force."""
    if patched.pins_file is not None:
        given = listed(root.what for root in patched.roots) or "the model"
        return "this file", f"imported, and called with {given}: {patched.pins_file.stem}.{call_of_pins(patched.roots)}"
    if patched.pins:
        return "these pins", "in force, and the model built"
    return "the patched code", "imported, and the model built"


WITHOUT, NOT_NEEDED = "without ", "not needed: "


def unneeded_unit(proof: Proof) -> str:
    """The first part of the patch, by its title, without which the failing step is as healthy; "" for none."""
    needless = (step.name for step in proof.steps if not step.passed and step.detail.startswith(NOT_NEEDED))
    return next(needless, "").removeprefix(WITHOUT)


def without_a_unit(title: str, seen: Seen) -> ProofStep:
    """Whether the failing step fails when a part of the patch is left out: else it is not needed."""
    name = WITHOUT + title
    if seen.failure:
        return ProofStep(name, False, f"could not be run: {seen.failure}")
    bad = next((one for one in seen.tried if not one.healthy), None)
    if bad is None:
        return ProofStep(name, False, NOT_NEEDED + _state(seen.tried[0]) if seen.tried else "not run")
    return ProofStep(name, True, f"step {bad.step} fails: {bad.why}")


def same_in_fp32(patched: Seen, reference: Seen, recorded: Sequence[float]) -> ProofStep:
    """Whether the model computes what it did, as FP32 shows it; ``recorded`` are FP32's losses as the run was made.

    Those were made in another process: what they differ by from this one's is what the code varies by itself.
    """
    name = "the model's function"
    if reference.failure:
        return ProofStep(name, False, f"could not be compared: {reference.failure}")
    for now, before, loss in zip(patched.tried, reference.tried, recorded, strict=True):
        share = _allowed(before.fp32_loss, loss)
        for what, one, other in (
            (what_of(now.reach).removeprefix("the "), now.fp32_loss, before.fp32_loss),
            ("gradients' norm", now.fp32_grad_norm, before.fp32_grad_norm),
        ):
            if not math.isclose(one, other, rel_tol=share):
                told = f"changed: in FP32 the {what} of step {now.step} is {_number(one)}, {_number(other)} without it"
                return ProofStep(name, False, told)
    losses = " and ".join(_number(one.fp32_loss) for one in patched.tried)
    what = what_of(next((one.reach for one in patched.tried if one.reach == "modules"), "whole"))
    return ProofStep(name, True, f"unchanged: in FP32 {what} is {losses} with and without the patch")


def _allowed(loss: float, recorded: float) -> float:
    return max(SAME_FUNCTION, NOISE_FLOORS * abs(loss - recorded) / abs(loss)) if loss else SAME_FUNCTION


def further_batches(seen: Seen) -> ProofStep:
    """Whether the patch also holds on batches that it was not made for."""
    healthy = sum(one.healthy for one in seen.further)
    bad = next((one for one in seen.further if not one.healthy), None)
    if not seen.further:
        return not_run("further batches", seen.further_failure or "FP32 fails on them")
    why = f"; {bad.why}" if bad else ""
    return ProofStep("further batches", bad is None, f"{healthy} of {len(seen.further)} healthy{why}")


def in_eval_mode(patched: Seen, reference: Seen) -> ProofStep:
    """Whether the patched model still runs in eval mode, where code takes branches that no step of training does."""
    name = "in eval mode"
    if not patched.eval_failure:
        return ProofStep(name, True, "the failing step's batch runs through")
    if reference.eval_failure:
        return not_run(name, f"the unpatched model raises too ({reference.eval_failure})")
    return ProofStep(name, False, f"{patched.eval_failure}; without the patch it does not")


def why_nothing_was_trained(precision: Precision, trained: Trained, tried: Sequence[Tried]) -> str:
    """What is wrong with a run of which every step was skipped, and what to type; "" for any other run."""
    if not trained.losses or len(trained.skipped) < len(trained.losses):
        return ""
    key = "precision.loss_scale.init" if isinstance(precision.loss_scale, LossScale) else "precision.loss_scale"
    lower = min(*(one.scale for one in tried), trained.scale / 4)
    return (
        f"every step was skipped, and nothing was trained: the loss scale of {trained.scale:g} is too large for the "
        f"gradients: --set {key}={lower:g}"
    )


def training_run(trained: Trained, nothing_trained: str = "") -> ProofStep:
    """Whether a run with the patch shows no finding of precision; ``nothing_trained`` says why no step was taken."""
    name = f"training {counted(trained.steps, 'step')}"
    wrong = trained.failure or next(iter(trained.faults), nothing_trained)
    if wrong:
        return ProofStep(name, False, wrong)
    begun = f"; begun at {scale(trained.begun_at)}, which the failing step bears" if trained.begun_at else ""
    beside = f", but for {', '.join(dict.fromkeys(trained.beside))}" if trained.beside else ""
    skipped = counted(len(trained.skipped), "skipped step")
    return ProofStep(name, True, f"healthy{beside}; loss scale {scale(trained.scale)}, {skipped}{begun}")


def losses_as_in_fp32(trained: Trained, float32: Trained, rounded: Trained | None) -> ProofStep:
    """Whether the losses of the run stay as near to FP32's as those of two FP32 runs that differ by rounding.

    The loss of a step that was skipped is no evidence: early in a run it is that of weights which nothing has trained.
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
    """Time and memory of a step with the patch beside the others, in a line; nothing is judged by it.

    Where CUDA is emulated there is no time: a CPU's says nothing of a GPU's.
    """
    if "patched" not in uses:
        return
    told, is_timed = [], not uses["patched"].is_emulated
    for shown, word in _USES if is_timed else _USES[1:]:
        values = {name: shown(use) for name, use in uses.items()}
        others = ", ".join(f"{_WAYS[name]} {value}" for name, value in values.items() if name in _WAYS and value)
        if values["patched"]:
            told.append(f"{values['patched']}{word}" + (f" ({others})" if others else ""))
    yield ProofStep("time and memory of a step" if is_timed else "memory of a step", True, "; ".join(told))


_WAYS = {"unpatched": "unpatched", "float32": "FP32"}

_USES: tuple[tuple[Callable[[StepUse], str], str], ...] = (
    (lambda use: duration(use.seconds), ""),
    (lambda use: byte_size(use.saved_bytes), " kept for the backward pass"),
    (lambda use: "" if use.peak_bytes is None else byte_size(use.peak_bytes), " at the peak"),
)


def _state(one: Tried) -> str:
    if not one.healthy:
        return one.why
    what = f"{SUM}:" if one.reach == "modules" else "loss"
    return f"healthy; {what} {_number(one.loss)}, {_number(one.fp32_loss)} in FP32"


def _missing(one: Tried) -> str:
    """What does not learn in such a step: half precision chose otherwise, or rounds to where a function is flat."""
    have = "has" if len(one.unreached) == 1 else "have"
    return f"{listed(one.unreached)} {have} none at any loss scale, and {have} one in FP32"


def _finite(run: Trained) -> bool:
    return bool(run.losses) and all(map(math.isfinite, run.losses))


def _number(value: float) -> str:
    """So many digits that half's rounding shows."""
    return f"{value:.4f}" if 0.1 <= abs(value) < 1e4 else f"{value:.5g}"
