"""Where a search keeps its trials, and what they hold for: the same step of the same code on the same torch."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from ampdbg import __version__
from ampdbg.pinning.digests import content_digest
from ampdbg.pinning.experiment import Case, Experiment
from ampdbg.pinning.found_pins import digest
from ampdbg.replay.run import Run
from ampdbg.search import Journal
from ampdbg.source.ownership import is_users_file


class Journals:
    """The journals of one search in ``folder``: by them it goes on after a kill or an interrupt, and by nothing else.

    Args:
        folder: where they lie; None where none is to be kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._opened: list[Journal] = []

    def journal(self, run: Run, experiment: Experiment, repeats: int) -> Journal | None:
        """The journal of the trials of these steps; it has answers where a search of them was cut off."""
        if self._folder is None:
            return None
        key = _key(run, experiment, repeats)
        self._opened.append(Journal(self._folder / f"{key[:16]}.jsonl", key))
        return self._opened[-1]

    def discard(self) -> None:
        """Deletes them: the search has ended, or what they say does not hold."""
        gone = [journal.discard() for journal in self._opened]
        self._opened.clear()
        if not all(gone):
            self._folder = None  # what cannot be deleted is not to be read again


def _key(run: Run, experiment: Experiment, repeats: int) -> str:
    """A digest of all that a trial depends on: config, code, versions, the steps with their weights, what they do."""
    about = {
        "config": run.config.resolved(),
        "device": str(run.device),
        "code": loaded_sources(),
        "versions": (__version__, torch.__version__, sys.version),
        "steps": [_of_case(case) for case in experiment.cases],
        "silent": experiment.is_silent,
        "repeats": repeats,
        # What the code reads from other files shows in what it does. Of a step that fails sometimes that is by chance.
        "unpinned": content_digest(experiment.seen_sites) if repeats == 1 else "",
    }
    return hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()


def _of_case(case: Case) -> Sequence[object]:
    failing = case.failing
    held = content_digest((failing.snapshot, failing.weights))
    return failing.made.step, failing.made.why, failing.scale, case.replays.keeps_scale, held


def loaded_sources() -> dict[str, str]:
    """The SHA-256 of each source file of the user's that is imported, by its absolute path."""
    files = {_file_of(module) for module in tuple(sys.modules.values())}
    return {str(Path(file).resolve()): digest(file) for file in sorted(files) if is_users_file(file)}


def _file_of(module: object) -> str:
    """The file of a module; "" where there is none. A module that is loaded when it is first used stays as it is."""
    try:
        file = object.__getattribute__(module, "__dict__").get("__file__")
    except AttributeError:
        return ""
    return file if isinstance(file, str) else ""
