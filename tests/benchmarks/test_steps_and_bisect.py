"""The steps and bisect benchmarks run at a tiny size. No test checks their times."""

import json
import random
from pathlib import Path

import pytest

from benchmarks import bisect, steps


@pytest.mark.slow
def test_the_steps_benchmark_writes_every_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "steps.json"
    steps.main(["--tiny", "--rounds", "4", "--slow-rounds", "1", "--threads", "1", "--json", str(file)])
    written = json.loads(file.read_text(encoding="utf-8"))
    assert len(written["results"]) == len(steps.COMPARISONS)
    assert all(result["ratio"] > 0 and result["parameters"] > 0 for result in written["results"])
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 + len(steps.COMPARISONS)


def test_the_interval_of_the_median_covers_the_median_in_about_95_percent() -> None:
    draw = random.Random(0)
    intervals = [steps.interval_of_median(sorted(draw.gauss(1.0, 0.1) for _ in range(61))) for _ in range(2000)]
    hits = sum(low <= 1.0 <= high for low, high in intervals)
    assert 0.93 <= hits / 2000 <= 0.98
    assert steps.interval_of_median([1.0]) == (1.0, 1.0)
    assert steps.interval_of_median([1.0, 2.0, 3.0]) == (1.0, 3.0)


def test_the_gpt_has_about_six_million_parameters() -> None:
    assert steps.gpt(tiny=False).parameters == pytest.approx(6e6, rel=0.1)


def test_the_bisect_benchmark_writes_and_prints_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bisect.json"
    arguments = ["--modules", "20", "--culprits", "2", "--strategy", "guided", "--threads", "1", "--json", str(file)]
    bisect.main(arguments)
    [row] = json.loads(file.read_text(encoding="utf-8"))["results"]
    assert (row["culprits"], row["exact"], row["trials"] <= row["allowed"]) == (2, True, True)
    assert len(capsys.readouterr().out.splitlines()) == 3
