r"""Escape text from the user that is unsafe to show: names of modules, groups and files, code lines, error messages.

The name of a module may hold terminal commands or marks that change the direction of writing. Each character that does
not print is therefore shown as its escape, ``\x1b``.
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
"""The part of an installed file's path before the name of its package."""


def printable(text: str, but: str = "") -> str:
    """Return ``text`` with each character escaped that does not print, except those in ``but``."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in but else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


def harmless(thing: T, folder: str = "", but: str = "") -> T:
    """Return ``thing``, a text or data that holds texts, with every text :func:`printable`.

    Files below ``folder`` are named relative to it. With a ``folder``, files of installed packages are named by their
    package: ``transformers/models/opt/modeling_opt.py``.
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
