"""A suggestion as text to apply, save or paste: a unified diff, a Python file of its own, JSON."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ampdbg.patch.by_name.helper import in_words
from ampdbg.patch.diffs import new_file_diff, unified_diff
from ampdbg.patch.file_edits import FileEdit
from ampdbg.record.file import to_json
from ampdbg.record.run import Record

if TYPE_CHECKING:
    from ampdbg.proof.suggestion import Suggestion

FORMAT, VERSION = "ampdbg.patch", 1

MANY = 6
"""Beyond so many pins the comments count them."""


def base_folder(edits: Sequence[FileEdit], config_folder: Path) -> tuple[Path, bool]:
    """What the paths of a diff are relative to, and whether that is the root of a git repository.

    That is the repository that holds all the files; else the config's folder, or what holds that and the files.
    """
    files = [edit.path.resolve() for edit in edits]
    root = _repository(files[0].parent) if files else None
    if root is not None and all(file.is_relative_to(root) for file in files):
        return root, True
    folder = config_folder.resolve()
    return Path(os.path.commonpath([folder, *(file.parent for file in files)])), False


def _repository(folder: Path) -> Path | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--show-toplevel"], capture_output=True, check=False
        )
    except OSError:
        return None
    root = os.fsdecode(done.stdout).removesuffix("\n").removesuffix("\r")
    return Path(root).resolve() if done.returncode == 0 and root else None


def diff(suggestion: Suggestion, base: Path) -> bytes:
    """A unified diff with the proof as comments above it, as ``git apply`` and ``patch -p1`` take the whole of it.

    Args:
        suggestion: one with a patch.
        base: what the paths in it are relative to.
    """
    assert suggestion.patch is not None
    return _comments(suggestion) + b"".join(_diff_of(edit, base) for edit in suggestion.patch.edits)


def _diff_of(edit: FileEdit, base: Path) -> bytes:
    path = PurePosixPath(edit.path.resolve().relative_to(base).as_posix())
    return new_file_diff(path, edit.after) if edit.before is None else unified_diff(path, edit.before, edit.after)


def module(suggestion: Suggestion) -> bytes:
    """A Python file of its own, with ``pin_fp32(model)``, for code that cannot be edited."""
    return (comments_by_name(suggestion) + "\n" + suggestion.pins_file(suggestion.names)).encode()


def comments_by_name(suggestion: Suggestion) -> str:
    """The proof as comments above pins by name, in Python or YAML."""
    return _commented([*_what(suggestion), *_proof(suggestion.record)])


def as_json(suggestion: Suggestion, base: Path) -> bytes:
    """The patch as one JSON object: pins, files with their diffs, proof and notes.

    ``pins`` and ``proof`` are as in the record; ``refused`` says why a pin is in no edit. ``base`` is what
    the files' paths are relative to.
    """
    patch = suggestion.patch
    record = json.loads(to_json(suggestion.record))
    content: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "folder": str(base),
        "names": list(suggestion.names),
        "pins": record["pins"],
        "files": [_file_as_data(edit, base) for edit in (patch.edits if patch is not None else ())],
        "units": [
            {"title": unit.title, "pins": list(unit.pins), "notes": list(unit.notes)}
            for unit in (patch.units if patch is not None else ())
        ],
        "proof": record["verification"],
        "notes": list(suggestion.notes),
        "refused": list(suggestion.refused),
    }
    return (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _file_as_data(edit: FileEdit, base: Path) -> dict[str, str]:
    """``encoding`` gives the diff's bytes back, whatever the file is written in."""
    content = _diff_of(edit, base)
    try:
        text, encoding = content.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        text, encoding = content.decode("latin-1"), "latin-1"
    return {"path": edit.path.resolve().relative_to(base).as_posix(), "encoding": encoding, "diff": text}


# The comments


def _comments(suggestion: Suggestion) -> bytes:
    return _commented([*_what(suggestion), *_units(suggestion), *_proof(suggestion.record)]).encode()


def _commented(lines: Sequence[str]) -> str:
    """Each line behind a ``#``: neither git nor patch takes such a line for a part of the diff."""
    return "".join(f"# {part}".rstrip() + "\n" for line in lines for part in line.splitlines() or [""])


def _what(suggestion: Suggestion) -> Iterator[str]:
    names = [in_words(name) for name in _kept(suggestion)]
    shown = ", ".join(names) if len(names) <= MANY else f"{len(names)} modules, {names[0]} to {names[-1]}"
    yield f"Keeps in FP32 under autocast: {shown}." if names else "Keeps in FP32 under autocast:"


def _kept(suggestion: Suggestion) -> Sequence[str]:
    """The pins that the patch stands for: what is only tied to one of them it may leave as it is."""
    if suggestion.patch is None:
        return suggestion.names
    covered = {name for unit in suggestion.patch.units for name in unit.pins}
    return [name for name in suggestion.names if name in covered]


def _units(suggestion: Suggestion) -> Iterator[str]:
    for unit in suggestion.patch.units if suggestion.patch is not None else ():
        yield f"  - {unit.title}"
        yield from (f"    {note}" for note in unit.notes)


def _proof(record: Record) -> Iterator[str]:
    proof, ran = record.verification, record.environment
    if proof is None:
        yield "Not proven: --no-verify was given, and nothing was run with this patch."
        return
    emulated = ", CUDA's autocast emulated" if ran.emulated else ""
    yield f"Proven by ampdbg {ran.ampdbg} (torch {ran.torch}, {ran.device}{emulated}):"
    for step in proof.steps:
        yield f"  - {step.name}: {step.detail}" if step.detail else f"  - {step.name}"
