"""Fresh processes: each has imported no user code, runs one ampdbg function, and reports a result or its failure.

Observer events in the process are forwarded to this process.
"""

from __future__ import annotations

import _thread
import base64
import contextlib
import functools
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from ampdbg.files import replace_file, temporary_folder
from ampdbg.observer import Observer

ENDING = 30.0
"""Seconds that a process may take to exit after its last event, since user code may have left threads."""

RUN = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "  # nothing to save during imports
    "import ampdbg.proof.captures, torch._dynamo; "  # imported here early: every torch optimizer imports it
    "from ampdbg.proof.processes import main; main()"
)

# Imports must resolve as in this process. `python -m` would search the working folder first, where a file may shadow a
# module of the standard library.
PATHS = "import os, sys; sys.path[:] = sys.argv.pop().split(os.pathsep); "

Deliver = Callable[[Any], None]
"""Takes the result, at most once. The process may exit right after."""

Task = Callable[..., None]
"""The function that a process calls with its arguments, an observer, a ``Deliver`` and a temporary folder."""


@dataclass(frozen=True)
class FreshProcess:
    """A process that waits for its task or runs it; both sides share the temporary ``folder``."""

    child: subprocess.Popen[str]
    folder: Path

    def begin(self, task: Task, *arguments: Any, outlives: bool = False) -> None:
        """Send the task. Unless it ``outlives`` this process, it is killed when this process ends."""
        (self.folder / "task").write_bytes(pickle.dumps((task, arguments, outlives, sys.argv)))
        print(self.folder, file=self.child.stdin, flush=True)

    def pass_on(self, observer: Observer) -> None:
        """Forward the process's events to the observer until it closes its output."""
        for line in cast(IO[str], self.child.stdout):
            name, arguments = pickle.loads(base64.b64decode(line))
            getattr(observer, name)(*arguments)

    def result(self) -> Any:
        """Return the delivered result, or None."""
        path = self.folder / "result"
        return pickle.loads(path.read_bytes()) if path.exists() else None

    def ending(self) -> str:
        """Wait until the process ends, and return how, with the last line of its output."""
        try:
            code = self.child.wait(ENDING)
            how = f"by a signal: {signal.strsignal(-code)}" if code < 0 else f"with exit code {code}"
            ending = f"its process ended {how}"
        except subprocess.TimeoutExpired:
            ending = "its process does not end"
        output = (self.folder / "output").read_text(encoding="utf-8", errors="replace").strip()
        return ": ".join([ending, *map(str.strip, output.splitlines()[-1:])])


@contextlib.contextmanager
def fresh_process(errors: str = "", **how: Any) -> Iterator[FreshProcess]:
    """Start a process in a new group, and kill the group on exit. Its stderr may go to the file ``errors`` in its
    folder."""
    with temporary_folder() as folder, contextlib.ExitStack() as stack:
        output = stack.enter_context((folder / errors).open("wb")) if errors else None
        child = subprocess.Popen(
            [sys.executable, "-c", PATHS + RUN, os.pathsep.join(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            encoding="utf-8",
            start_new_session=True,
            **how,
        )
        with child:
            try:
                yield FreshProcess(child, folder)
            finally:
                end_group(child.pid)


def end_group(pid: int) -> None:
    """Kill a process and, except on Windows, its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS raises this for an ended process
        if sys.platform == "win32":
            os.kill(pid, signal.SIGTERM)
        else:
            os.killpg(pid, signal.SIGKILL)


# The child process's side


def main() -> None:
    """Run the task in the folder named on stdin, or exit if there is none."""
    events, given = own_stdout(), os.fdopen(os.dup(0), encoding="utf-8")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    folder = Path(given.readline().rstrip("\n"))
    if not folder.name:
        return
    task, arguments, outlives, sys.argv = pickle.loads((folder / "task").read_bytes())
    if not outlives:
        _thread.start_new_thread(_end_with, (given,))

    def deliver(result: Any) -> None:
        replace_file(folder / "result", pickle.dumps(result))

    task(*arguments, _ForwardingObserver(events), deliver, folder)


def _end_with(given: IO[str]) -> None:
    """Wait until the parent process ends, then kill this process group."""
    given.read()
    end_group(os.getpid())


class _ForwardingObserver(Observer):
    def __init__(self, stream: IO[str]) -> None:
        for name in ("replay", "search", "trial", "stage"):
            setattr(self, name, functools.partial(self._send, stream, name))

    @staticmethod
    def _send(stream: IO[str], name: str, *arguments: Any) -> None:
        stream.write(base64.b64encode(pickle.dumps((name, arguments))).decode() + "\n")  # the script may replace print
        stream.flush()


def own_stdout() -> IO[str]:
    """Return the stream to the parent process, and redirect all other output to stderr.

    The stream must close when this process ends. Workers forked by the script drop it, since they may live longer.
    """
    stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=functools.partial(_let_go, stdout))
    return stdout


def _let_go(stream: IO[str]) -> None:
    """Redirect a stream to the null device without freeing its number, which may be closed again."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno(), inheritable=False)
