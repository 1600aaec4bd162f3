"""torch's functions that a training loop calls, replaced once while any watcher is attached.

The methods of GradScaler, ``backward`` and ``autograd.grad``, clipping, learning-rate schedulers, new optimizers, what
they come by between a step and their own hooks, casts of a model, its averages and its export.
Watchers may come and go in any order: the last one that leaves restores torch. A warning that torch gives its caller
is shown for the user's line meanwhile, and not for the one of ours that stands between.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from itertools import dropwhile
from traceback import walk_stack
from types import FrameType
from typing import Any, Literal

import torch
from torch.amp.grad_scaler import GradScaler
from torch.fx import _symbolic_trace
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from ampdbg.probes.unfollowed import leave_ours_alone
from ampdbg.source.ownership import AMPDBG, is_ampdbgs

Seam = Literal[
    "scale", "unscale_", "step", "update", "get_scale",
    "engine", "clip", "schedule", "optimizer", "written", "cast", "average", "export",
]  # fmt: skip

Function = Callable[..., Any]
"""One of torch's, or what stands in its place."""

Watcher = Callable[..., Any]
"""Called with the seam, torch's function and its arguments: runs the function, once, and returns what it returns."""

SHOW = "_showwarnmsg"
"""What Python calls with each warning that its filters let through, whoever shows it in the end."""

_changing = threading.RLock()
_watchers: list[Watcher] = []
_replaced: set[tuple[int, str]] = set()
_restoring = ExitStack()


@contextlib.contextmanager
def attached(watcher: Watcher) -> Iterator[None]:
    """While this is entered, the watcher stands around every call, outside of those that came before it.

    With the last watcher torch is as it was.
    """
    leave_ours_alone()
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
    yield torch.optim.Optimizer, "__init__", "optimizer"
    yield torch.optim.Optimizer, "_optimizer_step_code", "written"
    yield torch.nn.Module, "_apply", "cast"
    yield AveragedModel, "update_parameters", "average"
    yield torch.export, "export", "export"


def _seam_replaced(owner: Any, name: str, seam: Seam) -> AbstractContextManager[None]:
    cell = _cell(vars(owner)[name]) if seam == "clip" else None
    if cell is not None:  # where a function is kept in one, `from torch.nn.utils import clip_grad_norm_` is seen too
        owner, name = cell, "cell_contents"
    wrapped = _of_a_profiler if seam == "written" else _through
    return replaced(owner, name, lambda original: wrapped(original, seam))


def _of_a_profiler(original: Callable[..., Any], seam: Seam) -> Callable[..., Any]:
    through = _through(original, seam)

    def call(self: Any) -> Any:  # torch's profiler knows this code again, and looks for a local of this name
        return through(self)

    return call


def _through(original: Callable[..., Any], seam: Seam) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        run, outermost = original, None
        for watcher in () if only_follows() else _watchers:
            if outermost is not None:  # nearly always there is one watcher, and nothing is to be made
                run = functools.partial(outermost, seam, run)
            outermost = watcher
        return run(*args, **kwargs) if outermost is None else outermost(seam, run, *args, **kwargs)

    return call


def _shown_for_the_caller(original: Callable[..., Any]) -> Callable[..., Any]:
    def show(message: Any) -> Any:
        if str(message.filename).startswith(str(AMPDBG)):
            caller = _caller_of(message.filename, message.lineno)
            if caller is not None:
                message.filename, message.lineno, message.line = caller.f_code.co_filename, caller.f_lineno, None
        return original(message)

    return show


def _caller_of(file: str, line: int) -> FrameType | None:
    """The innermost frame of somebody else's that has led to this line of ours; None where none has."""
    frames = (frame for frame, _ in walk_stack(sys._getframe(1)))
    that_led_there = dropwhile(lambda frame: (frame.f_code.co_filename, frame.f_lineno) != (file, line), frames)
    return next((frame for frame in that_led_there if not is_ampdbgs(frame)), None)


_dispatch_mode, _KEYS = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey
_FAKE, _PROXY = _KEYS.FAKE, _KEYS.PROXY
_tracing_state, _is_compiling = torch._C._get_tracing_state, torch.compiler.is_compiling
# The second name is that of torch 2.6, and warns where the first is there.
is_fx_tracing: Callable[[], bool] = getattr(_symbolic_trace, "is_fx_symbolic_tracing", _symbolic_trace.is_fx_tracing)


def only_follows() -> bool:
    """Torch follows what is called, to make a graph of it: ``torch.jit.trace``, ``torch.export``, ``torch.fx``,
    ``make_fx``, tensors without values, and a CUDA graph. Such a call is no part of a loop, and whatever a probe
    computes in it would stand in the graph."""
    if _is_compiling() or _tracing_state() is not None or is_fx_tracing() or is_captured():
        return True
    return _dispatch_mode(_FAKE) is not None or _dispatch_mode(_PROXY) is not None


def is_captured() -> bool:
    """What a GPU is given now becomes part of a CUDA graph, and nothing may be read."""
    # Who asks a GPU that nobody uses yet would start it; a process that was forked must not.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_going_backward() -> bool:
    """A backward pass is under way in this thread: what it has kept is not to be written."""
    return torch._C._current_graph_task_id() != -1


def are_meta(roots: Any) -> bool:
    """What goes backward has shapes and no numbers, as where a loop is tried out."""
    return any(isinstance(root, torch.Tensor) and root.is_meta for root in roots)


def _cell(function: Any) -> Any:
    """The cell in which a clipping function of torch's keeps what it wraps; None for one that somebody has replaced."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return function.__closure__[names.index("func")] if "func" in names else None


def classes_with_own(owner: type, name: str) -> tuple[type, ...]:
    """A class and its subclasses, those that define the method ``name`` themselves."""
    found = [owner] if name in vars(owner) else []
    subclasses: list[type] = owner.__subclasses__()
    for subclass in subclasses:
        found += classes_with_own(subclass, name)
    return tuple(dict.fromkeys(found))


@contextlib.contextmanager
def replaced(owner: Any, name: str, replacement: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """While this is entered, what is made of a function of the owner's stands in its place.

    Who enters this while another has is to leave it first.
    """
    original, is_own = getattr(owner, name), name in getattr(owner, "__dict__", {name: None})
    ours = functools.wraps(original)(replacement(original))
    try:  # Ctrl-C may come while this begins
        setattr(owner, name, ours)
        yield
    finally:
        if getattr(owner, name) is ours:  # else somebody has wrapped it since, and ours only hands on what it gets
            setattr(owner, name, original) if is_own else delattr(owner, name)
