"""Lint, format and types are part of the test suite: `make test` is the one gate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

CHECKS = {
    "ruff check": ("ruff", "check", "--output-format=concise", "."),
    "ruff format (make format repairs it)": ("ruff", "format", "--check", "."),
    "mypy --strict": ("mypy",),
}


@pytest.mark.parametrize("arguments", CHECKS.values(), ids=CHECKS.keys())
def test_the_whole_project_passes(arguments: tuple[str, ...]) -> None:
    result = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
