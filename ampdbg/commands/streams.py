"""The streams of the program: results go to stdout, everything else to stderr. A reader may leave at any time."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from ampdbg.errors import AmpdbgError, reason_of


def is_terminal(stream: TextIO | None) -> bool:
    """True if the stream is open and shows on a terminal, not in a file or a pipe."""
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError, AttributeError):  # closed, or an object of the user's own
        return False


def is_rich_terminal(stream: TextIO | None) -> bool:
    """True if the stream shows colors and animation: no pipe, no old Windows console, no NO_COLOR or TERM=dumb."""
    if os.environ.get("NO_COLOR") or not is_terminal(stream):
        return False
    from rich.console import Console

    console = Console(file=stream)
    return not (console.is_dumb_terminal or console.legacy_windows)


def say(message: str) -> None:
    """Write a line to stderr. If it can no longer be read, the command continues."""
    try:
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # the reader has gone, the disk is full, it is closed, or None
        _silence(sys.stderr)


def _silence(stream: TextIO) -> None:
    """Discard the stream's buffer and everything that follows, on which Python would fail again at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        descriptor, null = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
        if null != descriptor:  # they are equal if stderr or stdout was closed
            os.dup2(null, descriptor)
            os.close(null)


def write_result(text: str | bytes, stream: TextIO) -> None:
    """Write the result, bytes unchanged; return silently if the reader has gone, such as ``head``.

    Raises:
        AmpdbgError: stdout cannot be written: it is closed, or a file on a full disk.
    """
    if sys.__stdout__ is None and text:
        raise AmpdbgError("stdout: cannot be written: it is closed")
    try:
        if isinstance(text, bytes):  # past the encoding and the line ends of the stream
            stream.buffer.write(text)
        else:
            encoding = getattr(stream, "encoding", None) or "utf-8"  # a text-only stream takes all characters
            # Names may hold any character; characters that the stream cannot encode are shown as escapes.
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError as error:
        _silence(stream)
        if not isinstance(error, BrokenPipeError):
            raise AmpdbgError(f"stdout: cannot be written: {reason_of(error)}") from None


def end_streams() -> None:
    """Flush stdout and stderr, or discard what is in them: Python would fail on it at exit, with code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            _silence(stream)


@contextlib.contextmanager
def results_only() -> Iterator[TextIO]:
    """Yield the real stdout; from then on everything that is printed, by any means, goes to stderr.

    Python's ``sys.stdout`` is replaced. So is the file descriptor, to which C++ code and subprocesses write, such as a
    DataLoader's workers. It stays replaced until the process ends. Otherwise output of the user's ``atexit`` functions
    or threads would follow the result, and spoil it.
    """
    stdout = sys.stdout
    stdout.flush()
    sys.stdout = sys.stderr
    try:
        descriptor, stderr = stdout.fileno(), sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):  # a notebook's stdout has no descriptor
        yield stdout
        return
    result = os.fdopen(os.dup(descriptor), "w", encoding=stdout.encoding, errors="backslashreplace")
    os.dup2(stderr, descriptor)
    try:
        yield result
    finally:
        with contextlib.suppress(OSError):  # the failed write was reported
            result.close()
