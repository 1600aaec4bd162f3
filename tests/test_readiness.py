"""Tests of the table in docs/readiness.md and of the script that makes it."""

import re
from pathlib import Path

import pytest

from scripts.readiness import BEGIN, END, FAMILIES, LEVELS, PAGE, row


def test_the_readiness_table_has_every_family_and_level_and_no_unexpected_result() -> None:
    made = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = re.findall(r"^\| (\w+) \| (as initialised|large) \|.* \| (.*) \|$", made, re.MULTILINE)
    expected = [(family, stream) for _ in LEVELS for family in FAMILIES for stream in ("as initialised", "large")]
    assert [one[:2] for one in rows] == expected
    assert {came_to for *_, came_to in rows} == {"trains", "fails without, trains with"}


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_a_large_gemma_3_stream_fails_in_fp16_and_trains_with_the_suggested_pins(level: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = tmp_path / "config.yaml"
    script = (Path(__file__).parents[1] / "scripts" / "readiness.py").as_posix()
    target = f"{{target: '{script}:NAME'}}"
    model, data = (target.replace("NAME", name) for name in ("build_model", "build_data"))
    config.write_text(f"model: {model}\ndata: {data}\nprecision: {{dtype: bfloat16}}\ntrain: {{device: cpu}}\n")
    fitting, large = (row(config, "gemma3", level, is_large=is_large) for is_large in (False, True))
    assert (fitting.ready.trains, fitting.ready.pins, fitting.is_right) == (True, (), True)
    assert (large.ready.trains, bool(large.ready.pins), large.is_right) == (True, True, True)
