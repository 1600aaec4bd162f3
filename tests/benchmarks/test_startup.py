"""The benchmark of the program's start runs; how fast it is, no test says."""

import pytest

from benchmarks import startup


def test_each_command_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    startup.main(["--rounds", "1"])
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.partition("  ")[0] for row in rows] == list(startup.COMMANDS)
