"""The program in this process, for tests that replace a part of it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands.program import Here


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    """Calls the program in an empty folder: ``here("scan", "c.yaml")``."""
    monkeypatch.chdir(tmp_path)
    return Here(tmp_path, monkeypatch, capfd)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell that runs the tests in the background has SIGINT ignored, and children would inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
