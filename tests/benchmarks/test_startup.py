"""The startup benchmark runs. No test checks its times."""

import pytest

from benchmarks import startup


def test_the_startup_benchmark_prints_a_row_for_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    startup.main(["--rounds", "1"])
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.partition("  ")[0] for row in rows] == list(startup.COMMANDS)
