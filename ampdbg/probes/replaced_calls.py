"""The functions of torch that a training loop calls by itself, replaced while it is watched.

``backward``, ``autograd.grad``, clipping and learning-rate schedulers; the scaler and the optimizers are
watched by :mod:`ampdbg.probes.watch`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ampdbg.precision.attributes import replaced

from .calls import Calls
from .loss_graph import scaler_of

OnBackward = Callable[[Sequence[Any]], None]


@contextlib.contextmanager
def calls_noted(
    calls: Calls, is_paused: Callable[[], bool], on_clip: OnBackward, on_backward: OnBackward
) -> Iterator[None]:
    """While this is entered the loop's own calls are noted; undone at the end, also when the loop raises.

    Args:
        calls: what notes them.
        is_paused: when it says so, nothing is noted.
        on_clip: called with the parameters whose gradients are about to be clipped.
        on_backward: called with the losses that no scaler has scaled, before they go backward.
    """
    with ExitStack() as stack:
        engine = torch.autograd.graph._engine_run_backward
        noting = functools.partial(_run_backward, engine, calls, is_paused, on_backward)
        stack.enter_context(replaced(torch.autograd, "_engine_run_backward", noting))
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            stack.enter_context(_clipping_replaced(name, calls, is_paused, on_clip))
        for owner in classes_with_own(LRScheduler, "step"):
            step = _scheduling(vars(owner)["step"], calls, is_paused)
            stack.enter_context(replaced(owner, "step", step))
        yield


def _run_backward(
    original: Callable[..., Any],
    calls: Calls,
    is_paused: Callable[[], bool],
    on_backward: OnBackward,
    roots: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """torch.autograd's one way into the engine: (roots, gradients, retain_graph, create_graph, inputs, ...)."""
    inside_the_engine = torch._C._current_graph_task_id() != -1
    if is_paused() or inside_the_engine:
        return original(roots, *args, **kwargs)
    if not kwargs.get("accumulate_grad", True):
        calls.grad(roots, creates_graph=bool(args[2]))
        return original(roots, *args, **kwargs)
    if not scaler_of(roots):
        on_backward(roots)
    return calls.backward(lambda: original(roots, *args, **kwargs), roots, args[0])


@contextlib.contextmanager
def _clipping_replaced(name: str, calls: Calls, is_paused: Callable[[], bool], on_clip: OnBackward) -> Iterator[None]:
    """Replaces what a clipping function wraps, so that ``from torch.nn.utils import clip_grad_norm_`` is seen too."""
    function = getattr(torch.nn.utils, name)
    cell = _wrapped(function)
    original = cell.cell_contents if cell is not None else function
    arguments = tuple(inspect.signature(original).parameters)[:2]  # the parameters, and the limit

    @functools.wraps(original)
    def clip(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(arguments, args, strict=False)), **kwargs}
        if is_paused() or not all(name in given for name in arguments):
            return original(*args, **kwargs)
        parameters, limit = (given.pop(name) for name in arguments)
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        on_clip(listed)
        return calls.clipped(lambda: original(listed, limit, *args[2:], **given), listed, limit)

    if cell is None:
        with replaced(torch.nn.utils, name, clip):
            yield
        return
    cell.cell_contents = clip
    try:
        yield
    finally:
        cell.cell_contents = original


def _wrapped(function: Any) -> Any:
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


def _scheduling(original: Callable[..., Any], calls: Calls, is_paused: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_paused():
            calls.scheduled(scheduler)
        return original(scheduler, *args, **kwargs)

    return step
