"""Precision levels, in Apex's words: what each is called, the mode that trains at it, and the format it lowers to.

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
    """A value of ``precision.level``: ``mode`` names its file in ``ampdbg/precision/modes``, which holds the rest.

    Attributes:
        name: as the config takes it.
        words: what it is, for messages.
        lowers: whether any op computes in less than FP32.
        loss_scale: what ``precision.loss_scale`` is where the config does not say: a static scale, or keys of a
            dynamic one that are not GradScaler's defaults.
        has_half_weights: whether the weights themselves are half.
    """

    name: str
    words: str
    mode: str
    lowers: bool = True
    loss_scale: float | Mapping[str, float] = field(default_factory=dict)
    has_half_weights: bool = False


def levels_of(modes: Path) -> Iterator[Level]:
    """What each file of modes says of its level in a literal ``LEVEL``, read and not run: the files import torch."""
    for file in modes.glob("*.py"):
        for line in ast.iter_child_nodes(syntax_tree(file.read_bytes())):
            if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "LEVEL":
                yield Level(mode=file.stem, **ast.literal_eval(line.value))


LEVELS: Mapping[str, Level] = {
    level.name: level
    for level in sorted(levels_of(Path(__file__).parent / "precision" / "modes"), key=lambda level: level.name)
}

CHOICES = ", ".join(f"{name} ({level.words})" for name, level in LEVELS.items())
"""How a message lists them."""


def lowest_format(level: str, dtype: str) -> FloatFormat:
    """The narrowest format that a level computes in when ``precision.dtype`` is ``dtype``."""
    return FORMATS[dtype] if LEVELS[level].lowers else FLOAT32


def precision_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section ``precision`` of the config that a record keeps; an empty one where there is none."""
    section = config.get("precision")
    return section if isinstance(section, Mapping) else {}


def format_of_config(config: Mapping[str, Any]) -> FloatFormat:
    """The narrowest format of a run, by the config that its record keeps; FP16 where that does not say."""
    precision = precision_of(config)
    level, dtype = str(precision.get("level", "O1")), str(precision.get("dtype", "float16"))
    return lowest_format(level if level in LEVELS else "O1", dtype if dtype in FORMATS else "float16")


def has_static_scale(config: Mapping[str, Any]) -> bool:
    """The config in a record gives the loss scale as a number, which nothing changes."""
    return isinstance(precision_of(config).get("loss_scale"), (int, float))
