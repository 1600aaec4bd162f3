"""From pins to a patch: for each the narrowest edit of the user's own code that the code allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ampdbg.patch.edits import CallPin, FunctionPin, Refused, StatementPin
from ampdbg.patch.file_edits import FileEdit
from ampdbg.patch.functions import modules_running
from ampdbg.patch.placements import WAYS, Edit, Materials, Way, applied, layers_of_one_tensor, lines_title, why_not
from ampdbg.pinning.tying import tied_together
from ampdbg.record.pins import Pin

__all__ = ["WAYS", "FileEdit", "Materials", "Patch", "PatchUnit", "layers_of_one_tensor", "planned", "wider_than"]


@dataclass(frozen=True)
class PatchUnit:
    """One edit that can be left out: what it is, and the names of the pins that it stands for.

    ``notes`` are for who reads the patch: why it is no narrower, and what else runs the code that it edits.
    """

    title: str
    pins: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Patch:
    """The edits of all files together. ``without`` has them for each unit's title with that one unit left out."""

    edits: tuple[FileEdit, ...]
    units: tuple[PatchUnit, ...]
    without: Mapping[str, tuple[FileEdit, ...]]
    refused: tuple[Refused, ...] = ()


def planned(materials: Materials, ways: Sequence[Way] | None = None) -> Patch:
    """The patch for the pins.

    Each pin is edited in the first of ``ways`` that the code allows; by default these are :data:`WAYS`'s first.
    What none allows is in ``refused``.
    """
    edits: list[Edit] = []
    refused: list[Refused] = []
    for pin in materials.pins:
        chosen, reasons = _first_that_works(pin, materials, WAYS[0] if ways is None else ways)
        edits += chosen
        refused += reasons
    edits = list(_merged(edits))
    parts = _tied(edits, materials)
    units = tuple(_unit(part, materials) for part in parts)
    without = {_title(part): applied([edit for edit in edits if edit not in part], materials)[0] for part in parts}
    made, more = applied(edits, materials)
    return Patch(made, units, without, (*refused, *more))


def wider_than(narrower: Patch, why: str, patch: Patch) -> Patch:
    """The patch, with a note at each unit that stands in for others of a narrower one: ``why`` that one failed."""
    units = []
    for unit in patch.units:
        before = [one.title for one in narrower.units if not set(one.pins).isdisjoint(unit.pins)]
        note = f"not {' and '.join(before)} alone: {why}"
        units.append(unit if unit.title in before or not before else replace(unit, notes=(*unit.notes, note)))
    return replace(patch, units=tuple(units))


def _tied(edits: Sequence[Edit], materials: Materials) -> list[list[Edit]]:
    """The edits in parts that can be left out: of tied modules, which were pinned together, one may do alone."""
    names = [pin.name for pin in materials.pins if pin.source is None]
    tied = [part for part in tied_together(names, materials.model) if len(part) > 1]
    parts: list[tuple[set[str], list[Edit]]] = []
    for edit in edits:
        ties = {name for part in tied if not set(part).isdisjoint(edit.pins) for name in part}
        same = [part for part in parts if part[0] & ties]
        parts = [part for part in parts if part not in same]
        parts.append((ties.union(*(part[0] for part in same)), [*(one for part in same for one in part[1]), edit]))
    return [part for _, part in parts]


def _unit(part: Sequence[Edit], materials: Materials) -> PatchUnit:
    pins = tuple(pin for edit in part for pin in edit.pins)
    notes = (note for edit in part for note in (*edit.notes, *_sharing(edit, materials)))
    return PatchUnit(_title(part), pins, tuple(dict.fromkeys(notes)))


def _title(part: Sequence[Edit]) -> str:
    return " and ".join(edit.title for edit in part)


def _sharing(edit: Edit, materials: Materials) -> Iterator[str]:
    """That the code which is edited runs for modules beside those that are pinned."""
    if edit.function is None:
        return
    running = modules_running(edit.function, materials.model)
    child = edit.source.callee.rpartition(".")[2] if isinstance(edit.source, CallPin) else ""
    pinned = sum(_is_pinned(".".join(filter(None, (name, child))), materials.pins) for name in running)
    if pinned < len(running):
        kind = edit.function.class_name or type(materials.model.get_submodule(running[0])).__name__
        yield f"applies to all {len(running)} instances of {kind}, {pinned} of them in the set"


def _is_pinned(name: str, pins: Iterable[Pin]) -> bool:
    """Whether a module runs in FP32 with these pins, by itself or with one that holds it."""
    of_modules = [pin for pin in pins if pin.source is None]
    return any(
        pin.module == name or (not pin.own and (not pin.module or name.startswith(f"{pin.module}.")))
        for pin in of_modules
    )


def _first_that_works(pin: Pin, materials: Materials, ways: Sequence[Way]) -> tuple[list[Edit], list[Refused]]:
    """The edits of the first way that all of them can be made in, with what was refused in those before told."""
    refused: list[Refused] = []
    narrower: list[str] = []
    for way in ways:
        edits = list(way(pin, materials))
        reasons = applied(edits, materials)[1]
        if edits and not reasons:
            return [replace(edit, notes=(*narrower, *edit.notes)) for edit in edits], []
        refused += reasons
        narrower += [reason for edit in edits for reason in why_not(edit, materials)]
    return [], refused or [Refused(0, f"{pin.name or 'the root'}: no code of yours makes or calls it")]


def _merged(edits: Sequence[Edit]) -> Iterator[Edit]:
    """Pins of several instances of a class come to the same edit; lines of one function to one, or to the whole."""
    whole = {edit.function for edit in edits if isinstance(edit.source, FunctionPin)}
    by_place: dict[tuple[object, ...], list[Edit]] = {}
    for edit in edits:
        place = ("function", edit.function) if edit.function in whole else _place(edit)
        by_place.setdefault(place, []).append(edit)
    for same in by_place.values():
        first = next((edit for edit in same if isinstance(edit.source, FunctionPin)), same[0])
        pins = tuple(dict.fromkeys(pin for edit in same for pin in edit.pins))
        notes = tuple(dict.fromkeys(note for edit in same for note in edit.notes))
        if isinstance(first.source, StatementPin):
            statements = [edit.source for edit in same if isinstance(edit.source, StatementPin)]
            lines = sorted({line for source in statements for line in source.lines})
            texts = {line: text for source in statements for line, text in source.texts.items()}
            source = replace(first.source, lines=tuple(lines), texts=texts)
            first = replace(first, title=lines_title(first.file, lines), source=source)
        yield replace(first, pins=pins, notes=notes)


def _place(edit: Edit) -> tuple[object, ...]:
    match edit.source:
        case StatementPin(function=function):
            return edit.file, "lines", edit.function or function
        case CallPin(function=function, callee=callee):
            return edit.file, "call", function, callee
    return edit.file, "helper", edit.pins
