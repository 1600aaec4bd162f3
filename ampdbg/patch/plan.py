"""Planning of a patch: for each pin, the smallest edit that the user's code allows.

An edit wraps lines of code, wraps the module's call, or pins the module by name.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType

import torch

from ampdbg.costs.step import StepCosts
from ampdbg.patch.by_name import edit_maker
from ampdbg.patch.constants import edit_constants
from ampdbg.patch.edits import Edited, LinePin, Refused, edit_source
from ampdbg.patch.file_edits import FileEdit, Patched, bytes_by_path, counterpart, lines_title
from ampdbg.patch.own_lines import MOST_GENERATIONS, OwnLines, UsersCall, library_lines, users_lines
from ampdbg.patch.statements import NOTHING_COMPUTED
from ampdbg.pinning.pin_set import grouped_by_shared_key, tied_together
from ampdbg.probes.half_names import LineNames, NamesByLine
from ampdbg.probes.makings import Constructions
from ampdbg.quantities import module_name, percent
from ampdbg.record.findings import Source
from ampdbg.record.pins import EVERYTHING, OWN, PatchUnit, Pin, in_words, is_pinned, within
from ampdbg.source.ownership import is_users_file
from ampdbg.source.source_file import EditError, read_source

LITTLE = 0.1
"""An edit may move this share of FLOPs in unpinned modules to FP32, or as much as in pinned ones."""


@dataclass(frozen=True)
class PlanInputs:
    """The inputs of a plan: the model with its pins and costs, the lines to wrap, and the half tensors' names there."""

    model: torch.nn.Module
    pins: tuple[Pin, ...]
    lines: OwnLines
    names: NamesByLine
    makings: Constructions
    costs: StepCosts

    @functools.cached_property
    def edited(self) -> Callable[[str, tuple[LinePin, ...]], Edited]:
        """A cached function that returns a file with the edits of some pins."""

        @functools.cache
        def edited(file: str, sources: tuple[LinePin, ...]) -> Edited:
            seen = {line: found for (other, line), found in self.names.items() if other == file}
            return edit_source(Path(file).read_bytes(), sources, seen)

        return edited

    @property
    def module_pins(self) -> list[str]:
        """The names of the pins of modules, and of their own lines."""
        return [pin.name for pin in self.pins if pin.source is None]


@dataclass(frozen=True)
class Placement:
    """One edit for one or more pins; ``refused`` holds the reasons if it cannot be made.

    ``source`` is None for a pin by name, which the helper applies. ``method`` is the qualified name of the edited
    method of the model. ``sharing`` says how many modules run it and the cost, if not all are pinned. ``is_wide`` is
    True if that costs much more than the pins. ``notes`` are for the reader of the patch.
    """

    title: str
    file: str
    source: LinePin | None
    pins: tuple[str, ...]
    method: str = ""
    sharing: str = ""
    is_wide: bool = False
    notes: tuple[str, ...] = ()
    refused: tuple[Refused, ...] = ()


PlacementRule = Callable[[Pin, PlanInputs], Iterator[Placement]]


def lines_that_may_be_edited(pins: Iterable[Pin], lines: OwnLines, model: torch.nn.Module) -> set[tuple[str, int]]:
    """Return the files and lines of all functions in which the pins may be edited, including their callers."""
    pins = tuple(pins)
    found = {(file, line) for pin in pins for (file, _), some in lines.lines_to_wrap(pin).items() for line in some}
    makers = {maker[:2] for pin in pins for some in lines.generations_of(pin) for maker in some}
    calls = [lines.calls[maker] for maker in makers if maker in lines.calls]
    calls += (call for pin in pins for call in lines.calls_of(pin))
    calls += filter(None, (call_of(pin.module, model) for pin in pins if pin.source is None))
    return found | makers | {(file, line) for file, call in calls for line in call.lines}


def _own_code(pin: Pin, materials: PlanInputs) -> Iterator[Placement]:
    """Place a pin at the lines that overflow or nearly do, inside or outside of modules."""
    is_users = not library_lines(pin) and all(site.source is not None for site in pin.sites)
    if not (is_users and _stands_in_lines(pin, materials)):
        return
    wrong = {line[:2] for line in users_lines(pin)}
    for (file, function), near in materials.lines.lines_to_wrap(pin).items():
        refused = {one.line for one in materials.edited(file, (LinePin(function, tuple(near)),)).refused}
        # A line only close to the limit may stay unedited.
        lines = tuple(line for line in near if line not in refused or (file, line) in wrong)
        yield _decided(lines_title(file, lines), pin, file, LinePin(function, lines), materials)


def _library_call(pin: Pin, materials: PlanInputs) -> Iterator[Placement]:
    """Place a pin at the user's call of a library function in which a line overflows."""
    for call in materials.lines.calls_of(pin) if _stands_in_lines(pin, materials) else ():
        yield _around(call, pin, materials)


def _around(users: UsersCall, pin: Pin, materials: PlanInputs) -> Placement:
    file, call = users
    return _decided(f"{call.callee}() on {lines_title(file, call.lines)}", pin, file, call, materials)


def _at_producers(pin: Pin, materials: PlanInputs, *, before: slice) -> Iterator[Placement]:
    """Place a pin, without casts to half, at lines ``before`` it that produced its inputs, or at their calls.

    ``before`` selects the generations of producers. A value that was rounded to half there cannot be repaired by a cast
    in the pin's own lines: ``1 - p`` is 0 once p has rounded to 1.
    """
    generations = materials.lines.generations_of(pin) if _stands_in_lines(pin, materials) else []
    for file, line, function in itertools.chain(*(generations[before] or generations[-1:])):
        place = _decided(
            lines_title(file, [line]), pin, file, LinePin(function, (line,), casts_to_fp32=True), materials
        )
        if not place.refused:
            yield place
        elif (file, line) in materials.lines.calls:
            yield _around(materials.lines.calls[file, line], pin, materials)


def _stands_in_lines(pin: Pin, materials: PlanInputs) -> bool:
    """True if the pin covers lines, or a module of a user's class without children, which runs nothing else."""
    module = materials.model.get_submodule(pin.module)
    forward = next(functions_run(type(module), "forward"), None)
    is_users = forward is not None and is_users_file(forward.__code__.co_filename)
    return bool(pin.source) or pin.own or (is_users and not list(module.children()))


def _call(pin: Pin, materials: PlanInputs) -> Iterator[Placement]:
    """Place a pin at the module's call in its parent's forward, if that is user code."""
    found = call_of(pin.module, materials.model) if pin.source is None else None
    # In an own-lines pin no trial ran the children in FP32.
    leaves_children = pin.own and list(materials.model.get_submodule(pin.module).children())
    if found is not None and not leaves_children:
        file, call = found
        title = f"{call.callee}() in {call.function} of {Path(file).name}"
        yield _decided(title, pin, file, call, materials)


def _helper(pin: Pin, materials: PlanInputs) -> Iterator[Placement]:
    """Place a pin by the module's name in a helper in the file that creates the model."""
    making = None if pin.source else materials.makings.of(materials.model, (pin.name,))
    if making is not None:
        edited = _with_helper(Path(making.file).read_bytes(), (pin.name,), materials)
        title = in_words(pin.name, type(materials.model).__name__)
        refused = _in_file(making.file, edited.refused)
        yield Placement(f"{title}, by name", making.file, None, (pin.name,), refused=refused)


GENERATIONS = (*(slice(number, number + 1) for number in range(MOST_GENERATIONS + 1)), slice(None))

WAYS: tuple[tuple[PlacementRule, ...], ...] = (
    (_own_code, _library_call, _call, _helper),
    *((functools.partial(_at_producers, before=before), _call, _helper) for before in GENERATIONS),
    (_call, _helper),
    (_helper,),
)
"""The placement rules, narrowest first. The planner goes to the next tuple if a patch does not cure the step."""


def _decided(title: str, pin: Pin, file: str, source: LinePin, materials: PlanInputs) -> Placement:
    """Return the placement with its refusals and sharing."""
    refused = _in_file(file, materials.edited(file, (source,)).refused)
    place = Placement(title, file, source, (pin.name,), refused=refused)
    function = None if refused else method_at(file, source.lines[0], materials.model)
    if function is None:
        return place
    running, lines = _modules_edited(function, file, source, materials)
    pinned = [name for name in running if is_pinned(name.removesuffix(OWN), materials.module_pins)]
    # A producer's line may run in modules that are not pinned, of which one must run it.
    edited = running, pinned or running[:1]
    all_cost, own_cost = (materials.costs.share_of_flops(names, lines) for names in edited)
    kind = function.__qualname__.split(".")[-2:][0]
    sharing = (
        f"applies to all {len(running)} instances of {kind}, {len(pinned)} of them in the set: "
        f"{percent(all_cost - own_cost)} more of the step's FLOPs in FP32"
    )
    return replace(
        place,
        method=function.__qualname__,
        sharing=sharing if max(len(pinned), 1) < len(running) else "",
        is_wide=all_cost - own_cost > max(LITTLE, own_cost),
    )


def _in_file(file: str, refused: Iterable[Refused]) -> tuple[Refused, ...]:
    return tuple(replace(one, file=file) for one in refused)


def _with_helper(source: bytes, names: Sequence[str], materials: PlanInputs) -> Edited:
    """Add the helper that pins modules by name to the file, possibly edited before, that creates the model."""
    making = materials.makings.of(materials.model, names)
    if making is None:
        return Edited(source, (Refused(0, "no one line creates the model; call the helper by hand"),))
    line = counterpart(making.line, Path(making.file).read_bytes(), source)
    if not line:
        reason = "the line that creates the model is edited already; call the helper by hand"
        return Edited(source, (Refused(making.line, reason),))
    return edit_maker(source, replace(making, line=line), [within(making.path, name) for name in names])


@dataclass(frozen=True)
class Patch:
    """The edits of all files. ``without`` maps each unit's title to the patch without that unit.

    ``unneeded_refusals`` holds the refusals of pins that no trial has shown to be needed.
    """

    edits: tuple[FileEdit, ...]
    units: tuple[PatchUnit, ...]
    without: Mapping[str, Patched]
    refused: tuple[Refused, ...] = ()
    unneeded_refusals: tuple[Refused, ...] = ()
    moves_constants: bool = False


def planned(materials: PlanInputs, ways: Sequence[PlacementRule] = WAYS[0], unneeded: Collection[str] = ()) -> Patch:
    """Return the patch for the pins.

    Each pin takes the first of ``ways`` that the code allows and that adds few other modules to FP32. The first wide
    way is the fallback. Pins without a way go to ``refused``, or to ``unneeded_refusals`` if no trial needed them.
    Units titled in ``unneeded`` are omitted; the proof decides if the rest is enough.
    """
    chosen: list[Placement] = []
    refused: list[Refused] = []
    not_needed: list[Refused] = []
    for pin in materials.pins:
        placements, reasons = _best(pin, materials, ways)
        chosen += placements
        (refused if pin.without else not_needed).extend(reasons)
    chosen = list(_merged(chosen, materials))
    parts = [part for part in _parts(chosen, materials) if _title(part) not in unneeded]
    chosen = [place for part in parts for place in part]
    units = tuple(map(_unit, parts))
    without = {_title(part): _rest([one for one in chosen if one not in part], materials) for part in parts}
    edits, more = _applied(chosen, materials)
    return Patch(edits, units, without, (*refused, *more), tuple(not_needed))


def constants_kept(constants: Sequence[Source], materials: PlanInputs) -> Patch:
    """Return a patch that keeps constants of user code within the range of half and pins nothing."""
    lines: dict[str, dict[int, None]] = {}
    for one in constants:
        lines.setdefault(one.file, {})[one.line] = None
    edits: list[FileEdit] = []
    refused: list[Refused] = []
    for file, here in lines.items():
        before = Path(file).read_bytes()
        half = {text for line in here for text in materials.names.get((file, line), LineNames()).half}
        edited = edit_constants(before, here, half)
        refused += _in_file(file, edited.refused)
        edits.append(FileEdit(Path(file), before, edited.source))
    title = " and ".join(f"the constant on {lines_title(file, list(here))}" for file, here in lines.items())
    units = (PatchUnit(title, ()),)
    return Patch(tuple(edits), units, {title: Patched()}, tuple(refused), moves_constants=True)


def wider_than(narrower: Patch, why: str, patch: Patch) -> Patch:
    """Return the patch with a note at each unit that replaces units of a narrower one: ``why`` that one failed."""
    units = []
    for unit in patch.units:
        before = [one.title for one in narrower.units if not set(one.pins).isdisjoint(unit.pins)]
        note = f"Editing {' and '.join(before)} alone was not enough: {why}"
        units.append(unit if unit.title in before or not before else replace(unit, notes=(*unit.notes, note)))
    return replace(patch, units=tuple(units))


def _best(pin: Pin, materials: PlanInputs, ways: Sequence[PlacementRule]) -> tuple[list[Placement], list[Refused]]:
    """Return the placements of the best way, or the refusals if there is none."""
    wide: list[Placement] = []
    refused: list[Refused] = []
    notes: list[str] = []
    for way in ways:
        placements = list(way(pin, materials))
        why_not = [(place.title, one) for place in placements for one in place.refused]
        refused += [one for _, one in why_not]
        # Where a line computes nothing, its callee is edited instead.
        why_not = [(title, one) for title, one in why_not if one.reason != NOTHING_COMPUTED]
        notes += dict.fromkeys(f"{title} cannot be edited: {one.reason}" for title, one in why_not)
        if not placements or any(place.refused for place in placements):
            continue
        placements = [replace(place, notes=tuple(notes)) for place in placements]
        beyond = [f"{place.title} {place.sharing}" for place in placements if place.is_wide]
        if not beyond:
            return placements, []
        wide = wide or placements
        notes += beyond
    what = f"line {pin.source.line}" if pin.source else module_name(pin.name)
    why_none = f"no line of your code is known to create or call {what}: a copied or unpickled model has none"
    return wide, [] if wide else refused or [Refused(0, why_none)]


def _modules_edited(
    function: FunctionType, file: str, source: LinePin, materials: PlanInputs
) -> tuple[list[str], set[tuple[str, int]]]:
    """Return the pins that the edit of a method amounts to: all its instances' own lines, or their called children.

    Also return the lines that then run in FP32: the edited statements, or any that the children run.
    """
    modules = dict(materials.model.named_modules())
    # A class runs this method rather than an override.
    kinds = {kind for kind in map(type, modules.values()) if function in functions_run(kind, function.__name__)}
    running = [path for path, module in modules.items() if type(module) in kinds]
    child = source.callee.rpartition(".")[2]
    called = [f"{name}.{child}".removeprefix(".") for name in running]
    # The callee in a library call is not a child module.
    if {*called} <= modules.keys():
        return called, {line for _, line in materials.costs.flops}
    located = read_source(Path(file).read_bytes())
    return [name + OWN for name in running], {(file, one) for line in source.lines for one in located.at(line).span}


def _merged(placements: Sequence[Placement], materials: PlanInputs) -> Iterator[Placement]:
    """Merge the pins of several instances into one edit, and lines of one function into one edit for each block."""
    by_target: dict[tuple[object, ...], list[Placement]] = {}
    for place in placements:
        source = place.source
        target = source and (place.method or source.function, source.callee)
        by_target.setdefault((place.file, target or place.pins), []).append(place)
    for same in by_target.values():
        first, pinned = same[0], same[0].source
        if pinned is None:
            yield first
            continue
        pins = tuple(dict.fromkeys(pin for place in same for pin in place.pins))
        notes = tuple(dict.fromkeys(note for place in same for note in place.notes))
        lines = tuple(sorted({line for place in same if place.source for line in place.source.lines}))
        on = f"{pinned.callee}() on " if pinned.callee else ""
        for part in _blocks(first.file, replace(pinned, lines=lines), materials):
            title = first.title if part == pinned.lines else on + lines_title(first.file, part)
            yield replace(first, title=title, pins=pins, notes=notes, source=replace(pinned, lines=part))


def _blocks(file: str, source: LinePin, materials: PlanInputs) -> list[tuple[int, ...]]:
    """Return the lines of a pin, grouped by block."""
    blocks, found = materials.edited(file, (source,)).blocks, dict[int, list[int]]()
    for line in source.lines:
        found.setdefault(blocks.get(line, next(reversed(found), line)), []).append(line)
    return [tuple(lines) for lines in found.values()]


def _parts(placements: Sequence[Placement], materials: PlanInputs) -> tuple[tuple[Placement, ...], ...]:
    """Group the placements into parts that can be omitted; tied modules, pinned together, are one part."""
    tied = [part for part in tied_together(materials.module_pins, materials.model) if len(part) > 1]
    ties = {name: part for part in tied for name in part}
    return grouped_by_shared_key(placements, lambda place: (ties[pin] for pin in place.pins if pin in ties))


def _unit(part: Sequence[Placement]) -> PatchUnit:
    notes = dict.fromkeys(note for place in part for note in (*place.notes, place.sharing) if note)
    return PatchUnit(_title(part), tuple(pin for place in part for pin in place.pins), tuple(notes))


def _title(part: Sequence[Placement]) -> str:
    return " and ".join(place.title for place in part)


def _rest(placements: Sequence[Placement], materials: PlanInputs) -> Patched:
    edits, _ = _applied(placements, materials)
    lines, _ = _applied([place for place in placements if place.source is not None], materials)
    names = tuple(name or EVERYTHING for place in placements if place.source is None for name in place.pins)
    return Patched(bytes_by_path(edits), for_live_model=Patched(bytes_by_path(lines), pins=names))


def _applied(
    placements: Sequence[Placement], materials: PlanInputs
) -> tuple[tuple[FileEdit, ...], tuple[Refused, ...]]:
    """Return all edits together, by file. The helper's call comes last because it moves the lines below it."""
    files: list[FileEdit] = []
    refused: list[Refused] = []
    for file in dict.fromkeys(place.file for place in placements):
        before = Path(file).read_bytes()
        here = [place for place in placements if place.file == file]
        edited = materials.edited(file, tuple(place.source for place in here if place.source is not None))
        here_refused = list(edited.refused)
        names = [name for place in here if place.source is None for name in place.pins]
        if names:
            edited = _with_helper(edited.source, names, materials)
            here_refused += edited.refused
        refused += _in_file(file, here_refused)
        if edited.source != before:
            files.append(FileEdit(Path(file), before, edited.source))
    return tuple(files), tuple(refused)


# Methods of module classes: which run, where, and what they call


def written(value: object) -> FunctionType | None:
    """Return the author's function of a method, property or decorated function; None for anything else."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    return inspect.unwrap(value) if isinstance(value, FunctionType) else None


def functions_run(kind: type, name: str) -> Iterator[FunctionType]:
    """Yield the functions that a class runs as its method ``name``: its own, and inherited functions that it calls."""
    for owner in kind.__mro__:
        function = written(vars(owner).get(name))
        if function is not None:
            yield function
        if name in vars(owner) and (function is None or name not in function.__code__.co_names):
            return  # it calls no inherited one, as `super().forward(x)` or `Block.forward(self, x)` would


def call_of(module: str, model: torch.nn.Module) -> UsersCall | None:
    """Return the calls of a module in its parent's ``forward``.

    Return None if it is not user code, or reaches the module indirectly: in a loop or through another function.
    """
    parent, _, child = module.rpartition(".")
    functions = functions_run(type(model.get_submodule(parent)), "forward") if child else ()
    for function in (one for one in functions if is_users_file(one.__code__.co_filename)):
        name, file = function.__qualname__, function.__code__.co_filename
        callee = f"{function.__code__.co_varnames[0]}.{child}"
        with contextlib.suppress(EditError, OSError):  # the file does not parse, or is gone
            if lines := read_source(Path(file).read_bytes()).calls_in(name, callee):
                return file, LinePin(name, lines, callee)
    return None


def method_at(file: str, line: int, model: torch.nn.Module) -> FunctionType | None:
    """Return the method of the model's classes that contains a statement."""
    with contextlib.suppress(EditError, OSError):
        located = read_source(Path(file).read_bytes()).at(line)
        owners = {owner for module in model.modules() for owner in type(module).__mro__}
        functions = (written(value) for owner in owners for value in vars(owner).values())
        here = (one for one in functions if one is not None and one.__code__.co_filename == file)
        return next((one for one in here if located.is_below(one.__qualname__)), None)
    return None
