"""Pins: modules, or a module's own lines alone, that run in FP32 inside autocast."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable
from types import TracebackType

import torch

from ampdbg.errors import WorkloadError
from ampdbg.record.pins import OWN

from .pinned_forward import OWN_LINES, WHOLE, LinesInFP32, PinnedForward, pinned_forward


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

    def _add(self, module: torch.nn.Module, pin: str | LinesInFP32) -> None:
        forward = pinned_forward(module)
        forward.add(pin)
        self._pins.append((forward, pin))

    def __enter__(self) -> PinHandle:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.remove()


def pin_fp32(model: torch.nn.Module, patterns: Iterable[str]) -> PinHandle:
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

    Raises:
        WorkloadError: a pattern names no module, or a module is scripted and cannot be pinned.
    """
    modules = dict(model.named_modules())
    whole, own = _named(patterns, modules)
    handle = PinHandle((*whole, *(name + OWN for name in own)))
    try:
        for name in whole:
            handle._add(modules[name], WHOLE)
        for name in own:
            handle._add(modules[name], OWN_LINES)
            for inner in _eager_modules(modules[name]):
                handle._add(inner, pinned_forward(modules[name]).lines)
    except BaseException:
        handle.remove()
        raise
    return handle


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
        raise WorkloadError(f"pins: no module is named {pattern!r}; {_some_names(pattern, modules)}")
    for name in names:
        if isinstance(modules[name], torch.jit.ScriptModule):
            raise WorkloadError(f"pins: {name!r} is a scripted module, whose forward cannot be wrapped; pin its parent")
    return names


def _some_names(pattern: str, modules: dict[str, torch.nn.Module]) -> str:
    near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.5) or [name for name in modules if name][:5]
    return "the model has " + ", ".join(repr(name) for name in near)


def _eager_modules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """All that own lines may call: the module itself too, should it recur."""
    return [inner for inner in module.modules() if not isinstance(inner, torch.jit.ScriptModule)]
