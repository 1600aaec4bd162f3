"""Proof before print: a patch is applied to a copy, and everything that is claimed of it is run in fresh processes."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ampdbg.errors import AmpdbgError
from ampdbg.observer import Observer
from ampdbg.proof.jobs import Job, Patched, Seen
from ampdbg.proof.process import in_fresh_process, save_steps
from ampdbg.proof.training_runs import why_nothing_was_trained
from ampdbg.proof.verdict import (
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

Perform = Callable[[Job], Seen]


def prove(job: Job, failing: Sequence[FailingStep], without: Mapping[str, Patched], observer: Observer) -> Proof:
    """Runs the failing steps, further batches and a training run with the patch, and holds them against FP32.

    Nothing is written to the files that are patched. Each experiment has a process of its own, in which the
    user's code is imported with the patched bytes.

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
    with tempfile.TemporaryDirectory(prefix="ampdbg-steps-", ignore_cleanup_errors=True) as folder:
        steps = Path(folder, "steps.pt")
        try:
            save_steps(failing, steps)
        except AmpdbgError as why:
            told = f"the failing step cannot be written to a file for it: {why}; --no-verify prints the patch unproven"
            return Proof(False, (ProofStep("a fresh process", False, told),))
        perform = functools.partial(in_fresh_process, steps=steps, observer=observer)
        return _proof(job, without, perform, recorded=_fp32_losses(failing), observer=observer)


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
    steps.append(training_run(trained, asked, nothing_trained))
    if "float32" in reference.runs:
        steps.append(losses_as_in_fp32(trained, reference.runs["float32"], reference.runs.get("rounded")))
    steps += use_of_a_step({**patched.uses, **reference.uses})
    return Proof(all(step.passed for step in steps), tuple(steps))


def _fp32_losses(failing: Sequence[FailingStep]) -> dict[int, float]:
    """What FP32 made of the steps when they were investigated."""
    return {
        step.snapshot.step: replay.loss
        for step in failing
        for replay in step.made.replays
        if replay.dtype == "float32" and not replay.rounded and not replay.error
    }
