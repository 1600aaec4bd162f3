"""The examples in configs/, run by the real program: failing ones fail as documented, their twins are healthy."""

import math
from pathlib import Path

import pytest

from ampdbg.record.file import read_record
from ampdbg.record.run import Record, Step
from tests.commands.program import ROOT, Result, start

FORWARD = ["linear_attention", "camera"]
"""Examples whose loss is non-finite from the first step on."""

EXAMPLES = [*FORWARD, "house_prices", "vit"]


def scan(folder: Path, config: str, *options: str) -> tuple[Result, Record]:
    """Scans ``configs/CONFIG.yaml`` in its own process."""
    pytest.importorskip("sklearn")
    path = str(ROOT / "configs" / f"{config}.yaml")
    # One thread: the thread count changes the order of additions, and with it a long run.
    result = start(folder, "scan", path, "--record", "record.json", *options, OMP_NUM_THREADS="1")
    return result, read_record(folder / "record.json")


def skipped(record: Record) -> list[Step]:
    return [step for step in record.steps if step.skipped]


def mean_loss(steps: tuple[Step, ...]) -> float:
    return sum(step.loss for step in steps) / len(steps)


def assert_learns(record: Record) -> None:
    """Asserts that the mean loss of the last tenth is clearly below that of the first tenth."""
    tenth = max(3, len(record.steps) // 10)
    assert mean_loss(record.steps[-tenth:]) < 0.85 * mean_loss(record.steps[:tenth])


def test_every_example_has_a_healthy_twin_and_a_header() -> None:
    names = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    assert names == sorted([*EXAMPLES, *(f"{name}_healthy" for name in EXAMPLES)])
    for name in names:
        header = (ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8").split("\n\n")[0]
        assert all(line.startswith("#") for line in header.splitlines())
        assert "# Expect: exit code" in header


@pytest.mark.slow
@pytest.mark.parametrize("name", FORWARD)
def test_a_forward_overflow_skips_every_step_and_affects_every_group(name: str, tmp_path: Path) -> None:
    result, record = scan(tmp_path, name)
    assert result.code == 1
    assert not any(math.isfinite(step.loss) for step in record.steps)
    assert skipped(record) == list(record.steps)
    assert all({group.name for group in step.groups} == set(record.groups) for step in record.steps)
    assert record.findings[0].phase == "forward"
    assert record.findings[0].step == 0


def test_the_house_prices_loss_becomes_infinite_without_a_skipped_step(tmp_path: Path) -> None:
    result, record = scan(tmp_path, "house_prices")
    assert result.code == 1
    assert not skipped(record)
    assert all(math.isfinite(step.loss) for step in record.steps[:10])
    assert all(step.loss == math.inf for step in record.steps[-10:])
    assert all(not step.groups and math.isfinite(step.grad_norm or 0.0) for step in record.steps)
    assert [finding.phase for finding in record.findings] == ["forward"]


@pytest.mark.slow
def test_the_first_attention_block_of_vit_collapses_the_loss_scale_during_training(tmp_path: Path) -> None:
    result, record = scan(tmp_path, "vit")
    assert result.code == 1
    # A last bit that differs by processor moves the first skips by a hundred steps, and the first NaN by more.
    assert sum(step.skipped for step in record.steps[:150]) <= 2
    assert not any(step.skipped for step in record.steps[:20])
    assert all(math.isfinite(step.loss) for step in record.steps[:150])
    gradients_only = [step for step in skipped(record) if math.isfinite(step.loss)]
    assert gradients_only
    assert gradients_only[0] == skipped(record)[0]
    assert all(group.name.startswith("block1.0.attn.") for step in gradients_only for group in step.groups)
    assert record.steps[-1].scale < 1.0
    assert {"scale-collapse"} <= {finding.code for finding in record.findings}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_healthy_twin_of_each_example_has_a_healthy_verdict_and_learns(name: str, tmp_path: Path) -> None:
    result, record = scan(tmp_path, f"{name}_healthy")
    assert result.code == 0
    assert record.verdict == "healthy"
    assert {finding.code for finding in record.findings} <= {"scale-calibration"}
    assert_learns(record)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_failing_example_has_no_findings_and_learns_in_fp32(name: str, tmp_path: Path) -> None:
    result, record = scan(tmp_path, name, "--set", "precision.level=O0")
    assert result.code == 0
    assert not record.findings
    assert_learns(record)
