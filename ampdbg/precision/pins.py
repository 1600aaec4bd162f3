"""Pins: modules, or a module's own lines alone, that run in FP32 inside autocast."""

from __future__ import annotations

import difflib
import fnmatch
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import Any

import torch
from torch.utils import _pytree

from ampdbg.errors import WorkloadError
from ampdbg.precision.widening import LIFTS, cast, widened
from ampdbg.quantities import quoted
from ampdbg.record.pins import OWN


class PinHandle:
    """Pins that are in force until :meth:`remove`, or until it is left as a context manager; it need not be kept."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.modules = modules
        """The qualified names of the pinned modules, with ``:own`` where it was asked for."""
        self._pins: list[tuple[PinnedForward, str | LinesInFP32]] = []

    def remove(self) -> None:
        """Takes these pins away, and leaves other handles' in force; a second call does nothing."""
        while self._pins:
            forward, pin = self._pins.pop()
            forward.drop(pin)

    def _add(self, module: torch.nn.Module, pin: str | LinesInFP32, returns: torch.dtype | None = None) -> None:
        forward = pinned_forward(module)
        forward.add(pin, returns)
        self._pins.append((forward, pin))

    def __enter__(self) -> PinHandle:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.remove()


def pin_fp32(model: torch.nn.Module, patterns: Iterable[str], *, returns: torch.dtype | None = None) -> PinHandle:
    """Runs the named modules in FP32 inside autocast.

    A pinned module's ``forward`` runs with autocast disabled, its half inputs are cast to float32 and its
    output stays float32, so that the ops behind it promote. Its parameters are left as they are. With
    ``:own`` behind its name this holds for the module's own lines alone: the modules that it calls run under
    autocast as they did before. A deep copy of the model is pinned as it is, and so is one that was pickled;
    the state dict does not show pins.

    Args:
        model: the root of the qualified names.
        patterns: qualified module names or fnmatch patterns (``blocks.2.attn``, ``blocks.*.attn``,
            ``blocks.*:own``), a name before a pattern; ``:own`` alone means the root's own lines.
        returns: the dtype that a pinned module's floating-point output is cast to where no pinned lines take it: that
            of weights behind it which take no other. The root's output stays float32.

    Raises:
        WorkloadError: a pattern names no module, or a module is scripted and cannot be pinned.
        TypeError: this is no model, or these are no names.
    """
    named = _checked(model, patterns)
    modules = dict(model.named_modules())
    whole, own = _named(named, modules)
    handle = PinHandle((*whole, *(name + OWN for name in own)))
    try:
        pinned_whole = frozenset(whole)
        for name in whole:
            handle._add(modules[name], WHOLE, returns if returns and _is_outermost(name, pinned_whole) else None)
        for name in own:
            handle._add(modules[name], OWN_LINES, returns if name else None)
            # All that own lines may call: the module itself too, should it recur.
            for inner in modules[name].modules():
                if not isinstance(inner, torch.jit.ScriptModule):
                    handle._add(inner, pinned_forward(modules[name]).lines)
    except BaseException:
        handle.remove()
        raise
    return handle


def _checked(model: object, patterns: object) -> list[str]:
    """The patterns, where the arguments of :func:`pin_fp32` are of the kinds that it takes."""
    allowed = 'allowed: pin_fp32(model, ["blocks.2.attn", ...])'
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"got a {type(model).__name__} instead of a Module; {allowed}")
    if isinstance(patterns, str):
        raise TypeError(f"got {patterns!r} instead of a list of names; {allowed}; try: [{patterns!r}]")
    if not isinstance(patterns, Iterable):
        raise TypeError(f"got a {type(patterns).__name__} instead of a list of names; {allowed}")
    named = list(patterns)
    for name in named:
        if not isinstance(name, str):
            raise TypeError(f"got a {type(name).__name__} instead of a module's name; {allowed}")
    return named


def _is_outermost(name: str, whole: Collection[str]) -> bool:
    """The module is not the root, and in no other that is pinned whole."""
    around = name.rpartition(".")[0]
    while around and around not in whole:
        around = around.rpartition(".")[0]
    return bool(name) and not around and "" not in whole


def pinned_names(model: torch.nn.Module, patterns: Iterable[str]) -> tuple[str, ...]:
    """The qualified names that :func:`pin_fp32` would pin, with ``:own`` where it was asked for; raises as it does."""
    whole, own = _named(patterns, dict(model.named_modules()))
    return (*whole, *(name + OWN for name in own))


def _named(patterns: Iterable[str], modules: dict[str, torch.nn.Module]) -> tuple[list[str], list[str]]:
    """The modules that are to be pinned whole, and those whose own lines are."""
    whole: dict[str, None] = {}
    own: dict[str, None] = {}
    for pattern in patterns:
        kind = own if pattern.endswith(OWN) else whole
        kind.update(dict.fromkeys(_matching(pattern.removesuffix(OWN), modules)))
    return list(whole), [name for name in own if name not in whole]


def _matching(pattern: str, modules: dict[str, torch.nn.Module]) -> list[str]:
    # A name is itself before it is a pattern: `heads[0]` would match `heads0` alone.
    names = [pattern] if pattern in modules else [name for name in modules if fnmatch.fnmatchcase(name, pattern)]
    if not names:
        raise WorkloadError(f"pins: no module is named {quoted(pattern, most=200)}; {_some_names(pattern, modules)}")
    for name in names:
        if isinstance(modules[name], torch.jit.ScriptModule):
            raise WorkloadError(f"pins: {name!r} is a scripted module, whose forward cannot be wrapped; pin its parent")
    return names


def _some_names(pattern: str, modules: dict[str, torch.nn.Module]) -> str:
    near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.5) or [name for name in modules if name][:5]
    return "the model has " + ", ".join(repr(name) for name in near)


WHOLE, OWN_LINES = "whole module", "own lines"

AutocastState = tuple[torch.dtype, bool]
"""The dtype of autocast for a type of device, and whether it is on."""

AutocastStates = tuple[AutocastState, AutocastState]
"""For CUDA and for the CPU."""


class PinnedForward:
    """The ``forward`` of a module while anything pins it; several pins may, and they may go in any order.

    An object of this module and no closure, so that it goes where the module goes: a deep copy runs the
    copy's weights, a pickled model comes back pinned, and ``torch.compile`` traces a whole module's pin.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        # By name through the class otherwise: a bound method that is pickled may come back as this very object.
        self._replaced: Callable[..., Any] | None = vars(module).get("forward")
        self._pins: list[str | LinesInFP32] = []
        self.lines = LinesInFP32()
        """The module's own lines, in force while ``OWN_LINES`` is among the pins."""
        self._returns: torch.dtype | None = None
        self._last_around: AutocastStates | None = None

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The ``forward`` behind, for ``inspect.signature``."""
        return self._replaced or type(self._module).forward.__get__(self._module)

    @property
    def __code__(self) -> CodeType:
        """For ``torch.export``, which reads where the ``forward`` of a model is written."""
        code: CodeType = self.__wrapped__.__code__
        return code

    def add(self, pin: str | LinesInFP32, returns: torch.dtype | None) -> None:
        """``WHOLE``, ``OWN_LINES``, or the lines in FP32 that may call this module, which is as before in them."""
        self._pins.append(pin)
        self._returns = returns or self._returns
        self._module.forward = self

    def drop(self, pin: str | LinesInFP32) -> None:
        """Takes one pin away; the last gives the module its own ``forward`` back, unless another one is in front."""
        self._pins.remove(pin)
        if not self._pins:
            self._returns = None
        if self._pins or vars(self._module).get("forward") is not self:
            return
        if self._replaced is None:
            del self._module.forward
        else:
            self._module.forward = self._replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        around = self._around_its_caller()
        if around is None:
            output = self._pinned(*args, **kwargs)
            return output if self._returns is None else cast(output, self._returns)
        cuda, cpu = around
        args, kwargs = _as_weights_take_it(self._module, (args, kwargs))
        with torch.autocast("cuda", *cuda), torch.autocast("cpu", *cpu):
            output = self._pinned(*args, **kwargs)
        # It is an input of the lines that called.
        return _cast_up(output)

    def _around_its_caller(self) -> AutocastStates | None:
        """The regions around a pin, if it is the lines of that pin that call this module now."""
        callers = [pin for pin in self._pins if isinstance(pin, LinesInFP32)]
        if callers and _is_recomputing() and not any(lines.are_running for lines in callers):
            # A checkpoint in those lines computes its part of them again, without them.
            return self._last_around
        # No ``next`` of a generator: torch.compile of torch 2.6 cannot trace its default.
        running = [lines.around for lines in callers if lines.are_innermost()]
        self._last_around = running[0] if running else None
        return self._last_around

    def _pinned(self, *args: Any, **kwargs: Any) -> Any:
        if WHOLE in self._pins:
            return _in_fp32(self._forward, args, kwargs)
        if OWN_LINES in self._pins:
            return self.lines.run(self._forward, args, kwargs)
        return self._forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._replaced is not None:
            return self._replaced(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)


def pinned_forward(module: torch.nn.Module) -> PinnedForward:
    """What comes before the module's ``forward``, or will with its first pin."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, PinnedForward) else PinnedForward(module)


class LinesInFP32(threading.local):
    """The calls of a module whose own lines run in FP32, the innermost last; each thread sees its own."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def __reduce__(self) -> tuple[type[LinesInFP32], tuple[()]]:
        """Calls stay in their thread: a copy of the model has none."""
        return LinesInFP32, ()

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls the ``forward`` that these lines are of."""
        around = _region("cuda"), _region("cpu")

        def lines(*args: Any, **kwargs: Any) -> Any:
            self._calls.append(_Call(around, _autocast_depth()))
            try:
                return forward(*args, **kwargs)
            finally:
                self._calls.pop()

        return _in_fp32(lines, args, kwargs)

    @property
    def are_running(self) -> bool:
        return bool(self._calls)

    @property
    def around(self) -> AutocastStates:
        """The regions around the innermost call."""
        return self._calls[-1].around

    def are_innermost(self) -> bool:
        """No region was entered since: neither the user's own, nor that of another module."""
        return self.are_running and self._calls[-1].depth == _autocast_depth()


@dataclass(frozen=True)
class _Call:
    """The regions of autocast around a call, and how deep in regions its own lines are."""

    around: AutocastStates
    depth: int


def _region(device_type: str) -> AutocastState:
    return torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)


def _is_recomputing() -> bool:
    """This is inside a backward pass, where modules run only for a checkpoint; traced code never is."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _autocast_depth() -> int:
    """In how many nested autocast regions this is; torch shows it only by counting up and down."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _in_fp32(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    args, kwargs = map(_cast_up, args), {name: _cast_up(value) for name, value in kwargs.items()}
    # Plain statements: torch.compile breaks the graph at an ExitStack.
    with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        return forward(*args, **kwargs)


def _cast_up(value: Any) -> Any:
    """The value with what is half in float32; itself where nothing is, for a module may write into a dict."""
    leaves, spec = _pytree.tree_flatten(value)
    wide = [widened(leaf, LIFTS["float32"]) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    is_same = all(one is other for one, other in zip(wide, leaves, strict=True))
    return value if is_same else _pytree.tree_unflatten(wide, spec)


def _as_weights_take_it(module: torch.nn.Module, inputs: Any) -> Any:
    """What lines in FP32 give to a module: half where its weights are, which would take nothing else."""
    dtype = next((weight.dtype for weight in module.parameters() if weight.is_floating_point()), torch.float32)
    return cast(inputs, dtype) if dtype in LIFTS["float32"] else inputs
