"""``ampdbg cost`` end to end: from a config to a page, a record and an exit code."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from ampdbg import api
from ampdbg.record.run import Record
from tests.commands.program import Here
from tests.costs.perceptron import NET, written
from tests.report.test_cost import ON_CPU

Faked = Callable[[Record], list[object]]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Faked:
    """Makes every comparison return the record; lists the ``memory`` option of each."""

    def faked(record: Record) -> list[object]:
        asked: list[object] = []

        def cost(given: object, *, memory: object, observer: object) -> Record:
            asked.append(memory)
            return record

        monkeypatch.setattr(api, "cost", cost)
        return asked

    return faked


def test_cost_shows_the_progress_of_each_level_and_two_levels_that_could_not_run(here: Here) -> None:
    written(here.folder, NET.replace("(self.first(x))", "(self.first(x)).float()"))
    result = here("cost", "c.yaml", "--steps", "2", "--batch-size", "1MB", "-v")
    assert result.code == 0
    assert result.stdout.count(" could not run: ") == 2
    assert "The largest batch in 1.0 MB, by doubling" in result.stdout
    for name in ("FP32", "O1", "O2", "O3", "bfloat16"):
        assert f"{name}: 2 steps\n" in result.stderr
    assert result.stderr.count("\nstep 1/2  loss ") == 3
    assert "FP32 from weights rounded to float16\n" in result.stderr


@pytest.mark.slow
def test_cost_exits_with_2_if_no_level_runs(here: Here) -> None:
    written(here.folder, NET.replace("self.first(x)", "self.third(x)"))
    result = here.refused("cost", "c.yaml", "--quiet")
    assert "has no attribute 'third'" in result.stderr


def test_json_prints_the_saved_record_and_report_redraws_the_page(here: Here, fake: Faked) -> None:
    written(here.folder)
    asked = fake(ON_CPU)
    result = here("cost", "c.yaml", "--json", "--quiet", "--memory", "2MiB", "--record", "r.json")
    data = json.loads(result.stdout)
    assert data == json.loads((here.folder / "r.json").read_text(encoding="utf-8"))
    assert (result.code, data["command"], asked, result.stderr) == (0, "cost", ["2MiB"], "")
    page = here("cost", "c.yaml", "--quiet").stdout
    assert page.startswith("✓ bfloat16 trains in 0.74 of FP32's memory.\n")
    assert here("report", "r.json").stdout.partition("Record:")[0] == page.partition("Record:")[0]


def test_an_interrupted_cost_exits_with_130_and_counts_the_finished_levels(here: Here, fake: Faked) -> None:
    written(here.folder)
    fake(replace(ON_CPU, interrupted=True))
    result = here("cost", "c.yaml", "--quiet")
    assert (result.code, result.stdout.partition("\n")[0]) == (130, "! Interrupted after 5 levels.")


@pytest.mark.parametrize("size", ["", " ", "64", "GiB", "-1GiB", "16 gallons", "1e9", "9" * 400 + "GiB"])
def test_an_invalid_size_is_refused_with_examples_of_valid_sizes(size: str, here: Here) -> None:
    result = here.refused("cost", "c.yaml", "--batch-size", size)
    told = "".join(line.strip("│ ") for line in result.stderr.splitlines()).replace(" ", "")
    assert f"got'{size.replace(' ', '')}'" in told
    assert "allowed:anumberanditsunit,suchas16GiBor800MB" in told
