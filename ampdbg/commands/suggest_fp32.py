"""``ampdbg suggest-fp32``: the patch that pins the ops that overflow, proven on the failing step."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ampdbg import api
from ampdbg.errors import EXIT_HEALTHY, ConfigError, PatchError, reason_of
from ampdbg.files import replace_file
from ampdbg.given import CommandInput, read_given
from ampdbg.record.file import LATEST, latest_record, to_json
from ampdbg.record.pins import Form
from ampdbg.report.formats import written

from . import bisect, options, progress
from .output import Saved, in_form, look_of, save, typed_as, with_page
from .streams import results_only, say, write_result


@options.with_run_options
def command(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help=f"{options.STEP}; by default the latest record.", show_default=False),
    ] = None,
    format_: Annotated[
        Form, typer.Option("--format", help="diff: a patch; module: a separate file; yaml: the pins; json.")
    ] = "diff",
    apply: Annotated[bool, typer.Option("--apply", help="Write the files instead of printing the patch.")] = False,
    force: Annotated[bool, typer.Option("--force", help="With --apply: also files with uncommitted changes.")] = False,
    output: options.OutputFile = None,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not prove the patch.")] = False,
    strategy: options.SearchingChoice = "guided",
    max_trials: options.MaxTrials = None,
    module: Annotated[Path | None, typer.Option("--module", hidden=True)] = None,
    script: options.ScriptToStart = "",
    *,
    run: options.RunOptions,
) -> int:
    """Print the patch that cures it, proven.

    Finds what must run in FP32, writes the patch, and proves it on the failing step.

    Try: ampdbg suggest-fp32 CONFIG | git apply
    """
    if apply and format_ != "diff":
        raise ConfigError(f"got --apply with --format {format_}; --apply goes with --format diff")
    if module is not None:
        instead = f"ampdbg bisect --module {shlex.quote(str(module))}"
        raise ConfigError(f"got --module {module}; suggest-fp32 takes the record that this writes: {instead}")
    options.check_place("--output", output, format_, config=config, record=run.record)
    if output is not None:
        from ampdbg.patch.file_edits import check_writable  # `ampdbg --help` does not need it

        check_writable(output)
    with results_only() as stdout:
        # If this folder has no record yet, its config is used.
        of_folder = options.default_config(None) if not LATEST.exists() else None
        taken = config or of_folder or latest_record()
        given = read_given(taken, None, script, takes_weights=True, **run.changes)
        if apply and not force and not run.quiet:
            _warn_of_uncommitted(given)
        with progress.shown(run.quiet, max_trials) as observer:
            found = api.suggest_fp32(
                given,
                form=format_,
                verify=not no_verify,
                apply=apply,
                force=force,
                strategy=strategy,
                max_trials=max_trials,
                observer=observer,
            )
        from ampdbg.report import suggestion  # `ampdbg --help` does not need the pages

        saved, text = save(found, run.record), suggestion.content(found)
        file = saved.handed_over
        if output is not None and text is not None:
            file = _written(output, text, saved)
        is_printed = not apply and output is None and text is not None
        warning = suggestion.warning_of_piping(found.handover)
        if warning and is_printed and not run.json and not stdout.isatty():
            say(warning)  # also with --quiet: git itself shows no error
        typed, is_record = typed_as(given.typed, saved.path, verbose=run.verbose), given.record is not None
        typed = replace(typed, handed_over=str(file or ""), is_applied=apply, is_record=is_record)
        saved = with_page(saved, found, typed, run.html)
        try:  # before the report: in a terminal it and the next command stay visible below a long patch
            write_result(in_form(to_json(found), "json") if run.json else text or b"" if is_printed else b"", stdout)
        finally:
            if text is None or not run.quiet:
                say(written(found, typed, look_of(sys.stderr), "text").rstrip())
    saved.raise_failure()
    return EXIT_HEALTHY if text is not None else bisect.exit_code(found)


def _warn_of_uncommitted(given: CommandInput) -> None:
    """Warn before the search that files may not be written: only the search finds which files the patch changes."""
    from ampdbg.patch.file_edits import uncommitted

    for file in filter(uncommitted, given.config.target_files()):
        say(
            f"warning: {file} has uncommitted changes; without --force ampdbg saves its patch beside the "
            "record instead of applying it"
        )


def _written(output: Path, text: bytes, saved: Saved) -> Path:
    """Write the text to ``output``; if that fails, the error names the other places of the patch."""
    try:
        replace_file(output, text)
    except OSError as error:
        kept = {"the patch": saved.handed_over, "the record": saved.path}
        places = " and ".join(f"{what} is in {shlex.quote(str(path))}" for what, path in kept.items() if path)
        raise PatchError(f"{output}: cannot be written: {reason_of(error)}; {places}") from None
    return output
