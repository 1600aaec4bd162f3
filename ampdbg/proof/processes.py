"""A fresh process: it has imported nothing of the user's, calls one function of ampdbg's, and answers however it ends.

What its observer sees arrives here.
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
from typing import IO, TYPE_CHECKING, Any

from ampdbg.files import replace_file, temporary_folder
from ampdbg.observer import Observer

if TYPE_CHECKING:
    from ampdbg.proof.jobs import Job, Seen

ENDING = 30.0
"""Seconds that a process may take to end once it has said all: the user's code may have left threads behind."""

RUN = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "  # while it imports there is nothing to keep
    "import ampdbg.proof.captures, torch._dynamo; "  # which every optimizer of torch's imports
    "from ampdbg.proof.processes import main; main()"
)

# Imports are to be found where they are in this process. `python -m` would look into the working folder first,
# where a file may have the name of a module of Python's own.
PATHS = "import os, sys; sys.path[:] = sys.argv.pop().split(os.pathsep); "

Deliver = Callable[[Any], None]
"""Takes the result, at most once; the process may end behind it."""

Task = Callable[..., None]
"""What a process calls: with arguments of its own, an observer, a ``Deliver``, and a temporary folder."""

Pending = Callable[[Observer], "Seen"]
"""Waits for what a job sees; a failure or crash is the ``failure`` of that."""

JobStarter = Callable[[Task, "Job"], Pending]
"""Begins what is to be seen of a job."""


@dataclass(frozen=True)
class FreshProcess:
    """One that waits for its task, or is at it; ``folder`` is a temporary one for both sides."""

    child: subprocess.Popen[str]
    folder: Path

    def begin(self, task: Task, *arguments: Any, outlives: bool = False) -> None:
        """Gives it its task. Unless it ``outlives`` this process, it ends at once with that."""
        (self.folder / "task").write_bytes(pickle.dumps((task, arguments, outlives, sys.argv)))
        assert self.child.stdin is not None
        self.child.stdin.write(f"{self.folder}\n")
        self.child.stdin.flush()

    def pass_on(self, observer: Observer) -> None:
        """Until it has said all."""
        assert self.child.stdout is not None
        for line in self.child.stdout:
            name, arguments = pickle.loads(base64.b64decode(line))
            getattr(observer, name)(*arguments)

    def result(self) -> Any:
        """What was delivered; None for nothing."""
        path = self.folder / "result"
        return pickle.loads(path.read_bytes()) if path.exists() else None


@contextlib.contextmanager
def fresh_process(errors: str = "", **how: Any) -> Iterator[FreshProcess]:
    """It leads a group of its own, and ends here with all that it has started; its stderr goes into the file ``errors``
    of its folder, where that is given."""
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


class FreshProcesses(contextlib.ExitStack):
    """Begins each job in a process of its own that works in ``folder``; while this is entered they live."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._waiting: list[FreshProcess] = []

    def warm(self) -> None:
        """Starts one ahead: torch takes seconds to import."""
        with contextlib.suppress(OSError):  # the reason is that of the first job, which cannot be begun either
            self._waiting.append(self._started())

    def __call__(self, task: Task, job: Job) -> Pending:
        from ampdbg.proof.jobs import Seen

        try:
            process = self._waiting.pop() if self._waiting else self._started()
            process.begin(task, job)
        except OSError as error:
            why = f"no process can be started: {error}"
            return lambda observer: Seen(failure=why)
        return functools.partial(_seen_by, process)

    def _started(self) -> FreshProcess:
        return self.enter_context(fresh_process("output", cwd=self._folder))


def _seen_by(process: FreshProcess, observer: Observer) -> Seen:
    from ampdbg.proof.jobs import Seen

    process.pass_on(observer)
    failure = _ended(process.child)
    seen: Seen | None = process.result()
    return seen or Seen(failure=": ".join(filter(None, (failure, _last_line(process.folder / "output")))))


def _ended(child: subprocess.Popen[str]) -> str:
    """How a process ended, where it has left no result."""
    try:
        code = child.wait(ENDING)
    except subprocess.TimeoutExpired:
        return "its process does not end"
    how = f"by a signal: {signal.strsignal(-code)}" if code < 0 else f"with exit code {code}"
    return f"its process ended {how}"


def _last_line(output: Path) -> str:
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def end_group(pid: int) -> None:
    """Ends a process and, where there are groups, all that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses for one that has ended
        if sys.platform == "win32":
            os.kill(pid, signal.SIGTERM)
        else:
            os.killpg(pid, signal.SIGKILL)


# The side of the process


def main() -> None:
    """Calls the task in the folder that comes by stdin; ends where none does."""
    events, given = own_stdout(), os.fdopen(os.dup(0), encoding="utf-8")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    folder = Path(given.readline().rstrip("\n"))
    if not folder.name:
        return
    task, arguments, outlives, sys.argv = pickle.loads((folder / "task").read_bytes())
    if not outlives:
        _thread.start_new_thread(_end_with, (given,))
    task(*arguments, _Told(events), functools.partial(_deliver, folder), folder)


def _end_with(given: IO[str]) -> None:
    """Waits for the end of who has started this process, and ends it."""
    given.read()
    end_group(os.getpid())


def _deliver(folder: Path, result: Any) -> None:
    replace_file(folder / "result", pickle.dumps(result))


class _Told(Observer):
    def __init__(self, stream: IO[str]) -> None:
        for name in ("replay", "search", "trial", "stage"):
            setattr(self, name, functools.partial(self._send, stream, name))

    @staticmethod
    def _send(stream: IO[str], name: str, *arguments: Any) -> None:
        stream.write(base64.b64encode(pickle.dumps((name, arguments))).decode() + "\n")  # print may be the script's
        stream.flush()


def own_stdout() -> IO[str]:
    """What the process that has started this one reads; whatever else is printed goes to stderr from now on.

    It ends with this process alone: a worker that the script has forked may live as long as the script, which is
    never to end.
    """
    stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=functools.partial(_let_go, stdout))
    return stdout


def _let_go(stream: IO[str]) -> None:
    """Leaves the other end of a stream to its other holders; its number stays taken, as somebody may close it here."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno(), inheritable=False)
