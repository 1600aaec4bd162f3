"""``ampdbg suggest-fp32``: the patch that pins what overflows, proven on the failing step."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ampdbg.errors import EXIT_HEALTHY, AmpdbgError, ConfigError, PatchError
from ampdbg.record import Record, read_record, to_json

from . import bisect, live_tree, options
from .bisect import JOURNALS, Strategy
from .config_sources import config_given, is_record
from .options import as_overrides
from .patch_output import FORMS, Form, Output, PatchFormat, next_step, output_of
from .record_files import LATEST, load_record, try_to_save
from .terminal import look_of, results_only, say, write_result

if TYPE_CHECKING:
    from ampdbg.config import Config
    from ampdbg.remedy.suggestion import Suggestion
    from ampdbg.report.verdict import NextStep

SUFFIXES = {
    PatchFormat.diff: ".patch",
    PatchFormat.module: ".py",
    PatchFormat.yaml: ".yaml",
    PatchFormat.json: ".patch.json",
}
"""What is saved beside the record, which itself ends in ``.json``."""


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
    strategy: Literal["guided", "ddmin", "prefix"] = "guided",
    max_trials: int | None = None,
) -> Record:
    """Finds what must run in FP32 and the patch that does it, proves the patch, and returns the record.

    The record has the set in ``pins`` and the proof in ``verification``. No record is written.

    Args:
        config: the YAML config, or a record, whose config is run again; without it the latest record of this folder.
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
        PatchError: the files cannot be written; none was.
    """
    checked, known = _given(config, as_overrides(steps, device, policy, seed, overrides))
    from ampdbg.remedy.suggestion import suggest

    with _diagnosed():
        found = suggest(checked, verify=verify, known=known, strategy=strategy, max_trials=max_trials)
    if apply:
        _apply(found, force)
    return found.record


def _given(config: str | Path | None, overrides: Sequence[str]) -> tuple[Config, Record | None]:
    """The config, and the record that it was taken from, if it was."""
    if config is None:
        load_record(None)  # says what to do where there is none
    path = LATEST if config is None else Path(config)
    known = read_record(path) if is_record(path) else None
    return config_given(path, None, overrides), known


@contextlib.contextmanager
def _diagnosed() -> Iterator[None]:
    """An error carries the record of the steps before it, diagnosed."""
    from ampdbg.diagnosis.diagnose import diagnose

    try:
        yield
    except AmpdbgError as error:
        if isinstance(error.record, Record):
            error.record = diagnose(error.record)
        raise


def _apply(found: Suggestion, force: bool) -> None:
    """Writes the files, where there is a patch."""
    from ampdbg.remedy.writing import write_edits

    if found.patch is not None:
        write_edits(found.patch.edits, force=force)


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
    strategy: Annotated[Strategy, typer.Option("--strategy", help="How to search, as of bisect.")] = Strategy.guided,
    max_trials: Annotated[
        int | None, typer.Option("--max-trials", metavar="N", min=1, help="Make at most N experiments.")
    ] = None,
    steps: options.Steps = None,
    device: options.Device = None,
    policy: options.PolicyChoice = None,
    seed: options.Seed = None,
    settings: options.Settings = None,
    record: options.RecordFile = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """Print the patch that cures it, proven.

    Finds what must run in FP32, edits the code so that it does, and proves the patch on the failing step. Without an
    argument the latest record is taken. Try: ampdbg suggest-fp32 CONFIG | git apply
    """
    if apply and format_ is not PatchFormat.diff:
        raise ConfigError(f"got --apply with --format {format_.value}; --apply writes the files that a diff is of")
    overrides = as_overrides(steps, device, policy.value if policy else None, seed, settings or ())
    with results_only() as result:
        checked, known = _given(config, overrides)
        found = _searched(checked, known, FORMS[format_], strategy, max_trials, verify=not no_verify, quiet=quiet)
        ready = output_of(found, format_, checked.folder)
        written, failure = try_to_save(found.record, record)
        file = _kept(ready, output, written if record is None else None)
        if ready.content is None or not quiet:
            given = shlex.quote(str(config if config is not None else LATEST))
            say(_report(found, ready, next_step(found, ready, given, file, applied=apply), given, written).rstrip())
        if apply:
            _apply(found, force)
        is_printed = not apply and output is None and ready.content is not None
        write_result(to_json(found.record) if json else ready.content or b"" if is_printed else b"", result)
    if failure is not None:
        if record is not None:
            raise failure
        say(f"warning: no record was written: {failure}; choose another place with --record FILE")
    return EXIT_HEALTHY if ready.content is not None else bisect.exit_code(found.record)


def _searched(
    config: Config,
    known: Record | None,
    form: Form,
    strategy: Strategy,
    max_trials: int | None,
    *,
    verify: bool,
    quiet: bool,
) -> Suggestion:
    """The suggestion, with the search shown as it goes on."""
    with contextlib.ExitStack() as display:
        view = display.enter_context(live_tree.shown(quiet, max_trials))

        def on_stage(doing: str) -> None:
            display.close()  # the search is over, and its tree would be drawn over these lines
            if not quiet:
                say(doing)

        view.training.on_start(config.train.steps)
        from ampdbg.remedy.suggestion import suggest

        with _diagnosed():
            return suggest(
                config,
                form=form,
                verify=verify,
                known=known,
                strategy=strategy.value,
                max_trials=max_trials,
                on_step=view.training.on_step,
                on_replay=view.training.on_replay,
                on_search=view.on_search,
                on_trial_start=view.on_trial_start,
                on_trial=view.on_trial,
                on_stage=on_stage,
                journal_folder=JOURNALS,
            )


def _kept(ready: Output, output: Path | None, beside: Path | None) -> Path | None:
    """Saves the text where it was asked for, else beside the record; where it is, if anywhere.

    Raises:
        PatchError: ``output`` cannot be written.
    """
    path = output or (beside.with_suffix(SUFFIXES[ready.format]) if beside is not None else None)
    if ready.content is None or path is None:
        return None
    try:
        path.write_bytes(ready.content)
    except OSError as error:
        if output is not None:
            raise PatchError(f"{output}: cannot be written: {error.strerror or error}") from None
        return None  # it is printed all the same
    return path


def _report(found: Suggestion, ready: Output, step: NextStep | None, given: str, written: Path | None) -> str:
    from ampdbg.report.suggestion import EditMade, Suggested, render_suggestion

    look = look_of(sys.stderr)
    is_by_name = ready.format in (PatchFormat.module, PatchFormat.yaml) and ready.content is not None
    units = found.patch.units if found.patch is not None and not is_by_name else ()
    return render_suggestion(
        found.record,
        Suggested(tuple(EditMade(unit.title, unit.notes) for unit in units), found.notes, step, is_by_name),
        width=look.width,
        color=look.color,
        unicode=look.unicode,
        config=given,
        record_path=shlex.quote(str(written)) if written else "",
        folder=str(Path.cwd()),
    )
