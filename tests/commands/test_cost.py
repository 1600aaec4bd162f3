"""``ampdbg cost``, the whole way: from a config to a page, a record and an exit code."""

from __future__ import annotations

import json

import pytest

from tests.commands.program import Here
from tests.costs.perceptron import NET, written


def test_the_page_the_record_and_progress_of_each_level(here: Here) -> None:
    written(here.folder)
    result = here("cost", "c.yaml", "--steps", "2", "--batch-size", "1MB", "--record", "r.json")
    assert result.code == 0
    assert result.stdout.startswith("✓ O2 trains in 0.9")
    assert "The largest batch in 1.0 MB, by doubling" in result.stdout
    for name in ("FP32", "O1", "O2", "O3", "bfloat16"):
        assert f"{name}: 2 steps\n" in result.stderr
    assert result.stderr.count("\nstep 1/2  loss ") == 5
    assert "FP32 from weights rounded to float16\n" in result.stderr
    again = here("report", "r.json")
    assert (again.code, again.stdout.partition("Record:")[0]) == (0, result.stdout.partition("Record:")[0])


def test_json_is_the_record(here: Here) -> None:
    written(here.folder)
    result = here("cost", "c.yaml", "--steps", "1", "--json", "--quiet", "--memory", "2MiB", "--record", "r.json")
    data = json.loads(result.stdout)
    assert data == json.loads((here.folder / "r.json").read_text(encoding="utf-8"))
    assert (data["command"], data["costs"]["budget"], result.stderr) == ("cost", 2 * 1024**2, "")


def test_a_failure_of_some_levels_is_no_failure_and_of_all_is_2(here: Here) -> None:
    written(here.folder, NET.replace("(self.first(x))", "(self.first(x)).float()"))
    result = here("cost", "c.yaml", "--steps", "1", "--quiet")
    assert result.code == 0
    assert result.stdout.count(" could not run: ") == 2
    written(here.folder, NET.replace("self.first(x)", "self.third(x)"))
    result = here("cost", "c.yaml", "--quiet")
    assert (result.code, result.stdout) == (2, "")
    assert "has no attribute 'third'" in result.stderr


@pytest.mark.parametrize("size", ["64", "GiB", "-1GiB", "16 gallons", "1e9"])
def test_a_size_without_a_unit_is_refused(size: str, here: Here) -> None:
    result = here("cost", "c.yaml", "--batch-size", size)
    assert (result.code, result.stdout) == (2, "")
    assert f"got '{size}'; allowed: a number and its unit, such as 16GiB or 800MB" in " ".join(result.stderr.split())
