"""The torch functions that a training loop calls, replaced while any watcher is attached.

These functions are called seams. They are GradScaler's methods, ``backward``, ``autograd.grad``, clipping, schedulers,
new scalers and optimizers, and casts, averages and exports of a model. One more seam lies between an optimizer's step
and its post hooks. Watchers may attach and detach in any order: the last one restores torch. Meanwhile a warning of
torch shows the user's line, and not the line of ampdbg's wrapper.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from itertools import dropwhile, filterfalse, islice
from traceback import walk_stack
from typing import Any, Literal

import torch
from torch.amp.grad_scaler import GradScaler
from torch.fx import _symbolic_trace
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from ampdbg.probes.unfollowed import exclude_from_compile
from ampdbg.source.ownership import AMPDBG, is_ampdbgs

Seam = Literal[
    "scale", "unscale_", "step", "update", "get_scale",
    "engine", "clip", "schedule", "scaler", "optimizer", "written", "cast", "average", "export",
]  # fmt: skip

Function = Callable[..., Any]
"""A function of torch, or its replacement."""

Watcher = Callable[..., Any]
"""Called with the seam, torch's function and its arguments. Runs the function once, and returns its result."""

SHOW = "_showwarnmsg"
"""Python calls this function with each warning that passes its filters, no matter what displays the warning."""

_changing = threading.RLock()
_watchers: list[Watcher] = []
_replaced: set[tuple[int, str]] = set()
_restoring = ExitStack()


@contextlib.contextmanager
def attached(watcher: Watcher) -> Iterator[None]:
    """Call the watcher around every seam call, outside earlier watchers. The last exit restores torch."""
    exclude_from_compile()
    try:  # Ctrl-C may come while this begins
        with _changing:
            _watchers.append(watcher)
            if not _replaced and hasattr(warnings, SHOW):
                _restoring.enter_context(replaced(warnings, SHOW, _shown_for_the_caller))
            for owner, name, seam in _seams():
                if (id(owner), name) not in _replaced:
                    _replaced.add((id(owner), name))
                    _restoring.enter_context(_seam_replaced(owner, name, seam))
        yield
    finally:
        with _changing:
            if watcher in _watchers:
                _watchers.remove(watcher)
            if not _watchers:
                _replaced.clear()
                _restoring.close()


def _seams() -> Iterator[tuple[Any, str, Seam]]:
    scaler_methods: tuple[Seam, ...] = ("scale", "unscale_", "step", "update", "get_scale")
    for method in scaler_methods:
        yield from ((owner, method, method) for owner in classes_with_own(GradScaler, method))
    yield torch.autograd, "_engine_run_backward", "engine"
    yield from ((torch.nn.utils, name, "clip") for name in ("clip_grad_norm_", "clip_grad_value_"))
    yield from ((owner, "step", "schedule") for owner in classes_with_own(LRScheduler, "step"))
    yield GradScaler, "__init__", "scaler"
    yield torch.optim.Optimizer, "__init__", "optimizer"
    yield torch.optim.Optimizer, "_optimizer_step_code", "written"
    yield torch.nn.Module, "_apply", "cast"
    yield AveragedModel, "update_parameters", "average"
    yield torch.export, "export", "export"


def _seam_replaced(owner: Any, name: str, seam: Seam) -> AbstractContextManager[None]:
    cell = _cell(vars(owner)[name]) if seam == "clip" else None
    if cell is not None:  # a new content also reaches functions that scripts imported by name
        owner, name = cell, "cell_contents"
    wrapped = _of_a_profiler if seam == "written" else _through
    return replaced(owner, name, lambda original: wrapped(original, seam))


def _of_a_profiler(original: Callable[..., Any], seam: Seam) -> Callable[..., Any]:
    through = _through(original, seam)

    def call(self: Any) -> Any:  # torch's profiler recognizes this code, and reads the local ``self``
        return through(self)

    return call


def _through(original: Callable[..., Any], seam: Seam) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        run, outermost = original, None
        for watcher in () if is_tracing() else _watchers:
            if outermost is not None:  # most often there is one watcher, which needs no partial
                run = functools.partial(outermost, seam, run)
            outermost = watcher
        return run(*args, **kwargs) if outermost is None else outermost(seam, run, *args, **kwargs)

    return call


def _shown_for_the_caller(original: Callable[..., Any]) -> Callable[..., Any]:
    """Show a warning that ampdbg's wrapper caused at the innermost line outside ampdbg that has called the wrapper."""

    def show(message: Any) -> Any:
        if str(message.filename).startswith(str(AMPDBG)):
            ours = message.filename, message.lineno
            frames = (frame for frame, _ in walk_stack(sys._getframe(1)))
            that_led_there = dropwhile(lambda frame: (frame.f_code.co_filename, frame.f_lineno) != ours, frames)
            for caller in islice(filterfalse(is_ampdbgs, that_led_there), 1):
                message.filename, message.lineno, message.line = caller.f_code.co_filename, caller.f_lineno, None
        return original(message)

    return show


class _Thread(threading.local):
    pauses = 0


_thread = _Thread()


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Pause every watch in this thread, for work outside any loop, such as a replay."""
    _thread.pauses += 1
    try:
        yield
    finally:
        _thread.pauses -= 1


def is_unwatched() -> bool:
    """True if watches are paused in this thread."""
    return _thread.pauses > 0


_dispatch_mode, _KEYS = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey
_FAKE, _PROXY = _KEYS.FAKE, _KEYS.PROXY
_tracing_state, _is_compiling = torch._C._get_tracing_state, torch.compiler.is_compiling
# The second name is for torch 2.6; later versions warn at its use.
is_fx_tracing: Callable[[], bool] = getattr(_symbolic_trace, "is_fx_symbolic_tracing", _symbolic_trace.is_fx_tracing)


def is_tracing() -> bool:
    """True if torch records calls for a graph: ``torch.jit.trace``, ``torch.export``, ``torch.fx``, ``make_fx``, fake
    tensors or a CUDA graph. Such calls are not part of a loop, and a probe's own ops would enter the graph."""
    if _is_compiling() or _tracing_state() is not None or is_fx_tracing() or is_captured():
        return True
    return _dispatch_mode(_FAKE) is not None or _dispatch_mode(_PROXY) is not None


def is_captured() -> bool:
    """True if GPU work is being captured into a CUDA graph, so nothing can be read."""
    # The second call would initialize an unused GPU, which a forked process must not do.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_in_backward() -> bool:
    """True if this thread runs a backward pass, so its saved tensors must not be written."""
    return torch._C._current_graph_task_id() != -1


def are_meta(roots: Any) -> bool:
    """True if a root of the backward pass is a meta tensor, without values, as in a dry run."""
    return any(isinstance(root, torch.Tensor) and root.is_meta for root in roots)


def _cell(function: Any) -> Any:
    """Return the closure cell with the function that torch's clipping function wraps, or None if it was replaced."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return function.__closure__[names.index("func")] if "func" in names else None


def classes_with_own(owner: type, name: str) -> tuple[type, ...]:
    """Return the classes that define the method ``name`` themselves, among a class and its subclasses."""
    found = [owner] if name in vars(owner) else []
    subclasses: list[type] = owner.__subclasses__()
    for subclass in subclasses:
        found += classes_with_own(subclass, name)
    return tuple(dict.fromkeys(found))


@contextlib.contextmanager
def replaced(owner: Any, name: str, replacement: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace a function of the owner with the result of ``replacement`` while the context is entered. Nested
    replacements must exit in reverse order."""
    original, is_own = getattr(owner, name), name in getattr(owner, "__dict__", {name: None})
    ours = functools.wraps(original)(replacement(original))
    try:  # Ctrl-C may come while this begins
        setattr(owner, name, ours)
        yield
    finally:
        if getattr(owner, name) is ours:  # else another library has wrapped ours, which now only calls the original
            setattr(owner, name, original) if is_own else delattr(owner, name)


@contextlib.contextmanager
def applications_replaced(run: Callable[[Callable[..., Any], Any, Any, Any], Any]) -> Iterator[None]:
    """Replace ``apply`` of every ``autograd.Function`` while the context is entered. ``run`` gets the original, the
    function, and its arguments and keyword arguments."""
    own: Any = vars(torch.autograd.Function)["apply"]

    @functools.wraps(own.__func__)
    def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return own.__func__(function, *args, **kwargs)
        return run(own.__get__(None, function), function, args, kwargs)

    ours = classmethod(apply)
    torch.autograd.Function.apply = ours  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        if vars(torch.autograd.Function)["apply"] is ours:  # else another wrapper replaced it since
            torch.autograd.Function.apply = own  # type: ignore[method-assign]
