"""The forms that a suggestion is handed over in: a diff, a Python file of its own, lines of the config, JSON."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ampdbg.escapes import printable
from ampdbg.given import Given
from ampdbg.record.file import to_json
from ampdbg.record.pins import Form
from ampdbg.record.run import Record
from ampdbg.report.view import NextCommand

if TYPE_CHECKING:
    from ampdbg.patch.file_edits import FileEdit
    from ampdbg.proof.suggestion import Suggestion

FORMAT, VERSION = "ampdbg.patch", 1

MANY = 6
"""Beyond so many pins the comments count them."""


@dataclass(frozen=True)
class Handover:
    """A suggestion in one form; ``content`` is None where it has nothing to hand over.

    ``base`` is what the paths of a diff are relative to, ``is_git`` whether that is the root of a repository.
    """

    form: Form
    content: bytes | None
    base: Path
    is_git: bool

    @property
    def suffix(self) -> str:
        """The end of the name of a file with it; the record beside it ends in ``.json``."""
        return FORMS[self.form][0]

    def applying(self, file: str = "") -> str:
        """The command that applies it from here: the patch of that name, else what is piped into it.

        git, typed below the root of a repository, passes over the files outside of this folder without a word.
        """
        if not self.is_git:
            return f"patch -p1{self._at('-d')}" + (f" < {shlex.quote(file)}" if file else "")
        return f"git{self._at('-C')} apply" + (f" {shlex.quote(os.path.relpath(file, self.base))}" if file else "")

    def _at(self, option: str) -> str:
        """The option for the folder that the paths count from; "" where it is this one."""
        here = Path.cwd().resolve()
        return "" if here == self.base else f" {option} {shlex.quote(os.path.relpath(self.base, here))}"


def hand_over(found: Suggestion, form: Form, folder: Path) -> Handover:
    """The suggestion in one form; a patch that failed its proof is handed over in none. ``folder`` is the config's."""
    edits = found.patch.edits if found.patch is not None else ()
    base, is_git = base_folder(edits, folder)
    proof = found.record.verification
    failed = proof is not None and not proof.passed
    # JSON holds a patch or names.
    has_form = (form in ("diff", "json") and found.patch is not None) or (form != "diff" and found.is_by_name)
    is_there = has_form and not failed and not found.record.interrupted
    return Handover(form, FORMS[form][1](found, base) if is_there else None, base, is_git)


def base_folder(edits: Sequence[FileEdit], config_folder: Path) -> tuple[Path, bool]:
    """What the paths of a diff are relative to, and whether that is the root of a git repository.

    That is the repository that holds all the files; else the config's folder, or what holds that and the files.
    """
    files = [edit.path.resolve() for edit in edits]
    root = _repository(files[0].parent) if files else None
    if root is not None and all(file.is_relative_to(root) for file in files):
        return root, True
    return Path(os.path.commonpath([config_folder.resolve(), *(file.parent for file in files)])), False


def warning_of_piping(handed: Handover) -> str | None:
    """That ``git apply`` in this folder may leave files as they are, with the diff piped into it; None where not."""
    if handed.form != "diff" or handed.content is None or handed.base == Path.cwd().resolve():
        return None
    return f"warning: the paths of this diff count from {handed.base}; type ... | {handed.applying()}"


def next_step(
    found: Suggestion, handed: Handover, given: Given, strategy: str, file: Path | None, *, applied: bool
) -> NextCommand | None:
    """What to type next, where ``file`` has the text, if any, and ``applied`` says whether the files were written."""
    proof = found.record.verification
    if proof is not None and not proof.passed:
        return NextCommand("search again, blind to what overflows", f"ampdbg bisect {given.typed} --strategy ddmin")
    again = f"ampdbg suggest-fp32 {given.typed}" + (f" --strategy {strategy}" if strategy != "guided" else "")
    if handed.content is None:
        if not found.names and found.patch is None:
            return None
        if handed.form == "diff":
            return NextCommand("write the pins into a file of their own", f"{again} --format module")
        return NextCommand("make a patch: lines outside of any module have no name", again)
    if applied:
        return NextCommand("run it again, with the patch", f"ampdbg scan {given.typed}")
    return _use_of(handed, str(file), given, again) if file is not None else None


def _use_of(handed: Handover, file: str, given: Given, again: str) -> NextCommand:
    """What to do with the file that has it."""
    if handed.form == "diff":
        return NextCommand("apply the patch", handed.applying(file))
    if handed.form == "module":
        what = "put it beside your code as ampdbg_pins.py, and call it where the model is made"
        return NextCommand(what, "from ampdbg_pins import pin_fp32; pin_fp32(model)")
    if handed.form == "json":
        return NextCommand("make a patch of it", again)
    if given.record is not None:  # a record does not know the name of its config's file
        return NextCommand("put these lines into the config of that run", "")
    return NextCommand("put these lines into the config, and run it again", f"ampdbg scan {given.typed}")


def _repository(folder: Path) -> Path | None:
    command = ["git", "-C", str(folder), "rev-parse", "--show-toplevel"]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError:
        return None
    root = os.fsdecode(done.stdout).removesuffix("\n").removesuffix("\r")
    return Path(root).resolve() if done.returncode == 0 and root else None


# A diff


def diff(found: Suggestion, base: Path) -> bytes:
    """A unified diff with the proof as comments above it, as ``git apply`` and ``patch -p1`` take the whole of it."""
    edits = found.patch.edits if found.patch is not None else ()
    comments = _commented([*_kept_in_fp32(found), *_units(found), *_proof(found.record)])
    return comments.encode() + b"".join(_diff_of(edit, base) for edit in edits)


def _diff_of(edit: FileEdit, base: Path) -> bytes:
    from ampdbg.patch.diffs import new_file_diff, unified_diff

    path = PurePosixPath(edit.path.resolve().relative_to(base).as_posix())
    return new_file_diff(path, edit.after) if edit.before is None else unified_diff(path, edit.before, edit.after)


# Pins by name


def module(found: Suggestion, base: Path) -> bytes:
    """A Python file of its own, with ``pin_fp32(model)``, for code that cannot be edited."""
    return f"{_comments_by_name(found)}\n{found.pins_file(found.names)}".encode()


def config_lines(found: Suggestion, base: Path) -> bytes:
    """The pins as the config takes them, in YAML."""
    from ampdbg.report.pins import pins_yaml

    return (_comments_by_name(found) + "\n".join(pins_yaml(found.names, found.record.config)) + "\n").encode()


def _comments_by_name(found: Suggestion) -> str:
    return _commented([*_kept_in_fp32(found), *_proof(found.record)])


# JSON


def as_json(found: Suggestion, base: Path) -> bytes:
    """One JSON object: pins, files with their diffs, proof and notes.

    ``pins`` and ``proof`` are as in the record; ``refused`` says why a pin is in no edit. ``folder`` is what the
    files' paths are relative to.
    """
    edits, units = (found.patch.edits, found.patch.units) if found.patch is not None else ((), ())
    record = json.loads(to_json(found.record))
    content: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "folder": str(base),
        "names": list(found.names),
        "pins": record["pins"],
        "files": [_file_as_data(edit, base) for edit in edits],
        "units": [{"title": unit.title, "pins": list(unit.pins), "notes": list(unit.notes)} for unit in units],
        "proof": record["verification"],
        "notes": list(found.notes),
        "refused": list(found.refused),
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


def _commented(lines: Sequence[str]) -> str:
    """Each line behind a ``#``: neither git nor patch takes such a line for a part of the diff."""
    return "".join(f"# {printable(part)}".rstrip() + "\n" for line in lines for part in line.splitlines() or [""])


def _kept_in_fp32(found: Suggestion) -> Iterator[str]:
    """The pins that the patch stands for: what is only tied to one of them it may leave as it is."""
    from ampdbg.patch.by_name.helper import in_words

    units = found.patch.units if found.patch is not None else None
    covered = found.names if units is None else {name for unit in units for name in unit.pins}
    names = [in_words(name) for name in found.names if name in covered]
    shown = ", ".join(names) if len(names) <= MANY else f"{len(names)} modules, {names[0]} to {names[-1]}"
    yield f"Keeps in FP32 under autocast: {shown}." if names else "Keeps in FP32 under autocast:"


def _units(found: Suggestion) -> Iterator[str]:
    for unit in found.patch.units if found.patch is not None else ():
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


FORMS: Mapping[Form, tuple[str, Callable[[Suggestion, Path], bytes]]] = {
    "diff": (".patch", diff),
    "module": (".py", module),
    "yaml": (".yaml", config_lines),
    "json": (".patch.json", as_json),
}
"""The end of the name of a file in each form, and its text."""
