"""From pins to the statements of a file that they mean, and what is known of the names in each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import libcst as cst

from ampdbg.patch.pieces import LineMark
from ampdbg.patch.regions import TensorNames
from ampdbg.patch.source_pins import CallPin, NamesSeen, Refused, StatementPin
from ampdbg.source.bindings import Bindings
from ampdbg.source.expressions import canonical
from ampdbg.source.imports import dotted
from ampdbg.source.source_file import EditError, Located, SourceFile

LinePin = StatementPin | CallPin


@dataclass
class Marks:
    """The pinned ``lines``, to put in a block, by the ``id`` of their nodes.

    ``pins`` are those of a function, by the ``id`` of its node (of None: the module's own code).
    """

    lines: dict[int, LineMark] = field(default_factory=dict)
    pins: dict[int, Sequence[LinePin]] = field(default_factory=dict)
    refused: list[Refused] = field(default_factory=list)

    def names_on(self, span: range, bindings: Bindings) -> TensorNames:
        """What the pins of a function know of the names on its lines."""
        return _names(self.pins[id(bindings.function)], span, bindings)


def marks_of(pins: Iterable[LinePin], source: SourceFile, left_out: Sequence[cst.FunctionDef]) -> Marks:
    """The marks of all pins but those in the functions ``left_out``; what a pin names and is not there is refused."""
    marks = Marks()
    pinned: list[tuple[LinePin, int, Located]] = []
    for pin in pins:
        for number in sorted(set(pin.lines)):
            try:
                located = _located(pin, number, source)
            except EditError as error:
                marks.refused.append(Refused(number, str(error)))
            else:
                if not any(function is done for function in located.place.functions for done in left_out):
                    pinned.append((pin, number, located))
    for pin, number, located in pinned:
        together = [other for other, _, place in pinned if place.place.function is located.place.function]
        _mark(marks, pin, number, located, source, together)
    return marks


def _located(pin: LinePin, number: int, source: SourceFile) -> Located:
    located = source.at(number)
    if not located.place.is_in(pin.function):
        where = ".".join(located.place.qualname) or "no function"
        raise EditError(f"the file has changed since the run: the line is in {where}, not in {pin.function}")
    if located.place.is_off:
        raise EditError("autocast is off there already; cast its half inputs with .float()")
    if (function := located.place.function) is not None and any(_is_scripted(item) for item in function.decorators):
        raise EditError(f"{function.name.value} is scripted, and TorchScript does not support such a block")
    return located


def _is_scripted(decorator: cst.Decorator) -> bool:
    return "jit.script" in dotted(decorator.decorator)


def _mark(
    marks: Marks,
    pin: LinePin,
    number: int,
    located: Located,
    source: SourceFile,
    together: Sequence[LinePin],
) -> None:
    place, key = located.place, id(located.line)
    bindings = Bindings(source.module, place.function)
    marks.pins[id(place.function)] = together
    new = LineMark(
        number,
        _names(together, located.span, bindings),
        frozenset({canonical(pin.callee)}) if isinstance(pin, CallPin) else frozenset(),
        operations=isinstance(pin, StatementPin),
    )
    if (old := marks.lines.get(key)) is not None:
        marks.lines[key] = replace(
            old,
            callees=old.callees | new.callees,
            operations=old.operations or new.operations,
        )
    else:
        marks.lines[key] = new


def _names(pins: Sequence[LinePin], span: range, bindings: Bindings) -> TensorNames:
    seen = [names for pin in pins for names in (pin.half_names, pin.full_names) if isinstance(names, Mapping)]
    # On lines that no trace saw, what it saw on the others counts.
    lines = {number for names in seen for number in names if number in span} or {n for names in seen for n in names}
    half = {canonical(code) for pin in pins for code in _on_lines(pin.half_names, lines)}
    full = {canonical(code) for pin in pins for code in _on_lines(pin.full_names, lines)}
    return TensorNames(frozenset(half), frozenset(full - half), bindings)


def _on_lines(names: NamesSeen, lines: set[int]) -> Iterator[str]:
    if not isinstance(names, Mapping):
        yield from names
        return
    for number in names.keys() & lines:
        yield from names[number]
