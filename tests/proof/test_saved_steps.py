"""Failing steps through a file: everything arrives, no more than that, and what cannot be carried says so."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ampdbg.config.schema import Config
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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, FailingStep]:
    """A config, and the failing step of its run."""
    config = written(tmp_path_factory.mktemp("made"))
    return config, failing_steps(config)[0]


def test_a_step_arrives_as_it_was(made: tuple[Config, FailingStep], tmp_path: Path) -> None:
    config, step = made
    with prepared(config) as run:
        loaded = carried(run, step, tmp_path / "steps")
    assert (repr(loaded.made), loaded.scale, loaded.snapshot.step) == (repr(step.made), step.scale, step.snapshot.step)
    found, before = ([*one.snapshot.batches[0], *one.snapshot.weights] for one in (loaded, step))
    assert all(torch.equal(*pair) for pair in zip(found, before, strict=True))
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
            assert step.made.fp32 is not None
            assert replay.loss == step.made.fp32.loss
            assert "calls" not in vars(run.workload.model)


def test_a_slice_does_not_carry_the_data_set_it_is_of(made: tuple[Config, FailingStep], tmp_path: Path) -> None:
    config, step = made
    rows = torch.randn(1_000_000, 8)
    with prepared(config) as run:
        loaded = carried(run, with_batch(step, duplicate((rows[:2], rows[2:4]))), tmp_path / "steps")
    assert torch.equal(loaded.snapshot.batches[0][1], rows[2:4])
    assert (tmp_path / "steps").stat().st_size < 1_000_000


@pytest.mark.parametrize(
    "held", [lambda: None, (number for number in range(3)), sys.stdout], ids=["lambda", "generator", "file"]
)
def test_what_cannot_be_pickled_is_said(held: object, made: tuple[Config, FailingStep], tmp_path: Path) -> None:
    with pytest.raises(AmpdbgError, match=r"^[^\n]+$"):
        save_steps([with_batch(made[1], {"x": held})], tmp_path / "steps")


def test_a_class_that_the_other_process_does_not_have_is_said(
    made: tuple[Config, FailingStep], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, step = made
    elsewhere = ModuleType("elsewhere")
    exec("class Held: pass", vars(elsewhere))
    monkeypatch.setitem(sys.modules, "elsewhere", elsewhere)
    save_steps([with_batch(step, elsewhere.Held())], tmp_path / "steps")
    monkeypatch.undo()
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
