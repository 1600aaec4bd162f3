"""Checkpoints: what training scripts save is found, what does not fit is said in one message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ampdbg.errors import WorkloadError
from tests.workload.folders import build

STATE = {"head.weight": torch.full((2, 4), 3.0), "head.bias": torch.full((2,), 5.0)}


def weights(folder: Path, content: Any, name: str = "w.pt", **files: str) -> list[float]:
    """Saves ``content``, builds with it as the checkpoint, and returns the first weight and bias of the head."""
    save = save_file if name.endswith(".safetensors") else torch.save
    save(content, folder / name)
    model = build(folder, f"checkpoint={name}", **files).model
    return [model.get_parameter("head.weight")[0, 0].item(), model.get_parameter("head.bias")[0].item()]


def prefixed(prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in STATE.items()}


@pytest.mark.parametrize(
    "content",
    [
        STATE,
        {"state_dict": STATE, "epoch": 3},
        {"model_state_dict": STATE, "optimizer_state_dict": {"state": {}, "param_groups": []}},
        {"model": STATE, "args": {"lr": 0.1}},
        prefixed("module."),
        prefixed("_orig_mod."),
        prefixed("module._orig_mod."),
        {"state_dict": prefixed("module.")},
        {name: tensor.half() for name, tensor in STATE.items()},
    ],
)
def test_a_state_dict_is_found_where_training_scripts_put_it(tmp_path: Path, content: Any) -> None:
    assert weights(tmp_path, content) == [3.0, 5.0]


def test_safetensors_are_read(tmp_path: Path) -> None:
    assert weights(tmp_path, STATE, "w.safetensors") == [3.0, 5.0]


TIED = """
class Tied(Net):
    def __init__(self):
        super().__init__()
        self.twin = nn.Linear(4, 2)
        self.twin.weight = self.head.weight
        self.twin.bias = self.head.bias
"""


def test_a_tied_parameter_may_be_saved_once(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "w.pt")
    model = build(tmp_path, "checkpoint=w.pt", "model.target=net.py:Tied", net=TIED).model
    assert model.get_parameter("twin.bias")[0].item() == 5.0


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
def test_what_does_not_fit_is_counted_and_named(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], expected: str
) -> None:
    state = dict(STATE)
    change(state)
    with pytest.raises(WorkloadError) as raised:
        weights(tmp_path, state)
    assert str(raised.value).splitlines() == [
        "--set checkpoint=w.pt: checkpoint: w.pt does not fit the Net",
        f"  {expected}",
    ]


def test_every_kind_of_misfit_is_in_one_message(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError) as raised:
        weights(tmp_path, {"head.weight": torch.ones(2, 5), "tail": torch.ones(1)})
    assert str(raised.value).splitlines()[1:] == [
        "  1 missing: head.bias",
        "  1 not in the model: tail",
        "  1 of another shape: head.weight ([2, 5] in the file, [2, 4] in the model)",
    ]


class Anything:
    """An object that no weights-only load may make."""


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (Anything(), "is damaged, or holds Python objects; allowed: tensors only"),
        ({"state_dict": STATE, "config": Anything()}, "is damaged, or holds Python objects; allowed: tensors only"),
        (torch.ones(3), "holds no state dict but a Tensor; allowed: names to tensors"),
        ({"epoch": 3, "lr": 0.1}, "holds no state dict but a dict with the keys epoch and lr"),
        ({}, "holds no state dict but a dict"),
        ({3: torch.ones(3)}, "holds a tensor under 3; allowed: names to tensors"),
    ],
)
def test_what_is_no_state_dict_is_refused(tmp_path: Path, content: Any, expected: str) -> None:
    with pytest.raises(WorkloadError) as raised:
        weights(tmp_path, content)
    assert expected in str(raised.value)
    assert str(raised.value).startswith("--set checkpoint=w.pt: checkpoint: w.pt")


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "w.pt")
    whole = (tmp_path / "w.pt").read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 10):
        (tmp_path / "w.pt").write_bytes(whole[:size])
        with pytest.raises(WorkloadError, match=r"checkpoint: w\.pt (cannot be read|is damaged)"):
            build(tmp_path, "checkpoint=w.pt")
