"""Finds the lines of the user's code that build a model, by the registrations of modules in other modules."""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from traceback import walk_stack
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from ampdbg.probes.models import ModelGroup, is_global_of_script
from ampdbg.record.pins import OWN, RootModel, is_line, root_of, within
from ampdbg.source.ownership import is_ampdbgs, is_users

FORWARD = "_call_impl"
"""torch's function that calls a forward; registrations inside a forward do not build the model."""


@dataclass(frozen=True)
class Construction:
    """The user's line that registers, itself or in a call, the last module on the paths to the pinned modules.

    ``known`` are expressions for the model before the line runs; none if the line creates the model. ``is_wrapped`` is
    True if the line puts the model into another module. ``path`` names the model if the script has several.
    """

    file: str
    line: int
    known: tuple[str, ...] = ()
    is_wrapped: bool = False
    path: str = ""


class _Caller(NamedTuple):
    """A frame of the user's code: its file and line, the modules among its arguments, and those that its names mean."""

    at: tuple[str, int]
    given: tuple[weakref.ref[nn.Module], ...]
    known: tuple[tuple[str, weakref.ref[nn.Module]], ...]


class _Event(NamedTuple):
    """A registration of a parameter or ``module`` in a module; ``callers`` are the user's frames, innermost first.
    Events are ordered by their ``number``, which is unique."""

    number: int
    callers: tuple[_Caller, ...]
    module: weakref.ref[nn.Module] | None


class Constructions:
    """Records, while entered, where the user's code registers modules and parameters in modules.

    Unpickling and copying register nothing, so their lines are unknown.
    """

    def __init__(self) -> None:
        self._events = WeakIdKeyDictionary()
        self._numbers = itertools.count()
        self._entered = ExitStack()

    def __enter__(self) -> Constructions:
        for register in (register_module_module_registration_hook, register_module_parameter_registration_hook):
            self._entered.callback(register(self._put).remove)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._entered.close()

    def of(self, model: nn.Module, pins: Sequence[str]) -> Construction | None:
        """Return the line that registers the last module on the paths to the pinned modules; None if unknown.

        If :meth:`Models.as_one_module` joined several models in ``model``, all pins must belong to one of them.
        """
        if not isinstance(model, ModelGroup):
            return self._of_one(model, pins)
        paths = set(map(root_of, pins))
        if len(paths) > 1 or "" in paths:
            return None
        (path,) = paths
        making = self._of_one(model.get_submodule(path), [within(path, pin) for pin in pins])
        return making if making is None else replace(making, path=path)

    def lines_apart(self, models: Sequence[nn.Module]) -> tuple[tuple[str, int], ...]:
        """Return the lines that build the models, at the innermost call where all differ; empty if there is none."""
        calls = [self._outside_at_first(model) for model in models]
        lines = (tuple(call.at for call in same) for same in zip(*calls, strict=False))
        return next((found for found in lines if len(set(found)) == len(models)), ())

    def _outside_at_first(self, model: nn.Module) -> list[_Caller]:
        """Return the callers of the model's first registration, innermost first, without the model's own methods."""
        return [*_outside(min(self._of(model).values()), model)] if self._of(model) else []

    def _of_one(self, model: nn.Module, pins: Sequence[str]) -> Construction | None:
        events = [event for pin in pins for event in self._leading_to(pin.removesuffix(OWN), model)]
        # Copied modules, such as the layers of nn.Transformer, have no event.
        last = max((event for event in events if event is not None), default=None)
        if not self._of(model) or last is None:
            return None
        begun = [caller.at for caller in self._outside_at_first(model)[:1]]
        # If a config names the model's class, ampdbg creates the model: then only its methods are user code.
        for caller in _outside(last, model) if begun else reversed(last.callers):
            known = tuple(name for name, held in caller.known if held() is model)
            if known or caller.at in begun:
                return Construction(*caller.at, known, self._is_wrapped(model, caller))
        return None

    def _is_wrapped(self, model: nn.Module, by: _Caller) -> bool:
        every = (event for events in self._events.values() for event in events.values())
        wrapping = (event for event in every if event.module is not None and event.module() is model)
        return any(caller.at == by.at for event in wrapping for caller in event.callers)

    def _leading_to(self, path: str, model: nn.Module) -> Iterator[_Event | None]:
        """Yield the registrations of the module at ``path`` and its parents; for no path, all in the model itself."""
        if not path:
            yield from self._of(model).values()
        for name in path.split(".") if path else ():
            yield self._of(model).get(name)
            model = model.get_submodule(name)

    def _of(self, module: nn.Module) -> dict[str, _Event]:
        events: dict[str, _Event] = self._events.get(module, {})
        return events

    def _put(self, module: nn.Module, name: str, value: Any) -> None:
        with contextlib.suppress(Exception):  # no object of the script may stop it
            callers = _callers(sys._getframe(1))
            held = weakref.ref(value) if isinstance(value, nn.Module) else None
            if callers:
                self._events.setdefault(module, {})[name] = _Event(next(self._numbers), callers, held)


def _outside(event: _Event, model: nn.Module) -> Iterator[_Caller]:
    """Return the callers without the model among their arguments, which excludes the model's own methods."""
    return (caller for caller in event.callers if not any(held() is model for held in caller.given))


def _callers(frame: FrameType) -> tuple[_Caller, ...]:
    """Return the user's frames, innermost first, up to ampdbg's first frame; empty inside a forward."""
    frames = [*takewhile(lambda one: not is_ampdbgs(one), (one for one, _ in walk_stack(frame)))]
    if any(one.f_code.co_name == FORWARD for one in frames):
        return ()
    return tuple(map(_caller, filter(is_users, frames)))


def _caller(frame: FrameType) -> _Caller:
    code, values = frame.f_code, dict(frame.f_locals)
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    known = dict(_modules_in(values))
    if code.co_argcount and parameters[0] not in known:  # a method, and its class is not a module
        own = _modules_in(getattr(values.get(parameters[0]), "__dict__", None))
        known |= {f"{parameters[0]}.{name}": value for name, value in own}
    return _Caller(
        (code.co_filename, frame.f_lineno),
        tuple(weakref.ref(known[name]) for name in parameters if name in known),
        tuple((name, weakref.ref(value)) for name, value in known.items()),
    )


def _modules_in(held: Any) -> Iterator[tuple[str, nn.Module]]:
    for name, value in list(held.items()) if isinstance(held, dict) else ():
        if issubclass(type(value), nn.Module):  # isinstance may run code of the value
            yield name, value


# In a script with several models, the names of pins begin with the name of the model.


TAKEN = ("module", "name", "functools")
"""Names that have another meaning in a file of pins."""


def roots_of(model: nn.Module, pins: Iterable[str], makings: Constructions) -> tuple[RootModel, ...]:
    """Return the models that the pins belong to, in the order of the pins; empty if the script has one model."""
    if not isinstance(model, ModelGroup):
        return ()
    names = dict.fromkeys(root_of(pin) for pin in pins if not is_line(pin))
    return tuple(
        RootModel(
            name,
            argument=f"{name}_" if name in TAKEN else name,
            what=_what(name, model, makings),
            is_global=is_global_of_script(name, model.get_submodule(name)),
        )
        for name in names
    )


def _what(name: str, model: ModelGroup, makings: Constructions) -> str:
    root = model.get_submodule(name)
    if is_global_of_script(name, root):
        return f"the model that the script calls {name}"
    kind = type(root).__name__
    same = [one for one in model.children() if type(one).__name__ == kind]
    if len(same) == 1:
        return f"the model of class {kind} that the script makes"
    lines = makings.lines_apart(same)
    if not lines:
        return f"one of the {len(same)} models of class {kind} that the script makes; which of them is not known"
    file, line = next(place for place, one in zip(lines, same, strict=True) if one is root)
    return f"the model of class {kind} that line {line} of {Path(file).name} makes"
