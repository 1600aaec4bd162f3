"""FP32 twins: the losses of a run at level O0, withheld updates, and the distance of two runs."""

import math
from pathlib import Path

import pytest

from ampdbg.config.file import load_config
from ampdbg.training.fp32_twin import distance, fp32_losses, last_quarter
from ampdbg.training.loop import train
from tests.proof.overflowing import CONFIG, NET, OVERFLOWS, written


def test_the_losses_of_an_fp32_twin_equal_those_of_a_run_at_level_o0(tmp_path: Path) -> None:
    steps = "train: {steps: 5, accumulate: 2, clip_grad_norm: 0.1}"
    config = written(tmp_path, config=CONFIG.replace("train: {steps: 3}", steps))
    record = train(load_config(tmp_path / "config.yaml", ["precision.level=O0"]), replays=0)
    assert fp32_losses(config) == pytest.approx([step.loss for step in record.steps], rel=1e-6)


def test_a_half_region_that_the_model_opens_itself_runs_in_fp32_too(tmp_path: Path) -> None:
    opened = f"        with torch.autocast(x.device.type, dtype=torch.float16):\n    {OVERFLOWS}"
    config = written(tmp_path, {"net.py": NET.replace(OVERFLOWS, opened)})
    (tmp_path / "plain").mkdir()
    assert fp32_losses(config) == fp32_losses(written(tmp_path / "plain"))


def test_withheld_updates_leave_the_weights_unchanged(tmp_path: Path) -> None:
    # Four batches: step 4 sees the first one again.
    config = written(tmp_path, config=CONFIG.replace("steps: 3", "steps: 5"))
    frozen = fp32_losses(config, withheld=range(5))
    assert frozen[4] == frozen[0]
    trained = fp32_losses(config, withheld=range(4))
    assert trained == frozen
    assert fp32_losses(config)[4] < frozen[4]


def test_rounded_weights_change_the_losses_by_less_than_1_percent(tmp_path: Path) -> None:
    config = written(tmp_path)
    assert 0 < distance(fp32_losses(config, is_rounded=True), fp32_losses(config)) < 1e-2


@pytest.mark.parametrize(("count", "last"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (200, 50)])
def test_the_last_quarter_is_rounded_up(count: int, last: int) -> None:
    assert len(last_quarter([1.0] * count)) == last


def test_the_distance_is_the_median_of_the_last_quarter_or_nan() -> None:
    assert distance([9.0] * 9 + [1.1, 1.0, 8.0], [1.0] * 12) == pytest.approx(0.1)
    assert distance([0.0], [0.0]) == 0.0
    assert math.isnan(distance([1.0, math.nan], [1.0, 1.0]))
    assert math.isnan(distance([], []))
