"""Proof before print: a patch is applied to a copy, and everything that is claimed of it is run in fresh processes."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ampdbg.observer import Observer
from ampdbg.proof.experiments import perform
from ampdbg.proof.jobs import Job, Patched, Seen, Uncarried
from ampdbg.proof.process import in_fresh_process, save_steps
from ampdbg.proof.training_runs import why_nothing_was_trained
from ampdbg.proof.verdict import (
    figures,
    further_batches,
    in_eval_mode,
    losses_as_in_fp32,
    same_in_fp32,
    training_run,
    use_of_a_step,
    with_the_patch,
    without_a_unit,
)
from ampdbg.record.pins import Proof, ProofStep
from ampdbg.replay.snapshot import FailingStep
from ampdbg.workload.targets import forget_user_modules

Perform = Callable[[Job], Seen]


def prove(job: Job, failing: Sequence[FailingStep], without: Mapping[str, Patched], observer: Observer) -> Proof:
    """Runs the failing steps, further batches and a training run with the patch, and holds them against FP32.

    Nothing is written to the files that are patched. Each experiment has a process of its own, in which the
    user's code is imported with the patched bytes; where a batch cannot be carried there, all are made in this one.

    Args:
        job: the patch, and what is to be shown of it; its training runs are longer where the loss scale would take
            most of them to settle.
        failing: the steps that the patch cures, at least one.
        without: for each part that can be left out, by its title, the patch without it.
        observer: sees what is about to run.

    Returns:
        The proof. It ends at the first failing step that the patch does not cure.

    Raises:
        KeyboardInterrupt: the process that was under way has been ended.
    """
    prover = functools.partial(_proof, job, without, recorded=_fp32_losses(failing), observer=observer)
    try:
        with tempfile.TemporaryDirectory(prefix="ampdbg-steps-", ignore_cleanup_errors=True) as folder:
            steps = Path(folder, "steps.pt")
            save_steps(failing, steps)
            return prover(lambda one: in_fresh_process(one, steps, observer))
    except Uncarried as why:
        # A process that died of the batch would say less than one that has it.
        told = ProofStep(
            "a fresh process", True, f"the failing step cannot be carried to one ({why}): proven in this one"
        )
        proof = prover(lambda one: _in_this_process(one, failing, observer))
        return replace(proof, steps=(told, *proof.steps))


def _proof(
    job: Job, without: Mapping[str, Patched], perform: Perform, *, recorded: Mapping[int, float], observer: Observer
) -> Proof:
    patched = perform(job)
    cured = tuple(with_the_patch(patched, job.patched))
    if not all(step.passed for step in cured):
        return Proof(False, cured)
    trained, asked = patched.runs["patched"], job.train_steps
    dropped = {}
    for title, rest in without.items():
        if not rest.changes_nothing:  # what the reference shows needs no process of its own
            observer.stage(f"the failing step without {title}")
            dropped[title] = perform(replace(job, kind="dropped", patched=rest))
    job = replace(job, train_steps=trained.steps, withheld=frozenset(trained.skipped))
    reference = perform(replace(job, kind="reference", patched=Patched()))
    steps = [*cured, same_in_fp32(patched, reference, recorded)]
    steps += [without_a_unit(title, dropped.get(title, reference)) for title in without or ["the patch"]]
    steps += [further_batches(patched), in_eval_mode(patched, reference)]
    nothing_trained = why_nothing_was_trained(job.config.precision, trained, patched.tried)
    steps.append(training_run(trained, reference.runs.get("unpatched"), asked, nothing_trained))
    if "float32" in reference.runs:
        steps.append(losses_as_in_fp32(trained, reference.runs["float32"], reference.runs.get("rounded")))
    numbers = figures(patched, reference, job.train_steps)
    use = use_of_a_step(numbers)
    return Proof(all(step.passed for step in steps), (*steps, *([use] if use else ())), numbers)


def _in_this_process(job: Job, failing: Sequence[FailingStep], observer: Observer) -> Seen:
    try:
        return perform(job, lambda run: failing, observer)
    finally:
        # Nothing that is imported from now on is to meet what was patched.
        forget_user_modules()


def _fp32_losses(failing: Sequence[FailingStep]) -> dict[int, float]:
    """What FP32 made of the steps when they were investigated."""
    return dict(_fp32_loss_of(failing))


def _fp32_loss_of(failing: Sequence[FailingStep]) -> Iterator[tuple[int, float]]:
    for step in failing:
        for replay in step.made.replays:
            if replay.dtype == "float32" and not replay.rounded and not replay.error:
                yield step.snapshot.step, replay.loss
