"""The benchmark of ranges runs, at a tiny size; how fast anything is, no test says."""

import pytest

from benchmarks import ranges


@pytest.mark.slow
def test_every_measurement_but_memory_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    ranges.main(["--tiny", "--rounds", "1", "--threads", "1"])
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 + 2 * (1 + len(ranges.KINDS))
    assert printed[2].startswith("gpt       shadow")
