"""``ampdbg run`` beside ``python``: a process ends as it would, whatever its script does with signals and streams."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ampdbg.record.file import read_record
from tests.commands.program import Result, environment, start

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="it has no such signals and files")


def alone(folder: Path, *arguments: str) -> Result:
    """What Python itself does with the same."""
    found = environment(PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run(
        [sys.executable, *arguments], check=False, cwd=folder, env=found, capture_output=True, text=True, timeout=60
    )
    return Result(done.returncode, done.stdout, done.stderr)


def both(folder: Path, text: str) -> tuple[Result, Result]:
    """How a script of this text ends alone, and watched; the record is ``r.json``."""
    (folder / "train.py").write_text(text, encoding="utf-8")
    return alone(folder, "train.py"), start(folder, "run", "--record=r.json", "train.py")


CHECKPOINT = """
import os, signal
said = []
def stop(number, frame):
    for handler in handlers:
        handler(number, frame)
before = signal.getsignal(signal.SIGTERM)
handlers = [lambda number, frame: said.append(number)]
if before not in (None, signal.SIG_DFL):
    handlers.append(before)  # as lightning's signal connector does
signal.signal(signal.SIGTERM, stop)
os.kill(os.getpid(), signal.SIGTERM)
print("saved", said)
"""

CALLS_WHAT_WAS_THERE = """
import os, signal
def stop(number, frame):
    print("stopping", flush=True)
    if callable(before):
        before(number, frame)
    else:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
before = signal.signal(signal.SIGTERM, stop)
os.kill(os.getpid(), signal.SIGTERM)
print("not reached")
"""

RESTORES = """
import os, signal
print(signal.signal(signal.SIGHUP, signal.SIG_IGN) is signal.SIG_DFL)
os.kill(os.getpid(), signal.SIGHUP)
print(signal.signal(signal.SIGHUP, signal.SIG_DFL) is signal.SIG_IGN, flush=True)
os.kill(os.getpid(), signal.SIGHUP)
"""

IMPORTED_BEFORE = """
import os, signal
from _signal import getsignal, signal as install  # as a library has them that was imported before the script began
before = getsignal(signal.SIGTERM)
install(signal.SIGTERM, lambda number, frame: before and callable(before) and before(number, frame))
os.kill(os.getpid(), signal.SIGTERM)
print("saved")
"""


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import os\nos.kill(os.getpid(), 15)", -signal.SIGTERM),
        ("import os\nos.kill(os.getpid(), 1)", -signal.SIGHUP),
        (CHECKPOINT, 0),
        (CALLS_WHAT_WAS_THERE, -signal.SIGTERM),
        (RESTORES, -signal.SIGHUP),
        (IMPORTED_BEFORE, 0),
    ],
    ids=["SIGTERM", "SIGHUP", "own handler", "calls the one before", "restores", "imported before"],
)
def test_a_signal_does_what_it_would_and_the_record_is_written(tmp_path: Path, text: str, code: int) -> None:
    python, watched = both(tmp_path, text)
    assert (watched.code, watched.stdout) == (python.code, python.stdout) == (code, python.stdout)
    script = read_record(tmp_path / "r.json").script
    assert script is not None
    assert script.exit_code == (code if code >= 0 else 128 - code)
