"""Precision modes: what each level lowers, scales and leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ampdbg.precision.modes
from ampdbg.config.schema import Precision
from ampdbg.formats import FLOAT16, FLOAT32
from ampdbg.levels import LEVELS, Level, format_of_config, levels_of
from ampdbg.precision.modes import LossScaler, PrecisionMode, mode_of

CPU = torch.device("cpu")


def mode(level: str = "O1", dtype: str = "float16", **more: object) -> PrecisionMode:
    return mode_of(Precision.model_validate({"level": level, "dtype": dtype, **more}), CPU)


def test_every_level_has_a_mode_and_every_mode_a_level() -> None:
    assert {type(mode(level)).__module__.rpartition(".")[2] for level in LEVELS} == {
        path.stem for path in Path(str(ampdbg.precision.modes.__file__)).parent.glob("*.py")
    } - {"__init__"}


def test_a_level_is_read_from_the_file_of_its_mode_which_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text('import nothing\n\nLEVEL = {"name": "O3", "words": "all half"}\nMODE = None\n')
    assert list(levels_of(tmp_path)) == [Level("O3", "all half", mode="half")]


@pytest.mark.parametrize(
    ("level", "dtype", "computes_in"),
    [
        ("O0", "float16", "float32"),
        ("O0", "bfloat16", "float32"),
        ("O1", "float32", "float32"),
        ("O1", "float16", "float16"),
        ("O1", "bfloat16", "bfloat16"),
    ],
)
def test_the_forward_pass_computes_in_the_modes_dtype(level: str, dtype: str, computes_in: str) -> None:
    made = mode(level, dtype)
    with made.forward():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert str(product.dtype) == f"torch.{computes_in}"
    assert (str(made.dtype), made.format.name) == (f"torch.{computes_in}", computes_in)


@pytest.mark.parametrize(("level", "dtype"), [("O0", "float16"), ("O1", "float32"), ("O1", "bfloat16")])
def test_only_float16_has_a_loss_scale(level: str, dtype: str) -> None:
    assert not mode(level, dtype).scaler().is_enabled()


def test_a_number_is_a_static_scale_and_overflowing_steps_are_skipped() -> None:
    made = mode(loss_scale=128.0)
    scaler = made.scaler()
    assert isinstance(scaler, LossScaler)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for factor, expected in ((1.0, [0.0, 0.0]), (torch.inf, [0.0, 0.0])):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        made.step(scaler, [optimizer])
        assert weight.tolist() == expected
        assert scaler.get_scale() == 128.0


def test_gradients_are_clipped_after_they_are_unscaled() -> None:
    made = mode()
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = made.scaler()
    scaler.scale((weight * 4.0).sum()).backward()
    made.step(scaler, [optimizer], clip_grad_norm=2.0)
    assert weight.item() == pytest.approx(-2.0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, FLOAT16),
        ({"precision": None}, FLOAT16),
        ({"precision": {"level": "O0", "dtype": "float16"}}, FLOAT32),
        ({"precision": {"level": "O1", "dtype": "float32"}}, FLOAT32),
        ({"precision": {"level": "of a later version"}}, FLOAT16),
    ],
)
def test_a_records_config_says_its_format(config: dict[str, object], expected: object) -> None:
    assert format_of_config(config) is expected
