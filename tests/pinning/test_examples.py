"""``bisect`` on the examples in configs/, through the real program, and their training with what it has found."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import ampdbg
from ampdbg.record.file import read_record
from tests.commands.program import ROOT, start

SETS = {
    "linear_attention": ["blocks.0.attn:own", "blocks.1.attn:own"],
    "camera": [":own"],
    "house_prices": [":own"],
    # The logits overflow in the end; the gradient of the projection that makes them only needs a lower loss scale.
    "vit": ["block1.0.attn:own"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_the_set_of_an_example(name: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    config = str(ROOT / "configs" / f"{name}.yaml")
    # One thread: the order of additions, and with it a long run, depends on how many there are.
    result = start(tmp_path, "bisect", config, "--record", "record.json", OMP_NUM_THREADS="1")
    assert result.code == 1, result.stderr
    record = read_record(tmp_path / "record.json")
    assert record.search is not None
    assert (record.search.outcome, record.search.minimal) == ("found", True)
    assert [pin.name for pin in record.pins] == SETS[name]
    assert (record.search.further, record.search.further_healthy) == (3, 3)
    assert all(name in result.stdout for name in SETS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear_attention", "camera", "vit"])
def test_200_steps_with_the_set_as_pins_are_healthy(name: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pins = yaml.safe_dump(SETS[name], default_flow_style=True).strip()
    record = ampdbg.scan(ROOT / "configs" / f"{name}.yaml", steps=200, overrides=[f"precision.pins={pins}"])
    assert [finding.code for finding in record.findings if finding.severity != "info"] == []
    assert record.verdict == "healthy"
    assert len(record.steps) == 200


@pytest.mark.slow
@pytest.mark.parametrize("name", ["camera_healthy", "house_prices_healthy"])
def test_a_healthy_example_has_nothing_to_pin(name: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    result = start(tmp_path, "bisect", str(ROOT / "configs" / f"{name}.yaml"), OMP_NUM_THREADS="1")
    assert result.code == 0, result.stderr
    assert "Nothing to pin: none of " in result.stdout
