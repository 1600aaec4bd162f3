"""Forks processes for tests from a process that has imported torch, because the import takes seconds. Linux only."""

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
from types import SimpleNamespace
from typing import IO, NoReturn

from ampdbg.proof import processes
from ampdbg.proof.processes import ENDING, PATHS, end_group

NUMBER = struct.Struct("q")

Wait = Callable[[], int]
"""Waits for a process and returns its exit code, negative for a signal; raises TimeoutError after ``ENDING``."""


# In the process of the tests


@contextlib.contextmanager
def server(folder: Path, program: str) -> Iterator[Callable[..., AbstractContextManager[tuple[IO[str], Wait]]]]:
    """Yields a function that forks a process from a server that works in ``folder`` and runs ``program``."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        arguments = [str(theirs.fileno())]
        child = subprocess.Popen(
            [sys.executable, "-c", PATHS + program, *arguments, os.pathsep.join(sys.path)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[theirs.fileno()],
        )
        with child:
            try:
                theirs.close()
                yield functools.partial(_forked, ours)
                ours.close()
                child.wait(ENDING)
            finally:
                if child.poll() is None:
                    end_group(child.pid)


@contextlib.contextmanager
def _forked(
    server: socket.socket, arguments: list[str], errors: IO[bytes], program: str
) -> Iterator[tuple[IO[str], Wait]]:
    said, says = os.pipe()
    ended, ends = os.pipe()
    with open(said, encoding="utf-8") as stages, open(ended, "rb", buffering=0) as status:
        try:
            socket.send_fds(server, [pickle.dumps((program, arguments))], [says, errors.fileno(), ends])
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


# In the process that forks


def serve() -> None:
    """Forks a process for each message on the socket of the command line; when the socket closes, ends all of them."""
    _serve(socket.socket(fileno=int(sys.argv[1])))


def _serve(connection: socket.socket) -> None:
    groups = []
    with connection:
        while True:
            message, files, *_ = socket.recv_fds(connection, 2**16, 4)
            if not message:
                break
            if (pid := os.fork()) == 0:
                connection.close()
                _guard(message, *files)
            groups.append(pid)  # until it is waited for, no other process gets its number
            for file in files:
                os.close(file)
    for pid in groups:
        end_group(pid)
        os.waitpid(pid, 0)  # its time counts among that of the tests


def _guard(message: bytes, stages: int, errors: int, status: int, *given: int) -> NoReturn:
    """Leads a process group with the worker, and reports the worker's exit code."""
    os.setsid()
    os.write(status, NUMBER.pack(os.getpid()))
    if (worker := os.fork()) == 0:
        os.close(status)
        for file, number in ((stages, 1), (errors, 2), *((one, 0) for one in given)):
            os.dup2(file, number)
        os.close(stages)
        os.close(errors)
        _work(*pickle.loads(message))
    os.close(stages)
    os.close(errors)
    how = os.waitpid(worker, 0)[1]
    os.write(status, NUMBER.pack(os.waitstatus_to_exitcode(how)))
    os._exit(0)


def _work(program: str, arguments: list[str]) -> NoReturn:
    """Runs a program as ``python -c`` does, and skips the exit handlers, which a fork must not run."""
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


# Processes that a forked process starts


def fork_fresh_processes() -> None:
    """From now on this process forks its fresh processes from a copy of its current state."""
    ours, theirs = socket.socketpair()
    if (child := os.fork()) == 0:
        if os.fork() == 0:  # not a child of this process, which may wait for all of its children
            ours.close()
            with open(os.devnull, "wb") as nothing:  # else a reader of this process's output would wait for this copy
                os.dup2(nothing.fileno(), 1)
            _serve(theirs)
        os._exit(0)
    os.waitpid(child, 0)
    theirs.close()
    processes.subprocess = SimpleNamespace(  # type: ignore[assignment, attr-defined]
        Popen=functools.partial(Forked, ours), PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
    )


class Forked:
    """Replaces ``Popen`` for a fresh process of a proof."""

    def __init__(
        self, server: socket.socket, command: list[str], stderr: IO[bytes] | None, cwd: Path | str = "", **_: object
    ) -> None:
        reading, said = os.pipe()
        heard, writing = os.pipe()
        self._ended, ends = os.pipe()
        prepared = "import os, tests.forking; tests.forking.fork_fresh_processes(); "
        program = f"{prepared}os.chdir({str(cwd or Path.cwd())!r}); {command[2]}"
        files = [writing, 2 if stderr is None else stderr.fileno(), ends, reading]
        socket.send_fds(server, [pickle.dumps((program, command[3:]))], files)
        for file in (writing, ends, reading):
            os.close(file)
        self.stdin, self.stdout = os.fdopen(said, "w", encoding="utf-8"), os.fdopen(heard, encoding="utf-8")
        self.pid: int = NUMBER.unpack(os.read(self._ended, NUMBER.size))[0]
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            data = os.read(self._ended, NUMBER.size)
            self._code = int(NUMBER.unpack(data)[0]) if data else -signal.SIGKILL
        return self._code

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.wait()
        os.close(self._ended)
