"""Pins: run modules, or only the lines of a module's own ``forward``, in FP32 inside autocast."""

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
    """Active pins. They last until :meth:`remove` or the exit of the ``with`` block, even if the handle is dropped."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.modules = modules
        """The qualified names of the pinned modules, with ``:own`` for pins of a module's own lines."""
        self._pins: list[tuple[PinnedForward, str | LinesInFP32]] = []

    def remove(self) -> None:
        """Remove the pins of this handle only. Later calls do nothing."""
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
    """Run the named modules in FP32 inside autocast.

    A pinned module's ``forward`` runs with autocast disabled. Its half inputs are cast to float32 and its output
    stays float32, so later ops promote to float32. Its parameters do not change. The suffix ``:own`` pins only the
    module's own lines: the submodules that it calls still run under autocast. Deep copies and pickled models
    keep their pins. The state dict does not contain them.

    Args:
        model: the root of the qualified names.
        patterns: qualified module names or fnmatch patterns (``blocks.2.attn``, ``blocks.*.attn``,
            ``blocks.*:own``). An exact name takes precedence over a pattern. ``:own`` alone means the root's own lines.
        returns: the dtype to which a pinned module's floating-point output is cast, unless pinned lines receive it.
            Later modules with half weights need that, as they accept no other dtype. The root's output stays float32.

    Raises:
        WorkloadError: a pattern matches no module, or a module is scripted and cannot be pinned.
        TypeError: ``model`` is not a Module, or ``patterns`` is not a list of strings.
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
            # Pinned lines may call any submodule, or the module itself if it is recursive.
            for inner in modules[name].modules():
                if not isinstance(inner, torch.jit.ScriptModule):
                    handle._add(inner, pinned_forward(modules[name]).lines)
    except BaseException:
        handle.remove()
        raise
    return handle


def _checked(model: object, patterns: object) -> list[str]:
    """Return the patterns as a list after checking the types of :func:`pin_fp32`'s arguments."""
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
    """True if the module is not the root and no enclosing module is pinned whole."""
    around = name.rpartition(".")[0]
    while around and around not in whole:
        around = around.rpartition(".")[0]
    return bool(name) and not around and "" not in whole


def pinned_names(model: torch.nn.Module, patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the names that :func:`pin_fp32` would pin, with ``:own`` where requested; raise as it does."""
    whole, own = _named(patterns, dict(model.named_modules()))
    return (*whole, *(name + OWN for name in own))


def _named(patterns: Iterable[str], modules: dict[str, torch.nn.Module]) -> tuple[list[str], list[str]]:
    """Return the names of the modules to pin whole, and of the modules to pin by their own lines only."""
    whole: dict[str, None] = {}
    own: dict[str, None] = {}
    for pattern in patterns:
        kind = own if pattern.endswith(OWN) else whole
        kind.update(dict.fromkeys(_matching(pattern.removesuffix(OWN), modules)))
    return list(whole), [name for name in own if name not in whole]


def _matching(pattern: str, modules: dict[str, torch.nn.Module]) -> list[str]:
    # An exact name takes precedence: as a pattern, `heads[0]` would match only `heads0`.
    names = [pattern] if pattern in modules else [name for name in modules if fnmatch.fnmatchcase(name, pattern)]
    if not names:
        near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.5) or [name for name in modules if name][:5]
        shown = ", ".join(map(repr, near))
        raise WorkloadError(f"pins: no module is named {quoted(pattern, most=200)}; the model has {shown}")
    for name in names:
        if isinstance(modules[name], torch.jit.ScriptModule):
            raise WorkloadError(f"pins: {name!r} is a scripted module, whose forward cannot be wrapped; pin its parent")
    return names


WHOLE, OWN_LINES = "whole module", "own lines"

AutocastState = tuple[torch.dtype, bool]
"""The autocast dtype of a device type, and whether autocast is enabled there."""

AutocastStates = tuple[AutocastState, AutocastState]
"""The autocast states of CUDA and of the CPU."""


class PinnedForward:
    """Replaces the ``forward`` of a pinned module. It can hold several pins, removable in any order.

    A module-level class and not a closure, so that it can be copied with the module. A deep copy runs its own weights,
    a pickled model stays pinned, and ``torch.compile`` can trace a whole module's pin.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        # Only an instance attribute is stored: a pickled bound method may be restored as this PinnedForward itself.
        self._replaced: Callable[..., Any] | None = vars(module).get("forward")
        self._pins: list[str | LinesInFP32] = []
        self.lines = LinesInFP32()
        """The module's own lines, in effect while ``OWN_LINES`` is among the pins."""
        self._returns: torch.dtype | None = None
        self._last_around: AutocastStates | None = None

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The original ``forward``, for ``inspect.signature``."""
        return self._replaced or type(self._module).forward.__get__(self._module)

    @property
    def __code__(self) -> CodeType:
        """The code of the original ``forward``: ``torch.export`` reads its source location."""
        code: CodeType = self.__wrapped__.__code__
        return code

    def add(self, pin: str | LinesInFP32, returns: torch.dtype | None) -> None:
        """Add ``WHOLE``, ``OWN_LINES``, or a caller's FP32 lines, in which this module keeps its normal precision."""
        self._pins.append(pin)
        self._returns = returns or self._returns
        self._module.forward = self

    def drop(self, pin: str | LinesInFP32) -> None:
        """Remove one pin. Removing the last one restores the ``forward``, unless another wrapper has replaced it."""
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
        args, kwargs = _cast_to_weights(self._module, (args, kwargs))
        with torch.autocast("cuda", *cuda), torch.autocast("cpu", *cpu):
            output = self._pinned(*args, **kwargs)
        # The output is an input of the pinned lines that made the call.
        return _cast_up(output)

    def _around_its_caller(self) -> AutocastStates | None:
        """If pinned lines are calling this module now, return the autocast states around their pin, else None."""
        callers = [pin for pin in self._pins if isinstance(pin, LinesInFP32)]
        if callers and _is_recomputing() and not any(lines.calls for lines in callers):
            # A checkpoint inside pinned lines recomputes its segment after those lines have returned.
            return self._last_around
        # Not ``next(generator, None)``: torch.compile of torch 2.6 cannot trace its default.
        running = [lines.calls[-1].around for lines in callers if lines.are_innermost()]
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
    """Return the object that replaces the module's ``forward``, or a new one for its first pin."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, PinnedForward) else PinnedForward(module)


class LinesInFP32(threading.local):
    """The running calls of a module with pinned own lines, innermost last. Each thread has its own list."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def __reduce__(self) -> tuple[type[LinesInFP32], tuple[()]]:
        """Copies start without calls, because calls belong to their thread."""
        return LinesInFP32, ()

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call ``forward`` in FP32 and record the call while it runs."""
        around = _region("cuda"), _region("cpu")

        def lines(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(_Call(around, _autocast_depth()))
            try:
                return forward(*args, **kwargs)
            finally:
                self.calls.pop()

        return _in_fp32(lines, args, kwargs)

    def are_innermost(self) -> bool:
        """True if no autocast region was entered since the innermost call, by the user's code or another module."""
        return bool(self.calls) and self.calls[-1].depth == _autocast_depth()


@dataclass(frozen=True)
class _Call:
    """The autocast states around a call, and the autocast nesting depth of the module's own lines."""

    around: AutocastStates
    depth: int


def _region(device_type: str) -> AutocastState:
    return torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)


def _is_recomputing() -> bool:
    """True inside a backward pass, where modules run only for a checkpoint. Always false in traced code."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _autocast_depth() -> int:
    """Return the number of nested autocast regions. torch exposes it only through its increment and decrement."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _in_fp32(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    args, kwargs = map(_cast_up, args), {name: _cast_up(value) for name, value in kwargs.items()}
    # Plain ``with`` statements, because torch.compile breaks the graph at an ExitStack.
    with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        return forward(*args, **kwargs)


def _cast_up(value: Any) -> Any:
    """Cast half tensors to float32. Return the value itself if nothing changes: modules may write to an argument."""
    leaves, spec = _pytree.tree_flatten(value)
    wide = [widened(leaf, LIFTS["float32"]) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    is_same = all(one is other for one, other in zip(wide, leaves, strict=True))
    return value if is_same else _pytree.tree_unflatten(wide, spec)


def _cast_to_weights(module: torch.nn.Module, inputs: Any) -> Any:
    """Cast the inputs from FP32 lines to half if the module's weights are half and accept no other dtype."""
    dtype = next((weight.dtype for weight in module.parameters() if weight.is_floating_point()), torch.float32)
    return cast(inputs, dtype) if dtype in LIFTS["float32"] else inputs
