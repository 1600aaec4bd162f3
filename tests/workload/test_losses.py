"""How a batch becomes losses: every convention of the config."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ampdbg.errors import WorkloadError
from tests.workload.folders import CONFIG, build, first_losses

NO_LOSS = "\n".join(CONFIG.splitlines()[:2]) + "\n"


def loss_of(folder: Path, net: str, *overrides: str, model: str = "M") -> float:
    """The loss of the first batch of ``data`` in ``net``, for the model ``M`` in it and no ``loss`` in the config."""
    targets = (f"model.target=net.py:{model}", "data.target=net.py:data")
    return float(first_losses(build(folder, *targets, *overrides, config=NO_LOSS, net=net))["loss"].item())


# A model whose output is made of what it was called with.
ECHO = """
class M(Net):
    def forward(self, *args, **kwargs):
        return 0 * self.head.weight.sum() + {}
"""


@pytest.mark.parametrize(
    ("batch", "output", "loss"),
    [
        ("{'a': 2, 'b': 3}", "kwargs['a'] * 10 + kwargs['b']", 23),
        ("(2, 3)", "args[0] * 10 + len(args)", 21),
        ("[2, 3]", "args[0] * 10 + len(args)", 21),
        ("((2, 5), 3)", "args[0] * 10 + args[1]", 25),
        ("([2, 5], 3)", "args[0][0] * 10 + args[0][1]", 25),
        ("(2, 3, 4)", "len(args) * 10 + len(args[0])", 13),
        ("(2,)", "len(args) * 10 + len(args[0])", 11),
        ("7", "args[0]", 7),
    ],
)
def test_a_batch_is_passed_by_its_shape(tmp_path: Path, batch: str, output: str, loss: float) -> None:
    assert loss_of(tmp_path, f"{ECHO.format(output)}\ndata = [{batch}]\n") == loss


def test_a_loss_gets_the_output_and_the_target(tmp_path: Path) -> None:
    net = (
        ECHO.format("args[0]")
        + "\ndata = [((2.0), 5.0)]\n\ndef loss(output, target):\n    return output * 10 + target\n"
    )
    assert loss_of(tmp_path, net, "loss.target=net.py:loss") == 25.0


@pytest.mark.parametrize(
    "loss",
    [
        "{target: torch.nn:CrossEntropyLoss}",
        "{target: torch.nn:CrossEntropyLoss, args: {reduction: mean}}",
        "{target: torch.nn.functional:cross_entropy}",
        "{target: torch.nn.functional:cross_entropy, args: {label_smoothing: 0.0}}",
        "{target: net.py:criterion}",
        "{target: net.py:Own}",
    ],
)
def test_a_loss_is_a_function_a_class_or_an_instance(tmp_path: Path, loss: str) -> None:
    net = """
        criterion = nn.CrossEntropyLoss()

        class Own:
            def __call__(self, output, target):
                return nn.functional.cross_entropy(output, target)
    """
    workload = build(tmp_path, f"loss={loss}", net=net)
    inputs, target = batch = next(workload.batches())
    expected = torch.nn.functional.cross_entropy(workload.model(inputs), target)
    assert torch.equal(workload.losses(batch)["loss"], expected)


def test_arguments_of_a_loss_are_used(tmp_path: Path) -> None:
    for target in ("torch.nn.functional:cross_entropy", "torch.nn:CrossEntropyLoss"):
        workload = build(tmp_path, f"loss={{target: '{target}', args: {{reduction: sum}}}}")
        inputs, labels = batch = next(workload.batches())
        expected = torch.nn.functional.cross_entropy(workload.model(inputs), labels, reduction="sum")
        assert torch.equal(workload.losses(batch)["loss"], expected)


@pytest.mark.parametrize(
    "output",
    [
        "loss",
        "loss[None]",
        "{'loss': loss, 'logits': None}",
        "types.SimpleNamespace(loss=loss)",
        "collections.namedtuple('Output', 'loss logits')(loss, None)",
    ],
)
def test_an_output_is_a_loss_or_carries_one(tmp_path: Path, output: str) -> None:
    net = f"""
        import collections, types

        class M(Net):
            def forward(self, x):
                loss = 3 + 0 * self.head.weight.sum()
                return {output}

        data = [1]
    """
    assert loss_of(tmp_path, net) == 3.0


def test_a_step_comes_before_everything_else(tmp_path: Path) -> None:
    net = """
        class M(Net):
            def training_step(self, batch, index):
                raise AssertionError

        def step(model, batch, times=1):
            return times * batch[0].sum() + 0 * model.head.weight.sum()
    """
    workload = build(tmp_path, "model.target=net.py:M", "step={target: net.py:step, args: {times: 2}}", net=net)
    stream = workload.batches()
    assert [workload.losses(next(stream))["loss"].item() for _ in range(3)] == [0.0, 64.0, 128.0]


def test_a_step_may_return_several_losses(tmp_path: Path) -> None:
    net = """
        def step(model, batch):
            zero = 0 * model.head.weight.sum()
            return {"a": zero + 1, "b": (zero + 2)[None]}
    """
    losses = first_losses(build(tmp_path, "step={target: net.py:step}", net=net))
    assert {name: loss.item() for name, loss in losses.items()} == {"a": 1.0, "b": 2.0}
    assert {loss.shape for loss in losses.values()} == {()}


def test_a_step_may_be_a_class(tmp_path: Path) -> None:
    net = """
        class Step:
            def __init__(self, times):
                self.times = times
            def __call__(self, model, batch):
                return self.times + 0 * model.head.weight.sum()
    """
    losses = first_losses(build(tmp_path, "step={target: net.py:Step, args: {times: 4}}", net=net))
    assert losses["loss"].item() == 4.0


def test_a_training_step_gets_the_batch_and_its_index(tmp_path: Path) -> None:
    net = """
        class M(Net):
            def training_step(self, batch, batch_idx):
                return {"loss": 0 * self.head.weight.sum() + 10 * batch + batch_idx, "log": 1}

        data = [5, 6]
    """
    workload = build(tmp_path, "model.target=net.py:M", "data.target=net.py:data", config=NO_LOSS, net=net)
    stream = workload.batches()
    assert [workload.losses(next(stream))["loss"].item() for _ in range(3)] == [50.0, 61.0, 52.0]


def test_a_training_step_may_return_several_losses(tmp_path: Path) -> None:
    net = """
        class M(Net):
            def training_step(self, batch, batch_idx):
                zero = 0 * self.head.weight.sum()
                return {"a": zero + 1, "b": zero + 2}
    """
    losses = first_losses(build(tmp_path, "model.target=net.py:M", config=NO_LOSS, net=net))
    assert {name: loss.item() for name, loss in losses.items()} == {"a": 1.0, "b": 2.0}


def test_a_training_step_may_do_without_the_index(tmp_path: Path) -> None:
    net = """
        class M(Net):
            def training_step(self, batch):
                return 0 * self.head.weight.sum() + batch

        data = [5]
    """
    assert loss_of(tmp_path, net) == 5.0


def test_a_loss_in_the_config_comes_before_a_training_step(tmp_path: Path) -> None:
    net = """
        class M(Net):
            def training_step(self, batch, index):
                raise AssertionError
    """
    assert first_losses(build(tmp_path, "model.target=net.py:M", net=net))["loss"].requires_grad


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        ("None", r"the loss is None; an output carries no loss when its batch has no labels"),
        ("torch.ones(0)", r"the loss has the shape \[0\]; needed: a scalar"),
        ("torch.tensor(1)", r"the loss has the dtype int64; needed: a floating-point scalar"),
        ("torch.tensor(1j)", r"the loss has the dtype complex64; needed: a floating-point scalar"),
    ],
)
def test_what_is_no_loss_is_refused(tmp_path: Path, loss: str, problem: str) -> None:
    net = f"class M(Net):\n    def forward(self, x):\n        return {{'loss': {loss}}}\n\ndata = [1]\n"
    with pytest.raises(WorkloadError, match=problem):
        loss_of(tmp_path, net)


def test_without_gradients_a_loss_need_not_require_one(tmp_path: Path) -> None:
    workload = build(tmp_path)
    with torch.no_grad():
        assert not first_losses(workload)["loss"].requires_grad


def test_a_loss_module_is_moved_to_the_device(tmp_path: Path) -> None:
    net = """
        class Weighted(nn.Module):
            moved = False
            def to(self, device):
                type(self).moved = True
                return super().to(device)
            def forward(self, output, target):
                assert self.moved
                return output.mean()
    """
    assert first_losses(build(tmp_path, "loss={target: net.py:Weighted}", net=net))["loss"].ndim == 0
