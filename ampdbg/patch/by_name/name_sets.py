"""How a set of module names is written down in code: one by one, or by the ending that they have in common."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ampdbg.record.pins import OWN

FEW = 4
"""So many names are listed even where they have an ending in common: a reader takes them in, and nothing else fits."""


def in_words(name: str) -> str:
    """A pin, as the config takes it, in a sentence: ``blocks.2.attn``, ``module 2``, ``the model (its own lines)``."""
    module = name.removesuffix(OWN)
    told = f"module {module}" if re.fullmatch(r"[\d.]+", module) else module or "the model"
    return f"{told} (its own lines)" if name.endswith(OWN) else told


@dataclass(frozen=True)
class NameSet:
    """Names, and the beginning and ending (with their dots) that they alone among all modules have, where there are."""

    names: tuple[str, ...]
    start: str = ""
    end: str = ""

    @property
    def is_pattern(self) -> bool:
        """Whether the set is told by what the names begin and end with."""
        return bool(self.end)


def name_set(names: Sequence[str], all_names: Collection[str] = ()) -> NameSet:
    """The shortest right way to write ``names`` down, which are qualified names among ``all_names``.

    An ending of whole parts is taken for more than ``FEW`` names where it fits these names and no other module, with
    a beginning where it takes one.
    """
    unique = tuple(dict.fromkeys(names))
    end = _common_end(unique)
    if len(unique) <= FEW or not end or not set(unique) <= set(all_names):
        return NameSet(unique)
    for start in dict.fromkeys(("", _common_start(unique))):
        if {name for name in all_names if name.startswith(start) and name.endswith(end)} == set(unique):
            return NameSet(unique, start, end)
    return NameSet(unique)


def _common_end(names: Sequence[str]) -> str:
    """``.DenseReluDense.wo``: the whole parts that all names end with, up to the first that is a number."""
    parts = _common(name.split(".")[::-1][:-1] for name in names)
    words = parts[: next((i for i, part in enumerate(parts) if re.fullmatch(r"\d+", part)), len(parts))]
    return "." + ".".join(words[::-1]) if words else ""


def _common_start(names: Sequence[str]) -> str:
    """``encoder.block.``: the whole parts that all names begin with."""
    return "".join(f"{part}." for part in _common(name.split(".")[:-1] for name in names))


def _common(split: Iterable[Sequence[str]]) -> list[str]:
    """The parts that all begin with."""
    common: list[str] = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return common
