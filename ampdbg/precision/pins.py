"""Pins: modules, or a module's own lines alone, that run in FP32 inside autocast."""

from __future__ import annotations

import difflib
import fnmatch
import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.utils import _pytree

from ampdbg.errors import WorkloadError
from ampdbg.experiments import OWN
from ampdbg.replacing import replace

DEVICE_TYPES = ("cuda", "cpu")


class PinHandle:
    """Pins that are in force until :meth:`remove`, or until it is left as a context manager; it need not be kept."""

    def __init__(self, modules: tuple[str, ...], stack: ExitStack) -> None:
        self.modules = modules
        """The qualified names of the pinned modules, with ``:own`` where it was asked for."""
        self._stack = stack

    def remove(self) -> None:
        """Gives every pinned module its own ``forward`` back; a second call does nothing."""
        self._stack.close()

    def __enter__(self) -> PinHandle:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.remove()


def pin_fp32(model: torch.nn.Module, patterns: Iterable[str]) -> PinHandle:
    """Runs the named modules in FP32 inside autocast.

    A pinned module's ``forward`` runs with autocast disabled, its half inputs are cast to float32 and its
    output stays float32, so that the ops behind it promote. Its parameters are left as they are. With
    ``:own`` behind its name this holds for the module's own lines alone: the modules that it calls run under
    autocast as they did before.

    Args:
        model: the root of the qualified names.
        patterns: qualified module names or fnmatch patterns (``blocks.2.attn``, ``blocks.*.attn``,
            ``blocks.*:own``); ``:own`` alone means the root's own lines.

    Raises:
        WorkloadError: a pattern names no module, or a module is scripted and cannot be pinned.
    """
    modules = dict(model.named_modules())
    whole, own = _named(patterns, modules)
    with ExitStack() as stack:
        for name in whole:
            stack.callback(replace(modules[name], "forward", _in_fp32(modules[name].forward)))
        pinned = {name: OwnLines(modules[name].forward) for name in own}
        for name, lines in pinned.items():
            stack.callback(replace(modules[name], "forward", lines))
        # Around the pins: what is called from own lines is under autocast again, and there pinned if it is to be.
        for name, lines in pinned.items():
            for inner in _eager_submodules(modules[name]):
                stack.callback(replace(inner, "forward", lines.left_by(inner.forward)))
        return PinHandle((*whole, *(name + OWN for name in own)), stack.pop_all())


def _named(patterns: Iterable[str], modules: dict[str, torch.nn.Module]) -> tuple[list[str], list[str]]:
    """The modules that are to be pinned whole, and those whose own lines are."""
    whole: dict[str, None] = {}
    own: dict[str, None] = {}
    for pattern in patterns:
        kind = own if pattern.endswith(OWN) else whole
        kind.update(dict.fromkeys(_matching(pattern.removesuffix(OWN), modules)))
    return list(whole), [name for name in own if name not in whole]


def _matching(pattern: str, modules: dict[str, torch.nn.Module]) -> list[str]:
    names = [name for name in modules if fnmatch.fnmatchcase(name, pattern)]
    if not names:
        raise WorkloadError(f"pins: no module is named {pattern!r}; {_some_names(pattern, modules)}")
    for name in names:
        if isinstance(modules[name], torch.jit.ScriptModule):
            raise WorkloadError(f"pins: {name!r} is a scripted module, whose forward cannot be wrapped; pin its parent")
    return names


def _some_names(pattern: str, modules: dict[str, torch.nn.Module]) -> str:
    near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.5) or [name for name in modules if name][:5]
    return "the model has " + ", ".join(repr(name) for name in near)


class OwnLines:
    """A ``forward`` whose own lines run in FP32, while the modules that it calls run as without the pin.

    What those return is cast up, as all inputs of the lines are.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self._pinned = _in_fp32(forward, self._enter)
        self._running: list[_Running] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before, around = len(self._running), _regions()
        self._running.append(_Running(around, depth=-1))
        try:
            return self._pinned(*args, **kwargs)
        finally:
            del self._running[before:]

    def left_by(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The ``forward`` of an inner module: called from these lines, it is in the regions around the pin again."""

        @functools.wraps(forward)
        def called(*args: Any, **kwargs: Any) -> Any:
            # Deeper than the pin itself: the user's own autocast region, or another inner module, is in between.
            if not self._running or _autocast_depth() != self._running[-1].depth:
                return forward(*args, **kwargs)
            with ExitStack() as stack:
                for device_type, dtype in self._running[-1].around:
                    stack.enter_context(torch.autocast(device_type, dtype=dtype))
                output = forward(*args, **kwargs)
            # The result is an input of the pinned lines.
            return _pytree.tree_map_only(torch.Tensor, _widened, output)

        return called

    def _enter(self) -> None:
        self._running[-1] = _Running(self._running[-1].around, _autocast_depth())


@dataclass(frozen=True)
class _Running:
    """One call: the autocast regions around it (device type and dtype), and how deep its own lines are in regions."""

    around: tuple[tuple[str, torch.dtype], ...]
    depth: int


def _regions() -> tuple[tuple[str, torch.dtype], ...]:
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in DEVICE_TYPES if torch.is_autocast_enabled(kind))


def _autocast_depth() -> int:
    """In how many nested autocast regions this is; torch tells only by counting up and down."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _eager_submodules(module: torch.nn.Module) -> list[torch.nn.Module]:
    return [
        inner for inner in module.modules() if inner is not module and not isinstance(inner, torch.jit.ScriptModule)
    ]


def _in_fp32(forward: Callable[..., Any], entered: Callable[[], None] = lambda: None) -> Callable[..., Any]:
    @functools.wraps(forward)
    def pinned(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _pytree.tree_map_only(torch.Tensor, _widened, (args, kwargs))
        with ExitStack() as stack:
            for device_type in DEVICE_TYPES:
                stack.enter_context(torch.autocast(device_type, enabled=False))
            entered()
            return forward(*args, **kwargs)

    return pinned


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
