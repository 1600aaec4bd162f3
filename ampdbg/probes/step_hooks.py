"""Hooks around every optimizer step, safe to add and remove while optimizers step in several threads.

torch iterates over its own dict of global hooks during a step, and raises if the dict changes meanwhile. So ampdbg's
hooks never enter that dict. While ampdbg has hooks, an object replaces the dict and returns copies.

A ``step`` set on an optimizer itself, instead of its class, bypasses torch's hooks. While ampdbg has hooks, it runs
between them, no matter when it was set. A step may run inner steps, as for an optimizer that wraps another; see
:func:`steps_around`.
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
"""Called with the optimizer, and the positional and keyword arguments of its step. A pre-step hook may return
replacements for the arguments, as torch's hooks do."""

_changing = threading.Lock()


class _Hooks(UserDict[int, Any]):
    """Torch's dict ``name`` with ampdbg's hooks after torch's. User code that adds or removes hooks changes torch's
    dict.

    This object lives as long as torch, because the handle of a user's hook holds a weak reference to it.
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
        return () if _unhooked.is_entered else (*self.data.values(), *self.ours)


class _Unhooked(threading.local):
    is_entered = False


_unhooked = _Unhooked()


@contextlib.contextmanager
def unhooked_steps() -> Iterator[None]:
    """Call no hooks around the steps in this thread while the context is entered, neither torch's nor ampdbg's.

    Other hooks of an optimizer itself still run. It works only while ampdbg has hooks."""
    _unhooked.is_entered = True
    try:
        yield
    finally:
        _unhooked.is_entered = False


_before, _behind = _Hooks("_global_optimizer_pre_hooks"), _Hooks("_global_optimizer_post_hooks")


@contextlib.contextmanager
def hooked_steps(before: StepHook | None = None, behind: StepHook | None = None) -> Iterator[None]:
    """Call the hooks before and after every step of an optimizer, in any thread, while the context is entered."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_own_steps.hooked())
        for hooks, hook in ((_before, before), (_behind, behind)):
            if hook is not None:
                stack.callback(hooks.remove, hook)  # first: Ctrl-C may come between the two
                hooks.add(hook)
        yield


def steps_around() -> list[Optimizer]:
    """Return the optimizers with steps that enclose the current step, from the inside out; for use in a hook. The
    optimizer itself is included if its own step calls its class's step."""
    return steps_under_way()[1:]


def steps_under_way() -> list[Optimizer]:
    """Return the optimizers with a step on the call stack, from the inside out."""
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # in each step of a loop; a generator would take three times as long
        if frame.f_code in _STEPPING:
            found.append(frame)
        frame = frame.f_back
    return [one.f_locals["self"] for one in found]


def is_torchs(step: Any) -> bool:
    """True if the step is torch's own, apart from torch's wrappers such as a scheduler's counter."""
    return _module_of(_first_of_others(step)).startswith("torch.optim.")


def name_of(optimizer: Optimizer) -> str:
    """Return the class of an optimizer with its module; mark an optimizer on which the script has set a step."""
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return name if is_of_class(optimizer) else f"the script's own step of {name}"


def step_of_class(optimizer: Optimizer) -> None:
    """Run one step of the optimizer's class, without hooks. A step that the script has set does not run."""
    step: Any = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def is_of_class(optimizer: Optimizer) -> bool:
    """True if the optimizer's step is its class's, and not one that the script has set on it."""
    return _innermost(optimizer.step) is _innermost(type(optimizer).step)


def _innermost(step: Any) -> Any:
    """Return the function of a step inside all wrappers, such as a scheduler's counter and ampdbg's hooks."""
    function = inspect.unwrap(step)
    return getattr(function, "__func__", function)


def _first_of_others(step: Any) -> Any:
    """Return the outermost function of a step that is not torch's, or the innermost function if all are torch's."""
    return inspect.unwrap(step, stop=lambda one: not _module_of(one).startswith("torch."))


def _module_of(function: Any) -> str:
    """Return the module in which a function is written; ``__module__`` names the module of the wrapped function."""
    return str(getattr(function, "__globals__", {}).get("__name__", ""))


def _between_hooks(optimizer: Optimizer, step: Any) -> Any:
    """Return a step set on an optimizer with ampdbg's hooks around it. Return torch's own step unchanged, because it
    calls the class's hooked step. The result is always a method, because torch's schedulers wrap its ``__func__``."""
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
        self._optimizer_step_code()  # as torch does, right after a step
        for hook in _behind.ours:
            hook(self, *given)
        return result

    return MethodType(stepping, optimizer)


def _code_inside(function: Any) -> CodeType:
    """Return the code of the inner function that replaces a step."""
    inside = (one for one in function.__code__.co_consts if isinstance(one, CodeType))
    return next(one for one in inside if "self" in one.co_varnames)


_OURS = _code_inside(_between_hooks)
_STEPPING = (_OURS, _code_inside(inspect.unwrap(Optimizer.profile_hook_step)))


def _is_ours(step: Any) -> bool:
    return getattr(step, "__code__", None) is _OURS


class _OwnSteps:
    """The steps that were set on optimizers while ampdbg has hooks."""

    def __init__(self) -> None:
        self._optimizers: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        self._setting = contextlib.ExitStack()
        self._entered: list[object] = []

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Run each step that is set meanwhile between the hooks; the last exit restores the original steps."""
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
                    for optimizer in self._optimizers.values():
                        step: Any = vars(optimizer).get("step")
                        if _is_ours(step):
                            vars(optimizer)["step"] = step.__wrapped__

    def hook(self, optimizer: Optimizer) -> None:
        """Wrap a step that was set on the optimizer earlier."""
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
"""Call this while hooks are entered, to run a step that was set on an optimizer earlier between the hooks."""
