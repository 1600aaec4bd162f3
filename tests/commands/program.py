"""The real program in a process of its own, and the same program called in this one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ampdbg.commands.app import main

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Result:
    """What a finished program left: its exit code and what it wrote."""

    code: int
    stdout: str
    stderr: str


def environment(**variables: str) -> dict[str, str]:
    """The environment without the variables that change how the program writes, plus ``variables``."""
    ours = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
    return {**ours, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", **variables}


def command(*arguments: str, flags: tuple[str, ...] = ()) -> list[str]:
    """The command line of the program; ``flags`` are Python's."""
    return [sys.executable, *flags, "-m", "ampdbg", *arguments]


def start(folder: Path, *arguments: str, flags: tuple[str, ...] = (), **variables: str) -> Result:
    """Runs the real program in ``folder`` to its end."""
    done = subprocess.run(
        command(*arguments, flags=flags),
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=600,  # a guard against a hang: the longest of the slow tests takes three minutes
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def imported_by(result: Result) -> set[str]:
    """The modules that a run with ``-X importtime`` imported."""
    lines = result.stderr.splitlines()
    return {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}


@dataclass(frozen=True)
class Here:
    """The program in this process, in a folder of its own: quick, and open to monkeypatching."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    capture: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str) -> Result:
        self.monkeypatch.setattr(sys, "argv", ["ampdbg", *arguments])
        with stdout_given_back(), pytest.raises(SystemExit) as exit_:
            main()
        captured = self.capture.readouterr()
        assert isinstance(exit_.value.code, int)
        return Result(exit_.value.code, captured.out, captured.err)


@contextlib.contextmanager
def stdout_given_back() -> Iterator[None]:
    """The program keeps stdout for its result until the process ends; this process goes on after it."""
    printed_to, saved = sys.stdout, os.dup(sys.stdout.fileno())
    try:
        yield
    finally:
        sys.stdout = printed_to
        os.dup2(saved, printed_to.fileno())
        os.close(saved)
