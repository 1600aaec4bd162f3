"""Fresh processes for the experiments of a proof: each imports the user's code anew, and answers however it ends.

On Linux they are forked from one that has imported torch and nothing of the user's: the import takes seconds.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from ampdbg.files import temporary_folder

if TYPE_CHECKING:
    from ampdbg.observer import Observer
    from ampdbg.proof.jobs import Job, Seen

ENDING = 30.0
"""Seconds that a process may take to end once it has said all: the user's code may have left threads behind."""

RUN = "from ampdbg.proof.experiments import main; main()"
"""What a process runs; its command line is the file with its task, and the one for its result."""

SERVE = "import ampdbg.proof.experiments, torch._dynamo; from ampdbg.proof.processes import serve; serve()"
"""What the others are forked from; every optimizer of torch's imports ``_dynamo``."""

# Imports are to be found where they are in this process. `python -m` would look into the working folder first,
# where a file may have the name of a module of Python's own.
PATHS = "import os, sys; sys.path[:] = sys.argv.pop().split(os.pathsep); "

NUMBER = struct.Struct("q")

Wait = Callable[[], int]
"""Waits for a process, and returns its exit code, negative for a signal; TimeoutError after ``ENDING``."""

ProcessStarter = Callable[[list[str], IO[bytes]], AbstractContextManager[tuple[IO[str], Wait]]]
"""Starts a process with a command line, whose stderr goes to a file, and yields its stdout; whatever happens in the
block, it ends there with all that it has started."""

JobRunner = Callable[["Job", Path, "Observer"], "Seen"]


@contextlib.contextmanager
def fresh_processes(folder: Path) -> Iterator[JobRunner]:
    """What runs a job on the file with the failing steps, in a process of its own that works in ``folder``.

    The observer sees what is about to run there. A failure or crash is the ``failure`` of what was seen.
    """
    with contextlib.ExitStack() as stack:
        start: ProcessStarter = functools.partial(spawned, folder, RUN)
        if sys.platform == "linux":
            # Where no server can be started, the reason is that of the first process, which cannot be either.
            with contextlib.suppress(OSError):
                start = stack.enter_context(server(folder, SERVE))
        yield functools.partial(_seen_by, start)


def _seen_by(start: ProcessStarter, job: Job, steps: Path, observer: Observer) -> Seen:
    # Not at the top: a server imports what SERVE says, and this module.
    import torch

    from ampdbg.proof.jobs import Seen

    with temporary_folder() as folder:
        task, result, output = (folder / part for part in ("task", "result", "output"))
        try:
            task.write_bytes(pickle.dumps((job, steps, torch.get_num_threads(), sys.argv)))
            with output.open("wb") as errors, start([str(task), str(result)], errors) as (stages, wait):
                for line in stages:
                    observer.stage(line.strip())
                failure = _ended(wait)
        except OSError as error:
            return Seen(failure=f"no process can be started: {error}")
        if result.exists():
            seen: Seen = pickle.loads(result.read_bytes())
            return seen
        return Seen(failure=": ".join(filter(None, (failure, _last_line(output)))))


def _ended(wait: Wait) -> str:
    """How a process ended, where it has left no result."""
    try:
        code = wait()
    except TimeoutError:
        return "its process does not end"
    return (
        f"its process ended by a signal: {signal.strsignal(-code)}"
        if code < 0
        else f"its process ended with exit code {code}"
    )


def _last_line(output: Path) -> str:
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def started(program: str, arguments: list[str], **how: Any) -> subprocess.Popen[str]:
    """A process that begins with nothing imported and leads a group of its own; its stdout is to be read here."""
    return subprocess.Popen(
        [sys.executable, "-c", PATHS + program, *arguments, os.pathsep.join(sys.path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
        **how,
    )


@contextlib.contextmanager
def spawned(
    folder: Path, program: str, arguments: list[str], errors: IO[bytes] | int, **how: Any
) -> Iterator[tuple[IO[str], Wait]]:
    """A process that begins with nothing imported, and ends here with all that it has started."""
    child = started(program, arguments, cwd=folder, stderr=errors, **how)

    def wait() -> int:
        try:
            return child.wait(ENDING)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None

    with child:
        try:
            assert child.stdout is not None
            yield child.stdout, wait
        finally:
            if child.poll() is None:
                end_group(child.pid)


def end_group(pid: int) -> None:
    """Ends a process and, where there are groups, all that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses for one that has ended
        if sys.platform == "win32":
            os.kill(pid, signal.SIGTERM)
        else:
            os.killpg(pid, signal.SIGKILL)


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


# Processes that are forked: the side of the proof


@contextlib.contextmanager
def server(folder: Path, program: str) -> Iterator[Callable[..., AbstractContextManager[tuple[IO[str], Wait]]]]:
    """Yields what starts a process that is forked from one that works in ``folder`` and runs ``program``."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        arguments = [str(theirs.fileno())]
        with spawned(folder, program, arguments, subprocess.DEVNULL, pass_fds=[theirs.fileno()]) as (_, wait):
            theirs.close()
            yield functools.partial(_forked, ours)
            ours.close()
            wait()


@contextlib.contextmanager
def _forked(
    server: socket.socket, arguments: list[str], errors: IO[bytes], program: str | None = None
) -> Iterator[tuple[IO[str], Wait]]:
    said, says = os.pipe()
    ended, ends = os.pipe()
    with open(said, encoding="utf-8") as stages, open(ended, "rb", buffering=0) as status:
        try:
            socket.send_fds(server, [pickle.dumps((program or RUN, arguments))], [says, errors.fileno(), ends])
        finally:
            os.close(says)
            os.close(ends)

        def wait() -> int:
            if not select.select([status], [], [], ENDING)[0]:
                raise TimeoutError
            return _number(status)

        pid = _number(status)
        try:
            yield stages, wait
        finally:
            end_group(pid)


def _number(status: IO[bytes]) -> int:
    data = status.read(NUMBER.size)
    if len(data) < NUMBER.size:
        raise OSError("the process that it is forked from has ended")
    number: int = NUMBER.unpack(data)[0]
    return number


# Processes that are forked: the side that forks


def serve() -> None:
    """Forks a process for each message on the socket of the command line; when that is closed, all of them end."""
    groups = []
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        while True:
            message, files, *_ = socket.recv_fds(connection, 2**16, 3)
            if not message:
                break
            if (pid := os.fork()) == 0:
                connection.close()
                _guard(message, *files)
            groups.append(pid)  # as nobody waits for it, no other process gets its number
            for file in files:
                os.close(file)
    for pid in groups:
        end_group(pid)


def _guard(message: bytes, stages: int, errors: int, status: int) -> NoReturn:
    """Leads a group with the process, and tells how that ends."""
    os.setsid()
    os.write(status, NUMBER.pack(os.getpid()))
    if (worker := os.fork()) == 0:
        os.close(status)
        os.dup2(stages, 1)
        os.dup2(errors, 2)
        os.close(stages)
        os.close(errors)
        _work(*pickle.loads(message))
    os.close(stages)
    os.close(errors)
    how = os.waitpid(worker, 0)[1]
    os.write(status, NUMBER.pack(os.waitstatus_to_exitcode(how)))
    os._exit(0)


def _work(program: str, arguments: list[str]) -> NoReturn:
    """Runs a program as ``python -c`` would, and ends without what a fork of another process must not do at exit."""
    sys.argv = ["-c", *arguments]
    code: object = 1
    try:
        exec(program, {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - as at the end of any program
        traceback.print_exc()
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
