"""``ampdbg run``: an unchanged training script, watched from outside; its output and exit code stay its own."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TextIO, cast

import typer

from ampdbg import api
from ampdbg.errors import EXIT_HEALTHY, ConfigError
from ampdbg.given import RunSettings
from ampdbg.observer import Observer
from ampdbg.quantities import byte_count
from ampdbg.record.run import Record
from ampdbg.report.formats import written

from . import options
from .output import failure_of_page, look_of, save, say, typed_as
from .scan import FailOn, exit_code
from .source_findings import loaded_files, say_source_findings


def command(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file; with -m a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="All that follows is the script's own.")
    ] = None,
    is_module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as of python -m.")] = False,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="On a machine without a GPU: the script finds one, with CUDA's FP16.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch/--no-watch", help="--no-watch only emulates: what to compare a watched run with.")
    ] = True,
    captures: Annotated[
        Path, typer.Option("--captures", metavar="DIR", file_okay=False, help="Where steps that go wrong are written.")
    ] = RunSettings.folder,
    max_captures: Annotated[
        int, typer.Option("--max-captures", metavar="N", min=0, help="Write at most N of them.")
    ] = RunSettings.most,
    max_capture_size: Annotated[
        str, typer.Option("--max-capture-size", metavar="SIZE", help="Write none that is larger, such as 800MB.")
    ] = f"{RunSettings.largest // 2**30}GiB",
    investigate: Annotated[
        bool, typer.Option("--investigate/--no-investigate", help="Run a step that goes wrong again, or only write it.")
    ] = True,
    log: Annotated[
        Path | None,
        typer.Option("--log", metavar="FILE", dir_okay=False, help="A line for each step; by default in .ampdbg/."),
    ] = None,
    trend: Annotated[
        int,
        typer.Option("--trend", metavar="N", min=0, help="At one step of N: what grows towards FP16's limit."),
    ] = 0,
    fail_on: Annotated[
        FailOn, typer.Option("--fail-on", help="The least severity that makes the exit code 1, where it would be 0.")
    ] = "warning",
    record: options.RecordFile = None,
    html: options.HtmlFile = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No report on stderr; only the record.")] = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> int:
    """Run a training script as it is, and watch it.

    Options stand before SCRIPT. Its output and its exit code are its own; the report goes to stderr, and only where
    it ends with 0 and something was found is the code 1.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    options.check_page(html, record=record, script=None if is_module else Path(script))
    command_typed, started, stderr = shlex.join([script, *(arguments or ())]), Path.cwd(), sys.stderr

    def tell(seen: Record) -> None:
        with redirect_stderr(stderr):  # the script's own may be a file of its own, or closed
            with _working_in(started):
                saved = save(seen, record)
                typed = replace(typed_as(command_typed, saved.path), verbose=verbose)
                no_page = failure_of_page(seen, typed, html)
            if not quiet:
                say(written(seen, typed, look_of(stderr), "text").rstrip("\n"))
            if saved.failure is not None:
                say(f"warning: no record was written: {saved.failure}; choose another place with --record FILE")
            if no_page is not None:
                say(f"warning: no page was written: {no_page}; choose another place with --html FILE")

    if not watch:
        return api.run_unwatched(script, arguments or (), is_module=is_module, emulate=emulate)
    observer = _Said(stderr, is_quiet=quiet)
    try:
        seen = api.run(
            script,
            arguments or (),
            is_module=is_module,
            emulate=emulate,
            settings=RunSettings(
                captures,
                max_captures,
                _bytes(max_capture_size),
                investigate,
                log or (record and record.with_suffix(".jsonl")),
                trend,
            ),
            ended=tell,
            observer=observer,
            ends_process=True,
        )
    except SystemExit as ended:  # in a child that the script has forked
        return cast(int, ended.code)
    tell(seen)
    with redirect_stderr(stderr), _working_in(started):
        say_source_findings(seen, loaded_files() if is_module else [script, *loaded_files()], is_quiet=quiet)
    ended_with = seen.script.exit_code if seen.script else EXIT_HEALTHY
    return ended_with or exit_code(seen, fail_on)


def _bytes(size: str) -> int:
    try:
        return byte_count(size)
    except ValueError as error:
        raise ConfigError(f"--max-capture-size: {error}") from None


class _Said(Observer):
    """Says that the script waits, and why; and what could not be done beside it."""

    def __init__(self, stderr: TextIO, *, is_quiet: bool) -> None:
        self._said, self._stderr, self._is_quiet = -1, stderr, is_quiet

    def warned(self, text: str) -> None:
        with redirect_stderr(self._stderr):
            say(f"warning: {text}")

    def replay(self, step: int, doing: str) -> None:
        if step != self._said and not self._is_quiet:
            self._said = step
            with redirect_stderr(self._stderr):
                say(f"step {step} is not finite; the script waits while it is run again, in FP32 too")


@contextlib.contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    """While this is entered, paths start from the folder: a script may have gone to another one."""
    left = None
    with contextlib.suppress(OSError):  # the script's own may be gone
        left = Path.cwd()
    with contextlib.suppress(OSError):
        os.chdir(folder)
    try:
        yield
    finally:
        if left is not None:
            os.chdir(left)
