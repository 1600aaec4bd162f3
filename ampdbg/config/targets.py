"""Targets as written in the config: their syntax, and checks for their existence without imports."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import symtable
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from ampdbg.quantities import listed, quoted
from ampdbg.syntax_tree import UNPARSABLE, syntax_tree

LONGEST_NAME = 255
"""The maximum length of a file name on all common systems."""

TARGET_FORMS = "FILE.py:NAME (relative to the config) or package.module:NAME"


@dataclass(frozen=True)
class Target:
    """A target: ``FILE.py:NAME`` has a ``file``, ``package.module:NAME`` a ``module``; ``name`` may be dotted."""

    text: str
    file: str
    module: str
    name: str

    def path(self, folder: Path) -> Path:
        """Return the absolute path of the file for a config in ``folder``."""
        return Path(os.path.abspath(folder / self.file))


def parse_target(text: str) -> Target:
    """Parse a target.

    Raises:
        ValueError: the text has neither form; the message names the allowed forms.
    """
    # Split from the right because of "C:\\model.py:build".
    place, colon, name = text.strip().rpartition(":")
    if not colon or not place or text.strip().endswith(".py"):
        raise ValueError(f"got {quoted(text)}; allowed: {TARGET_FORMS}{_without_colon(text.strip())}")
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"got {quoted(text)}: {quoted(name)} is no Python name; allowed: {TARGET_FORMS}")
    if place.endswith(".py"):
        return Target(text, file=place, module="", name=name)
    if all(part.isidentifier() for part in place.split(".")):
        return Target(text, file="", module=place, name=name)
    raise ValueError(f"got {quoted(text)}: {quoted(place)} is neither a .py file nor a module; allowed: {TARGET_FORMS}")


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """Return ``" Did you mean 'steps'?"``, or "" if no allowed word is similar."""
    words = list(allowed)
    by_folded = {word.casefold(): word for word in words}
    folded = get_close_matches(given.casefold(), by_folded, n=1)
    close = get_close_matches(given, words, n=1) or [by_folded[word] for word in folded]
    return f" Did you mean {close[0]!r}?" if close else ""


def why_absent(target: Target, folder: Path) -> str | None:
    """Return the reason why the target cannot exist, as far as visible without running code, or None."""
    if target.file:
        return _why_absent_from_file(target, target.path(folder))
    package = target.module.partition(".")[0]
    if _module_exists(package, folder):
        return None
    message = f"got {quoted(target.text)}, but no module {quoted(package)} is installed or lies beside the config"
    if os.path.isfile(folder / f"{package}.py"):
        return message
    return f"{message}. Install it, or name a file as FILE.py:{target.name}"


def why_no_file(path: Path, written: str, pattern: str) -> str | None:
    """Return the reason why ``path`` is not a readable file, with similar files in its folder, or None."""
    if max(map(len, path.parts)) > LONGEST_NAME:
        return f"got {quoted(written)}, a name of more than {LONGEST_NAME} characters"
    if os.path.isdir(path.parent) and not os.access(path.parent, os.X_OK):
        return f"got {quoted(written)}, but the folder {path.parent} may not be entered"
    # os.path is used because Path's methods raise if a name is too long for the system.
    if os.path.isfile(path):
        return None
    if os.path.isdir(path):
        return f"got {quoted(written)}, which is a folder; allowed: a file.{_files_in(path, path.name, pattern)}"
    if os.path.exists(path):
        return f"got {quoted(written)}, which is neither a file nor a folder; allowed: a file"
    if not os.path.isdir(path.parent):
        return f"got {quoted(written)}, but there is no folder {path.parent}"
    near = _files_in(path.parent, path.name, pattern)
    return f"got {quoted(written)}, but there is no such file in {path.parent}.{near}"


def _files_in(folder: Path, missing: str, pattern: str) -> str:
    """Return a hint with the most similar file by stem, or with all files of the kind."""
    beside = sorted(item.name for item in folder.glob(pattern) if item.is_file())
    by_stem = {Path(name).stem: name for name in beside}
    close = get_close_matches(Path(missing).stem, by_stem, n=1)
    if close:
        return f" Did you mean {by_stem[close[0]]!r}?"
    return f" There {'is' if len(beside) == 1 else 'are'} {listed(beside, most=8)}." if beside else ""


def _without_colon(text: str) -> str:
    if len(text) > LONGEST_NAME:
        return ""
    if text.endswith(".py"):
        return f"; add the name that the file defines: {text}:NAME"
    head, dot, name = text.rpartition(".")
    return f". Did you mean '{head}:{name}'?" if dot and head and name.isidentifier() else ""


def _why_absent_from_file(target: Target, path: Path) -> str | None:
    absent = why_no_file(path, target.text, "*.py")
    if absent:
        return absent
    defined = defined_names(path)
    name = target.name.partition(".")[0]
    if defined is None or name in defined:
        return None
    public = [item for item in defined if not item.startswith("_")]
    has = f"it defines {listed(public, most=8)}" if public else "it defines nothing"
    return f"got {quoted(target.text)}, but {target.file} has no {quoted(name)}; {has}.{did_you_mean(name, public)}"


def defined_names(path: Path) -> list[str] | None:
    """Return the names defined at the top level of a Python file, definitions before imports.

    Return None if that requires running it: it does not parse, imports ``*``, or uses ``globals()`` or ``exec``.
    """
    try:
        source = importlib.util.decode_source(path.read_bytes())
        tree, table = syntax_tree(source), symtable.symtable(source, str(path), "exec")
    except (OSError, *UNPARSABLE):
        return None
    if any(_is_opaque(node) for node in ast.walk(tree)):
        return None
    symbols = table.get_symbols()
    own = [item.get_name() for item in symbols if item.is_assigned() or item.is_namespace()]
    declared = [name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names]
    imported = [item.get_name() for item in symbols if item.is_imported()]
    return list(dict.fromkeys([*own, *declared, *imported]))


def _is_opaque(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return any(alias.name == "*" for alias in node.names)
    if isinstance(node, ast.FunctionDef):
        return node.name == "__getattr__"
    return isinstance(node, ast.Name) and node.id in ("globals", "exec", "vars", "setattr")


def _module_exists(package: str, folder: Path) -> bool:
    if importlib.machinery.PathFinder.find_spec(package, [str(folder), os.getcwd()]) is not None:
        return True
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # it is loaded, and has no spec
        return True
