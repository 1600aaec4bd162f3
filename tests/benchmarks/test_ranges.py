"""The ranges benchmark runs at a tiny size. No test checks its times."""

import pytest

from benchmarks import ranges


@pytest.mark.slow
def test_the_ranges_benchmark_prints_every_measurement_except_memory(capsys: pytest.CaptureFixture[str]) -> None:
    ranges.main(["--tiny", "--rounds", "1", "--threads", "1"])
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 + 2 * (1 + len(ranges.KINDS))
    assert printed[2].startswith("gpt       shadow")
