"""Which module is running: its qualified name and which of its calls this is."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

Where = tuple[str, int]
"""A qualified module name and the number of its call in this step, from 0; ``("", 0)`` is outside or the root."""

OUTSIDE: Where = ("", 0)


class ModulePaths:
    """The stack of modules that are running now. A shared module has the name it was registered under first.

    A module that runs during a backward pass is computed again, by a checkpoint: that is no new call but an
    earlier one, and they come back last first.
    """

    def __init__(self) -> None:
        self._stack: list[_Running] = []
        self._calls: Counter[str] = Counter()
        self._recomputed: Counter[str] = Counter()

    @property
    def current(self) -> Where:
        """The innermost running module."""
        return self._stack[-1].where if self._stack else OUTSIDE

    @property
    def is_recomputing(self) -> bool:
        """Whether the innermost running module was entered during a backward pass."""
        return bool(self._stack) and self._stack[-1].recomputed

    def _enter(self, name: str) -> None:
        recomputed = torch._C._current_autograd_node() is not None and self._calls[name] > 0
        if recomputed:
            self._recomputed[name] += 1
            call = max(0, self._calls[name] - self._recomputed[name])
        else:
            call = self._calls[name]
            self._calls[name] += 1
        self._stack.append(_Running((name, call), recomputed))

    def _leave(self, name: str) -> None:
        # An exception inside a child that its parent caught leaves the child behind.
        while self._stack and self._stack.pop().where[0] != name:
            pass


@dataclass(frozen=True, slots=True)
class _Running:
    where: Where
    recomputed: bool


@contextlib.contextmanager
def module_paths(model: torch.nn.Module) -> Iterator[ModulePaths]:
    """Follows the calls of the model's modules; its hooks are gone afterwards. Scripted modules refuse them."""
    paths = ModulePaths()
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            before = module.register_forward_pre_hook(_entering(paths, name))
            stack.callback(before.remove)
            after = module.register_forward_hook(_leaving(paths, name), always_call=True)
            stack.callback(after.remove)
        yield paths


def _entering(paths: ModulePaths, name: str) -> Any:
    def hook(module: torch.nn.Module, args: Any) -> None:
        paths._enter(name)

    return hook


def _leaving(paths: ModulePaths, name: str) -> Any:
    def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
        paths._leave(name)

    return hook
