"""How a batch becomes losses, by every convention of the config."""

import itertools
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


# A model whose output is made of its arguments.
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
def test_the_structure_of_a_batch_sets_the_model_inputs(tmp_path: Path, batch: str, output: str, loss: float) -> None:
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
        "{target: torch.nn:CrossEntropyLoss, args: {reduction: sum}}",
        "{target: torch.nn.functional:cross_entropy}",
        "{target: torch.nn.functional:cross_entropy, args: {reduction: sum}}",
        "{target: net.py:criterion}",
        "{target: net.py:Own}",
    ],
)
def test_a_loss_is_a_function_a_class_or_an_instance_with_arguments(tmp_path: Path, loss: str) -> None:
    net = """
        criterion = nn.CrossEntropyLoss()

        class Own:
            def __call__(self, output, target):
                return nn.functional.cross_entropy(output, target)
    """
    workload = build(tmp_path, f"loss={loss}", net=net)
    inputs, target = batch = next(workload.batches())
    reduction = "sum" if "sum" in loss else "mean"
    expected = torch.nn.functional.cross_entropy(workload.model(inputs), target, reduction=reduction)
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
def test_the_loss_is_the_model_output_or_an_item_of_the_output(tmp_path: Path, output: str) -> None:
    net = f"""
        import collections, types

        class M(Net):
            def forward(self, x):
                loss = 3 + 0 * self.head.weight.sum()
                return {output}

        data = [1]
    """
    assert loss_of(tmp_path, net) == 3.0


STEP = """
class M(Net):
    def training_step(self, batch, index):
        raise AssertionError

def step(model, batch, times=1):
    zero = 0 * model.head.weight.sum()
    return RETURNED

class Step:
    def __init__(self, times):
        self.times = times

    def __call__(self, model, batch):
        return step(model, batch, self.times)

def loss(output, target):
    return 0 * output.sum() + len(target)
"""
TRAINING_STEP = """
class M(Net):
    def training_step(self, batch, *index):
        zero = 0 * self.head.weight.sum()
        return RETURNED
"""
WITHOUT_INDEX = TRAINING_STEP.replace(", *index", "")
STEP_CASES: dict[str, tuple[str, str, str, list[dict[str, float]]]] = {
    "a step": (
        STEP,
        "times * batch[0].sum() + zero",
        "step={target: net.py:step, args: {times: 2}}",
        [{"loss": 0.0}, {"loss": 64.0}, {"loss": 128.0}],
    ),
    "a step of several losses": (
        STEP,
        "{'a': zero + 1, 'b': (zero + 2)[None]}",
        "step={target: net.py:step}",
        [{"a": 1.0, "b": 2.0}],
    ),
    "a step that is a class": (STEP, "times + zero", "step={target: net.py:Step, args: {times: 4}}", [{"loss": 4.0}]),
    "the config's own": (STEP, "", "loss={target: net.py:loss}", [{"loss": 8.0}]),
    "a training step, which gets the batch and its index": (
        TRAINING_STEP,
        "{'loss': zero + 10 * batch[0][0, 0] + index[0], 'log': 1}",
        "data.args.count=2",
        [{"loss": 0.0}, {"loss": 11.0}, {"loss": 2.0}],
    ),
    "a training step of several losses": (TRAINING_STEP, "{'a': zero + 1, 'b': zero + 2}", "", [{"a": 1.0, "b": 2.0}]),
    "a training step without the index": (WITHOUT_INDEX, "zero + len(batch)", "", [{"loss": 2.0}]),
}
"""The code, the return value of its step, a key of the config, and the losses of the first steps."""


@pytest.mark.parametrize("name", STEP_CASES)
def test_every_kind_of_step_and_the_loss_of_the_config_give_scalar_losses(name: str, tmp_path: Path) -> None:
    code, returned, key, losses = STEP_CASES[name]
    net = code.replace("RETURNED", returned)
    workload = build(tmp_path, "model.target=net.py:M", *filter(None, [key]), config=NO_LOSS, net=net)
    made = [workload.losses(batch) for batch in itertools.islice(workload.batches(), len(losses))]
    assert [{name: loss.item() for name, loss in step.items()} for step in made] == losses
    assert {loss.shape for step in made for loss in step.values()} == {()}


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        ("None", r"the loss is None; an output carries no loss when its batch has no labels"),
        ("torch.ones(0)", r"the loss has the shape \[0\]; needed: a scalar"),
        ("torch.tensor(1)", r"the loss has the dtype int64; needed: a floating-point scalar"),
        ("torch.tensor(1j)", r"the loss has the dtype complex64; needed: a floating-point scalar"),
    ],
)
def test_a_value_that_is_not_a_floating_point_scalar_loss_is_refused(tmp_path: Path, loss: str, problem: str) -> None:
    net = f"class M(Net):\n    def forward(self, x):\n        return {{'loss': {loss}}}\n\ndata = [1]\n"
    with pytest.raises(WorkloadError, match=problem):
        loss_of(tmp_path, net)


def test_a_loss_under_no_grad_need_not_require_grad(tmp_path: Path) -> None:
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
