"""The ``ampdbg`` program: the table of its commands.

A command's module is imported when the command is typed. Slow imports (torch, pydantic, rich) are inside the commands
that need them. So ``ampdbg --help`` and a mistyped option answer at once.
"""

from __future__ import annotations

import functools
import importlib
import io
import sys
from collections.abc import Callable
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from ampdbg import __version__
from ampdbg.errors import EXIT_COULD_NOT_RUN, EXIT_HEALTHY, AmpdbgError
from ampdbg.escapes import printable

from .streams import end_streams, say, write_result

COMMANDS = {
    "scan": "Train a few steps, and explain what fails.",
    "ranges": "Show how close one step is to FP16's limits.",
    "bisect": "Find the fewest modules that need FP32.",
    "suggest-fp32": "Print the patch that cures it, proven.",
    "cost": "Compare what each precision level takes.",
    "run": "Run a training script unchanged, and watch it.",
    "replay": "Replay a captured step, and explain it.",
    "compare": "Compare two records: what got worse.",
    "lint": "Find AMP misuse and apex in source code, without running it.",
    "report": "Show a record again, in any format.",
    "explain": "Explain a finding: meaning, decision, remedy.",
    "init": "Write a config and a workload to start from.",
    "schema": "Print the config's JSON schema.",
    "doctor": "Show what this machine can do for mixed precision.",
}
"""The commands in the order of the help, with the first line of their help. Each has a module of its name."""


def function_of(name: str) -> Callable[..., int]:
    """Import a command's module, and return the function that Typer reads its options from."""
    module = importlib.import_module(f".{name.replace('-', '_')}", __package__)
    return cast(Callable[..., int], module.command)


class _LazyCommand(TyperCommand):
    """A command that is imported when it is typed. The help of the program shows only its first line."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return _command(str(self.name)).make_context(info_name, args, parent, **extra)


def _command(name: str) -> Any:
    from .failure import guarded

    runs_a_script = name == "run"
    settings = {"allow_interspersed_args": False} if runs_a_script else {}
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    app.command(name, context_settings=settings)(guarded(function_of(name), takes_signals=not runs_a_script))
    return typer.main.get_command(app)


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


@functools.cache
def program() -> TyperGroup:
    """Return the program with its commands, as a click group. Typer would rebuild it at each call."""
    app = typer.Typer(
        name="ampdbg",
        rich_markup_mode=None,  # rich help would cost 80 ms of import
        pretty_exceptions_enable=False,  # guarded() shows the errors
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(_program)
    group = cast(TyperGroup, typer.main.get_command(app))
    for name, summary in COMMANDS.items():
        group.add_command(_LazyCommand(name, help=summary, rich_markup_mode=None))
    return group


# Typer includes its own click, or uses the installed one.
UsageError: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def main() -> None:
    """Run the program on ``sys.argv`` and exit with its code."""
    code: Any = EXIT_COULD_NOT_RUN
    try:
        code = program()(sys.argv[1:] or ["--help"], prog_name="ampdbg", standalone_mode=False)
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
