"""Pins: modules that run in FP32 inside autocast."""

from __future__ import annotations

import difflib
import fnmatch
import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch.utils import _pytree

from ampdbg.errors import WorkloadError
from ampdbg.replacing import replaced


class PinHandle:
    """Pins that are in force; :meth:`remove`, or leaving it as a context manager, undoes them."""

    def __init__(self, modules: tuple[str, ...], stack: ExitStack) -> None:
        self.modules = modules
        """The qualified names of the pinned modules."""
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
    output stays float32, so that the ops behind it promote. Its parameters are left as they are.

    Args:
        model: the root of the qualified names.
        patterns: qualified module names or fnmatch patterns (``blocks.2.attn``, ``blocks.*.attn``).

    Raises:
        WorkloadError: a pattern names no module, or a module is scripted and cannot be pinned.
    """
    modules = dict(model.named_modules())
    names = tuple(dict.fromkeys(name for pattern in patterns for name in _matching(pattern, modules)))
    with ExitStack() as stack:
        for name in names:
            module = modules[name]
            stack.enter_context(replaced(module, "forward", _in_fp32(module.forward)))
        return PinHandle(names, stack.pop_all())


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


def _in_fp32(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def pinned(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _pytree.tree_map_only(torch.Tensor, _widened, (args, kwargs))
        with ExitStack() as stack:
            for device_type in ("cuda", "cpu"):
                stack.enter_context(torch.autocast(device_type, enabled=False))
            return forward(*args, **kwargs)

    return pinned


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
