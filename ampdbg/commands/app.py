"""The ``ampdbg`` program: the table of its commands.

Slow imports (torch, pydantic, rich) are inside the commands that need them. So ``ampdbg --help`` and a mistyped option
answer at once.
"""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable
from typing import Annotated, Any, cast

import typer

from ampdbg import __version__
from ampdbg.errors import EXIT_COULD_NOT_RUN, EXIT_HEALTHY, AmpdbgError
from ampdbg.escapes import printable

from . import (
    bisect,
    compare,
    cost,
    doctor,
    explain,
    init,
    lint,
    ranges,
    replay,
    report,
    run,
    scan,
    schema,
    suggest_fp32,
)
from .failure import guarded
from .output import end_streams, say, write_result

VERBS = (scan, ranges, bisect, suggest_fp32, cost, run, replay, compare, lint, report, explain, init, schema, doctor)
"""One file for each command, in the order of the help."""

COMMANDS: dict[str, Callable[..., int]] = {
    verb.__name__.rpartition(".")[2].replace("_", "-"): verb.command for verb in VERBS
}


def _show_version(wanted: bool) -> None:
    if wanted:
        write_result(f"ampdbg {__version__}\n", sys.stdout)
        raise typer.Exit


def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """The precision debugger for PyTorch mixed-precision training.

    Results go to stdout, progress and messages to stderr. Exit codes: 0 nothing wrong, 1 something
    was found, 2 could not run, 130 interrupted.
    """


def program() -> typer.Typer:
    """Return the program with its commands, as a Typer app."""
    app = typer.Typer(
        name="ampdbg",
        rich_markup_mode=None,  # rich help would cost 80 ms of import
        pretty_exceptions_enable=False,  # guarded() shows the errors
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(_program)
    for name, function in COMMANDS.items():
        of_a_script = function is run.command
        settings = {"allow_interspersed_args": False} if of_a_script else {}
        app.command(name, context_settings=settings)(guarded(function, takes_signals=not of_a_script))
    return app


@functools.cache
def _commands() -> Callable[..., Any]:
    """The program as a click command. Typer would rebuild all commands and its excepthook at each call."""
    return typer.main.get_command(program())


# Typer includes its own click, or uses the installed one.
UsageError: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def main() -> None:
    """Run the program on ``sys.argv`` and exit with its code."""
    code: Any = EXIT_COULD_NOT_RUN
    try:
        code = _commands()(sys.argv[1:] or ["--help"], prog_name="ampdbg", standalone_mode=False)
    except UsageError as error:
        said = io.StringIO()
        cast(Any, error).show(said)
        say(printable(said.getvalue().rstrip(), but="\n"))
    except SystemExit:  # the reader of the help has gone, for which Typer exits with 1
        code = EXIT_HEALTHY
    except (AmpdbgError, OSError) as error:  # the version or the help could not be written
        say(f"error: {error if isinstance(error, AmpdbgError) else f'stdout: cannot be written: {error.strerror}'}")
    end_streams()
    sys.exit(code)
