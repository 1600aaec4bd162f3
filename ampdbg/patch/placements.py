"""The ways in which a pin can be edited into the user's code, the narrowest first."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ampdbg.config import Config
from ampdbg.config.targets import parse_target
from ampdbg.patch.by_name.helper import applies_to, edit_factory, in_words, takes_one_tensor
from ampdbg.patch.edits import CallPin, Edited, FunctionPin, Refused, SourcePin, StatementPin, edit_source
from ampdbg.patch.file_edits import FileEdit
from ampdbg.patch.functions import (
    Written,
    call_of,
    function_at,
    functions_run,
    lines_of,
    may_run_modules,
    modules_running,
    parameters_of,
)
from ampdbg.patch.own_lines import OwnLines
from ampdbg.probes.half_names import NamesByLine
from ampdbg.record.pins import Pin
from ampdbg.source.ownership import is_users_file


@dataclass(frozen=True)
class Materials:
    """What a plan is made from: the model, its pins, the lines to wrap, and what holds half tensors on them."""

    config: Config
    model: torch.nn.Module
    pins: tuple[Pin, ...]
    lines: OwnLines
    names: NamesByLine


def lines_that_may_be_edited(pins: Iterable[Pin], lines: OwnLines, model: torch.nn.Module) -> set[tuple[str, int]]:
    """A line, by its file, of each function that a pin may be edited in: its own lines', its caller, its forward."""
    pins = tuple(pins)
    found = {(file, line) for pin in pins for (file, _), some in lines.of(pin).items() for line in some}
    names = {pin.module for pin in pins if pin.source is None}
    calls = [call for name in names if (call := call_of(name, model)) is not None]
    found |= {(call.function.file, line) for call in calls for line in call.lines}
    forwards = (next(functions_run(type(model.get_submodule(name)), "forward"), None) for name in names)
    return found | {(each.file, each.line) for each in forwards if each is not None and is_users_file(each.file)}


@dataclass(frozen=True)
class Edit:
    """One unit in the making.

    ``source`` is None for a name in the helper's call, where the model is made. ``function`` is what it edits, where
    that is known; ``notes`` are for the reader of the patch.
    """

    title: str
    file: str
    source: SourcePin | None
    pins: tuple[str, ...]
    function: Written | None = None
    notes: tuple[str, ...] = ()


Way = Callable[[Pin, Materials], Iterator[Edit]]


def _own_code(pin: Pin, materials: Materials) -> Iterator[Edit]:
    """The lines that go wrong, and those about to, in the module's own code or outside of any module.

    Where a line cannot be wrapped, it is the function that holds it, if no child module runs in there.
    """
    if pin.module and not pin.own:
        return
    sources = [pin.source] if pin.source else [site.source for site in pin.sites]
    if not sources or not all(source is not None and is_users_file(source.file) for source in sources):
        return
    for (file, function), lines in materials.lines.of(pin).items():
        statement = _statement(file, function, lines, materials.names)
        edit = Edit(lines_title(file, lines), file, statement, (pin.name,), function_at(file, lines[0]))
        reasons = why_not(edit, materials)
        yield (_around(edit, pin, materials, reasons) if reasons else None) or edit


def _around(edit: Edit, pin: Pin, materials: Materials, reasons: tuple[str, ...]) -> Edit | None:
    """The edit of the whole function that holds the lines of a refused one, or None where that is refused too."""
    function = edit.function
    if function is None:
        return None
    half, full = _parameters_seen(function, materials)
    module = None if pin.source else materials.model.get_submodule(pin.module)
    if not half or may_run_modules(function, module, frozenset({*half, *full})):
        return None
    whole = _whole(function, half, (pin.name,), reasons)
    return None if why_not(whole, materials) else whole


def _parameters_seen(function: Written, materials: Materials) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The parameters of a function that held half tensors, and those that held other ones."""
    keys = [(function.file, line) for line in lines_of(function)]
    seen = [materials.names[key] for key in keys if key in materials.names]
    parameters = parameters_of(function)
    half = tuple(name for name in parameters if any(name in names.half for names in seen))
    return half, tuple(name for name in parameters if any(name in names.full for names in seen))


def _forward(pin: Pin, materials: Materials) -> Iterator[Edit]:
    """The forward of the user's own class, where it is pinned with all that it calls, in all of its instances."""
    if pin.source or _leaves_children(pin, materials):
        return
    function = next(functions_run(type(materials.model.get_submodule(pin.module)), "forward"), None)
    if function is None or not is_users_file(function.file):
        return
    pinned = {other.module for other in materials.pins if not (other.source or _leaves_children(other, materials))}
    if set(modules_running(function, materials.model)) <= pinned:
        yield _whole(function, _parameters_seen(function, materials)[0], (pin.name,))


def _whole(function: Written, half: tuple[str, ...], pins: tuple[str, ...], notes: tuple[str, ...] = ()) -> Edit:
    source = FunctionPin(function.qualname, half)
    return Edit(f"{function.qualname} in {Path(function.file).name}", function.file, source, pins, function, notes)


def _leaves_children(pin: Pin, materials: Materials) -> bool:
    """Whether the pin leaves child modules in half: an edit that takes them into FP32 is not what was tried."""
    return pin.own and any(True for _ in materials.model.get_submodule(pin.module).children())


def _call(pin: Pin, materials: Materials) -> Iterator[Edit]:
    """The call of the module in its parent's forward, where that is the user's own code."""
    if pin.source or _leaves_children(pin, materials):
        return
    call = call_of(pin.module, materials.model)
    if call is None:
        return
    file, where = call.function.file, call.function.qualname
    half, full = _names_in(file, materials.names)
    texts = {line: linecache.getline(file, line).strip() for line in call.lines}
    source = CallPin(where, call.callee, call.lines, half, full, texts=texts)
    yield Edit(f"{call.callee}() in {where} of {Path(file).name}", file, source, (pin.name,), call.function)


def _helper(pin: Pin, materials: Materials) -> Iterator[Edit]:
    """The helper, by the module's name, where the config's own file makes the model."""
    file = _file_that_makes_the_model(materials.config)
    if is_users_file(file) and not pin.source:
        note = applies_to(Path(file).read_bytes(), parse_target(materials.config.model.target).name)
        yield Edit(f"{in_words(pin.name)}, by name", file, None, (pin.name,), notes=(note,) if note else ())


WAYS: tuple[tuple[Way, ...], ...] = ((_own_code, _forward, _call, _helper), (_forward, _call, _helper), (_helper,))
"""The narrowest first; each next one is for where the patch of the one before does not cure the step."""


def _statement(file: str, function: str, lines: Sequence[int], names: NamesByLine) -> StatementPin:
    half, full = _names_in(file, names)
    texts = {line: linecache.getline(file, line).strip() for line in lines}
    return StatementPin(function, tuple(lines), half_names=half, full_names=full, texts=texts)


def _names_in(file: str, names: NamesByLine) -> tuple[dict[int, tuple[str, ...]], tuple[str, ...]]:
    """What held half tensors in a file, by line, and what held other tensors and nowhere half ones."""
    here = {line: found for (other, line), found in names.items() if other == file}
    half = {line: tuple(found.half) for line, found in here.items()}
    full = dict.fromkeys(text for found in here.values() for text in found.full)
    every = {text for texts in half.values() for text in texts}
    return half, tuple(text for text in full if text not in every)


def why_not(edit: Edit, materials: Materials) -> tuple[str, ...]:
    """Why an edit is refused, in words for who reads a wider one; () where it can be made."""
    reasons = dict.fromkeys(refused.reason for refused in applied([edit], materials)[1])
    return tuple(f"not {edit.title} alone: {reason}" for reason in reasons)


def applied(edits: Sequence[Edit], materials: Materials) -> tuple[tuple[FileEdit, ...], tuple[Refused, ...]]:
    """All edits together, file by file; the helper's call comes last, for it moves the lines below it."""
    files: list[FileEdit] = []
    refused: list[Refused] = []
    for file in dict.fromkeys(edit.file for edit in edits):
        before = Path(file).read_bytes()
        here = [edit for edit in edits if edit.file == file]
        edited = edit_source(before, [edit.source for edit in here if edit.source is not None])
        here_refused = list(edited.refused)
        names = [name for edit in here if edit.source is None for name in edit.pins]
        if names:
            edited = _with_helper(edited, names, materials)
            here_refused += edited.refused
        refused += (replace(one, file=file) for one in here_refused)
        if edited.source != before:
            files.append(FileEdit(Path(file), before, edited.source))
    return tuple(files), tuple(refused)


def _with_helper(edited: Edited, names: Sequence[str], materials: Materials) -> Edited:
    makes = parse_target(materials.config.model.target).name
    return edit_factory(edited.source, makes, names, one_tensor=layers_of_one_tensor(names, materials.model))


def layers_of_one_tensor(names: Iterable[str], model: torch.nn.Module) -> tuple[str, ...]:
    """Those of the pins that are plain layers, called with one tensor."""
    modules = dict(model.named_modules())
    return tuple(name for name in names if name in modules and takes_one_tensor(modules[name]))


def _file_that_makes_the_model(config: Config) -> str:
    target = parse_target(config.model.target)
    if target.file:
        return str(target.path(config.folder))
    module = sys.modules.get(target.module)
    return (module.__file__ or "") if module is not None else ""


def lines_title(file: str, lines: Sequence[int]) -> str:
    """Lines of a file in words."""
    name = Path(file).name
    if len(lines) == 1:
        return f"line {lines[0]} of {name}"
    between = "and" if len(lines) == 2 and lines[1] > lines[0] + 1 else "to"
    return f"lines {lines[0]} {between} {lines[-1]} of {name}"
