"""The real program in its own process, and the same program called in this process."""

import atexit
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ampdbg.commands.app import main
from tests import forking

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Result:
    """The exit code and the output of a finished program."""

    code: int
    stdout: str
    stderr: str


def environment(**variables: str) -> dict[str, str]:
    """The environment plus ``variables``, without the variables that change the style of the output."""
    ours = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
    return {**ours, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", **variables}


def command(*arguments: str, flags: tuple[str, ...] = ()) -> list[str]:
    """The command line of the program; ``flags`` go to Python."""
    return [sys.executable, *flags, "-m", "ampdbg", *arguments]


THREADS = os.environ.get("OMP_NUM_THREADS")

WARM = """
import gc, importlib, pkgutil, sys
import torch._dynamo, torch._subclasses.schema_check_mode, ampdbg
for module in pkgutil.walk_packages(ampdbg.__path__, "ampdbg."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from tests.forking import serve
ampdbg.probes.unfollowed.exclude_from_compile()
ownership = ampdbg.source.ownership
installed = {getattr(module, "__file__", None) for module in sys.modules.values()} - {*ownership.loaded_files()}
look = ownership.is_users_file
ownership.is_users_file = lambda file: file not in installed and look(file)  # thousands of files, in each process
for kind in (*ampdbg.record.log.KINDS.values(), ampdbg.record.run.Record):
    ampdbg.record.file.adapter(kind)
ampdbg.commands.app.program()
gc.freeze()
serve()
"""

FORKED = """
import json, os, sys
folder, variables, arguments = json.loads(sys.argv[1])
os.chdir(folder)
os.environ.clear()
os.environ.update(variables)
sys.path.insert(0, "")  # as python -m has it
sys.argv = ["ampdbg", *arguments]
for stream in (sys.stdout, sys.stderr):
    stream.reconfigure(encoding=variables["PYTHONIOENCODING"], errors="backslashreplace")
from tests.forking import fork_fresh_processes
if arguments and arguments[0] in ("bisect", "replay", "suggest-fp32"):
    fork_fresh_processes()
from ampdbg.__main__ import main
main()
"""


FORKED_CODE = """
import json, os, sys
folder, variables, code = json.loads(sys.argv[1])
os.chdir(folder)
os.environ.clear()
os.environ.update(variables)
exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
"""


@functools.cache
def _server() -> Callable[..., Any]:
    """Starts a server that forks processes with torch imported; it runs until this process ends."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(forking.server(ROOT, WARM))


def start(folder: Path, *arguments: str, flags: tuple[str, ...] = (), **variables: str) -> Result:
    """Runs the real program in ``folder`` to its end.

    On Linux, forks it from a process that has imported torch, since the import takes seconds.
    """
    if flags or sys.platform != "linux" or variables.get("OMP_NUM_THREADS", THREADS) != THREADS:
        return start_fresh(folder, *arguments, flags=flags, **variables)
    return _forked(FORKED, [str(folder), environment(**variables), arguments])


def start_python(folder: Path, code: str) -> Result:
    """Runs code in ``folder`` like ``python -c``; on Linux, forks as :func:`start` does."""
    if sys.platform != "linux":
        program = [sys.executable, "-c", code]
        done = subprocess.run(program, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
        return Result(done.returncode, done.stdout, done.stderr)
    return _forked(FORKED_CODE, [str(folder), environment(), code])


def _forked(program: str, task: list[Any]) -> Result:
    with tempfile.TemporaryFile() as errors:
        with _server()([json.dumps(task)], errors, program=program) as (stdout, wait):
            output = stdout.read()
            code = wait()
        errors.seek(0)
        return Result(code, output, errors.read().decode("utf-8", "replace"))


def start_fresh(folder: Path, *arguments: str, flags: tuple[str, ...] = (), **variables: str) -> Result:
    """Like :func:`start`, but in a new Python process, with ``flags`` and a normal exit."""
    done = subprocess.run(
        command(*arguments, flags=flags),
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=600,  # a guard against hangs: the longest slow test takes three minutes
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def imported_by(result: Result) -> set[str]:
    """The modules that a run with ``-X importtime`` imported."""
    lines = result.stderr.splitlines()
    return {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}


@dataclass(frozen=True)
class Here:
    """The program in this process, in its own folder: fast, and open to monkeypatching."""

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

    def stub(self, *names: str) -> None:
        """Writes configs with these names, for a model and batches that do nothing."""
        (self.folder / "net.py").write_text("class Net: ...\ndef batches(): ...\n", encoding="utf-8")
        for name in names:
            config = "model: {target: net.py:Net}\ndata: {target: net.py:batches}\n"
            (self.folder / name).write_text(config, encoding="utf-8")

    def refused(self, *arguments: str) -> Result:
        """Calls the program and asserts exit code 2 and an empty stdout."""
        result = self(*arguments)
        assert (result.code, result.stdout) == (2, ""), result
        return result


@contextlib.contextmanager
def stdout_given_back() -> Iterator[None]:
    """Restores stdout, which the program keeps until its process ends; this process continues."""
    printed_to, saved = sys.stdout, os.dup(sys.stdout.fileno())
    try:
        yield
    finally:
        sys.stdout = printed_to
        os.dup2(saved, printed_to.fileno())
        os.close(saved)
