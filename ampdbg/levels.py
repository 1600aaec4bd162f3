"""Precision levels, in Apex's terms: the name, the training mode, and the narrowest format of each.

A new level is a file of :mod:`ampdbg.precision.modes` (no torch here).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ampdbg.formats import FLOAT32, FORMATS, FloatFormat
from ampdbg.syntax_tree import syntax_tree


@dataclass(frozen=True)
class Level:
    """A value of ``precision.level``, as a file of ``ampdbg/precision/modes`` declares it.

    Attributes:
        name: the value in the config.
        words: a description for messages.
        mode: the name of the file, without ``.py``.
        lowers: some op computes in less than FP32.
        loss_scale: the default ``precision.loss_scale``: a static scale, or a dynamic scale's keys unlike GradScaler's.
        has_half_weights: the weights themselves are half.
    """

    name: str
    words: str
    mode: str
    lowers: bool = True
    loss_scale: float | Mapping[str, float] = field(default_factory=dict)
    has_half_weights: bool = False


def levels_of(modes: Path) -> Iterator[Level]:
    """Yield the level in the literal ``LEVEL`` of each file. The files import torch, so they are parsed and not run."""
    for file in modes.glob("*.py"):
        for line in ast.iter_child_nodes(syntax_tree(file.read_bytes())):
            if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "LEVEL":
                yield Level(mode=file.stem, **ast.literal_eval(line.value))


LEVELS: Mapping[str, Level] = {
    level.name: level
    for level in sorted(levels_of(Path(__file__).parent / "precision" / "modes"), key=lambda level: level.name)
}

CHOICES = ", ".join(f"{name} ({level.words})" for name, level in LEVELS.items())
"""The levels, as a message lists them."""


def lowest_format(level: str, dtype: str) -> FloatFormat:
    """Return the narrowest format that a level computes in if ``precision.dtype`` is ``dtype``."""
    return FORMATS[dtype] if LEVELS[level].lowers else FLOAT32


def precision_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section ``precision`` of a record's config; an empty mapping if it has none."""
    section = config.get("precision")
    return section if isinstance(section, Mapping) else {}


def format_of_config(config: Mapping[str, Any]) -> FloatFormat:
    """Return the narrowest format of a run from the config in its record; FP16 if the config names none."""
    precision = precision_of(config)
    level, dtype = str(precision.get("level", "O1")), str(precision.get("dtype", "float16"))
    return lowest_format(level if level in LEVELS else "O1", dtype if dtype in FORMATS else "float16")


def has_static_scale(config: Mapping[str, Any]) -> bool:
    """True if the config in a record gives the loss scale as a number, which nothing changes."""
    return isinstance(precision_of(config).get("loss_scale"), (int, float))
