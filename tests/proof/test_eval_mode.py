"""One forward pass in eval mode: what it raises is told, and it leaves no trace."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ampdbg.proof.experiments import raised_in_eval_mode
from ampdbg.replay.random_state import RandomState
from ampdbg.replay.run import prepared
from ampdbg.replay.snapshot import FailingStep
from tests.proof.overflowing import CONFIG, NET, failing_steps, written

COUNTING = NET.replace(
    "        x = self.before(x)\n",
    "        x = self.before(F.dropout(self.norm(x.flatten(0, -2)).view_as(x), training=True))\n"
    "        SEEN.append((self.training, torch.is_grad_enabled(), x.dtype))\n",
)
NOTES = "class Notes(list):\n    pass\n\nSEEN = Notes()\n"
"""A plain list of a module is restored after each replay; one of the user's own kind is not."""

COUNTING = f"{NOTES}{COUNTING}".replace(
    "nn.Linear(8, 8)\n", "nn.Linear(8, 8)\n        self.norm = nn.BatchNorm1d(8).eval()\n", 1
)


def seen_by(model: torch.nn.Module) -> list[object]:
    """What the user's module has noted."""
    seen: list[object] = vars(sys.modules[type(model).__module__])["SEEN"]
    return seen


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> FailingStep:
    return failing_steps(written(tmp_path_factory.mktemp("failing")))[0]


def test_it_is_one_pass_and_leaves_mode_buffers_and_random_state_as_they_were(
    failing: FailingStep, tmp_path: Path
) -> None:
    config = written(tmp_path, {"net.py": COUNTING})
    with prepared(config) as run:
        model = run.workload.model
        model.get_submodule("norm").eval()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        random = RandomState.now()
        assert raised_in_eval_mode(run, failing) == ""
        assert seen_by(model) == [(False, False, torch.float16)]
        assert [model.training, model.get_submodule("norm").training] == [True, False]
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert torch.equal(RandomState.now().cpu, random.cpu)


def test_what_it_raises_is_told_in_a_line_and_the_mode_put_back(failing: FailingStep, tmp_path: Path) -> None:
    raising = "        if not self.training:\n            raise ValueError('one\\ntwo')\n        x = self.before(x)\n"
    config = written(tmp_path, {"net.py": NET.replace("        x = self.before(x)\n", raising)})
    with prepared(config) as run:
        assert raised_in_eval_mode(run, failing) == "Net raised ValueError: one"
        assert all(module.training for module in run.workload.model.modules())


def test_what_a_method_of_the_users_does_in_eval_is_undone(failing: FailingStep, tmp_path: Path) -> None:
    merging = "    def train(self, mode=True):\n        SEEN.append(mode)\n        return super().train(mode)\n\n"
    config = written(
        tmp_path,
        {"net.py": NOTES + NET.replace("    def forward", merging + "    def forward") + "\n\nMODES = []\n"},
    )
    with prepared(config) as run:
        assert raised_in_eval_mode(run, failing) == ""
        assert seen_by(run.workload.model) == [False, True]


def test_an_output_that_the_loss_does_not_take_in_eval_mode_is_no_fault(failing: FailingStep, tmp_path: Path) -> None:
    listed = NET.replace("return self.after(x)", "return self.after(x) if self.training else [x]")
    config = written(tmp_path, {"net.py": listed})
    with prepared(config) as run:
        assert raised_in_eval_mode(run, failing) == ""


def test_a_step_function_is_run_as_a_whole(failing: FailingStep, tmp_path: Path) -> None:
    step = "\n\ndef step(model, batch):\n    return loss(model(batch[0]), batch[1]) / (1 // model.training)\n"
    config = written(tmp_path, {"net.py": NET + step}, CONFIG + "step: {target: net.py:step}\n")
    with prepared(config) as run:
        assert raised_in_eval_mode(run, failing) == "Net raised ZeroDivisionError: integer division or modulo by zero"
