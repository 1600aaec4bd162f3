"""Failing steps through a file: everything arrives, no more than that, and what cannot be carried says so."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ampdbg.errors import AmpdbgError
from ampdbg.proof.jobs import load_steps, save_steps
from ampdbg.replay.copies import duplicate
from ampdbg.replay.replay import Manner, replay_step
from ampdbg.replay.run import Run, prepared
from ampdbg.replay.snapshot import FailingStep, weights_of
from tests.proof.overflowing import CONFIG, NET, failing_steps, written


def with_batch(step: FailingStep, batch: Any) -> FailingStep:
    return replace(step, snapshot=replace(step.snapshot, batches=(batch,)))


def carried(run: Run, step: FailingStep, file: Path) -> FailingStep:
    save_steps([step], file)
    (loaded,) = load_steps(file, run.workload)
    return loaded


def test_a_step_arrives_as_it_was(tmp_path: Path) -> None:
    config = written(tmp_path)
    (step,) = failing_steps(config)
    with prepared(config) as run:
        loaded = carried(run, step, tmp_path / "steps")
    assert (repr(loaded.made), loaded.scale, loaded.snapshot.step) == (repr(step.made), step.scale, step.snapshot.step)
    pairs = zip(loaded.snapshot.batches[0], step.snapshot.batches[0], strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert all(
        torch.equal(one, other) for one, other in zip(loaded.snapshot.weights, step.snapshot.weights, strict=True)
    )
    assert torch.equal(loaded.snapshot.random_state.cpu, step.snapshot.random_state.cpu)


def test_a_model_that_is_built_anew_replays_it_with_the_state_that_the_step_found(tmp_path: Path) -> None:
    counting = NET.replace(
        "        x = self.before(x)\n",
        "        self.calls = getattr(self, 'calls', 0) + 1\n"
        "        self.bank = x.detach() + getattr(self, 'bank', 0.0)\n"
        "        x = self.before(x) if self.calls > 1 else self.before(x) * 1e-3 + self.bank * 1e-3\n",
    )
    config = written(tmp_path, {"net.py": counting})
    (step,) = failing_steps(config)
    assert step.snapshot.step == 1
    with prepared(config) as run:
        for one in (step, carried(run, step, tmp_path / "steps")):
            with weights_of(run.workload.model, one):
                replay = replay_step(run, one.snapshot, Manner("float32")).replay
            assert replay.loss == step.made.replays[1].loss
            assert "calls" not in vars(run.workload.model)


def test_a_slice_does_not_carry_the_data_set_it_is_of(tmp_path: Path) -> None:
    config = written(tmp_path)
    (step,) = failing_steps(config)
    rows = torch.randn(1_000_000, 8)
    with prepared(config) as run:
        loaded = carried(run, with_batch(step, duplicate((rows[:2], rows[2:4]))), tmp_path / "steps")
    assert torch.equal(loaded.snapshot.batches[0][1], rows[2:4])
    assert (tmp_path / "steps").stat().st_size < 1_000_000


@pytest.mark.parametrize(
    "held", [lambda: None, (number for number in range(3)), sys.stdout], ids=["lambda", "generator", "file"]
)
def test_what_cannot_be_pickled_is_said(held: object, tmp_path: Path) -> None:
    (step,) = failing_steps(written(tmp_path))
    with pytest.raises(AmpdbgError, match=r"^[^\n]+$"):
        save_steps([with_batch(step, {"x": held})], tmp_path / "steps")


def test_a_class_that_the_other_process_does_not_have_is_said(tmp_path: Path) -> None:
    config = written(tmp_path, {"elsewhere.py": "class Held: pass\n"})
    (step,) = failing_steps(config)
    sys.path.insert(0, str(tmp_path))
    try:
        from elsewhere import Held  # type: ignore[import-not-found]

        save_steps([with_batch(step, Held())], tmp_path / "steps")
    finally:
        sys.path.remove(str(tmp_path))
        del sys.modules["elsewhere"]
    (tmp_path / "elsewhere.py").unlink()
    with prepared(config) as run, pytest.raises(AmpdbgError, match="elsewhere"):
        load_steps(tmp_path / "steps", run.workload)


def test_a_class_of_the_workload_is_found(tmp_path: Path) -> None:
    named = "\n\nclass Pair(tuple):\n    pass\n\n\ndef pairs():\n    return [Pair(pair) for pair in batches()]\n"
    config = written(tmp_path, {"net.py": NET + named}, CONFIG.replace("net.py:batches", "net.py:pairs"))
    (step,) = failing_steps(config)
    save_steps([step], tmp_path / "steps")
    with prepared(config) as run:
        (loaded,) = load_steps(tmp_path / "steps", run.workload)
        assert type(loaded.snapshot.batches[0]) is sys.modules["net"].Pair
