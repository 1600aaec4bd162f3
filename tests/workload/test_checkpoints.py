"""Checkpoints: the states that training scripts save are found, and every mismatch is in one message."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ampdbg.errors import WorkloadError
from ampdbg.workload.build import Workload
from ampdbg.workload.checkpoint import load_optimizer
from ampdbg.workload.optimizers import groups_of
from tests.workload.folders import build

WEIGHTS = {"head.weight": torch.full((2, 4), 3.0), "head.bias": torch.full((2,), 5.0)}


def built(folder: Path, content: Any, *overrides: str, **files: str) -> Workload:
    torch.save(content, folder / "run.pt")
    return build(folder, "checkpoint=run.pt", *overrides, **files)


def first_values(workload: Workload) -> list[float]:
    """The first weight and bias of the head."""
    return [workload.model.get_parameter(f"head.{name}").flatten()[0].item() for name in ("weight", "bias")]


def prefixed(prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in WEIGHTS.items()}


@pytest.mark.parametrize(
    "content",
    [
        WEIGHTS,
        {"state_dict": WEIGHTS, "epoch": 3},
        {"model_state_dict": WEIGHTS, "optimizer_state_dict": {"state": {}, "param_groups": []}},
        {"model": WEIGHTS, "args": {"lr": 0.1}},
        prefixed("module."),
        prefixed("_orig_mod."),
        prefixed("module._orig_mod."),
        {"state_dict": prefixed("module.")},
        {name: tensor.half() for name, tensor in WEIGHTS.items()},
    ],
)
def test_a_state_dict_is_found_under_the_keys_of_training_scripts(tmp_path: Path, content: Any) -> None:
    assert first_values(built(tmp_path, content)) == [3.0, 5.0]


def test_a_safetensors_file_is_loaded(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "w.safetensors")
    assert first_values(build(tmp_path, "checkpoint=w.safetensors")) == [3.0, 5.0]


TIED = """
class Tied(Net):
    def __init__(self):
        super().__init__()
        self.twin = nn.Linear(4, 2)
        self.twin.weight = self.head.weight
        self.twin.bias = self.head.bias
"""


def test_a_tied_parameter_may_be_saved_once(tmp_path: Path) -> None:
    model = built(tmp_path, WEIGHTS, "model.target=net.py:Tied", net=TIED).model
    assert model.get_parameter("twin.bias")[0].item() == 5.0


def refusal(folder: Path, content: Any, *overrides: str, **files: str) -> list[str]:
    with pytest.raises(WorkloadError) as raised:
        built(folder, content, *overrides, **files)
    return str(raised.value).splitlines()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda state: state.pop("head.bias"), "1 missing: head.bias"),
        (lambda state: state.update(tail=torch.ones(1)), "1 not in the model: tail"),
        (
            lambda state: state.update({"head.bias": torch.ones(3)}),
            "1 of another shape: head.bias ([3] in the file, [2] in the model)",
        ),
        (
            lambda state: state.update({f"x.{index}": torch.ones(1) for index in range(9)}),
            "9 not in the model: x.0, x.1, x.2, x.3 and 5 more",
        ),
    ],
)
def test_missing_extra_and_misshapen_tensors_are_counted_and_named(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], expected: str
) -> None:
    state = dict(WEIGHTS)
    change(state)
    assert refusal(tmp_path, state) == [
        "--set checkpoint=run.pt: checkpoint: run.pt does not fit the Net",
        f"  {expected}",
    ]


def test_every_kind_of_misfit_is_in_one_message(tmp_path: Path) -> None:
    assert refusal(tmp_path, {"head.weight": torch.ones(2, 5), "tail": torch.ones(1)})[1:] == [
        "  1 missing: head.bias",
        "  1 not in the model: tail",
        "  1 of another shape: head.weight ([2, 5] in the file, [2, 4] in the model)",
    ]


class Anything:
    """An object that a weights-only load must refuse."""


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (Anything(), "is damaged, or holds Python objects; allowed: tensors only"),
        ({"state_dict": WEIGHTS, "config": Anything()}, "is damaged, or holds Python objects; allowed: tensors only"),
        (torch.ones(3), "holds no state dict but a Tensor; allowed: names to tensors"),
        ({"epoch": 3, "lr": 0.1}, "holds no state dict but a dict with the keys epoch and lr"),
        ({}, "holds no state dict but a dict"),
        ({3: torch.ones(3)}, "holds a tensor under 3; allowed: names to tensors"),
    ],
)
def test_a_file_that_is_not_a_state_dict_is_refused(tmp_path: Path, content: Any, expected: str) -> None:
    first, *_ = refusal(tmp_path, content)
    assert first.startswith(f"--set checkpoint=run.pt: checkpoint: run.pt {expected}")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "w.pt")
    whole = (tmp_path / "w.pt").read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 10):
        (tmp_path / "w.pt").write_bytes(whole[:size])
        with pytest.raises(WorkloadError, match=r"checkpoint: w\.pt (cannot be read|is damaged)"):
            build(tmp_path, "checkpoint=w.pt")


SCALER = {**torch.amp.GradScaler("cpu", init_scale=8.0).state_dict(), "_growth_tracker": 7}
LINEAR = {"target": "torch.optim.lr_scheduler:LinearLR"}


def state_of(kind: type[torch.optim.Optimizer], **settings: Any) -> dict[str, Any]:
    """The state of one group of all parameters after a step."""
    model = torch.nn.Sequential(OrderedDict(head=torch.nn.Linear(4, 2)))
    optimizer = kind(model.parameters(), **settings)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def adamw() -> dict[str, Any]:
    return state_of(torch.optim.AdamW, lr=0.25)


def moments(workload: Workload) -> list[float]:
    state = [workload.optimizers[0].state[parameter] for parameter in workload.model.parameters()]
    return [round(float(one["exp_avg"].flatten()[0]), 4) for one in state if one]


LIGHTNING = {"epoch": 1, "global_step": 7, "lr_schedulers": [], "loops": {"fit_loop": {"state_dict": {}}}}


@pytest.mark.parametrize(
    "content",
    [
        {"model": WEIGHTS, "optimizer": adamw(), "scaler": SCALER},
        {"model_state_dict": WEIGHTS, "optimizer_state_dict": adamw(), "scaler_state_dict": SCALER, "epoch": 3},
        {"model": WEIGHTS, "optim": adamw(), "grad_scaler": SCALER},
        {"model": WEIGHTS, "optimizers": adamw(), "amp_scaler": SCALER},
        {"state_dict": WEIGHTS, "optimizer_states": [adamw()], "MixedPrecision": SCALER, **LIGHTNING},
    ],
)
def test_optimizer_and_scaler_are_found_under_the_keys_of_scripts_and_lightning(tmp_path: Path, content: Any) -> None:
    workload = built(tmp_path, content)
    assert moments(workload) == [0.1, 0.1]
    assert {group["lr"] for group in workload.optimizers[0].param_groups} == {0.25}
    assert [group["name"] for group in workload.optimizers[0].param_groups] == ["head.weight", "head.bias"]
    assert workload.scaler_state == SCALER
    assert workload.notes == ()


def test_the_loss_scale_of_an_apex_checkpoint_is_read(tmp_path: Path) -> None:
    amp = OrderedDict(loss_scaler0={"loss_scale": 32.0, "unskipped": 5})
    assert built(tmp_path, {"model": WEIGHTS, "amp": amp}).scaler_state == {
        "scale": 32.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 5,
    }


@pytest.mark.parametrize("grouping", ["parameter", "module", "single"])
def test_the_state_of_a_single_group_fits_every_grouping_of_a_config(tmp_path: Path, grouping: str) -> None:
    assert moments(built(tmp_path, {"model": WEIGHTS, "optimizer": adamw()}, f"optimizer.groups={grouping}")) == [
        0.1,
        0.1,
    ]


def test_frozen_parameters_in_the_optimizer_state_are_left_out(tmp_path: Path) -> None:
    state = adamw()
    del state["state"][0]
    net = "class Frozen(Net):\n    def __init__(self):\n        super().__init__()\n"
    net += "        self.head.weight.requires_grad_(False)\n"
    workload = built(tmp_path, {"model": WEIGHTS, "optimizer": state}, "model.target=net.py:Frozen", net=net)
    assert workload.optimizers[0].state.keys() == {workload.model.get_parameter("head.bias")}
    assert moments(workload) == [0.1]


def test_an_optimizer_setting_may_be_a_subclass_of_float() -> None:
    class Rate(float):  # like numpy.float64
        pass

    model, state = torch.nn.Sequential(OrderedDict(head=torch.nn.Linear(4, 2))), adamw()
    state["param_groups"][0]["lr"] = Rate(0.5)
    optimizer = torch.optim.AdamW(groups_of(model, "single"))
    load_optimizer(optimizer, state, model, "single")
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_fused_and_capturable_settings_are_not_loaded(tmp_path: Path) -> None:
    state = adamw()
    state["param_groups"][0] |= {"fused": True, "capturable": True, "lr": 0.5}
    (group, *_) = built(tmp_path, {"model": WEIGHTS, "optimizer": state}).optimizers[0].param_groups
    assert (group["fused"], group["capturable"], group["lr"]) == (None, False, 0.5)


def test_empty_states_are_ignored_and_the_weights_may_be_loaded_alone(tmp_path: Path) -> None:
    off = torch.amp.GradScaler("cpu", enabled=False).state_dict()
    workload = built(tmp_path, {"model": WEIGHTS, "optimizer": {"state": {}, "param_groups": []}, "scaler": off})
    assert (moments(workload), workload.scaler_state) == ([], None)
    torch.save({"model": WEIGHTS, "optimizer": adamw(), "scaler": SCALER}, tmp_path / "run.pt")
    workload = build(tmp_path, "checkpoint={model: run.pt}")
    assert (moments(workload), workload.scaler_state, first_values(workload)) == ([], None, [3.0, 5.0])


def test_an_unnamed_scheduler_or_a_missing_scheduler_state_is_noted(tmp_path: Path) -> None:
    content = {"model": WEIGHTS, "optimizer": adamw()}
    (note,) = built(tmp_path, {**content, "scheduler": {"last_epoch": 3}}).notes
    assert "the scheduler in run.pt is not used: the config names no scheduler, so the learning rate stays" in note
    assert built(tmp_path, content, "scheduler.target=torch.optim.lr_scheduler:LinearLR").notes == (
        "the checkpoint has no state of a learning-rate scheduler: the schedule starts over",
    )


# --- mismatches ---


def changed(state: dict[str, Any], **group: Any) -> dict[str, Any]:
    return {**state, "param_groups": [{**state["param_groups"][0], **group}]}


def with_moment(value: Any) -> dict[str, Any]:
    state = adamw()
    state["state"][0]["exp_avg"] = value
    return state


def two_groups() -> dict[str, Any]:
    state, (group,) = adamw(), adamw()["param_groups"]
    return {**state, "param_groups": [{**group, "params": [0]}, {**group, "params": [1]}]}


GROUPS = "; make it as the training script does: optimizer: {target: FILE.py:NAME}, a function of the model"
MISFITS: dict[str, tuple[Any, str]] = {
    "another optimizer": (
        state_of(torch.optim.SGD, lr=0.1, momentum=0.9),
        "settings that are missing, or no numbers: betas and eps",
    ),
    "more parameters": (
        changed(adamw(), params=[0, 1, 2]),
        f"other parameter groups: one of 3 parameters in the file, 2 of 1 and 1 parameters in the run{GROUPS}",
    ),
    "another shape": (with_moment(torch.ones(3, 4)), "exp_avg of head.weight: missing, or of another shape"),
    "no tensor": (with_moment("x"), "exp_avg of head.weight: missing, or of another shape"),
    "no moments": ({**adamw(), "state": {0: {"step": torch.tensor(1.0)}}}, "exp_avg and exp_avg_sq of head.weight"),
    "a setting that is no number": (changed(adamw(), lr="high"), "settings that are missing, or no numbers: lr"),
    "no state dict": ({"lr": 0.1}, "it is no state_dict() of a torch optimizer"),
    "no groups": ({"state": {0: {}}, "param_groups": [3]}, "it is no state_dict() of a torch optimizer"),
    "groups without parameters": (changed(adamw(), params=3), "it is no state_dict() of a torch optimizer"),
    "a parameter twice": (changed(adamw(), params=[0, 0]), "it is no state_dict() of a torch optimizer"),
    "a state of nothing": ({**adamw(), "state": {9: {}}}, "it is no state_dict() of a torch optimizer"),
    "a state that is none": ({**adamw(), "state": {0: 3}}, "it is no state_dict() of a torch optimizer"),
    "two optimizers": ([adamw(), adamw()], "another number of optimizers: 2 in the file, 1 in the run"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_state_that_does_not_fit_the_optimizer_is_refused(tmp_path: Path, name: str) -> None:
    state, expected = MISFITS[name]
    first, problem, hint = refusal(tmp_path, {"model": WEIGHTS, "optimizer": state})
    assert first == "--set checkpoint=run.pt: checkpoint: the optimizer in run.pt does not fit the AdamW"
    assert expected in problem
    assert hint == "  to load the weights only: checkpoint: {model: FILE}"


def test_custom_parameter_groups_need_the_optimizer_of_the_script(tmp_path: Path) -> None:
    _, problem, _ = refusal(tmp_path, {"model": WEIGHTS, "optimizer": two_groups()}, "optimizer.groups=single")
    assert problem == (
        f"  other parameter groups: 2 of 1 and 1 parameters in the file, one of 2 parameters in the run{GROUPS}"
    )
    opt = "import torch\ndef make(model): return torch.optim.AdamW([{'params': [p]} for p in model.parameters()])\n"
    workload = built(tmp_path, {"model": WEIGHTS, "optimizer": two_groups()}, "optimizer.target=opt.py:make", opt=opt)
    assert moments(workload) == [0.1, 0.1]


@pytest.mark.parametrize(
    "change",
    [
        *({"scale": value} for value in (0.0, -1.0, float("nan"), float("inf"), "x", None, [1, 2], torch.ones(2))),
        *({"growth_interval": value} for value in (0, 1e300, float("nan"))),
        *({"growth_factor": 0.5}, {"backoff_factor": 2.0}, {"_growth_tracker": -1}),
    ],
    ids=str,
)
def test_a_scaler_state_with_an_invalid_value_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    first, problem, _ = refusal(tmp_path, {"model": WEIGHTS, "scaler": {**SCALER, **change}})
    assert first == "--set checkpoint=run.pt: checkpoint: the scaler in run.pt does not fit the GradScaler"
    assert problem == f"  missing, or not allowed: {next(iter(change))}"


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"last_epoch": "x"}, "missing, or no numbers: start_factor, end_factor, total_iters, base_lrs and 1 more"),
        ([{}, {"last_epoch": 3}], "another number of schedulers: 2 in the file, 1 in the run"),
    ],
)
def test_a_state_that_does_not_fit_the_scheduler_is_refused(tmp_path: Path, state: Any, expected: str) -> None:
    content = {"model": WEIGHTS, "scheduler": state}
    first, problem, _ = refusal(tmp_path, content, "scheduler.target=torch.optim.lr_scheduler:LinearLR")
    assert first.endswith("the scheduler in run.pt does not fit the LinearLR")
    assert problem == f"  {expected}"


def test_a_scheduler_state_cannot_replace_its_optimizer_or_methods(tmp_path: Path) -> None:
    scheduler = torch.optim.lr_scheduler.LinearLR(torch.optim.SGD([torch.ones(1)], 0.1))
    hostile = {**scheduler.state_dict(), "optimizer": 3, "step": 4, "last_epoch": 2, "base_lrs": [0.1]}
    workload = built(
        tmp_path,
        {"model": WEIGHTS, "scheduler": hostile},
        "scheduler.target=torch.optim.lr_scheduler:LinearLR",
        "optimizer.groups=single",
    )
    (schedule,) = workload.schedules
    assert schedule.scheduler.last_epoch == 2
    assert schedule.scheduler.optimizer is workload.optimizers[0]
    schedule.step_was_taken()
    assert schedule.scheduler.last_epoch == 3


def test_a_file_without_the_state_of_its_part_is_refused(tmp_path: Path) -> None:
    torch.save({"model": WEIGHTS, "epoch": 3}, tmp_path / "run.pt")
    with pytest.raises(WorkloadError) as raised:
        build(tmp_path, "checkpoint={model: run.pt, optimizer: run.pt}")
    assert str(raised.value) == (
        "--set checkpoint={model: run.pt, optimizer: run.pt}: checkpoint.optimizer: run.pt holds no state of an "
        "optimizer but a dict with the keys model and epoch; allowed: its state_dict(), at the top or under optimizer, "
        "optimizer_state_dict, optimizer_states, optimizers, optim"
    )


def test_a_python_object_in_any_checkpoint_file_is_refused(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "run.pt")
    torch.save({**adamw(), "more": Anything()}, tmp_path / "opt.pt")
    with pytest.raises(WorkloadError, match=r"checkpoint\.optimizer: opt\.pt is damaged, or holds Python objects"):
        build(tmp_path, "checkpoint={model: run.pt, optimizer: opt.pt}")
