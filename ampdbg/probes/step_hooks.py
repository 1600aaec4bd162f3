"""Hooks around every step of every optimizer, that come and go while optimizers step in other threads.

torch goes through its own dict of such hooks as an optimizer steps, and raises where one is added or removed meanwhile.
So ours never enter that dict: while there are any, an object stands in its place, which hands out copies.

A ``step`` that is set on an optimizer itself, in place of its class's, goes past torch's hooks. While there are any of
ours it is called between them, whenever it was set. A step may run others inside of it, as that of an optimizer that
holds another one does: :func:`steps_around` has those.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, MethodType
from typing import Any

from torch.optim import Optimizer
from torch.optim import optimizer as torchs

from ampdbg.probes.seams import replaced

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
        self.ours: tuple[StepHook, ...] = ()

    def add(self, hook: StepHook) -> None:
        with _changing:
            self.ours = (*self.ours, hook)
            setattr(torchs, self._name, self)

    def remove(self, hook: StepHook) -> None:
        with _changing:
            self.ours = tuple(one for one in self.ours if one is not hook)
            if not self.ours and getattr(torchs, self._name) is self:
                setattr(torchs, self._name, self.data)

    def values(self) -> Any:
        return (*self.data.values(), *self.ours)


_before, _behind = _Hooks("_global_optimizer_pre_hooks"), _Hooks("_global_optimizer_post_hooks")


@contextlib.contextmanager
def hooked_steps(before: StepHook | None = None, behind: StepHook | None = None) -> Iterator[None]:
    """While this is entered, they are called before and behind every step of an optimizer, in whichever thread."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_own_steps.hooked())
        for hooks, hook in ((_before, before), (_behind, behind)):
            if hook is not None:
                stack.callback(hooks.remove, hook)  # first: Ctrl-C may come between the two
                hooks.add(hook)
        yield


def steps_around() -> list[Optimizer]:
    """To be called by a hook: the optimizers whose steps have led to the one that it is called for, from the inside
    out. The optimizer itself is one of them where its own step calls that of its class."""
    return steps_under_way()[1:]


def steps_under_way() -> list[Optimizer]:
    """The optimizers whose steps have led here, from the inside out."""
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # in each step of a loop: a generator would take three times as long
        if frame.f_code in _STEPPING:
            found.append(frame)
        frame = frame.f_back
    return [one.f_locals["self"] for one in found]


def is_torchs(step: Any) -> bool:
    """A step of an optimizer is torch's own, whatever of torch's is around it, such as a scheduler's count."""
    return _module_of(_first_of_others(step)).startswith("torch.optim.")


def name_of(optimizer: Optimizer) -> str:
    """The class of an optimizer with its module, and whether its step is another one, which was set on it."""
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return name if _innermost(optimizer.step) is _innermost(kind.step) else f"the script's own step of {name}"


def _innermost(step: Any) -> Any:
    """The function of a step inside of all that is around it, such as a scheduler's count and our hooks."""
    function = inspect.unwrap(step)
    return getattr(function, "__func__", function)


def _first_of_others(step: Any) -> Any:
    """The outermost function of a step that is not torch's; the innermost one where all are."""
    return inspect.unwrap(step, stop=lambda one: not _module_of(one).startswith("torch."))


def _module_of(function: Any) -> str:
    """Where a function is written; ``__module__`` is that of what it wraps."""
    return str(getattr(function, "__globals__", {}).get("__name__", ""))


def _between_hooks(optimizer: Optimizer, step: Any) -> Any:
    """A step that was set on an optimizer, with our hooks around it; torch's own as it is, which leads to the class's.

    It is a method in any case: torch's schedulers wrap its ``__func__``.
    """
    if is_torchs(step) or _is_ours(_first_of_others(step)):
        return step
    is_method = isinstance(step, MethodType) and step.__self__ is optimizer
    call: Any = step.__func__ if is_method else lambda _, *args, **kwargs: step(*args, **kwargs)

    @functools.wraps(step)
    def stepping(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        given: Any = ((self, *args), kwargs)
        for hook in _before.ours:
            given = hook(self, *given) or given
        result = call(*given[0], **given[1])
        self._optimizer_step_code()  # as torch does, right behind a step
        for hook in _behind.ours:
            hook(self, *given)
        return result

    return MethodType(stepping, optimizer)


def _code_inside(function: Any) -> CodeType:
    """That of the function which a function makes to stand in the place of a step."""
    inside = (one for one in function.__code__.co_consts if isinstance(one, CodeType))
    return next(one for one in inside if "self" in one.co_varnames)


_OURS = _code_inside(_between_hooks)
_STEPPING = (_OURS, _code_inside(inspect.unwrap(Optimizer.profile_hook_step)))


def _is_ours(step: Any) -> bool:
    return getattr(step, "__code__", None) is _OURS


class _OwnSteps:
    """The steps that were set on optimizers while there are hooks of ours."""

    def __init__(self) -> None:
        self._optimizers: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        self._setting = contextlib.ExitStack()
        self._entered: list[object] = []

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """While this is entered a step that is set is called between hooks; behind the last it is what was set."""
        entered = object()
        try:  # Ctrl-C may come while this begins
            with _changing:
                self._entered.append(entered)
                if len(self._entered) == 1:
                    self._setting.enter_context(replaced(Optimizer, "__setattr__", self._noting))
            yield
        finally:
            with _changing:
                self._entered = [one for one in self._entered if one is not entered]
                if not self._entered:
                    self._setting.close()
                    self._restore()

    def _restore(self) -> None:
        for optimizer in self._optimizers.values():
            step: Any = vars(optimizer).get("step")
            if _is_ours(step):
                vars(optimizer)["step"] = step.__wrapped__

    def hook(self, optimizer: Optimizer) -> None:
        """A step that was set before."""
        if callable(vars(optimizer).get("step")):
            self._optimizers[id(optimizer)] = optimizer
            vars(optimizer)["step"] = _between_hooks(optimizer, vars(optimizer)["step"])

    def _noting(self, original: Callable[..., None]) -> Callable[..., None]:
        def set_attribute(optimizer: Optimizer, name: str, value: Any) -> None:
            original(optimizer, name, value)
            if name == "step":
                self.hook(optimizer)

        return set_attribute


_own_steps = _OwnSteps()
hook_own_step = _own_steps.hook
"""To be called while hooks are entered: the step that was set on an optimizer before is called between them too."""
