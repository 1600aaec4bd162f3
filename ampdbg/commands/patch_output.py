"""What ``ampdbg suggest-fp32`` hands over: the text in the format that was asked for, and what to do with it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from ampdbg.report.verdict import NextStep

if TYPE_CHECKING:
    from ampdbg.proof.suggestion import Form, Suggestion


class PatchFormat(str, Enum):
    """How the suggestion is written down."""

    diff = "diff"
    module = "module"
    yaml = "yaml"
    json = "json"


FORMS: Mapping[PatchFormat, Form] = {
    PatchFormat.diff: "code",
    PatchFormat.module: "file",
    PatchFormat.yaml: "config",
    PatchFormat.json: "code",
}
"""What is suggested, and proven, for each."""


@dataclass(frozen=True)
class Output:
    """The suggestion as bytes; ``content`` is None where there is nothing to hand over in this format.

    ``base`` is what the paths of a diff are relative to, ``is_git`` whether that is the root of a repository.
    ``files`` are those that a diff is of.
    """

    format: PatchFormat
    content: bytes | None
    base: Path
    is_git: bool
    files: tuple[Path, ...] = ()

    @property
    def out_of_reach(self) -> tuple[Path, ...]:
        """The files that ``git apply`` or ``patch -p1``, typed in this folder, would not find.

        Within a repository git finds those below the folder, and passes over the others without a word.
        """
        here = Path.cwd().resolve()
        if here == self.base:
            return ()
        finds = here if self.is_git and here.is_relative_to(self.base) else None
        return tuple(file for file in self.files if finds is None or not file.is_relative_to(finds))

    def applying(self, file: str = "") -> str:
        """The command that applies it from here: the patch of that name, else what is piped into it."""
        if not self.is_git:
            command = f"patch -p1{self._at('-d')}"
            return f"{command} < {shlex.quote(file)}" if file else command
        if not self.out_of_reach:
            return f"git apply {shlex.quote(file)}" if file else "git apply"
        return f"git{self._at('-C')} apply" + (f" {shlex.quote(os.path.abspath(file))}" if file else "")

    def _at(self, option: str) -> str:
        """The option for the folder that the paths count from, as short as that goes; "" where it is this one."""
        here = Path.cwd().resolve()
        if here == self.base:
            return ""
        return f" {option} {shlex.quote(_shorter(self.base, here))}"


def _shorter(folder: Path, here: Path) -> str:
    """The folder from here or from the root, whichever is shorter; on Windows there may be no way from here."""
    try:
        return min(os.path.relpath(folder, here), str(folder), key=len)
    except ValueError:
        return str(folder)


def output_of(found: Suggestion, format_: PatchFormat, config_folder: Path) -> Output:
    """The suggestion in one format. A patch that failed its proof is handed over in none."""
    from ampdbg.proof.dialects import base_folder

    edits = found.patch.edits if found.patch is not None else ()
    base, is_git = base_folder(edits, config_folder)
    proof = found.record.verification
    failed = proof is not None and not proof.passed
    content = None if failed or found.record.interrupted else WRITERS[format_](found, base)
    return Output(format_, content, base, is_git, tuple(edit.path.resolve() for edit in edits))


def _diff(found: Suggestion, base: Path) -> bytes | None:
    from ampdbg.proof.dialects import diff

    return diff(found, base) if found.patch is not None else None


def _json(found: Suggestion, base: Path) -> bytes | None:
    from ampdbg.proof.dialects import as_json

    return as_json(found, base) if found.patch is not None or found.is_by_name else None


def _module(found: Suggestion, base: Path) -> bytes | None:
    from ampdbg.proof.dialects import module

    return module(found) if found.is_by_name else None


def _yaml(found: Suggestion, base: Path) -> bytes | None:
    from ampdbg.proof.dialects import comments_by_name
    from ampdbg.report.pin_text import pins_yaml

    if not found.is_by_name:
        return None
    lines = pins_yaml(found.names, found.record.config)
    return (comments_by_name(found) + "\n".join(lines) + "\n").encode()


WRITERS: Mapping[PatchFormat, Callable[[Suggestion, Path], bytes | None]] = {
    PatchFormat.diff: _diff,
    PatchFormat.module: _module,
    PatchFormat.yaml: _yaml,
    PatchFormat.json: _json,
}


@dataclass(frozen=True)
class Given:
    """What was typed: a config or record, quoted for a shell, with the options that change the run; the strategy."""

    typed: str
    is_record: bool
    strategy: str = "guided"

    @property
    def again(self) -> str:
        """The same run once more; a scan takes no record."""
        return f"ampdbg {'bisect' if self.is_record else 'scan'} {self.typed}"

    @property
    def suggestion(self) -> str:
        """The same suggestion once more."""
        strategy = f" --strategy {self.strategy}" if self.strategy != "guided" else ""
        return f"ampdbg suggest-fp32 {self.typed}{strategy}"


def warning_of_piping(output: Output) -> str | None:
    """That ``git apply`` in this folder, with the diff piped into it, would leave files as they are; None where not."""
    missed = output.out_of_reach
    if output.format is not PatchFormat.diff or output.content is None or not missed:
        return None
    plain = "git apply" if output.is_git else "patch -p1"
    names = ", ".join(_shorter(file, Path.cwd().resolve()) for file in missed)
    return f"warning: {plain} in this folder would leave {names} unpatched; type ... | {output.applying()}"


def next_step(found: Suggestion, output: Output, given: Given, file: Path | None, *, applied: bool) -> NextStep | None:
    """What to type next.

    Args:
        found: what was suggested.
        output: what was handed over of it.
        given: what was typed.
        file: where the text was saved.
        applied: whether the files were written.
    """
    proof = found.record.verification
    if proof is not None and not proof.passed:
        return NextStep("another search, blind to what overflows", f"ampdbg bisect {given.typed} --strategy ddmin")
    if output.content is None:
        return NextStep(*_other_format(found, output, given)) if found.names or found.patch is not None else None
    if applied:
        return NextStep("the same run, with the patch", given.again)
    if file is None:
        return None
    return NextStep(*HANDED_OVER[output.format](output, str(file), given))


def _other_format(found: Suggestion, output: Output, given: Given) -> tuple[str, str]:
    if output.format is PatchFormat.diff:
        return "the pins as a file of their own", f"{given.suggestion} --format module"
    return "lines outside of any module have no name; as a patch", given.suggestion


def _in_the_config(output: Output, file: str, given: Given) -> tuple[str, str]:
    """A record does not know the name of its config's file."""
    if given.is_record:
        return "these lines belong into the config of that run", ""
    return "these lines belong into the config; then", given.again


def _apply(output: Output, file: str, given: Given) -> tuple[str, str]:
    return "the patch, where it is not applied yet", output.applying(file)


HANDED_OVER: Mapping[PatchFormat, Callable[[Output, str, Given], tuple[str, str]]] = {
    PatchFormat.diff: _apply,
    PatchFormat.module: lambda output, file, given: (
        "put it beside your code as ampdbg_pins.py, and call it where the model is made",
        "from ampdbg_pins import pin_fp32; pin_fp32(model)",
    ),
    PatchFormat.yaml: _in_the_config,
    PatchFormat.json: lambda output, file, given: ("the same as a patch", given.suggestion),
}
