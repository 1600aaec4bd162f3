"""The search and the proof of ``ampdbg suggest-fp32``, shown as they go on; or what a watched loop's record says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ampdbg.record.run import Record

from . import progress
from .config_sources import told_of_watched_loop
from .options import Searching
from .patch_files import uncommitted_sources
from .scan import diagnosed
from .terminal import say

if TYPE_CHECKING:
    from ampdbg.config import Config
    from ampdbg.proof.suggestion import Form, Suggestion


def told(path: Path, strategy: Searching) -> tuple[Suggestion, Path] | None:
    """What there is to say of a watched loop's record, without a run, and the folder that paths count from."""
    record = told_of_watched_loop(path, "suggest-fp32", strategy.value)
    if record is None:
        return None
    from ampdbg.proof.suggestion import Suggestion

    return Suggestion(record, patch=None, names=()), Path()


def _warn_of_uncommitted(config: Config) -> None:
    """Which files the patch will be of is not known before the search; that it may not be written is said now."""
    if files := [str(file) for file in uncommitted_sources(config)]:
        say(
            f"warning: {', '.join(files)}: git has not got it as it is now; a patch of it is not applied without "
            "--force, but saved beside the record"
        )


def searched(
    config: Config,
    known: Record | None,
    form: Form,
    strategy: Searching,
    max_trials: int | None,
    *,
    verify: bool,
    quiet: bool,
    warns: bool,
) -> tuple[Suggestion, Path]:
    """The suggestion, with the search shown as it goes on, and the config's folder.

    With ``warns`` files that a patch could not be written to are named first.
    """
    if warns and not quiet:
        _warn_of_uncommitted(config)
    with progress.shown(quiet, max_trials) as observer:
        observer.start(config.train.steps)
        from ampdbg.proof.suggestion import suggest

        with diagnosed("suggest-fp32"):
            found = suggest(
                config,
                form=form,
                verify=verify,
                known=known,
                strategy=strategy.value,
                max_trials=max_trials,
                observer=observer,
            )
    return found, config.folder
