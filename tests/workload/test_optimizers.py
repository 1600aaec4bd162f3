"""Models and optimizers: what a target may be, and how parameters are grouped and named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ampdbg.errors import WorkloadError
from ampdbg.workload.build import Workload
from tests.workload.folders import CONFIG, build

TWO_LAYERS = """
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.first = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4).requires_grad_(False)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.first.weight

    def forward(self, x):
        return self.head(self.norm(self.first(x))) * self.scale
"""


def names(workload: Workload) -> list[list[str]]:
    return [[group["name"] for group in optimizer.param_groups] for optimizer in workload.optimizers]


@pytest.mark.parametrize(
    ("grouping", "expected"),
    [
        ("parameter", ["scale", "first.weight", "first.bias", "head.bias"]),
        ("module", ["(root)", "first", "head"]),
        ("single", ["all"]),
    ],
)
def test_three_ways_of_grouping_leave_out_frozen_and_tied_parameters(
    tmp_path: Path, grouping: str, expected: list[str]
) -> None:
    workload = build(tmp_path, "model.target=net.py:Two", f"optimizer.groups={grouping}", net=TWO_LAYERS)
    assert names(workload) == [expected]
    grouped = [parameter for group in workload.optimizers[0].param_groups for parameter in group["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in workload.model.parameters() if p.requires_grad}


def test_the_default_optimizer_is_adamw_with_its_defaults(tmp_path: Path) -> None:
    (optimizer,) = build(tmp_path).optimizers
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults == torch.optim.AdamW([torch.ones(1)]).defaults


def test_the_arguments_reach_every_group(tmp_path: Path) -> None:
    (optimizer,) = build(tmp_path, "optimizer.args={lr: 3e-2, betas: [0.5, 0.9]}").optimizers
    assert [(group["lr"], tuple(group["betas"])) for group in optimizer.param_groups] == [(0.03, (0.5, 0.9))] * 2


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("class Own(torch.optim.SGD): pass\nmake = Own", [["head.weight", "head.bias"]]),
        ("def make(params): return torch.optim.SGD(params)", [["head.weight", "head.bias"]]),
        ("def make(groups): return [torch.optim.SGD([g]) for g in groups]", [["head.weight"], ["head.bias"]]),
        ("def make(model): return torch.optim.SGD(model.parameters())", [["head.* (2)"]]),
        (
            "def make(model): return torch.optim.SGD([{'params': [p]} for p in model.parameters()])",
            [["head.weight", "head.bias"]],
        ),
        ("def make(model): return torch.optim.SGD([{'params': model.parameters(), 'name': 'mine'}])", [["mine"]]),
    ],
)
def test_an_optimizer_is_a_class_or_a_function_of_the_groups_or_of_the_model(
    tmp_path: Path, source: str, expected: list[list[str]]
) -> None:
    workload = build(tmp_path, "optimizer.target=opt.py:make", opt=f"import torch\n{source}\n")
    assert names(workload) == expected


def test_groups_without_a_common_module_are_named_after_the_first_parameter(tmp_path: Path) -> None:
    opt = "import torch\ndef make(model): return torch.optim.SGD(model.parameters())\n"
    overrides = ("model.target=net.py:Two", "optimizer.target=opt.py:make")
    assert names(build(tmp_path, *overrides, net=TWO_LAYERS, opt=opt)) == [["scale and 5 more"]]


def test_an_optimizer_instance_belongs_to_a_model_instance(tmp_path: Path) -> None:
    net = "model = Net()\noptimizer = torch.optim.SGD(model.parameters())\n"
    workload = build(tmp_path, "model.target=net.py:model", "optimizer.target=net.py:optimizer", net=net)
    assert names(workload) == [["head.* (2)"]]
    with pytest.raises(WorkloadError, match="the SGD holds no parameter of the model"):
        build(tmp_path, "optimizer.target=net.py:optimizer", net=net)


LIGHTNING = """
class Module(Net):
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        first = torch.optim.SGD([self.head.weight])
        second = torch.optim.Adam([self.head.bias])
        schedule = torch.optim.lr_scheduler.StepLR(first, 1)
        return RETURNED
"""


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("first", [["head.weight"]]),
        ("[first, second]", [["head.weight"], ["head.bias"]]),
        ("(first, second)", [["head.weight"], ["head.bias"]]),
        ("[first], [schedule]", [["head.weight"]]),
        ("first, schedule", [["head.weight"]]),
        ("[first, schedule]", [["head.weight"]]),
        ("[first, second], []", [["head.weight"], ["head.bias"]]),
        ("{'optimizer': first, 'lr_scheduler': schedule}", [["head.weight"]]),
        ("[{'optimizer': first}, {'optimizer': second}]", [["head.weight"], ["head.bias"]]),
        ("({'optimizer': first, 'frequency': 1}, {'optimizer': second})", [["head.weight"], ["head.bias"]]),
    ],
)
def test_everything_that_configure_optimizers_may_return_is_understood(
    tmp_path: Path, returned: str, expected: list[list[str]]
) -> None:
    workload = build(tmp_path, "model.target=net.py:Module", net=LIGHTNING.replace("RETURNED", returned))
    assert names(workload) == expected


def test_one_that_takes_arguments_is_not_lightnings_and_the_default_trains(tmp_path: Path) -> None:
    """As minGPT's and nanoGPT's."""
    net = LIGHTNING.replace("configure_optimizers(self)", "configure_optimizers(self, config)")
    (optimizer,) = build(tmp_path, "model.target=net.py:Module", net=net).optimizers
    assert type(optimizer) is torch.optim.AdamW


@pytest.mark.parametrize("returned", ["None", "[]", "{}", "[first, None]", "3", "'adam'"])
def test_anything_else_is_refused(tmp_path: Path, returned: str) -> None:
    with pytest.raises(WorkloadError, match=r"Module\.configure_optimizers\(\) gave .*; needed: a torch\.optim"):
        build(tmp_path, "model.target=net.py:Module", net=LIGHTNING.replace("RETURNED", returned))


def test_an_optimizer_in_the_config_comes_before_configure_optimizers(tmp_path: Path) -> None:
    net = LIGHTNING.replace("RETURNED", "None")
    (optimizer,) = build(tmp_path, "model.target=net.py:Module", "optimizer.args.lr=1.0", net=net).optimizers
    assert type(optimizer) is torch.optim.AdamW


# --- models ---


@pytest.mark.parametrize(
    "source",
    [
        "thing = Net",
        "thing = Net()",
        "def thing(): return Net()",
        "import functools\nthing = functools.partial(Net, 4)",
    ],
)
def test_a_model_is_a_class_a_factory_or_an_instance(tmp_path: Path, source: str) -> None:
    assert type(build(tmp_path, "model.target=net.py:thing", net=source + "\n").model).__name__ == "Net"


def test_a_model_in_evaluation_mode_is_put_in_training_mode(tmp_path: Path) -> None:
    assert build(tmp_path, "model.target=net.py:thing", net="def thing(): return Net().eval()\n").model.training


def test_a_part_kept_in_evaluation_mode_stays_there(tmp_path: Path) -> None:
    net = "def thing():\n    net = Net()\n    net.head.eval()\n    return net\n"
    model = build(tmp_path, "model.target=net.py:thing", net=net).model
    assert model.training
    assert not model.get_submodule("head").training


def test_building_draws_no_random_number_of_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = torch.nn.Linear(4, 2).weight
    torch.manual_seed(0)
    model = build(tmp_path, config=CONFIG).model
    assert torch.equal(model.get_parameter("head.weight"), expected)
