"""What a case of the zoo says of itself: the code that must be found in it, where, and its healthy twin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HERE = "# <- here"
"""Marks the line of a case's file that the finding must name."""


@dataclass(frozen=True)
class Case:
    """``code`` is the root finding's, ``None`` where nothing worse than calibration may be found.

    ``verdict``, ``module``, ``op``, ``step`` and ``phase`` are the root's, where they are given; ``follows`` are
    codes that must be there too, and ``says`` are parts of its message. ``config`` replaces keys of the
    config that the runner makes from the names in the file; ``twin`` are the settings that make it healthy.
    The source line must be the one that is marked, and there must be none where no line is.
    """

    code: str | None = None
    verdict: str = "healthy"
    module: str | None = None
    op: str | None = None
    step: int | None = None
    phase: str | None = None
    severity: str = "error"
    follows: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    steps: int = 6
    config: Mapping[str, Any] = field(default_factory=dict)
    twin: tuple[str, ...] = ()
