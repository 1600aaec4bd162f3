"""Where a pin can stand in the user's code: its lines, the forward around them, the call of the module, or its name."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ampdbg.config import Config
from ampdbg.config.targets import parse_target
from ampdbg.patch.by_name.helper import edit_factory, takes_one_tensor
from ampdbg.patch.edits import Edited, edit_source
from ampdbg.patch.functions import (
    SourceFunction,
    call_of,
    function_at,
    functions_run,
    lines_of,
    modules_running,
    parameters_of,
)
from ampdbg.patch.own_lines import OwnLines
from ampdbg.patch.source_pins import CallPin, FunctionPin, Refused, SourcePin, StatementPin
from ampdbg.probes.half_names import NamesByLine
from ampdbg.record.pins import Pin, in_words
from ampdbg.source.ownership import is_users_file


@dataclass(frozen=True)
class Materials:
    """What a plan is made from: the model, its pins, the lines to wrap, and what holds half tensors on them."""

    config: Config
    model: torch.nn.Module
    pins: tuple[Pin, ...]
    lines: OwnLines
    names: NamesByLine


@dataclass(frozen=True)
class Placement:
    """One edit for one or more pins, decided once: ``refused`` says why it cannot be made, if so.

    ``source`` is None for names in the helper's call, where the model is made. ``function`` is what it edits, where
    that is known; ``notes`` are for the reader of the patch, ``length`` counts the lines that it takes out or puts in.
    """

    title: str
    file: str
    source: SourcePin | None
    pins: tuple[str, ...]
    function: SourceFunction | None = None
    notes: tuple[str, ...] = ()
    refused: tuple[Refused, ...] = ()
    length: int = 0

    @property
    def why_not(self) -> tuple[str, ...]:
        """Why it cannot be made, for who reads a wider edit in its place."""
        reasons = dict.fromkeys(one.reason for one in self.refused)
        return tuple(f"{self.title} cannot be edited: {reason}" for reason in reasons)


Way = Callable[[Pin, Materials], Iterator[Placement]]


def lines_that_may_be_edited(pins: Iterable[Pin], lines: OwnLines, model: torch.nn.Module) -> set[tuple[str, int]]:
    """A line, by its file, of each function that a pin may be edited in: its own lines', its caller, its forward."""
    pins = tuple(pins)
    found = {(file, line) for pin in pins for (file, _), some in lines.of(pin).items() for line in some}
    found |= {(call.file, call.line) for pin in pins for call in lines.calls_of(pin)}
    names = {pin.module for pin in pins if pin.source is None}
    calls = [call for name in names if (call := call_of(name, model)) is not None]
    found |= {(call.function.file, line) for call in calls for line in call.lines}
    forwards = (next(functions_run(type(model.get_submodule(name)), "forward"), None) for name in names)
    return found | {(each.file, each.line) for each in forwards if each is not None and is_users_file(each.file)}


def _own_code(pin: Pin, materials: Materials) -> Iterator[Placement]:
    """The lines that go wrong, and those about to, in the module's own code or outside of any module."""
    if pin.module and not pin.own:
        return
    sources = [pin.source] if pin.source else [site.source for site in pin.sites]
    if not sources or not all(source is not None and is_users_file(source.file) for source in sources):
        return
    for (file, function), lines in materials.lines.of(pin).items():
        half, full = _names_in(file, materials.names)
        statement = StatementPin(function, tuple(lines), half, full)
        yield _decided(lines_title(file, lines), file, statement, (pin.name,), function_at(file, lines[0]))


def _half_parameters(function: SourceFunction, materials: Materials) -> tuple[str, ...]:
    """The parameters of a function that held half tensors."""
    keys = [(function.file, line) for line in lines_of(function)]
    seen = {name for key in keys if key in materials.names for name in materials.names[key].half}
    return tuple(name for name in parameters_of(function) if name in seen)


def _library_call(pin: Pin, materials: Materials) -> Iterator[Placement]:
    """The user's own call of an installed library's function in which a line goes wrong."""
    for call in materials.lines.calls_of(pin):
        half, full = _names_in(call.file, materials.names)
        source = CallPin(call.function, call.callee, (call.line,), half, full)
        title = f"{call.callee}() on line {call.line} of {Path(call.file).name}"
        yield _decided(title, call.file, source, (pin.name,), function_at(call.file, call.line))


def _forward(pin: Pin, materials: Materials) -> Iterator[Placement]:
    """The forward of the user's own class, where it is pinned with all that it calls, in all of its instances."""
    if pin.source or _leaves_children(pin, materials):
        return
    function = next(functions_run(type(materials.model.get_submodule(pin.module)), "forward"), None)
    if function is None or not is_users_file(function.file):
        return
    pinned = {other.module for other in materials.pins if not (other.source or _leaves_children(other, materials))}
    if set(modules_running(function, materials.model)) <= pinned:
        title = f"{function.qualname} in {Path(function.file).name}"
        pinned_whole = FunctionPin(function.qualname, _half_parameters(function, materials))
        yield _decided(title, function.file, pinned_whole, (pin.name,), function)


def _leaves_children(pin: Pin, materials: Materials) -> bool:
    """Whether the pin leaves child modules in half: an edit that takes them into FP32 is not what was tried."""
    return pin.own and any(True for _ in materials.model.get_submodule(pin.module).children())


def _call(pin: Pin, materials: Materials) -> Iterator[Placement]:
    """The call of the module in its parent's forward, where that is the user's own code."""
    if pin.source or _leaves_children(pin, materials):
        return
    call = call_of(pin.module, materials.model)
    if call is None:
        return
    file, where = call.function.file, call.function.qualname
    half, full = _names_in(file, materials.names)
    source = CallPin(where, call.callee, call.lines, half, full)
    title = f"{call.callee}() in {where} of {Path(file).name}"
    yield _decided(title, file, source, (pin.name,), call.function)


def _helper(pin: Pin, materials: Materials) -> Iterator[Placement]:
    """The helper, by the module's name, where the config's own file makes the model."""
    file = _file_that_makes_the_model(materials.config)
    if not is_users_file(file) or pin.source:
        return
    refused = _in_file(file, with_helper(Path(file).read_bytes(), (pin.name,), materials).refused)
    yield Placement(f"{in_words(pin.name)}, by name", file, None, (pin.name,), refused=refused)


WAYS: tuple[tuple[Way, ...], ...] = (
    (_own_code, _library_call, _forward, _call, _helper),
    (_forward, _call, _helper),
    (_helper,),
)
"""The narrowest first; each next one is for where the patch of the one before does not cure the step."""


def _decided(
    title: str,
    file: str,
    source: SourcePin,
    pins: tuple[str, ...],
    function: SourceFunction | None,
    notes: tuple[str, ...] = (),
) -> Placement:
    """The placement, with why it is refused or how many lines it takes."""
    before = Path(file).read_bytes()
    edited = edit_source(before, [source])
    matcher = difflib.SequenceMatcher(None, before.splitlines(), edited.source.splitlines(), autojunk=False)
    length = sum(end - start + new - old for kind, start, end, old, new in matcher.get_opcodes() if kind != "equal")
    return Placement(title, file, source, pins, function, notes, _in_file(file, edited.refused), length)


def _in_file(file: str, refused: Iterable[Refused]) -> tuple[Refused, ...]:
    return tuple(replace(one, file=file) for one in refused)


def _names_in(file: str, names: NamesByLine) -> tuple[dict[int, tuple[str, ...]], tuple[str, ...]]:
    """What held half tensors in a file, by line, and what held other tensors and nowhere half ones."""
    here = {line: found for (other, line), found in names.items() if other == file}
    half = {line: tuple(found.half) for line, found in here.items()}
    full = dict.fromkeys(text for found in here.values() for text in found.full)
    every = {text for texts in half.values() for text in texts}
    return half, tuple(text for text in full if text not in every)


def with_helper(source: bytes, names: Sequence[str], materials: Materials) -> Edited:
    """The file that makes the model, with the helper that pins modules by name."""
    makes = parse_target(materials.config.model.target).name
    return edit_factory(source, makes, names, one_tensor=layers_of_one_tensor(names, materials.model))


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
