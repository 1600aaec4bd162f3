"""Text from the user's world made harmless: names of modules, groups and files, lines of code, exceptions' texts.

A module may be named with terminal commands or marks that turn the direction of writing. Where such text is shown, each
character that does not print is shown as its escape, ``\\x1b``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

INSTALLED = re.compile(
    r"(?<![\w.\-/\\])(?:[A-Za-z]:)?[/\\](?:[^\s/\\:'\"]+[/\\])*(?:site|dist)-packages[/\\](?=[^\s/\\])"
)
"""What comes before the name of a package in the path of a file of its."""


def printable(text: str, but: str = "") -> str:
    """``text`` with every character escaped that does not print, but those in ``but``."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in but else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


def harmless(thing: T, folder: str = "", but: str = "") -> T:
    """``thing``, a text or data that holds texts, with all of them :func:`printable`.

    Files below ``folder`` are named as they are typed there, and where there is one also files of installed packages
    by their package: ``transformers/models/opt/modeling_opt.py``.
    """
    start = folder.rstrip("/\\")
    below = re.compile(r"(?<![\w.\-/\\])" + re.escape(start) + r"[/\\](?=[^\s/\\])") if start else None

    def shown(value: Any) -> Any:
        if isinstance(value, str):
            if start and "-packages" in value:
                value = INSTALLED.sub("", value)
            return printable(below.sub("", value) if below and start in value else value, but)
        if isinstance(value, tuple):
            made = tuple(map(shown, value))
            return made if any(new is not old for new, old in zip(made, value, strict=True)) else value
        if isinstance(value, Mapping):
            shown_items = {shown(key): shown(item) for key, item in value.items()}
            return value if shown_items == value else shown_items
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _replaced(value)
        return value

    def _replaced(value: Any) -> Any:
        old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        new = {name: shown(item) for name, item in old.items()}
        changed = {name: item for name, item in new.items() if item is not old[name]}
        return dataclasses.replace(value, **changed) if changed else value

    made: T = shown(thing)
    return made
