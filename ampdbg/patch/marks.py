"""From pins to the statements of a file that they mean, and what is known of the names in each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import libcst as cst

from ampdbg.patch.modes import TensorNames
from ampdbg.patch.pieces import Mark, entries_of
from ampdbg.patch.source_pins import CallPin, NamesSeen, Refused, StatementPin
from ampdbg.patch.steps import value_of
from ampdbg.source.bindings import Bindings
from ampdbg.source.expressions import assigned_codes, canonical, code_of, find
from ampdbg.source.imports import dotted
from ampdbg.source.source_file import EditError, Line, Located, Place, SourceMap, functions_in, parts_of

LinePin = StatementPin | CallPin


@dataclass(frozen=True)
class Off:
    """A pinned line under which autocast is off already, and what holds FP32 there by then."""

    mark: Mark
    made: frozenset[str]


@dataclass
class Marks:
    """Pinned lines by the ``id`` of their nodes: those to put in a block, and those ``off`` that stand in one.

    ``pins`` are those of a function, by the ``id`` of its node (of None: the module's own code).
    """

    lines: dict[int, Mark] = field(default_factory=dict)
    off: dict[int, Off] = field(default_factory=dict)
    pins: dict[int, Sequence[LinePin]] = field(default_factory=dict)
    refused: list[Refused] = field(default_factory=list)

    def names_on(self, span: range, bindings: Bindings) -> TensorNames:
        """What the pins of a function know of the names on its lines."""
        return _names(self.pins[id(bindings.function)], span, bindings)


def marks_of(pins: Iterable[LinePin], source: SourceMap, text: str, left_out: Sequence[cst.FunctionDef]) -> Marks:
    """The marks of all pins but those in the functions ``left_out``; what a pin names and is not there is refused."""
    marks = Marks()
    lines = re.split(r"\r\n|\r|\n", text)
    pinned: list[tuple[LinePin, int, Located]] = []
    for pin in pins:
        for number in _lines_of(pin, source, marks):
            try:
                located = _located(pin, number, source, lines)
            except EditError as error:
                marks.refused.append(Refused(number, str(error)))
            else:
                if not any(function is done for function in located.place.functions for done in left_out):
                    pinned.append((pin, number, located))
    for pin, number, located in pinned:
        together = [other for other, _, place in pinned if place.place.function is located.place.function]
        numbers = {other for _, other, place in pinned if place.line is located.line}
        _mark(marks, pin, number, located, source, together, _left_alone(located.line, numbers, source))
    return marks


def _left_alone(line: Line, numbers: set[int], source: SourceMap) -> frozenset[int]:
    """The entries of a literal over several lines that no pinned line is of; none where each has one, or none has."""
    statement = line.body[0] if isinstance(line, cst.SimpleStatementLine) else line
    entries = entries_of(value_of(statement))
    left = [entry for entry in entries if numbers.isdisjoint(source.span(entry))]
    return frozenset(id(entry) for entry in left) if len(left) < len(entries) else frozenset()


def _lines_of(pin: LinePin, source: SourceMap, marks: Marks) -> Sequence[int]:
    if pin.lines or isinstance(pin, StatementPin):
        return sorted(set(pin.lines))
    callee = canonical(pin.callee)
    calls = (call for call in find(source.module, cst.Call) if code_of(call.func) == callee)
    found = sorted({source.positions[call].start.line for call in calls} & set(_lines_in(pin.function, source)))
    if not found:
        marks.refused.append(Refused(0, f"{pin.callee} is not called in {pin.function}"))
    return found


def _lines_in(function: str, source: SourceMap) -> Iterator[int]:
    asked = parts_of(function)
    for qualname, node in functions_in(source.module):
        if asked in (qualname, qualname[-1:]):
            yield from source.span(node)


def _located(pin: LinePin, number: int, source: SourceMap, lines: Sequence[str]) -> Located:
    located = source.at(number)
    now, then = lines[number - 1].strip(), pin.texts.get(number, "").strip()
    if then and now != then:
        raise EditError(f"the file has changed since it was run: the line was `{then}` and is `{now}`; run it again")
    if not located.place.is_in(pin.function):
        where = ".".join(located.place.qualname) or "no function"
        raise EditError(f"the file has changed since it was run: the line is in {where}, not in {pin.function}")
    if (function := located.place.function) is not None and any(_is_scripted(item) for item in function.decorators):
        raise EditError(f"{function.name.value} is scripted, and TorchScript has no such block")
    return located


def _is_scripted(decorator: cst.Decorator) -> bool:
    return "jit.script" in dotted(decorator.decorator)


def _mark(
    marks: Marks,
    pin: LinePin,
    number: int,
    located: Located,
    source: SourceMap,
    together: Sequence[LinePin],
    left: frozenset[int],
) -> None:
    place, key = located.place, id(located.line)
    bindings = Bindings(source.module, place.function)
    marks.pins[id(place.function)] = together
    new = Mark(
        number,
        _names(together, located.span, bindings),
        frozenset({canonical(pin.callee)}) if isinstance(pin, CallPin) else frozenset(),
        operations=isinstance(pin, StatementPin),
        device_type=pin.device_type,
        left=left,
    )
    if place.off is not None:
        marks.off[key] = Off(new, _made_before(located, place, source))
    elif (old := marks.lines.get(key)) is not None:
        marks.lines[key] = replace(
            old,
            callees=old.callees | new.callees,
            operations=old.operations or new.operations,
            device_type=old.device_type or new.device_type,
        )
    else:
        marks.lines[key] = new


def _made_before(located: Located, place: Place, source: SourceMap) -> frozenset[str]:
    """What the region assigns in front of the line: FP32, as it is computed there."""
    if place.off is None:
        return frozenset()
    before = (line for line in find(place.off.body, cst.SimpleStatementLine) if source.span(line)[-1] < located.span[0])
    return frozenset().union(*(assigned_codes(line) for line in before))


def _names(pins: Sequence[LinePin], span: range, bindings: Bindings) -> TensorNames:
    seen = [names for pin in pins for names in (pin.half_names, pin.full_names) if isinstance(names, Mapping)]
    # On lines that no trace saw, what it saw on the others counts.
    lines = {number for names in seen for number in names if number in span} or {n for names in seen for n in names}
    half = {canonical(code) for pin in pins for code in _on_lines(pin.half_names, lines)}
    full = {canonical(code) for pin in pins for code in _on_lines(pin.full_names, lines)}
    is_traced = any(pin.half_names or pin.full_names for pin in pins)
    return TensorNames(frozenset(half), frozenset(full - half), is_traced, bindings)


def _on_lines(names: NamesSeen, lines: set[int]) -> Iterator[str]:
    if not isinstance(names, Mapping):
        yield from names
        return
    for number in names.keys() & lines:
        yield from names[number]
