"""``ampdbg suggest-fp32``: the patch that pins what overflows, proven on the failing step."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ampdbg.errors import EXIT_HEALTHY, ConfigError, PatchError
from ampdbg.record.file import read_record, to_json
from ampdbg.record.pins import Strategy
from ampdbg.record.run import Record

from . import bisect, options
from .config_sources import config_given, is_python, is_record, told_of_watched_loop
from .options import Searching, as_overrides, as_typed
from .patch_files import apply_patch, with_places, write_suggestion
from .patch_output import FORMS, Given, Output, PatchFormat, next_step, output_of, warning_of_piping
from .record_files import LATEST, load_record, tell_unsaved, try_to_save
from .scan import diagnosed
from .suggesting import searched, told
from .terminal import look_of, results_only, say, shown_as, write_result

if TYPE_CHECKING:
    from ampdbg.config import Config
    from ampdbg.proof.suggestion import Suggestion
    from ampdbg.report.verdict import NextStep

MODULE_FILE = "bisect takes --module; suggest-fp32 takes the record that it writes"


def suggest_fp32(
    config: str | Path | None = None,
    *,
    steps: int | None = None,
    device: str | None = None,
    policy: str | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    verify: bool = True,
    apply: bool = False,
    force: bool = False,
    strategy: Strategy = "guided",
    max_trials: int | None = None,
) -> Record:
    """Finds what must run in FP32 and the patch that does it, proves the patch, and returns the record.

    The record has the set in ``pins`` and the proof in ``verification``. No record is written.

    Args:
        config: the YAML config, or a record, whose config is run again; without it the latest record of this folder.
            The record of a watched loop, which has none, is only told where no pin helps.
        steps: replaces ``train.steps``; ``device``, ``policy`` and ``seed`` replace their keys likewise.
        device: where to run.
        policy: whose autocast op lists apply.
        seed: the random seed.
        overrides: any keys, as ``"dotted.key=YAML value"``.
        verify: prove the patch in fresh processes.
        apply: write the files, where there is a patch.
        force: write them also where git sees uncommitted changes in them.
        strategy: as of ``ampdbg.bisect``, and ``max_trials`` too.
        max_trials: no more experiments than that.

    Raises:
        ConfigError: the config is missing or holds mistakes.
        RecordError: the record cannot be read, or there is none.
        WorkloadError: a target cannot be found or used, or a file has changed since the record was made.
        UserCodeError: the workload's own code raised.
        PatchError: the files cannot be written; none was. ``record`` of the error is the record.
    """
    path = _path(config)
    watched = told_of_watched_loop(path, "suggest-fp32", strategy)
    if watched is not None:
        return watched
    checked, known = _given(path, as_overrides(steps, device, policy, seed, overrides))
    from ampdbg.proof.suggestion import suggest

    with diagnosed("suggest-fp32"):
        found = suggest(checked, verify=verify, known=known, strategy=strategy, max_trials=max_trials)
    if apply:
        try:
            apply_patch(found, force)
        except PatchError as error:
            error.record = found.record
            raise
    return found.record


def _path(config: str | Path | None) -> Path:
    """What was given, or the latest record."""
    if config is None:
        load_record(None)  # says what to do where there is none
    return LATEST if config is None else Path(config)


def _given(path: Path, overrides: Sequence[str]) -> tuple[Config, Record | None]:
    """The config, and the record that it was taken from, if it was."""
    if is_python(path):
        raise _module_refused(path, f"{path}: a Python file, not a config")
    known = read_record(path) if is_record(path) else None
    return config_given(path, None, overrides), known


def _module_refused(module: Path, what: str) -> ConfigError:
    return ConfigError(f"{what}; {MODULE_FILE}: ampdbg bisect --module {shlex.quote(str(module))}")


def command(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG or RECORD", help="The YAML config of the run, or a record.", show_default=False),
    ] = None,
    format_: Annotated[
        PatchFormat, typer.Option("--format", help="diff; module: a file of its own; yaml: the pins; json.")
    ] = PatchFormat.diff,
    apply: Annotated[bool, typer.Option("--apply", help="Write the files instead of printing the patch.")] = False,
    force: Annotated[bool, typer.Option("--force", help="With --apply: also files with uncommitted changes.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", dir_okay=False, help="Write the text here.")
    ] = None,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not prove the patch.")] = False,
    strategy: options.SearchingChoice = Searching.guided,
    max_trials: options.MaxTrials = None,
    steps: options.Steps = None,
    device: options.Device = None,
    policy: options.PolicyChoice = None,
    seed: options.Seed = None,
    settings: options.Settings = None,
    record: options.RecordFile = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
    module: Annotated[Path | None, typer.Option("--module", hidden=True)] = None,
) -> int:
    """Print the patch that cures it, proven.

    Finds what must run in FP32, edits the code so that it does, and proves the patch on the failing step. Without an
    argument the latest record is taken. Try: ampdbg suggest-fp32 CONFIG | git apply
    """
    if apply and format_ is not PatchFormat.diff:
        raise ConfigError(f"got --apply with --format {format_.value}; --apply writes the files that a diff is of")
    if module is not None:
        raise _module_refused(module, f"got --module {module}")
    if output is not None:
        from ampdbg.patch.file_edits import check_writable

        check_writable(output)
    path = _path(config)
    overrides = as_overrides(steps, device, policy.value if policy else None, seed, settings or ())
    typed = as_typed(shlex.quote(str(path)), steps, device, policy, seed, settings or ())
    given = Given(typed, is_record(path), strategy.value)
    with results_only() as result:
        found, folder = told(path, strategy) or searched(
            *_given(path, overrides),
            FORMS[format_],
            strategy,
            max_trials,
            verify=not no_verify,
            quiet=quiet,
            warns=apply and not force,
        )
        ready = output_of(found, format_, folder)
        saved, failure = try_to_save(found.record, record)
        written = write_suggestion(
            found, ready, output, saved, apply=apply, force=force, beside_record=record is None and output is None
        )
        is_printed = not apply and output is None and ready.content is not None
        if is_printed and not json and not result.isatty() and (warning := warning_of_piping(ready)):
            say(warning)  # also with --quiet: git itself would say nothing
        if ready.content is None or not quiet:
            step = next_step(found, ready, given, written.file, applied=apply and written.failure is None)
            say(_report(found, ready, step, typed, saved).rstrip())
        write_result(to_json(found.record) if json else ready.content or b"" if is_printed else b"", result)
    if written.failure is not None:
        raise with_places(written.failure, written.file, saved)
    tell_unsaved(failure, record)
    return EXIT_HEALTHY if ready.content is not None else bisect.exit_code(found.record)


def _report(found: Suggestion, ready: Output, step: NextStep | None, given: str, written: Path | None) -> str:
    from ampdbg.report.suggestion import EditMade, Suggested, render_suggestion

    look = look_of(sys.stderr)
    is_by_name = ready.format in (PatchFormat.module, PatchFormat.yaml) and ready.content is not None
    units = found.patch.units if found.patch is not None and not is_by_name else ()
    edits = tuple(EditMade(unit.title, unit.notes) for unit in units)
    suggested = Suggested(edits, found.notes, step, is_by_name, found.refused)
    return render_suggestion(found.record, suggested, **shown_as(look, given, written))
