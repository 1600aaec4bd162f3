"""Code that ``torch.compile`` does not follow: ours, which may run in the middle of what a script has compiled.

Only the frames of ours are run as they are: what they call of the script's or of torch's is compiled as it would be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import _lru_cache_wrapper as _Cached
from functools import cached_property
from traceback import walk_stack
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch._C import _dynamo as compiler
from torch.utils._python_dispatch import TorchDispatchMode

from ampdbg.source.ownership import AMPDBG, module_of

PACKAGE = "ampdbg"

FOLLOWED = ("ampdbg.precision.pins",)
"""A script's model may be pinned by these, and is compiled with them."""

_OURS = (str(AMPDBG), "<string>")
"""The files that our code is of: what a dataclass makes is of none."""

_done = {*FOLLOWED}


def leave_ours_alone() -> None:
    """Has ``torch.compile`` follow none of our code that is there by now.

    torch's own decorators for this import the compiler, which takes seconds; it need not be there.
    """
    skip = _skipping()
    if skip is None:
        return
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] == PACKAGE and name not in _done:
            _done.add(name)
            for code in _code_in(module):
                skip(code)


def is_compiled_code_there() -> bool:
    """Whether this process has compiled something so far that it may call again."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return counters is not None and counters["frames"]["ok"] > 0


def is_in_compiled_call() -> bool:
    """Whether this runs in the middle of what a script has compiled, such as a whole step.

    A mode that is entered there is not so for long: as the call returns torch goes back to what was before it.
    """
    return _compiled_call() is not None


def note_mode_left() -> None:
    """To be called where a dispatch mode was left, in the thread that had entered it outside of any compiled call.

    As such a call returns, torch (since 2.11) dispatches to modes if there was one before it, and fails if there is
    none by then. So one that does nothing stays until it has returned.
    """
    call = _compiled_call()
    if call is not None:
        mode = _NoMode()
        mode.__enter__()
        _when_it_returns(call, lambda: mode.__exit__(None, None, None))


class _NoMode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*args, **(kwargs or {}))


def _compiled_call() -> FrameType | None:
    """The outermost call of what is compiled that this thread is in."""
    if _CALLER not in sys.modules:
        return None
    frames = (frame for frame, _ in walk_stack(sys._getframe()))
    found = [frame for frame in frames if _ENTERED in frame.f_code.co_varnames and module_of(frame) == _CALLER]
    return found[-1] if found else None


def _when_it_returns(frame: FrameType, function: Callable[[], None]) -> None:
    """Calls the function as the frame, of this thread, has left all its blocks."""
    tracer, traced = sys.gettrace(), frame.f_trace

    def trace(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal traced
        if event == "return":
            function()
            if tracer is None:
                sys.settrace(None)
        if traced is not None:
            traced = traced(frame, event, value)
        return trace

    frame.f_trace = trace
    if tracer is None:
        sys.settrace(lambda frame, event, value: None)


_CALLER, _ENTERED = "torch._dynamo.eval_frame", "cleanups"
"""Where torch calls what is compiled, and what only that function of it has, whose name has changed."""


def _skipping() -> Callable[[CodeType], None] | None:
    """What marks code as not to be followed; None in a Python that the compiler does not know."""
    frames: Any = getattr(compiler, "eval_frame", None)
    if hasattr(frames, "skip_code"):  # torch 2.6
        skip: Callable[[CodeType], None] = frames.skip_code
        return skip
    if not hasattr(frames, "_FrameExecStrategy"):
        return None
    as_it_is = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    return lambda code: frames.set_code_exec_strategy(code, as_it_is)


def _code_in(owner: ModuleType | type) -> Iterator[CodeType]:
    """The code of the functions that a module or a class defines, with what is defined within them."""
    name = owner.__module__ if isinstance(owner, type) else owner.__name__
    for value in [*vars(owner).values()]:
        if isinstance(value, type) and value.__module__ == name and value is not owner:
            yield from _code_in(value)
        for function in _functions_of(value):
            if function.__module__ == name and function.__code__.co_filename.startswith(_OURS):
                yield from _with_inner(function.__code__)


def _functions_of(value: Any) -> Iterator[FunctionType]:
    """A function, those in a table of them, and what stands behind a descriptor or a decorator, maybe of torch's."""
    behind: Iterable[Any] = ()
    if isinstance(value, FunctionType):
        yield value
    if isinstance(value, dict):
        behind = [*value.values()]
    elif isinstance(value, property):
        behind = (value.fget, value.fset)
    elif isinstance(value, cached_property):
        behind = (value.func,)
    elif isinstance(value, (staticmethod, classmethod)):
        behind = (value.__func__,)
    elif isinstance(value, (FunctionType, _Cached)):
        behind = (getattr(value, "__wrapped__", None),)
    for function in behind:
        yield from _functions_of(function)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
