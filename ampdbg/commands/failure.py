"""The one place where an exception becomes a message and an exit code."""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import shlex
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import typer

from ampdbg.errors import EXIT_INTERRUPTED, AmpdbgError, ConfigError, UserCodeError
from ampdbg.escapes import printable
from ampdbg.record.run import Record

from .interrupts import INTERRUPTED, interruptible
from .options import Debug
from .output import WRITTEN, save, typed_as, with_page
from .streams import say


def guarded(command: Callable[..., int], *, takes_signals: bool = True) -> Callable[..., None]:
    """Wrap a command, a function that returns its exit code, for Typer, so that no traceback of ampdbg leaves it.

    With ``takes_signals`` it handles signals; a command that runs a script leaves them to the script. Every command
    gets the option ``debug``, which shows the traceback. On an error, the record of the steps before it is written
    where the whole record would be: to the ``record`` option, if the command has one.
    """

    @functools.wraps(command)
    def run(debug: bool, **options: Any) -> None:
        WRITTEN.set(None)
        INTERRUPTED.set([])
        try:
            with interruptible(_interrupted) if takes_signals else contextlib.nullcontext():
                code = command(**options)
        except AmpdbgError as error:
            code = _explain(error, debug)
            _keep(error, options)
        except KeyboardInterrupt:
            code = _interrupted()
        except Exception as error:  # noqa: BLE001 - the last resort: a bug of ampdbg
            if INTERRUPTED.get([]):  # an interrupted import can end in any exception
                code = _interrupted()
            elif isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # for any path that Python opens
                needed = f"{error.filename}: {error.strerror}; needed: the path of a file or folder"
                code = _explain(ConfigError(needed), debug)
            else:
                hint = "" if debug else "; rerun with --debug to see where, and please report it"
                failure = f"ampdbg itself failed with {type(error).__name__}: {error}{hint}"
                code = _explain(AmpdbgError(failure), debug)
        raise typer.Exit(code)

    own = inspect.signature(command, eval_str=True)
    with_traceback = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)
    vars(run)["__signature__"] = own.replace(parameters=[*own.parameters.values(), with_traceback])
    return run


def _interrupted() -> int:
    path = WRITTEN.get()
    what = f"the findings so far: ampdbg report {shlex.quote(str(path))}" if path else "nothing was recorded"
    say(f"interrupted: {what}")
    return EXIT_INTERRUPTED


def _explain(error: AmpdbgError, debug: bool) -> int:
    if debug:
        say(traceback.format_exc().rstrip())
    elif isinstance(error, UserCodeError) and error.user_traceback:
        say(printable(error.user_traceback.rstrip(), but="\n\t"))
    say(printable(f"error: {error}", but="\n"))
    return error.exit_code


def _keep(error: AmpdbgError, options: Mapping[str, Any]) -> None:
    """Write the record that an error carries, and its page if requested, and say where it is."""
    if not isinstance(error.record, Record):
        return
    saved = save(error.record, options.get("record"))
    typed = typed_as(shlex.quote(str(options.get("config") or "CONFIG")), saved.path)
    with_page(saved, error.record, typed, options.get("html")).say_failures()
    if saved.handed_over is not None:
        say(f"the patch is in {shlex.quote(str(saved.handed_over))}")
    if saved.path is not None:
        steps = error.record.steps_run
        before = "the step before it" if steps == 1 else f"the {steps} steps before it"
        what = before if error.record.handover is None else "the findings so far"
        say(f"{what}: ampdbg report {shlex.quote(str(saved.path))}")
