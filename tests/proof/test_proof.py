"""Proofs of hand-written patches: a good one passes, and a wrong one fails in the step that shows its fault."""

import inspect
import linecache
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ampdbg.config.schema import Config
from ampdbg.patch.by_name import module_text
from ampdbg.patch.file_edits import Patched
from ampdbg.proof.jobs import FreshProcesses
from ampdbg.record.pins import Proof
from ampdbg.replay.random_state import RandomState
from ampdbg.replay.run import prepared
from tests.observing import observing
from tests.proof.overflowing import (
    CONFIG,
    GOOD,
    IN_FP32,
    NET,
    OVERFLOWS,
    failing_steps,
    proven,
    run_in_this_process,
    step_of,
    written,
)

TITLE = "line 15 of net.py"


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts no process, which takes seconds: the tests check the results of the experiments."""
    monkeypatch.setattr(FreshProcesses, "__call__", run_in_this_process)


def failed(proof: Proof) -> list[str]:
    return [step.name for step in proof.steps if not step.passed]


def test_a_good_patch_is_proven_in_the_live_run_and_in_a_fresh_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # The overflow is in a sibling with CRLF and Latin-1; the model's file prints, and notes its process.
    scaling = (
        "# -*- coding: latin-1 -*-\r\nimport torch\r\n\r\n\r\ndef large(x):  # größer\r\n"
        "    return (300 * x) @ (300 * torch.eye(8, device=x.device))\r\n"
    )
    cured = scaling.replace(
        "    return (300 * x)",
        "    with torch.autocast(x.device.type, enabled=False):\r\n        return (300 * x.float())",
    )
    net = NET.replace(OVERFLOWS, "        large = scaling.large(x)\n").replace(
        "import torch\n",
        "import os\nimport torch\nimport scaling\nprint('not for the patch')\n"
        "with open('processes', 'a') as file:\n    print(os.getpid(), file=file)\n",
        1,
    )
    path = tmp_path / "scaling.py"
    path.write_bytes(scaling.encode("latin-1"))
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        config = written(tmp_path, {"net.py": net})
        stages: list[str] = []
        failing = failing_steps(config)
        capfd.readouterr()
        patch, without = {path: cured.encode("latin-1")}, {"line 6 of scaling.py": {path: scaling.encode("latin-1")}}
        proof = proven(config, patch, without, failing=failing, observer=observing(stage=stages.append))
    finally:
        os.chdir(here)

    assert proof.passed, proof
    assert [step.name for step in proof.steps] == [
        "the patched code",
        "the failing step (0)",
        "the model's function",
        "without line 6 of scaling.py",
        "further batches",
        "in eval mode",
        "training 8 steps",
        "its losses",
        "time and memory of a step" if torch.cuda.is_available() else "memory of a step",
    ]
    assert step_of(proof, "the failing step (0)").detail.startswith("healthy; loss 1.4873, 1.4872 in FP32")
    assert "loss NaN: mm (scaling.py:6)" in step_of(proof, "without line 6 of scaling.py").detail
    assert step_of(proof, "further batches").detail == "3 of 3 healthy"
    assert step_of(proof, "training 8 steps").detail == "healthy; loss scale 1,024, 0 skipped steps"
    assert stages[0] == "the failing step with the patch"
    assert "8 steps in FP32" in stages
    assert capfd.readouterr() == ("not for the patch\n", "")  # from the live run only
    assert path.read_bytes() == scaling.encode("latin-1")
    # The process of the failing step, and the one that trains with the patch.
    assert len(set((tmp_path / "processes").read_text().split())) == 2


MOVED = {
    "a line that only moved": ("        large = (GAIN * x) @", "        large = (GAIN * x) @", "(net.py:15)"),
    "one that is indented": (OVERFLOWS, "        if True:\n    " + OVERFLOWS, "(net.py:15)"),
    "one that the patch has written": ("(GAIN * x) @", "(1.0 * GAIN * x) @", "(net.py)"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("name", MOVED)
def test_a_proof_names_lines_by_their_numbers_in_the_unpatched_file(name: str, tmp_path: Path) -> None:
    before, after, place = MOVED[name]
    config = written(tmp_path)
    failing = failing_steps(config)
    shifted = "import functools\n\n" + NET.replace(before, after)
    path = tmp_path / "net.py"
    (*_, step) = proven(config, {path: shifted.encode()}, failing=failing).steps
    assert (step.passed, step.detail.partition(" reaches")[0]) == (False, f"loss NaN: mm {place}")
    proof = proven(config, {path: GOOD.encode()}, {TITLE: {path: shifted.encode()}}, failing=failing)
    assert f"loss NaN: mm {place}" in step_of(proof, f"without {TITLE}").detail


def pins_file(config: Config, *names: str) -> Patched:
    path = config.folder / "ampdbg_pins.py"
    return Patched({path: module_text(names).encode()}, pins_file=path)


def config_pins(config: Config, *names: str) -> Patched:
    return Patched(pins=names)


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("make", "what"),
    [(pins_file, "this file: imported, and called with the model"), (config_pins, "these pins: in force")],
)
def test_pins_by_name_are_proven_in_a_file_or_a_config(make: Callable[..., Patched], what: str, tmp_path: Path) -> None:
    config = written(tmp_path)
    failing = failing_steps(config)
    proof = proven(config, make(config, ":own"), {"the root's own lines": Patched()}, failing=failing)
    assert proof.passed, proof
    assert any(f"{step.name}: {step.detail}".startswith(what) for step in proof.steps)
    assert step_of(proof, "without the root's own lines").detail.startswith("step 0 fails: loss NaN")
    wrong = proven(config, make(config, "after"), failing=failing)
    assert failed(wrong) == ["the failing step (0)"]
    superfluous = proven(
        config, make(config, ":own", "after"), {"after": make(config, ":own"), "own": Patched()}, failing=failing
    )
    assert failed(superfluous) == ["without after"]
    assert not (tmp_path / "ampdbg_pins.py").exists()
    with prepared(config) as run, torch.autocast(run.device.type, dtype=torch.float16):
        assert torch.isnan(run.workload.losses(next(run.workload.batches()))["loss"]), "a pin is left behind"


@pytest.mark.slow
def test_a_patch_is_proven_with_batches_that_cannot_be_pickled(tmp_path: Path) -> None:
    kept = (
        "\n\ndef step(model, batch):\n    return loss(model(batch['x']), batch['y'])\n\n\n"
        "def unpicklable():\n    return [{'x': x, 'y': y, 'augment': lambda: None} for x, y in batches()]\n"
    )
    config = written(
        tmp_path,
        {"net.py": NET + kept},
        CONFIG.replace("net.py:batches", "net.py:unpicklable") + "step: {target: net.py:step}\n",
    )
    path = tmp_path / "net.py"
    assert proven(config, {path: (GOOD + kept).encode()}, {TITLE: {path: path.read_bytes()}}).passed


@pytest.mark.usefixtures("in_this_process")
def test_a_patch_of_code_that_runs_on_import_is_proven_with_a_rebuilt_model(tmp_path: Path) -> None:
    config, path = written(tmp_path), tmp_path / "net.py"
    elsewhere = GOOD.replace("GAIN = 300.0", "GAIN = 3e2 * 1.0").encode()
    proof = proven(config, {path: elsewhere}, {TITLE: {path: path.read_bytes()}})
    assert proof.passed, proof
    said = "imported, with the model rebuilt, for it changes code that runs when net.py is imported"
    assert step_of(proof, "the patched code").detail == said


GATED = GOOD.replace("        return", "        gate = self.before(x) if self.training else None\n        return")
BROKEN_IN_EVAL = GATED.replace("return self.after(x)", "return self.after(x) + 0 * gate.float().sum()")
BROKEN_ANYWAY = BROKEN_IN_EVAL.replace(IN_FP32, OVERFLOWS)
NO_FLOAT = "Net raised AttributeError: 'NoneType' object has no attribute 'float'"

WRONG = {
    "does not cure": (GOOD.replace("enabled=False", "enabled=True"), ["the failing step (0)"], "loss NaN: mm (net.py)"),
    "changes the loss": (
        GOOD.replace("large / GAIN**2", "1.01 * large / GAIN**2").replace("F.layer_norm", "0.99 * F.layer_norm"),
        ["the model's function"],
        "changed: in FP32 the loss of step 0 is",
    ),
    "changes the gradients": (
        GOOD.replace("return self.after(x)", "return self.after(x) - (self.after(x) - self.after(x.detach()))"),
        ["the model's function"],
        "changed: in FP32 the gradients' norm of step 0 is",
    ),
    "changes the weights": (
        GOOD.replace("self.before, self.after =", "self.more = nn.Linear(8, 8)\n        self.before, self.after ="),
        ["the patched code"],
        "other parameters than the failing step",
    ),
    "breaks the import": (
        GOOD.replace("class Net(", "class Net(oops."),
        ["the patched code"],
        "NameError: name 'oops' is not defined",
    ),
    "holds on one batch only": (
        GOOD.replace("enabled=False", "enabled=not is_first").replace(
            "        x = self.before(x)\n",
            "        is_first = bool(x[0, 0] == batches()[0][0][0, 0])\n        x = self.before(x)\n",
        ),
        ["further batches", "training 8 steps"],
        "0 of 3 healthy; loss NaN",
    ),
    "raises in eval mode": (BROKEN_IN_EVAL, ["in eval mode"], f"{NO_FLOAT}; without the patch it does not"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(("patch", "steps", "detail"), WRONG.values(), ids=WRONG)
def test_a_wrong_patch_fails_in_the_matching_step(patch: str, steps: list[str], detail: str, tmp_path: Path) -> None:
    config = written(tmp_path)
    proof = proven(config, {tmp_path / "net.py": patch.encode()})
    assert not proof.passed
    assert failed(proof) == steps
    assert detail in step_of(proof, steps[0]).detail
    assert (tmp_path / "net.py").read_text() == NET


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_a_patch_of_a_file_that_the_run_does_not_import_fails(tmp_path: Path) -> None:
    config = written(tmp_path, {"unused.py": "X = 1\n"})
    proof = proven(config, {tmp_path / "net.py": GOOD.encode(), tmp_path / "unused.py": b"X = 2\n"})
    assert proof.steps[-1].detail == "the run does not import unused.py"
    assert not proof.passed


@pytest.mark.usefixtures("in_this_process")
def test_a_patch_with_a_unit_that_is_not_needed_fails(tmp_path: Path) -> None:
    config, path = written(tmp_path), tmp_path / "net.py"
    more = GOOD.replace(
        "        return self.after(x)\n",
        "        with torch.autocast(x.device.type, enabled=False):\n            return self.after(x.float())\n",
    )
    without = {TITLE: {path: more.replace(IN_FP32, OVERFLOWS).encode()}, "line 17 of net.py": {path: GOOD.encode()}}
    proof = proven(config, {path: more.encode()}, without)
    assert not proof.passed
    assert failed(proof) == ["without line 17 of net.py"]
    assert step_of(proof, "without line 17 of net.py").detail.startswith("not needed: healthy; loss 1.48")
    if not torch.cuda.is_available():  # on a GPU one process trains at a time, and none for a failed patch
        assert step_of(proof, f"without {TITLE}").passed


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_an_eval_error_of_the_unpatched_model_does_not_count_against_the_patch(tmp_path: Path) -> None:
    config, path = written(tmp_path), tmp_path / "net.py"
    failing = failing_steps(config)
    path.write_text(BROKEN_ANYWAY)
    proof = proven(config, {path: BROKEN_IN_EVAL.encode()}, failing=failing)
    assert proof.passed, proof
    detail = step_of(proof, "in eval mode").detail
    assert detail == f"not run: the unpatched model raises too ({NO_FLOAT})"


LARGE = ("F.mse_loss(output.float(), target)", "F.mse_loss(output.float(), target) * 100")
AT_TWO_TO_THE_24 = CONFIG.replace("init: 1024.0", "init: 16777216.0")


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_the_training_run_starts_at_a_loss_scale_that_suits_the_failing_step(tmp_path: Path) -> None:
    config, path = written(tmp_path, {"net.py": NET.replace(*LARGE)}, AT_TWO_TO_THE_24), tmp_path / "net.py"
    proof = proven(config, {path: GOOD.replace(*LARGE).encode()}, train_steps=2)
    assert proof.passed, proof
    detail = step_of(proof, "training 2 steps").detail
    assert ", 0 skipped steps; started at " in detail
    assert detail.endswith(", a scale that suits the failing step")


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("patch", [GOOD, GOOD.replace("GAIN = 300.0", "GAIN = 3e2 * 1.0")])
def test_a_proof_leaves_the_live_run_bitwise_unchanged(patch: str, tmp_path: Path) -> None:
    config, path = written(tmp_path), tmp_path / "net.py"
    failing = failing_steps(config)
    with prepared(config) as run:
        kind = type(run.workload.model)
        weights = {name: value.clone() for name, value in run.workload.model.state_dict().items()}
        code, random, modules = kind.forward.__code__, RandomState.now(), dict(sys.modules)
        assert proven(config, {path: patch.encode()}, failing=failing, run=run).passed
        assert all(torch.equal(value, weights[name]) for name, value in run.workload.model.state_dict().items())
        assert kind.forward.__code__ is code
        assert torch.equal(RandomState.now().cpu, random.cpu)
        assert {name: one for name, one in sys.modules.items() if name in modules} == modules
        assert linecache.getlines(str(path)) == NET.splitlines(keepends=True)
    assert path.read_text() == NET


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_a_proof_leaves_another_prepared_run_unpatched(tmp_path: Path) -> None:
    config = written(tmp_path)
    failing = failing_steps(config)
    with prepared(config) as run:

        def losses() -> list[torch.Tensor]:
            """In FP32 and in FP16. Only with the patch both are finite."""
            batch = next(run.workload.batches())
            with torch.autocast(run.device.type, dtype=torch.float16):
                low = run.workload.losses(batch)["loss"]
            return [run.workload.losses(batch)["loss"], low]

        before = losses()
        assert proven(config, {tmp_path / "net.py": GOOD.encode()}, failing=failing).passed
        after = losses()
    assert [loss.isfinite().item() for loss in before] == [True, False]
    assert [loss.isfinite().item() for loss in after] == [True, False]


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("at", ["further batches with the patch", "8 steps with the patch"])
def test_an_interrupt_propagates_and_the_patch_is_removed(at: str, tmp_path: Path) -> None:
    config = written(tmp_path)
    failing, finders = failing_steps(config), list(sys.meta_path)

    def interrupt(stage: str) -> None:
        if stage == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        proven(config, {tmp_path / "net.py": GOOD.encode()}, failing=failing, observer=observing(stage=interrupt))
    assert sys.meta_path == finders
    with prepared(config) as run:
        assert "enabled=False" not in inspect.getsource(type(run.workload.model))
