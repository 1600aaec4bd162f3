"""Where a search keeps its trials, and what they hold for: the same step of the same code on the same torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from ampdbg import __version__
from ampdbg.search import Journal
from ampdbg.training.failing_step import FailingStep
from ampdbg.training.run import Run


def journal_of(folder: Path | None, run: Run, failing: FailingStep, repeats: int) -> Journal | None:
    """The journal of the trials of this step in ``folder``; None where none is to be kept."""
    if folder is None:
        return None
    key = _key(run, failing, repeats)
    return Journal(folder / f"{key[:16]}.jsonl", key)


def _key(run: Run, failing: FailingStep, repeats: int) -> str:
    """A digest of all that a trial depends on: config, code beside the config, versions, step and weights."""
    about = {
        "config": run.config.resolved(),
        "code": {path.name: path.read_text("utf-8", "replace") for path in sorted(run.config.folder.glob("*.py"))},
        "versions": (__version__, torch.__version__),
        "step": (failing.made.step, failing.made.why, failing.scale),
        "repeats": repeats,
        "weights": [float(weight.detach().double().sum()) for weight in failing.weights],
    }
    return hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()
