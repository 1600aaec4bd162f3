"""Models, optimizers and learning-rate schedules: valid targets, groups of parameters, and what is stepped."""

from pathlib import Path

import pytest
import torch

from ampdbg.config.file import load_config
from ampdbg.errors import UserCodeError, WorkloadError
from ampdbg.record.run import Record
from ampdbg.training.loop import train
from ampdbg.workload.build import Workload
from tests.workload.folders import build

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
def test_every_grouping_leaves_out_frozen_parameters_and_lists_tied_ones_once(
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


def test_the_optimizer_arguments_apply_to_every_group(tmp_path: Path) -> None:
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
def test_an_optimizer_is_a_class_or_a_function_of_the_groups_or_the_model(
    tmp_path: Path, source: str, expected: list[list[str]]
) -> None:
    workload = build(tmp_path, "optimizer.target=opt.py:make", opt=f"import torch\n{source}\n")
    assert names(workload) == expected


def test_groups_without_a_common_module_are_named_after_the_first_parameter(tmp_path: Path) -> None:
    opt = "import torch\ndef make(model): return torch.optim.SGD(model.parameters())\n"
    overrides = ("model.target=net.py:Two", "optimizer.target=opt.py:make")
    assert names(build(tmp_path, *overrides, net=TWO_LAYERS, opt=opt)) == [["scale and 5 more"]]


def test_an_optimizer_instance_must_hold_parameters_of_the_model_instance(tmp_path: Path) -> None:
    net = "model = Net()\noptimizer = torch.optim.SGD(model.parameters())\n"
    workload = build(tmp_path, "model.target=net.py:model", "optimizer.target=net.py:optimizer", net=net)
    assert names(workload) == [["head.* (2)"]]
    with pytest.raises(WorkloadError, match="the SGD holds no parameter of the model"):
        build(tmp_path, "optimizer.target=net.py:optimizer", net=net)


LIGHTNING = """
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

class Module(Net):
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        first = torch.optim.SGD([self.head.weight], lr=1.0)
        second = torch.optim.Adam([self.head.bias], lr=1.0)
        halving = StepLR(first, 1, 0.5)
        other = StepLR(second, 1, 0.5)
        each_step = {"scheduler": halving, "interval": "step"}
        plateau = ReduceLROnPlateau(first)
        return RETURNED
"""


def of_module(folder: Path, returned: str, *overrides: str) -> Workload:
    return build(folder, "model.target=net.py:Module", *overrides, net=LIGHTNING.replace("RETURNED", returned))


def rates_after(workload: Workload, steps: int) -> list[float]:
    """The learning rate of each optimizer after ``steps`` steps of all optimizers."""
    for _ in range(steps):
        with workload.scheduled():
            for optimizer in workload.optimizers:
                optimizer.step()
    return [optimizer.param_groups[0]["lr"] for optimizer in workload.optimizers]


RETURNED: dict[str, list[float]] = {
    "first": [1.0],
    "[first, second]": [1.0, 1.0],
    "(first, second)": [1.0, 1.0],
    "[first, second], []": [1.0, 1.0],
    "[first], [each_step]": [0.125],
    "[first, second], [each_step, {'scheduler': other, 'interval': 'step', 'frequency': 3}]": [0.125, 0.5],
    "{'optimizer': first, 'lr_scheduler': each_step}": [0.125],
    "{'optimizer': first, 'lr_scheduler': {**each_step, 'frequency': 2}}": [0.5],
    "[{'optimizer': first}, {'optimizer': second}]": [1.0, 1.0],
    "[{'optimizer': first, 'lr_scheduler': each_step}, {'optimizer': second}]": [0.125, 1.0],
    "({'optimizer': first, 'frequency': 1}, {'optimizer': second})": [1.0, 1.0],
    "({'optimizer': first}, {'optimizer': second, 'lr_scheduler': None})": [1.0, 1.0],
}
"""The learning rates after three steps for each valid return value."""

EPOCH, FOREIGN = "it waits for the end of an epoch", "it is no LRScheduler over an optimizer of the run"
NOT_STEPPED: dict[str, tuple[str, str]] = {
    "first, halving": ("StepLR", EPOCH),
    "[first, halving]": ("StepLR", EPOCH),
    "[first], [halving]": ("StepLR", EPOCH),
    "{'optimizer': first, 'lr_scheduler': halving}": ("StepLR", EPOCH),
    "{'optimizer': first, 'lr_scheduler': {'scheduler': halving, 'interval': 'epoch'}}": ("StepLR", EPOCH),
    "{'optimizer': first, 'lr_scheduler': {'scheduler': plateau, 'interval': 'step', 'monitor': 'loss'}}": (
        "ReduceLROnPlateau",
        "it waits for the metric of a validation",
    ),
    "{'optimizer': first, 'lr_scheduler': object()}": ("object", FOREIGN),
    "{'optimizer': first, 'lr_scheduler': other}": ("StepLR", FOREIGN),
}
"""The schedulers in valid return values that are not stepped, and why."""


@pytest.mark.parametrize("returned", [*RETURNED, *NOT_STEPPED])
def test_the_optimizers_and_schedulers_of_a_lightning_module_are_stepped_or_noted(
    tmp_path: Path, returned: str
) -> None:
    workload, rates = of_module(tmp_path, returned), RETURNED.get(returned, [1.0])
    kind, why = NOT_STEPPED.get(returned, ("", ""))
    said = f"ampdbg does not step the {kind} of Module.configure_optimizers(): {why}; the learning rate stays constant"
    assert workload.notes == (said,) * bool(kind)
    assert names(workload) == [["head.weight"], ["head.bias"]][: len(rates)]
    assert rates_after(workload, 3) == rates


@pytest.mark.parametrize("returned", ["None", "[]", "{}", "[first, None]", "3", "'adam'"])
def test_configure_optimizers_that_returns_no_optimizer_is_refused(tmp_path: Path, returned: str) -> None:
    with pytest.raises(WorkloadError, match=r"Module\.configure_optimizers\(\) gave .*; needed: a torch\.optim"):
        of_module(tmp_path, returned)


@pytest.mark.parametrize("frequency", ["0", "-1", "1.5", "True", "'often'"])
def test_an_invalid_scheduler_frequency_is_refused(tmp_path: Path, frequency: str) -> None:
    with pytest.raises(WorkloadError, match=r"gave the frequency .*; needed: a whole number of at least 1"):
        of_module(tmp_path, f"{{'optimizer': first, 'lr_scheduler': {{**each_step, 'frequency': {frequency}}}}}")


def test_configure_optimizers_with_arguments_is_ignored(tmp_path: Path) -> None:
    """As in minGPT and nanoGPT: the default optimizer trains."""
    net = LIGHTNING.replace("configure_optimizers(self)", "configure_optimizers(self, config)")
    (optimizer,) = build(tmp_path, "model.target=net.py:Module", net=net).optimizers
    assert type(optimizer) is torch.optim.AdamW


def test_the_optimizer_and_scheduler_of_the_config_override_those_of_the_model(tmp_path: Path) -> None:
    (optimizer,) = of_module(tmp_path, "None", "optimizer.args.lr=1.0").optimizers
    assert type(optimizer) is torch.optim.AdamW
    scheduler = "scheduler={target: torch.optim.lr_scheduler:StepLR, args: {step_size: 1, gamma: 0.1}}"
    workload = of_module(tmp_path, "[first, second], [halving]", scheduler)
    assert rates_after(workload, 2) == pytest.approx([0.01, 0.01])


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


def test_a_model_in_evaluation_mode_is_switched_to_training_mode(tmp_path: Path) -> None:
    assert build(tmp_path, "model.target=net.py:thing", net="def thing(): return Net().eval()\n").model.training


def test_a_submodule_in_evaluation_mode_stays_in_evaluation_mode(tmp_path: Path) -> None:
    net = "def thing():\n    net = Net()\n    net.head.eval()\n    return net\n"
    model = build(tmp_path, "model.target=net.py:thing", net=net).model
    assert model.training
    assert not model.get_submodule("head").training


def test_a_build_draws_no_random_number_of_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = torch.nn.Linear(4, 2).weight
    torch.manual_seed(0)
    model = build(tmp_path).model
    assert torch.equal(model.get_parameter("head.weight"), expected)


OF_ANOTHER = """
import torch
other = torch.optim.SGD([torch.ones(1)])
def make(optimizer): return torch.optim.lr_scheduler.StepLR(other, 1)
"""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("make = 3", "is an int; needed: an LRScheduler class, or a function that returns one"),
        ("def make(optimizer): return None", "gave None; needed: an LRScheduler that is stepped after each step"),
        ("from torch.optim.lr_scheduler import ReduceLROnPlateau as make", "without a metric"),
        ("def make(): ...", r"cannot be called with \(optimizer\)"),
        (OF_ANOTHER, "gave a StepLR of another optimizer"),
    ],
)
def test_a_target_that_is_not_a_usable_scheduler_is_refused(tmp_path: Path, source: str, expected: str) -> None:
    with pytest.raises(WorkloadError, match=expected):
        build(tmp_path, "scheduler.target=sched.py:make", sched=f"{source}\n")


# --- in a run ---

NET = """
def huge(model, batch):
    return model(batch[0]).float().sum() * 1e3

def fine(model, batch):
    return model(batch[0]).float().square().mean()

def logged(optimizer):
    class Logged(torch.optim.lr_scheduler.StepLR):
        def step(self, epoch=None):
            super().step()
            with open(LOG, "a") as file:
                print(self.last_epoch, file=file)
    return Logged(optimizer, 1)
"""


def run(folder: Path, step: str, *overrides: str) -> tuple[Record, list[str]]:
    """Trains four steps. Also returns what the scheduler logged, including its start."""
    log = folder / "log.txt"
    net = NET.replace("LOG", repr(str(log)))
    build(folder, net=net)
    log.unlink(missing_ok=True)
    given = [f"step.target=net.py:{step}", "loss=null", "scheduler.target=net.py:logged", "train.device=cpu"]
    record = train(load_config(folder / "config.yaml", [*given, "train.steps=4", *overrides]), replays=0)
    return record, log.read_text().split()


@pytest.mark.parametrize("fused", ["null", "true"])
def test_the_scheduler_does_not_step_after_a_skipped_step(tmp_path: Path, fused: str) -> None:
    adam = f"optimizer={{target: torch.optim:AdamW, args: {{lr: 1.0e-9, fused: {fused}}}}}"
    record, log = run(tmp_path, "huge", adam, "precision.loss_scale={init: 16}")
    taken = [not step.skipped for step in record.steps]
    assert 0 < sum(taken) < 4
    assert log == [str(number) for number in range(sum(taken) + 1)]
    assert not [misuse for misuse in record.misuses if misuse.code == "misuse-scheduler-on-skip"]


def test_the_scheduler_steps_after_every_step_without_a_scaler(tmp_path: Path) -> None:
    record, log = run(tmp_path, "fine", "precision.dtype=bfloat16")
    assert [step.skipped for step in record.steps] == [False] * 4
    assert log == ["0", "1", "2", "3", "4"]


def test_a_schedule_stepped_past_its_end_raises_a_user_code_error(tmp_path: Path) -> None:
    over = "scheduler={target: torch.optim.lr_scheduler:OneCycleLR, args: {max_lr: 0.1, total_steps: 2}}"
    with pytest.raises(UserCodeError, match="the learning-rate scheduler's step raised ValueError: Tried to step"):
        run(tmp_path, "fine", over)


def test_no_hook_is_left_on_an_optimizer_after_an_error(tmp_path: Path) -> None:
    workload = build(tmp_path, "scheduler={target: torch.optim.lr_scheduler:StepLR, args: {step_size: 1}}")
    with pytest.raises(RuntimeError, match="in between"), workload.scheduled():
        raise RuntimeError("in between")
    assert not workload.optimizers[0]._optimizer_step_post_hooks
    assert isinstance(workload.optimizers[0], torch.optim.AdamW)
