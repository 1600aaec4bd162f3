"""Every kind of mistake through the real program: one message on stderr, exit code 2, no traceback of ours."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import ampdbg
from ampdbg.commands.app import main
from ampdbg.record.file import read_record
from tests.broken.cases import BROKEN, Broken
from tests.commands.program import stdout_given_back

PACKAGE = str(Path(ampdbg.__file__).parent)
"""Not the bare name: a clone, and the environment inside it, lie in a folder called ampdbg."""

LARGE = "20,000 unknown keys"
"""It takes PyYAML seconds to read, once more than test_broken.py has it do."""

IN_A_SUBPROCESS = ("empty file", "unclosed bracket")


def check(case: Broken, code: int, out: str, err: str) -> None:
    """What the user must see: the message once, whole, and nothing of ampdbg's insides."""
    assert code == 2, out + err
    assert out == ""
    assert len(re.findall(r"^error: ", err, flags=re.MULTILINE)) == 1, err
    assert "ampdbg itself failed" not in err
    assert [part for part in case.expected if part not in err] == [], err
    assert PACKAGE not in err, err
    assert ("raised" in err) == case.blames_user_code or "Traceback" not in err, err


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case.name == LARGE else ()) for case in BROKEN],
    ids=lambda case: case.name,
)
def test_a_mistake_gives_one_message_and_exit_code_2(
    case: Broken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    case.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ampdbg", "scan", "config.yaml", "--quiet"])
    with stdout_given_back(), pytest.raises(SystemExit) as exit_code:
        main()
    captured = capfd.readouterr()
    assert isinstance(exit_code.value.code, int)
    check(case, exit_code.value.code, captured.out, captured.err)
    # Only a mistake that shows in mid-run leaves a record: of the steps before it.
    assert all(record.steps and record.error for record in map(read_record, tmp_path.glob(".ampdbg/*.json")))


@pytest.mark.parametrize("name", IN_A_SUBPROCESS)
def test_the_same_in_a_process_of_its_own(name: str, tmp_path: Path) -> None:
    case = next(case for case in BROKEN if case.name == name)
    case.write(tmp_path)
    call = [sys.executable, "-m", "ampdbg", "scan", "config.yaml"]
    ran = subprocess.run(call, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    check(case, ran.returncode, ran.stdout, ran.stderr)
