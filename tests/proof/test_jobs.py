"""Experiments with a patch: a pass in eval mode, the memory and time of a step, and a run that may disprove it."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from ampdbg.config.file import load_config
from ampdbg.observer import UNOBSERVED
from ampdbg.patch.file_edits import Patched
from ampdbg.proof.jobs import Job, Trained, raised_in_eval_mode, step_use, trained_with_the_patch
from ampdbg.replay.pinned_replays import ScaleRange
from ampdbg.replay.random_state import RandomState
from ampdbg.replay.run import prepared
from ampdbg.replay.snapshot import FailingStep
from tests.proof.overflowing import CONFIG, NET, failing_steps, written
from tests.siblings import slow_except

# In eval mode

BEFORE = "        x = self.before(x)\n"
NOTING = """\
import queue

SEEN = queue.SimpleQueue()  # no plain data: after a replay it holds what that has put in
""" + NET.replace(
    BEFORE,
    "        x = self.before(F.dropout(self.norm(x.flatten(0, -2)).view_as(x), training=True))\n"
    "        SEEN.put((self.training, torch.is_grad_enabled(), x.dtype))\n",
).replace(
    "nn.Linear(8, 8)\n\n",
    "nn.Linear(8, 8)\n        self.norm = nn.BatchNorm1d(8).eval()\n\n"
    "    def train(self, mode=True):\n        SEEN.put(mode)\n        return super().train(mode)\n\n",
)


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> FailingStep:
    return failing_steps(written(tmp_path_factory.mktemp("failing")))[0]


def raised(failing: FailingStep, folder: Path, net: str, config: str = CONFIG) -> str:
    """The error of this model's pass; all modules are in training mode before and after it."""
    with prepared(written(folder, {"net.py": net}, config)) as run:
        said = raised_in_eval_mode(run, failing)
        assert all(module.training for module in run.workload.model.modules())
        return said


def test_the_eval_pass_runs_once_and_restores_mode_buffers_and_random_state(
    failing: FailingStep, tmp_path: Path
) -> None:
    with prepared(written(tmp_path, {"net.py": NOTING})) as run:
        model = run.workload.model
        seen = vars(sys.modules[type(model).__module__])["SEEN"]
        model.get_submodule("norm").eval()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        random = RandomState.now()
        while not seen.empty():
            seen.get()
        assert raised_in_eval_mode(run, failing) == ""
        assert [seen.get() for _ in range(seen.qsize())] == [
            False,
            (False, False, torch.float16),
            True,
        ]  # the user's own train() restores the mode
        assert [model.training, model.get_submodule("norm").training] == [True, False]
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert torch.equal(RandomState.now().cpu, random.cpu)


def test_an_eval_error_is_reported_in_one_line_and_the_mode_is_restored(failing: FailingStep, tmp_path: Path) -> None:
    raising = "        if not self.training:\n            raise ValueError('one\\ntwo')\n"
    assert raised(failing, tmp_path, NET.replace(BEFORE, raising + BEFORE)) == "Net raised ValueError: one"


def test_an_eval_output_that_the_loss_does_not_accept_is_not_a_fault(failing: FailingStep, tmp_path: Path) -> None:
    listed = NET.replace("return self.after(x)", "return self.after(x) if self.training else [x]")
    assert raised(failing, tmp_path, listed) == ""


def test_the_eval_pass_runs_the_whole_step_function(failing: FailingStep, tmp_path: Path) -> None:
    step = "\n\ndef step(model, batch):\n    return loss(model(batch[0]), batch[1]) / (1 // model.training)\n"
    said = raised(failing, tmp_path, NET + step, CONFIG + "step: {target: net.py:step}\n")
    assert said == "Net raised ZeroDivisionError: integer division or modulo by zero"


# The memory and time of a step

LINEAR = (
    NET.replace("nn.Linear(8, 8), nn.Linear(8, 8)", "nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)")
    .replace("        x = F.layer_norm(large / GAIN**2, (8,))\n", "")
    .replace("        large = (GAIN * x) @ (GAIN * torch.eye(8, device=x.device))\n", "        x = x * float('inf')\n")
)


def test_the_use_of_a_step_counts_the_bytes_kept_for_the_backward_pass(tmp_path: Path) -> None:
    config = written(tmp_path, {"net.py": LINEAR})
    (step,) = failing_steps(config)
    # Both inputs, and in half a copy of the second weight, which the gradient of its input needs.
    for dtype, kept in (("float16", 2 * 2 * 16 * 8 + 2 * 8 * 8), ("float32", 4 * 2 * 16 * 8)):
        with prepared(config) as run:
            use = step_use(run, step, dtype)
        assert use is not None
        assert use.saved_bytes == kept + 2 * 4 * 16 * 8  # the loss keeps its two operands in FP32
        assert bool(use.seconds) is torch.cuda.is_available()  # on a CPU that emulates a GPU it would mean nothing
        assert use.peak_bytes is None or torch.cuda.is_available()


def test_a_step_that_raises_is_not_measured(failing: FailingStep, tmp_path: Path) -> None:
    config = written(tmp_path, {"net.py": NET.replace("return self.after(x)", "raise RuntimeError")})
    with prepared(config) as run:
        assert step_use(run, failing, "float16") is None


# A run with the patch

TRAINS = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)

    def forward(self, x):
        {forward}


def batches():
    return [{gain} * torch.ones(1, 4) for step in range(60)]


def step(model, x):
    return model(x).float().sum()
"""

RUN = """\
model: {target: net.py:Net}
data: {target: net.py:batches}
step: {target: net.py:step}
optimizer: {target: torch.optim:SGD, args: {lr: 1.0e-9}}
"""


@dataclass(frozen=True)
class Case:
    """A run of 60 steps: the loss of a batch of ones, and the factor of each step's batch."""

    forward: str = "return self.a(x)"
    gain: str = "1.0"
    scale: float = 65536.0


GROWS = "1.5 * 2.0 ** min(max(0, step - 20) // 2, {most})"
CASES = {
    "gradients that grow take a few skips": (Case(gain=GROWS.format(most=4), scale=32768.0), (), ""),
    "a large loss needs a scale below 1": (Case("return self.a(x).float() * 1e6", scale=4.0), ("scale-runaway",), ""),
    "gradients that grow to the end": (Case(gain=GROWS.format(most=60), scale=32768.0), (), "gradient-overflow: "),
}


def trained(case: Case, folder: Path) -> Trained:
    (folder / "net.py").write_text(TRAINS.replace("{forward}", case.forward).replace("{gain}", case.gain))
    (folder / "config.yaml").write_text(RUN)
    config = load_config(
        folder / "config.yaml", [f"precision.loss_scale.init={case.scale}", "train.device=cpu", "train.steps=60"]
    )
    job = Job("patched", config, Patched(), (ScaleRange(4.0),), is_silent=False)
    return trained_with_the_patch(replace(job, begins_at=case.scale, survived_scale=case.scale), UNOBSERVED)


@pytest.mark.parametrize("name", slow_except(["a large loss needs a scale below 1"], CASES))
def test_only_a_failure_of_the_run_disproves_the_patch_and_the_rest_is_a_caveat(name: str, tmp_path: Path) -> None:
    case, beside, fault = CASES[name]
    run = trained(case, tmp_path)
    assert run.failure == ""
    assert set(run.beside) >= set(beside)
    assert bool(run.faults) is bool(fault)
    assert not fault or [one for one in run.faults if one.startswith(fault)]
