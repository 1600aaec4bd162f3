"""Errors of the user's code that autocast itself causes: they are findings, not failures to run."""

from __future__ import annotations

import linecache
import re
import traceback
from pathlib import Path

import torch

from ampdbg.errors import AmpdbgError
from ampdbg.record.findings import Source
from ampdbg.record.run import AutocastError

CAUSED_BY_AUTOCAST = (
    (re.compile(r"cannot be converted to type (c10|at)::Half"), "mask-constant"),
    (re.compile(r"binary_cross_entropy and torch\.nn\.BCELoss are unsafe to autocast"), "misuse-bce"),
    (re.compile(r"Attempting to unscale FP16 gradients"), "misuse-half-parameters"),
)
"""What torch says, and the code of the finding that it is."""

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))  # torch, ampdbg


def autocast_error(raised: AmpdbgError, step: int) -> AutocastError | None:
    """The finding that an exception is, or None when autocast did not cause it."""
    cause = raised.__cause__
    if cause is None:
        return None
    text = str(cause)
    for pattern, code in CAUSED_BY_AUTOCAST:
        if pattern.search(text):
            return AutocastError(code, step, text, _source(cause))
    return None


def _source(error: BaseException) -> Source | None:
    """The innermost frame that is neither torch's nor ampdbg's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    if not frames or frames[-1].lineno is None:
        return None
    frame = frames[-1]
    line = frame.lineno or 0
    return Source(frame.filename, line, frame.name, linecache.getline(frame.filename, line).strip())


def _is_users(filename: str) -> bool:
    return not filename.startswith(_NOT_THE_USERS) and not filename.startswith("<")
