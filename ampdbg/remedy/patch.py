"""From pins to a patch: for each the narrowest edit of the user's own code that the code allows."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ampdbg.config import Config
from ampdbg.config.target_names import parse_target
from ampdbg.experiments import Pin
from ampdbg.remedy.by_name.helper_form import edit_factory
from ampdbg.remedy.by_name.plain_layers import takes_one_tensor
from ampdbg.remedy.half_names import Seen
from ampdbg.remedy.own_lines import OwnLines
from ampdbg.remedy.ownership import file_of_class, is_users_file
from ampdbg.remedy.pins.tying import tied_together
from ampdbg.remedy.source.edits import CallPin, Edited, ForwardPin, Refused, SourcePin, StatementPin, edit_source
from ampdbg.remedy.writing import FileEdit

__all__ = ["FileEdit", "Patch", "PatchUnit", "planned"]


@dataclass(frozen=True)
class PatchUnit:
    """One edit that can be left out: what it is, and the names of the pins that it stands for."""

    title: str
    pins: tuple[str, ...]


@dataclass(frozen=True)
class Patch:
    """The edits of all files together. ``without`` has them for each unit's title with that one unit left out."""

    edits: tuple[FileEdit, ...]
    units: tuple[PatchUnit, ...]
    without: Mapping[str, tuple[FileEdit, ...]]
    refused: tuple[Refused, ...] = ()


@dataclass(frozen=True)
class Materials:
    """What a plan is made from: the model, its pins, the lines to wrap, and what holds half tensors on them."""

    config: Config
    model: torch.nn.Module
    pins: tuple[Pin, ...]
    lines: OwnLines
    names: Seen


@dataclass(frozen=True)
class _Edit:
    """One unit in the making. ``source`` is None for a name in the helper's call, where the model is made."""

    title: str
    file: str
    source: SourcePin | None
    pins: tuple[str, ...]


Way = Callable[[Pin, Materials], Iterator[_Edit]]


def planned(materials: Materials, ways: Sequence[Way] | None = None) -> Patch:
    """The patch for the pins.

    Each pin is edited in the first of ``ways`` that the code allows; by default these are :data:`WAYS`'s first.
    What none allows is in ``refused``.
    """
    edits: list[_Edit] = []
    refused: list[Refused] = []
    for pin in materials.pins:
        chosen, reasons = _first_that_works(pin, materials, WAYS[0] if ways is None else ways)
        edits += chosen
        refused += reasons
    edits = list(_merged(edits))
    parts = _tied(edits, materials)
    units = tuple(PatchUnit(_title(part), tuple(pin for edit in part for pin in edit.pins)) for part in parts)
    without = {_title(part): _applied([edit for edit in edits if edit not in part], materials)[0] for part in parts}
    applied, more = _applied(edits, materials)
    return Patch(applied, units, without, (*refused, *more))


def _tied(edits: Sequence[_Edit], materials: Materials) -> list[list[_Edit]]:
    """The edits in parts that can be left out: of tied modules, which were pinned together, one may do alone."""
    names = [pin.name for pin in materials.pins if pin.source is None]
    tied = [part for part in tied_together(names, materials.model) if len(part) > 1]
    parts: list[tuple[set[str], list[_Edit]]] = []
    for edit in edits:
        ties = {name for part in tied if not set(part).isdisjoint(edit.pins) for name in part}
        same = [part for part in parts if part[0] & ties]
        parts = [part for part in parts if part not in same]
        parts.append((ties.union(*(part[0] for part in same)), [*(one for part in same for one in part[1]), edit]))
    return [part for _, part in parts]


def _title(part: Sequence[_Edit]) -> str:
    return " and ".join(edit.title for edit in part)


def _first_that_works(pin: Pin, materials: Materials, ways: Sequence[Way]) -> tuple[list[_Edit], list[Refused]]:
    refused: list[Refused] = []
    for way in ways:
        edits = list(way(pin, materials))
        reasons = _applied(edits, materials)[1]
        if edits and not reasons:
            return edits, []
        refused += reasons
    return [], refused or [Refused(0, f"{pin.name or 'the root'}: no code of yours makes or calls it")]


def _statements(pin: Pin, materials: Materials) -> Iterator[_Edit]:
    """The lines that go wrong, and those about to, in the module's own code or outside of any module."""
    if pin.module and not pin.own:
        return
    sources = [pin.source] if pin.source else [site.source for site in pin.sites]
    if not sources or not all(source is not None and is_users_file(source.file) for source in sources):
        return
    for (file, function), lines in materials.lines.of(pin).items():
        yield _Edit(_lines_of(file, lines), file, _statement(file, function, lines, materials.names), (pin.name,))


def _forward(pin: Pin, materials: Materials) -> Iterator[_Edit]:
    """The forward of the user's own class, where all of its instances are pinned."""
    if pin.is_library or pin.source:
        return
    kind = type(materials.model.get_submodule(pin.module))
    instances = {name for name, module in materials.model.named_modules() if type(module) is kind}
    if instances <= {other.module for other in materials.pins if other.source is None}:
        file = file_of_class(kind)
        yield _Edit(f"{kind.__name__}.forward in {Path(file).name}", file, ForwardPin(kind.__name__), (pin.name,))


def _call(pin: Pin, materials: Materials) -> Iterator[_Edit]:
    """The call of the module in its parent's forward, where that is the user's own code."""
    parent, _, name = pin.module.rpartition(".")
    if not name or pin.source:
        return
    kind = type(materials.model.get_submodule(parent))
    file = file_of_class(kind)
    if is_users_file(file):
        half = tuple({text for (other, _), names in materials.names.items() if other == file for text in names.half})
        call = CallPin("forward", f"self.{name}", half_names=half)
        yield _Edit(f"self.{name}() in {kind.__name__}.forward of {Path(file).name}", file, call, (pin.name,))


def _helper(pin: Pin, materials: Materials) -> Iterator[_Edit]:
    """The helper, by the module's name, where the config's own file makes the model."""
    file = _file_that_makes_the_model(materials.config)
    if is_users_file(file) and not pin.source:
        yield _Edit(f"{pin.name or 'the model'}, by name", file, None, (pin.name,))


WAYS: tuple[tuple[Way, ...], ...] = ((_statements, _forward, _call, _helper), (_forward, _call, _helper), (_helper,))
"""The narrowest first; each next one is for where the patch of the one before does not cure the step."""


def _statement(file: str, function: str, lines: Sequence[int], names: Seen) -> StatementPin:
    here = {line: found for (other, line), found in names.items() if other == file}
    half = {line: tuple(found.half) for line, found in here.items()}
    full = dict.fromkeys(text for found in here.values() for text in found.full)
    every = {text for texts in half.values() for text in texts}
    return StatementPin(
        function,
        tuple(lines),
        half_names=half,
        full_names=tuple(text for text in full if text not in every),
        texts={line: linecache.getline(file, line).strip() for line in lines},
    )


def _merged(edits: Iterable[_Edit]) -> Iterator[_Edit]:
    """Pins of several instances of a class come to the same edit; statements of one function to one."""
    by_place: dict[tuple[object, ...], list[_Edit]] = {}
    for edit in edits:
        by_place.setdefault(_place(edit), []).append(edit)
    for same in by_place.values():
        pins = tuple(dict.fromkeys(pin for edit in same for pin in edit.pins))
        first = same[0]
        if isinstance(first.source, StatementPin):
            statements = [edit.source for edit in same if isinstance(edit.source, StatementPin)]
            lines = sorted({line for source in statements for line in source.lines})
            texts = {line: text for source in statements for line, text in source.texts.items()}
            source = replace(first.source, lines=tuple(lines), texts=texts)
            yield _Edit(_lines_of(first.file, lines), first.file, source, pins)
        else:
            yield replace(first, pins=pins)


def _place(edit: _Edit) -> tuple[object, ...]:
    match edit.source:
        case StatementPin(function=function):
            return edit.file, "statement", function
        case CallPin(function=function, callee=callee):
            return edit.file, "call", function, callee
        case ForwardPin(class_name=name):
            return edit.file, "forward", name
    return edit.file, "helper", edit.pins


def _applied(edits: Sequence[_Edit], materials: Materials) -> tuple[tuple[FileEdit, ...], tuple[Refused, ...]]:
    """All edits together, file by file; the helper's call comes last, for it moves the lines below it."""
    files: list[FileEdit] = []
    refused: list[Refused] = []
    for file in dict.fromkeys(edit.file for edit in edits):
        before = Path(file).read_bytes()
        here = [edit for edit in edits if edit.file == file]
        edited = edit_source(before, [edit.source for edit in here if edit.source is not None])
        refused += edited.refused
        names = [name for edit in here if edit.source is None for name in edit.pins]
        if names:
            edited = _with_helper(edited, names, materials)
            refused += edited.refused
        if edited.source != before:
            files.append(FileEdit(Path(file), before, edited.source))
    return tuple(files), tuple(refused)


def _with_helper(edited: Edited, names: Sequence[str], materials: Materials) -> Edited:
    every = [name for name, _ in materials.model.named_modules()]
    makes = parse_target(materials.config.model.target).name
    return edit_factory(edited.source, makes, names, every, one_tensor=layers_of_one_tensor(names, materials.model))


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


def _lines_of(file: str, lines: Sequence[int]) -> str:
    name = Path(file).name
    return f"line {lines[0]} of {name}" if len(lines) == 1 else f"lines {lines[0]} to {lines[-1]} of {name}"
