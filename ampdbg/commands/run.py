"""``ampdbg run``: watch an unchanged training script from outside; it keeps its output and exit code."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Annotated, TextIO, cast

import typer

from ampdbg import api
from ampdbg.errors import ConfigError
from ampdbg.escapes import printable
from ampdbg.given import RunSettings
from ampdbg.observer import Observer
from ampdbg.obstacles import obstacle_in
from ampdbg.quantities import byte_count, in_module
from ampdbg.record.file import of_rank
from ampdbg.record.run import Record
from ampdbg.report.formats import written
from ampdbg.report.view import CommandContext
from ampdbg.source.ownership import loaded_files

from . import options
from .output import look_of, save, typed_as, with_page
from .scan import FailOn, exit_code
from .source_findings import say_source_findings
from .streams import say


def command(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file; with -m a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="Passed to the script as they are.")
    ] = None,
    is_module: Annotated[bool, typer.Option("-m", help="Run SCRIPT as a module, like python -m.")] = False,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Emulate a GPU with CUDA's FP16, on a machine without one.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch/--no-watch", help="--no-watch only emulates, to compare with a watched run.")
    ] = True,
    captures: Annotated[
        Path,
        typer.Option("--captures", metavar="DIR", file_okay=False, help="The folder for captures of failing steps."),
    ] = RunSettings.folder,
    max_captures: Annotated[
        int, typer.Option("--max-captures", metavar="N", min=0, help="Write at most N captures.")
    ] = RunSettings.most,
    max_capture_size: Annotated[
        str, typer.Option("--max-capture-size", metavar="SIZE", help="Skip captures larger than this, such as 800MB.")
    ] = f"{RunSettings.largest // 2**30}GiB",
    capture_step: Annotated[
        int,
        typer.Option("--capture-step", metavar="N", min=0, help="Also capture step N, failing or not; 0 for none."),
    ] = RunSettings.wanted,
    investigate: Annotated[
        bool,
        typer.Option(
            "--investigate/--no-investigate",
            help="Replay failing steps, and compare one healthy step with FP32.",
        ),
    ] = True,
    log: Annotated[
        Path | None,
        typer.Option(
            "--log", metavar="FILE", dir_okay=False, help="The log, one line per step; by default in .ampdbg/."
        ),
    ] = None,
    trend: Annotated[
        int,
        typer.Option(
            "--trend", metavar="N", min=0, help="Sample every N-th step for values that grow towards FP16's limit."
        ),
    ] = 0,
    fail_on: Annotated[
        FailOn | None,
        typer.Option(
            "--fail-on",
            help="The least severity that turns an exit code of 0 into 1. Default: warning; never under torchrun.",
            show_default=False,
        ),
    ] = None,
    record: options.RecordFile = None,
    html: options.HtmlFile = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no report; only write the record.")] = False,
    verbose: options.Verbose = False,
) -> int:
    """Run a training script unchanged, and watch it.

    Options of ampdbg come before SCRIPT. The script keeps its output and its exit code, and the report goes to stderr.
    An exit code of 0 becomes 1 where ampdbg found something.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    from ampdbg.script.launch import launched_as

    launched_rank = launched_as()[0]
    own_record, page, own_log = (_of_rank(path, launched_rank) for path in (record, html, log))
    file = None if is_module else Path(script)
    options.check_place("--record", own_record, "record")
    options.check_place("--html", page, "html", record=own_record, script=file)
    options.check_place("--log", own_log, "log", record=own_record, page=page, script=file)
    started, stderr = Path.cwd(), sys.stderr
    flags = _flags(context)

    def show(seen: Record) -> None:
        misplaced = [one for one in arguments or () if seen.exit_code and one in flags]
        command_typed = shlex.join([script, *(one for one in arguments or () if one not in misplaced)])
        with redirect_stderr(stderr):  # the script may have replaced or closed its stderr
            with _working_in(started):
                saved = save(seen, _of_rank(record, seen.rank))
                typed = typed_as(command_typed, saved.path, verbose=verbose)
                saved = with_page(saved, seen, typed, _of_rank(html, seen.rank))
            if not quiet:
                _show_report(seen, typed)
                if misplaced:
                    moved, before = shlex.join(misplaced), "-m " * is_module
                    instead = f"ampdbg run {moved} {before}{command_typed}"
                    say(f"{moved} follows the script, so the script got it. To give it to ampdbg: {instead}")
            saved.say_failures()

    if not watch:
        return api.run_unwatched(script, arguments or (), is_module=is_module, emulate=emulate)
    observer = _ScriptMessages(stderr, is_quiet=quiet)
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
                _of_rank(log or _log_beside(record), launched_rank),
                trend,
                capture_step,
            ),
            ended=show,
            observer=observer,
            ends_process=True,
        )
    except SystemExit as ended:  # in a child that the script has forked
        return cast(int, ended.code)
    show(seen)
    with redirect_stderr(stderr), _working_in(started):
        files = loaded_files() if is_module else [script, *loaded_files()]
        # If the machine lacks something, the run that the report suggests shows more than the source.
        say_source_findings(seen, files, is_quiet=quiet or seen.rank > 0 or obstacle_in(seen.error) is not None)
    if seen.exit_code:
        return seen.exit_code
    is_alone = seen.script is None or seen.script.processes == 1
    return exit_code(seen, fail_on or ("warning" if is_alone else "never"))


def _flags(context: typer.Context) -> set[str]:
    """Return the flags of ampdbg, without a value: the script may have received one that was meant for ampdbg."""
    flags = (one for one in context.command.params if getattr(one, "is_flag", False))
    return {name for one in flags for name in (*one.opts, *one.secondary_opts) if name.startswith("--")}


def _of_rank(path: Path | None, rank: int) -> Path | None:
    """Return the file of this process, if several processes get the same name."""
    return path and path.with_name(f"{of_rank(path.stem, rank)}{path.suffix}")


def _log_beside(record: Path | None) -> Path | None:
    """Return the default place of the log; None for the folder of records, also if the record goes to a device."""
    if record is None or record.suffix == ".jsonl" or (record.exists() and not record.is_file()):
        return None
    return record.with_suffix(".jsonl")


def _show_report(seen: Record, typed: CommandContext) -> None:
    """Print the report; of several processes only the first prints it, and the rest print their first finding."""
    if seen.rank == 0:
        say(written(seen, typed, look_of(sys.stderr), "text").rstrip("\n"))
    for found in seen.findings[:1] if seen.rank else ():
        where = in_module(printable(found.module))
        report = f": ampdbg report {typed.record_path}" * bool(typed.record_path)
        say(f"rank {seen.rank} found {found.code}{where} at step {found.step}{report}")


def _bytes(size: str) -> int:
    try:
        return byte_count(size)
    except ValueError as error:
        raise ConfigError(f"--max-capture-size: {error}") from None


class _ScriptMessages(Observer):
    """Says that the script waits for a replay or ends later, and warns of what failed beside it."""

    def __init__(self, stderr: TextIO, *, is_quiet: bool) -> None:
        self._said, self._stderr, self._is_quiet = -1, stderr, is_quiet

    def warned(self, text: str) -> None:
        self._say(f"warning: {text}", is_quiet=False)

    def replay(self, step: int, doing: str) -> None:
        if step != self._said:
            self._say(f"step {step} is not finite; the script waits while ampdbg replays it, also in FP32")
        self._said = step

    def ended_in(self, step: int) -> None:
        self._say(f"the script ended in step {step}; ampdbg replays that step now, also in FP32")

    def _say(self, text: str, *, is_quiet: bool | None = None) -> None:
        if not (self._is_quiet if is_quiet is None else is_quiet):
            with redirect_stderr(self._stderr):
                say(text)


@contextlib.contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    """Within the block paths are relative to ``folder``: a script may have changed the working folder."""
    left = None
    with contextlib.suppress(OSError):  # the script's own folder may be gone
        left = Path.cwd()
    with contextlib.suppress(OSError):
        os.chdir(folder)
    try:
        yield
    finally:
        if left is not None:
            os.chdir(left)
