"""Hooks around every step of every optimizer, that come and go while optimizers step in other threads.

torch goes through its own dict of such hooks as an optimizer steps, and raises where one is added or removed meanwhile.
So ours never enter that dict: while there are any, an object stands in its place, which hands out copies.
"""

from __future__ import annotations

import contextlib
import threading
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import optimizer as torchs

StepHook = Callable[[Any, Any, Any], Any]
"""Called with the optimizer, and the positional and the keyword arguments of its step; before one it may return others
for them, as torch's own hooks do."""

_changing = threading.Lock()


class _Hooks(UserDict[int, Any]):
    """torch's dict ``name``, with our hooks behind its own. What others add or remove is added to that or removed.

    It lasts as long as torch does: the handle of a hook that others add has a weak reference to it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.data = getattr(torchs, name)
        self._ours: tuple[StepHook, ...] = ()

    def add(self, hook: StepHook) -> None:
        with _changing:
            self._ours = (*self._ours, hook)
            setattr(torchs, self._name, self)

    def remove(self, hook: StepHook) -> None:
        with _changing:
            self._ours = tuple(one for one in self._ours if one is not hook)
            if not self._ours and getattr(torchs, self._name) is self:
                setattr(torchs, self._name, self.data)

    def values(self) -> Any:
        return (*self.data.values(), *self._ours)


_before, _behind = _Hooks("_global_optimizer_pre_hooks"), _Hooks("_global_optimizer_post_hooks")


@contextlib.contextmanager
def hooked_steps(before: StepHook | None = None, behind: StepHook | None = None) -> Iterator[None]:
    """While this is entered, they are called before and behind every step of an optimizer, in whichever thread."""
    with contextlib.ExitStack() as stack:
        for hooks, hook in ((_before, before), (_behind, behind)):
            if hook is not None:
                stack.callback(hooks.remove, hook)  # first: Ctrl-C may come between the two
                hooks.add(hook)
        yield
