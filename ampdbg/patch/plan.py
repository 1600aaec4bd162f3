"""From pins to a patch: for each the smallest edit of the user's own code that the code allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ampdbg.patch.edits import edit_source
from ampdbg.patch.file_edits import FileEdit
from ampdbg.patch.functions import modules_running
from ampdbg.patch.placements import (
    WAYS,
    Materials,
    Placement,
    Way,
    layers_of_one_tensor,
    lines_title,
    with_helper,
)
from ampdbg.patch.source_pins import CallPin, FunctionPin, Refused, StatementPin
from ampdbg.pinning.pin_set import tied_together
from ampdbg.record.pins import PatchUnit, Pin

__all__ = ["WAYS", "FileEdit", "Materials", "Patch", "layers_of_one_tensor", "planned", "wider_than"]

LONG = 20
"""A longer edit is passed over where another of the user's code takes so many lines fewer."""

FEW = 2
"""So many modules that are not pinned may run in FP32 with those that are, if these are no more than they."""


@dataclass(frozen=True)
class Patch:
    """The edits of all files together. ``without`` has them for each unit's title with that one unit left out."""

    edits: tuple[FileEdit, ...]
    units: tuple[PatchUnit, ...]
    without: Mapping[str, tuple[FileEdit, ...]]
    refused: tuple[Refused, ...] = ()


@dataclass(frozen=True)
class Sharing:
    """How many modules run the code that an edit changes, of which class, and how many of them are pinned."""

    kind: str
    running: int
    pinned: int

    @property
    def is_wide(self) -> bool:
        """Whether the edit takes many more modules into FP32 than the set holds."""
        return self.running - self.pinned > max(FEW, self.pinned)

    def __str__(self) -> str:
        return f"applies to all {self.running} instances of {self.kind}, {self.pinned} of them in the set"


def planned(materials: Materials, ways: Sequence[Way] | None = None) -> Patch:
    """The patch for the pins.

    Each pin is edited in the first of ``ways`` that the code allows, unless another is much smaller or runs many
    fewer modules in FP32; by default these are :data:`WAYS`'s first. What none allows is in ``refused``.
    """
    chosen: list[Placement] = []
    refused: list[Refused] = []
    for pin in materials.pins:
        placements, reasons = _best(pin, materials, WAYS[0] if ways is None else ways)
        chosen += placements
        refused += reasons
    chosen = list(_merged(chosen))
    parts = _parts(chosen, materials)
    units = tuple(_unit(part, materials) for part in parts)
    without = {_title(part): _applied([one for one in chosen if one not in part], materials)[0] for part in parts}
    edits, more = _applied(chosen, materials)
    return Patch(edits, units, without, (*refused, *more))


def wider_than(narrower: Patch, why: str, patch: Patch) -> Patch:
    """The patch, with a note at each unit that stands in for others of a narrower one: ``why`` that one failed."""
    units = []
    for unit in patch.units:
        before = [one.title for one in narrower.units if not set(one.pins).isdisjoint(unit.pins)]
        note = f"Editing {' and '.join(before)} alone was not enough: {why}"
        units.append(unit if unit.title in before or not before else replace(unit, notes=(*unit.notes, note)))
    return replace(patch, units=tuple(units))


def _best(pin: Pin, materials: Materials, ways: Sequence[Way]) -> tuple[list[Placement], list[Refused]]:
    """The placements of one way, and what was refused where there is none."""
    narrow: list[list[Placement]] = []
    wide: list[list[Placement]] = []
    refused: list[Refused] = []
    notes: list[str] = []
    for way in ways:
        placements = list(way(pin, materials))
        reasons = [reason for place in placements for reason in place.refused]
        refused += reasons
        if not placements or reasons:
            notes += [note for place in placements for note in place.why_not]
            continue
        reach = [
            f"{place.title} {each}" for place in placements if (each := _sharing(place, materials)) and each.is_wide
        ]
        (wide if reach else narrow).append([replace(place, notes=(*notes, *place.notes)) for place in placements])
        notes += reach
        if not reach and _length(placements) <= LONG:
            break
    if not narrow and not wide:
        return [], refused or [Refused(0, f"no code of yours makes or calls {pin.name or 'the root module'}")]
    return _shortest(narrow or wide), []


def _shortest(possible: Sequence[list[Placement]]) -> list[Placement]:
    """The first, or one of the user's code that is much shorter."""
    best = possible[0]
    for other in possible[1:]:
        if all(place.source is not None for place in other) and _length(other) + LONG < _length(best):
            best = other
    return best


def _length(placements: Iterable[Placement]) -> int:
    return sum(place.length for place in placements)


def _sharing(place: Placement, materials: Materials) -> Sharing | None:
    """What modules run the code that is edited; None where that is not known."""
    if place.function is None:
        return None
    running = modules_running(place.function, materials.model)
    if not running:
        return None
    modules = dict(materials.model.named_modules())
    child = place.source.callee.rpartition(".")[2] if isinstance(place.source, CallPin) else ""
    called = [".".join(filter(None, (name, child))) for name in running]
    # What a library call calls is no child.
    pinned = sum(_is_pinned(name, materials.pins) for name in (called if called[0] in modules else running))
    return Sharing(place.function.class_name or type(modules[running[0]]).__name__, len(running), pinned)


def _is_pinned(name: str, pins: Iterable[Pin]) -> bool:
    """Whether a module runs in FP32 with these pins, by itself or with one that holds it."""
    of_modules = [pin for pin in pins if pin.source is None]
    return any(
        pin.module == name or (not pin.own and (not pin.module or name.startswith(f"{pin.module}.")))
        for pin in of_modules
    )


def _merged(placements: Sequence[Placement]) -> Iterator[Placement]:
    """Pins of several instances of a class come to the same edit; lines of one function to one, or to the whole."""
    whole = {place.function for place in placements if isinstance(place.source, FunctionPin)}
    by_target: dict[tuple[object, ...], list[Placement]] = {}
    for place in placements:
        target = ("function", place.function) if place.function in whole else _target(place)
        by_target.setdefault(target, []).append(place)
    for same in by_target.values():
        first = next((place for place in same if isinstance(place.source, FunctionPin)), same[0])
        pins = tuple(dict.fromkeys(pin for place in same for pin in place.pins))
        notes = tuple(dict.fromkeys(note for place in same for note in place.notes))
        if isinstance(first.source, StatementPin):
            statements = [place.source for place in same if isinstance(place.source, StatementPin)]
            lines = sorted({line for source in statements for line in source.lines})
            source = replace(first.source, lines=tuple(lines))
            first = replace(first, title=lines_title(first.file, lines), source=source)
        yield replace(first, pins=pins, notes=notes)


def _target(place: Placement) -> tuple[object, ...]:
    match place.source:
        case StatementPin(function=function):
            return place.file, "lines", place.function or function
        case CallPin(function=function, callee=callee):
            return place.file, "call", function, callee
    return place.file, "helper", place.pins


def _parts(placements: Sequence[Placement], materials: Materials) -> list[list[Placement]]:
    """The placements in parts that can be left out: of tied modules, which were pinned together, one may do alone."""
    names = [pin.name for pin in materials.pins if pin.source is None]
    tied = [part for part in tied_together(names, materials.model) if len(part) > 1]
    parts: list[tuple[set[str], list[Placement]]] = []
    for place in placements:
        ties = {name for part in tied if not set(part).isdisjoint(place.pins) for name in part}
        same = [part for part in parts if part[0] & ties]
        parts = [part for part in parts if part not in same]
        parts.append((ties.union(*(part[0] for part in same)), [*(one for part in same for one in part[1]), place]))
    return [part for _, part in parts]


def _unit(part: Sequence[Placement], materials: Materials) -> PatchUnit:
    pins = tuple(pin for place in part for pin in place.pins)
    notes = [note for place in part for note in (*place.notes, *_sharing_note(place, materials))]
    return PatchUnit(_title(part), pins, tuple(dict.fromkeys(notes)))


def _sharing_note(place: Placement, materials: Materials) -> Iterator[str]:
    """That the code which is edited runs for modules beside those that are pinned."""
    sharing = _sharing(place, materials)
    if sharing is not None and sharing.pinned < sharing.running:
        yield str(sharing)


def _title(part: Sequence[Placement]) -> str:
    return " and ".join(place.title for place in part)


def _applied(placements: Sequence[Placement], materials: Materials) -> tuple[tuple[FileEdit, ...], tuple[Refused, ...]]:
    """All edits together, file by file; the helper's call comes last, for it moves the lines below it."""
    files: list[FileEdit] = []
    refused: list[Refused] = []
    for file in dict.fromkeys(place.file for place in placements):
        before = Path(file).read_bytes()
        here = [place for place in placements if place.file == file]
        edited = edit_source(before, [place.source for place in here if place.source is not None])
        here_refused = list(edited.refused)
        names = [name for place in here if place.source is None for name in place.pins]
        if names:
            edited = with_helper(edited.source, names, materials)
            here_refused += edited.refused
        refused += (replace(one, file=file) for one in here_refused)
        if edited.source != before:
            files.append(FileEdit(Path(file), before, edited.source))
    return tuple(files), tuple(refused)
