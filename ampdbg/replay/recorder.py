"""Records the training step while it runs, so that a failing step can be replayed at once.

The recorder notes the outermost module calls. It also notes the torch functions that take their results before the
backward pass. Arguments are kept by reference, with their version: how often the tensor had been written in place. A
step consists of the calls that led to certain losses: those with a backward pass since the last optimizer step. A
tensor written since its call cannot be recovered. ampdbg names it, and copies it from then on.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from itertools import count, islice, takewhile
from types import FunctionType
from typing import Any

import torch
from torch._C import (  # imported by name, because an emulated GPU replaces the public names
    _get_function_stack_at,
    _len_torch_function_stack,
    get_autocast_dtype,
    is_autocast_enabled,
)
from torch._C._functorch import peek_interpreter_stack
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils import _pytree

from ampdbg.probes.guard import Guard
from ampdbg.probes.loss_graph import SCALED_BY_HAND, leaves_beside, leaves_of_small_graph
from ampdbg.probes.models import WRAPPERS
from ampdbg.probes.optimizers import stepped_by
from ampdbg.probes.seams import (
    Seam,
    applications_replaced,
    attached,
    is_captured,
    is_fx_tracing,
    is_in_backward,
    is_tracing,
    replaced,
)
from ampdbg.probes.source_lines import innermost_line
from ampdbg.probes.step_hooks import hooked_steps
from ampdbg.probes.tensors import Mark, is_finite, nbytes, read_aside, times_written
from ampdbg.probes.unfollowed import exclude_from_compile, uncompiled
from ampdbg.replay.before import EarlierStates
from ampdbg.replay.copies import Copying, duplicate
from ampdbg.replay.random_state import RandomStates
from ampdbg.replay.run import name_of_line
from ampdbg.replay.state import CONSTANTS, tensors_in
from ampdbg.replay.step import (
    KEPT,
    MOVES_OR_CASTS,
    Made,
    NotReplayableError,
    Own,
    OwnFunction,
    PassEnd,
    RecordedCall,
    RecordedStep,
    ScalePower,
    made_in,
    made_in_arguments,
    scaled_gradients,
    weighted,
)
from ampdbg.source.ownership import Line
from ampdbg.workload.batches import tensor_leaves

MOST_CALLS = 20_000
"""The most calls of one step; more calls mean an epoch rather than a step."""

PRUNED_FROM = 16
"""Start pruning once this many calls are kept."""

FEW_CALLS = 64
"""Pruning examines all kept calls if there are at most this many, and otherwise only the new calls."""

MOST_DATA_CALLS = 1000
"""The most calls kept for results without gradients, such as the predictions of a validation that the script
collects."""

MOST_DATA_BYTES = 2**27
"""The most bytes kept alive for such calls; up to twice as many may be alive until the next pruning. The script itself
has dropped most of the tensors, for example the batches of its validation."""

MOST_STEP_BYTES = 2**30
"""The inputs of the micro-batches of one step may take this many bytes; the oldest are dropped beyond that."""

ALWAYS_KEPT = 16
"""Results of the last module call are kept at any size if they need at most this many calls."""

DEVICES = ("cpu", "cuda")
"""The device types with an autocast state that is recorded."""

VIEWS = frozenset({"T", "H", "mT", "mH", "real", "imag", "data"})
"""The tensor attributes that are views. Reading any attribute but these, such as ``grad``, computes nothing."""

NOT_RECORDED = (torch.Tensor.backward, torch.Tensor.__deepcopy__, torch.Tensor.item, torch.Tensor.__bool__)
"""Functions that are not part of a step."""

DRAWS = re.compile(r"rand|dropout|bernoulli|multinomial|poisson|rrelu|gumbel|fractional|normal|uniform|exponential")
"""Matches the names of torch functions that draw random numbers."""

WRITES = ("__setitem__", "__set__")
"""Functions that write into their first argument although their names do not end in an underscore."""

PRODUCTS = ("mul", "multiply", "mul_", "__mul__", "__rmul__", "__imul__")

QUOTIENTS = ("div", "divide", "true_divide", "__truediv__")

HOOKS = ("register_hook", "retain_grad")
"""Functions that may change the gradient of a tensor, or retain it."""

NOT_ALL_SEEN = "ampdbg did not see every call that its loss needs"
"""The reason why a step cannot be replayed if its autograd graph includes unrecorded calls."""

TOO_LARGE = "the inputs of its micro-batches take more than the 1 GiB that ampdbg keeps"
"""Why a step with gradient accumulation cannot be replayed whole: its first micro-batches are dropped."""

COMPILED = (
    "the compiled function {} also runs a model or a backward pass; compile the model alone, or set "
    "TORCHDYNAMO_DISABLE=1 for one run"
)
"""The reason why a step cannot be replayed if a compiled function hides the calls of its modules."""

OF_SCALED = "its loss takes gradients of a scaled loss, and ampdbg did not see them divided by the loss scale"
"""The reason why a step cannot be replayed if its gradients contain the loss scale: no different scale can be tried."""


class _Thread:
    """The records of one thread."""

    def __init__(self) -> None:
        self.calls: dict[int, RecordedCall] = {}
        self.modules = Counter[int]()
        """The number of recorded calls of each module, by ``id``."""
        self.numbers = count()
        self.made: dict[int, tuple[weakref.ref[torch.Tensor], Made, bool, int]] = {}
        """By ``id``: each result, its origin, and its ``requires_grad`` and version at that time."""
        self.scaled: dict[int, weakref.ref[torch.Tensor]] = {}
        self.changed: dict[int, list[int]] = {}
        self.losses: list[tuple[Made | None, torch.Tensor | None, set[int]]] = []
        self.has_dropped = False
        """Some of the ``losses`` are None because their calls took too much memory."""
        self.has_stepped, self.is_stepping = True, False
        self.runs_closure: Optimizer | None = None
        """The optimizer that runs a closure in its step now; the closure computes the gradients."""
        self.inside = self.wrappers = self.compiled = 0
        self.compiled_calls = list[int]()
        """The numbers of the recorded calls of compiled functions that run now."""
        self.is_on = False
        self.prune_at, self.pruned_to, self.whole_at = PRUNED_FROM, -1, -1
        """When to prune, the last call that pruning examined, and the call from which it examines all calls again."""
        self.bytes, self.prune_at_bytes = 0, MOST_DATA_BYTES
        """The size of the data that recorded calls keep alive, and the size at which to prune."""
        self.earlier = 0  # calls of earlier steps, kept because the script still holds their results
        self.scalars: deque[tuple[weakref.ref[torch.Tensor], Mark]] = deque(maxlen=PRUNED_FROM)
        self.trained_at: set[Line | None] = set()
        """The lines of the module calls that backward passes have reached."""
        self.was_on = self.trains = False
        self.has_gone = False
        self.takers = defaultdict[int, list[int]](list)
        """The calls that took a tensor as an input, by the ``id`` of the tensor. Forgotten calls may be included."""
        self.counted: set[int] = set()
        """The ``id`` of each tensor counted in ``bytes``."""
        self.random_states = RandomStates()

    def count_bytes(self, tensor: torch.Tensor) -> None:
        """Count the bytes of a tensor that a recorded call keeps alive."""
        if not tensor.requires_grad and id(tensor) not in self.counted:
            self.counted.add(id(tensor))
            self.bytes += nbytes(tensor)


class _Threads(threading.local):
    """The records of every thread. Callers read ``now`` once a call, because thread-local access is slow."""

    def __init__(self) -> None:
        self.now = _Thread()


class Recorder(TorchFunctionMode):
    """Records the calls of a training loop while it is entered.

    Args:
        is_paused: returns True if nothing must be recorded now.
        on_pass_without_step: called before a module is called again without a backward pass in between. Also called
            before a module call if no optimizer step followed the last backward pass.
        about_to_step: called right before each optimizer step, with the optimizer and the enabled scaler or None. For a
            step with a closure, called after each backward pass of the closure.
        about_to_call: called with the line of each call before the call runs.
        is_inside_a_step: returns True if the optimizer step that begins or ends is part of another step.
    """

    def __init__(
        self,
        is_paused: Callable[[], bool] = lambda: False,
        on_pass_without_step: Callable[[], None] = lambda: None,
        about_to_step: Callable[[Optimizer, torch.amp.GradScaler | None], None] = lambda optimizer, scaler: None,
        about_to_call: Callable[[Line | None], None] = lambda line: None,
        is_inside_a_step: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self._is_paused, self._is_inside_a_step = is_paused, is_inside_a_step
        self._on_pass_without_step = on_pass_without_step
        self._about_to_step, self._about_to_call = about_to_step, about_to_call
        self._threads = _Threads()
        self._steps, self._stepped = 0, dict[int, int]()
        self._stepped_before = dict[int, int]()
        """The previous entry in ``_stepped`` of each optimizer that has stepped since the last backward pass."""
        self._doubtful: tuple[int, Callable[[], None]] | None = None
        self._copied: set[tuple[Line | None, str]] = set()
        self._scaling: set[int] = set()
        self.entered_dtypes: set[torch.dtype] = set()
        """The dtypes of the autocast regions that were entered, those inside modules too."""
        self._entered: list[Recorder] = []
        self.before = EarlierStates()
        self.ends_in_weights: Callable[..., bool] = lambda *arguments: False
        """Returns True if ``autograd.grad`` with these arguments is the backward pass of a step."""
        self.looking: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Returns the context manager entered around each recorded call; a null context once the script compiles."""
        self._guard = Guard()
        self._leaving = ExitStack()

    def __enter__(self) -> Recorder:
        exclude_from_compile()
        stack, entered = self._leaving, self._entered
        entered.append(self)
        stack.callback(self._off)
        stack.callback(entered.clear)
        stack.enter_context(replaced(torch.nn.Module, "__call__", lambda original: _noting(original, entered)))
        stack.enter_context(replaced(torch, "compile", lambda original: _compiling(original, entered)))
        stack.enter_context(applications_replaced(functools.partial(_applied, entered)))
        for owner, name, do in (
            (torch.Tensor, "backward", Recorder._leave_before_backward),
            (torch.autograd, "backward", Recorder._leave_before_backward),
            (torch.amp.autocast_mode.autocast, "__enter__", Recorder._on_autocast_entered),
        ):
            stack.enter_context(replaced(owner, name, functools.partial(_first, do, entered)))
        stack.enter_context(hooked_steps(self._before_step, self._behind_step))
        stack.enter_context(attached(self._around))
        return self

    def __exit__(self, *raised: Any) -> None:
        """Stop recording and keep the records."""
        self._leaving.close()

    @property
    def _now(self) -> _Thread:
        return self._threads.now

    # The torch-function mode is active from autocast, or the end of a root call, up to a backward pass.

    def _on(self) -> None:
        """Push the mode as the lowest of all, so that the script pops its own modes and not this one."""
        if self._now.is_on or self._now.compiled:
            return
        self._off()
        above = [_pop_mode() for _ in range(_len_torch_function_stack())]
        if above and above[-1] is getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None):
            _push_mode(above.pop())  # the mode of a default device must be the lowest
        _push_mode(self)
        self._now.is_on = True
        for mode in reversed(above):
            _push_mode(mode)

    def _on_autocast_entered(self, region: Any, *_: Any) -> None:
        """Start to record when an autocast region is entered: casts before the first module call belong to the step."""
        if region._enabled:
            self.entered_dtypes.add(region.fast_dtype)
        is_step = region._enabled and torch.is_grad_enabled() and not self._now.inside
        if is_step and not (self._guard.failure or self._is_paused() or is_tracing()):
            self._guard.run_hook(self._on)

    def _off(self) -> None:
        self._now.is_on = False
        height = _len_torch_function_stack()
        if not any(_get_function_stack_at(place) is self for place in range(height)):
            return  # also while torch has popped it to run a function: it only forwards calls then
        above: list[TorchFunctionMode] = []
        while (top := _pop_mode()) is not self:
            above.append(top)
        for mode in reversed(above):
            _push_mode(mode)

    def _leave_before_backward(self, *_: Any) -> None:
        """Pop the mode before a backward pass, because torch would push it again after the pass."""
        now = self._now
        if now.is_on and not now.inside:
            self._off()
            now.was_on = True

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function, and record it if it takes floating-point tensors or results of recorded calls."""
        kwargs = kwargs or {}
        now = self._now
        if now.inside or not now.is_on or not self._guard.run_hook(self._is_recorded, function, args, kwargs):
            return function(*args, **kwargs)
        return self._run(function, function, args, kwargs)

    def _is_recorded(self, function: Any, args: Any, kwargs: Any) -> bool:
        name = getattr(function, "__name__", "")
        if name in ("__get__", "__set__") and getattr(getattr(function, "__self__", None), "__name__", "") not in VIEWS:
            return False
        if function in NOT_RECORDED or (self._now.wrappers and name in HOOKS):
            return False
        if function is torch.autograd.grad and self.ends_in_weights(*_of_the_engine(*args, **kwargs)):
            return False
        if self._guard.failure or self._is_paused() or _may_be_tracing():
            return False
        # Ops on data alone count as well: a target that is inf in half precision is finite in an FP32 replay.
        return any(one.is_floating_point() or self._maker(one) is not None for one in _tensors(args, kwargs))

    def run_call(self, original: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module call, and record it if it is an outermost one."""
        if self._guard.failure or is_tracing() or torch.is_inference_mode_enabled():
            return original(module, *args, **kwargs)
        if self._is_paused() or is_in_backward():
            return original(module, *args, **kwargs)
        if _is_wrapper(module):  # its tensor hooks serve its own backward pass, and are not recorded
            now = self._now
            now.wrappers += 1
            try:
                return original(module, *args, **kwargs)
            finally:
                now.wrappers -= 1
        if peek_interpreter_stack() is not None:  # a backward pass of torch.func belongs to no single call
            return original(module, *args, **kwargs)
        self._off()
        self._guard.run_hook(self._root_call_begins, module, args, kwargs)
        try:
            return self._run(module, functools.partial(original, module), args, kwargs)
        finally:
            self._guard.run_hook(self._on)

    def run_application(self, apply: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
        """Run an ``autograd.Function``, and record it like a torch function if it belongs to the script."""
        now = self._now
        is_noted = now.is_on and not now.inside and not function.__module__.startswith("torch.")
        if not is_noted or not self._guard.run_hook(self._is_recorded, function, args, kwargs):
            return apply(*args, **kwargs)
        return self._run(OwnFunction(function, apply), apply, args, kwargs)

    def run_compiled(self, compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a compiled function, and record it like a torch function. Meanwhile the mode is off, because
        ``torch.compile`` would trace it too. A function that runs a model or a backward pass is not a single call."""
        now, begun = self._now, list[_Begun]()
        was_on = now.is_on
        self._off()
        if not now.inside and self._guard.run_hook(self._is_recorded, compiled, args, kwargs):
            self._guard.run_hook(self._begins, begun, OwnFunction(compiled, compiled), args, kwargs)
        known = [noted.why_not for _, noted, _ in begun]
        for number, noted, _ in begun:
            noted.why_not = COMPILED.format(noted.name)
            now.compiled_calls.append(number)
        now.compiled, now.inside = now.compiled + 1, now.inside + len(begun)
        try:
            result = compiled(*args, **kwargs)
        finally:
            now.compiled, now.inside = now.compiled - 1, now.inside - len(begun)
            del now.compiled_calls[len(now.compiled_calls) - len(begun) :]
            if was_on:
                self._guard.run_hook(self._on)
        for one, why_not in zip(begun, known, strict=True):
            self._guard.run_hook(self._compiled_returns, one, args, kwargs, result, why_not, was_on)
        return result

    def _compiled_returns(
        self, begun: _Begun, args: Any, kwargs: Any, result: Any, why_not: str, is_of_step: bool
    ) -> None:
        number, noted, _ = begun
        results = (tensor for _, tensor in made_in(result))
        is_single = next(self._now.numbers) == number + 1
        is_single = is_single and not leaves_beside(results, tensor_leaves((args, kwargs)))
        noted.why_not = why_not if is_single else noted.why_not
        if is_single and not is_of_step:  # such as the preparation of a batch
            self._forget(number)
            return
        self._returns(begun, args, kwargs, result)
        if not is_single:  # no call of its modules prunes
            self._prune()

    def _run(self, function: Callable[..., Any], run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run and record a function or a module call, but not the calls inside it."""
        begun = list[_Begun]()
        self._guard.run_hook(self._begins, begun, function, args, kwargs)
        with self.looking():
            result = self._alone(run, *args, **kwargs)
        for one in begun:
            self._guard.run_hook(self._returns, one, args, kwargs, result)
        return result

    def _begins(self, begun: list[_Begun], function: Callable[..., Any], args: Any, kw: Any) -> None:
        now, module = self._now, function if isinstance(function, torch.nn.Module) else None
        if len(now.calls) - now.earlier >= MOST_CALLS:
            return
        name = "" if module is not None else getattr(function, "__name__", "")
        number, line = next(now.numbers), innermost_line()
        lowers = {kind: get_autocast_dtype(kind) for kind in DEVICES if is_autocast_enabled(kind)}
        state = now.random_states.before_a_call() if _draws(function, name) else now.random_states.latest
        noted = RecordedCall(function, name, line, lowers, state, self._steps, has_gradients=torch.is_grad_enabled())
        taking = _ArgumentRecorder(self, noted, is_in_place=_is_in_place(name))
        noted.given = tuple(map(taking.of, args)), {key: taking.of(value) for key, value in kw.items()}
        for tensor, _ in noted.inputs:
            now.takers[id(tensor)].append(number)
        if function is torch.autograd.grad and self._is_of_scaled(args, kw):
            noted.function, noted.given = scaled_gradients, ((ScalePower(1), *noted.given[0]), noted.given[1])
        if module is not None:
            noted.training = module.training
            self.before.begins(number, module)
            now.modules[id(module)] += 1
        now.calls[number] = noted
        begun.append((number, noted, taking))
        self._about_to_call(line)

    def _returns(self, begun: _Begun, args: Any, kwargs: Any, result: Any) -> None:
        number, noted, taking = begun
        noted.has_returned, name = True, noted.name
        if _draws(noted.function, name):
            self._now.random_states.after_a_call()
        if noted.module is not None:
            self.before.returned(number, noted.module)
        is_first = bool(args) and result is args[0]
        noted.writes = name in WRITES or (is_first and name not in MOVES_OR_CASTS)  # a cast may do nothing
        for made, tensor, times in taking.made:
            if times_written(tensor) != times or name in HOOKS:
                self._is_changed(number, made, tensor)
        is_a_weight = is_first and not noted.writes and result.is_leaf and result.requires_grad
        if not is_a_weight:  # a parameter stays the model's
            self._add_results(number, noted, made_in(args[0] if noted.writes else result))
        if noted.module is not None:
            written = (one for one in made_in_arguments(args, kwargs) if taking.is_new(one[1]))
            self._add_results(number, noted, written)

    def _copy_before_write(self, tensor: torch.Tensor) -> None:
        """Before a write to a data tensor, store a copy of the tensor in all calls that took it."""
        numbers = self._now.takers.get(id(tensor), ())
        calls = [call for number in numbers if (call := self._now.calls.get(number)) is not None]
        given = [(call, times) for call in calls for one, times in call.inputs if one is tensor]
        takers = [call for call, times in given if times == times_written(tensor) and not tensor.requires_grad]
        copied = duplicate(tensor.detach()) if takers else tensor
        for call in takers:
            call.replace_input(tensor, copied)
        if tensor._base is not None:
            self._copy_before_write(tensor._base)

    def _is_changed(self, number: int, made: Made, tensor: torch.Tensor) -> None:
        """Make later readers of the written tensor depend on this call too."""
        base = self._maker(tensor._base) if tensor._base is not None else None
        for call in {made.call, *([base.call] if base is not None else [])}:
            self._now.changed.setdefault(call, []).append(number)

    def _add_results(self, number: int, noted: RecordedCall, results: Iterable[tuple[str, torch.Tensor]]) -> None:
        now, made = self._now, self._now.made
        for path, tensor in results:
            held = weakref.ref(tensor)
            noted.results.append(held)
            made[id(tensor)] = held, Made(number, path), tensor.requires_grad, times_written(tensor)
            is_scalar = tensor.numel() == 1 and tensor.requires_grad and not path.startswith(".")
            if now.trains and is_scalar and not is_captured():
                now.scalars.append((held, Mark(tensor)))

    def _maker(self, tensor: torch.Tensor) -> Made | None:
        known = self._now.made.get(id(tensor))
        if known is None or known[0]() is not tensor:
            return self._kept(tensor) if tensor.grad_fn is not None else None
        _, made, wants, times = known
        call = self._now.calls.get(made.call)
        is_of_a_step_before = call is not None and call.steps != self._steps
        is_another = is_of_a_step_before and times_written(tensor) != times  # as a reused input buffer has
        if call is not None and not tensor.requires_grad and (is_another or self._counts_as_data(call)):
            return None
        is_led_there = call is not None and not call.has_gradients and tensor.grad_fn is not None
        if wants is tensor.requires_grad and not is_led_there:
            return made
        # A custom Function may return its input, or a tensor computed without gradients, and attach a graph itself.
        if type(tensor.grad_fn).__name__ != "CheckpointFunctionBackward" or call is None:
            return None
        call.has_gradients = True
        return made

    def _kept(self, tensor: torch.Tensor) -> Made | None:
        """Record the tensor, such as an auxiliary loss, as a result of the last call whose module keeps it."""
        for number, call in reversed(self._now.calls.items()):
            for name, module in call.module.named_modules() if call.module is not None else ():
                for key in (key for key, value in vars(module).items() if value is tensor):
                    path = KEPT + f"{name}.{key}".lstrip(".")
                    call.results.append(weakref.ref(tensor))
                    self._now.made[id(tensor)] = call.results[-1], Made(number, path), True, times_written(tensor)
                    return Made(number, path)
        return None

    def _is_of_scaled(self, args: Any, kwargs: Any) -> bool:
        scaled = ((tensor, self._now.scaled.get(id(tensor))) for tensor in _tensors(args, kwargs))
        return any(held is not None and held() is tensor for tensor, held in scaled)

    def _alone(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a function without recording it or any call inside it."""
        self._now.inside += 1
        try:
            return function(*args, **kwargs)
        finally:
            self._now.inside -= 1

    # Backward passes and optimizer steps.

    def _around(self, seam: Seam, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Handle one call of a torch function that the training loop makes."""
        now = self._now
        if seam == "export":
            self._off()
        is_inside = now.inside > now.compiled  # a compiled function may hold a part of the loop
        if is_inside or self._guard.failure or self._is_paused() or seam not in ("scale", "engine", "step"):
            return original(*args, **kwargs)
        if seam == "engine":
            return self._run_backward(original, *args, **kwargs)
        scaler = args[0]
        if not scaler.is_enabled():
            return original(*args, **kwargs)
        if seam == "scale":
            result = self._alone(original, *args, **kwargs)
            outputs = args[1] if len(args) > 1 else kwargs["outputs"]
            self._alone(self._guard.run_hook, self._scaled, outputs, result)
            return result
        optimizer = args[1] if len(args) > 1 else kwargs["optimizer"]
        self._off()
        self._guard.run_hook(self._about_to_step, optimizer, scaler)
        thread = threading.get_ident()
        self._scaling.add(thread)
        try:
            return original(*args, **kwargs)
        finally:
            self._scaling.discard(thread)
            now.has_stepped = True

    def _scaled(self, outputs: Any, results: Any) -> None:
        """Record the scaler's outputs as the unscaled losses, because a replay has a different loss scale."""
        next(self._now.numbers)  # as for a pass
        for (_, loss), (_, scaled) in zip(tensor_leaves(outputs), tensor_leaves(results), strict=False):
            made = self._maker(loss)
            self._now.scaled[id(scaled)] = weakref.ref(scaled)
            if made is not None:
                self._now.made[id(scaled)] = weakref.ref(scaled), made, scaled.requires_grad, times_written(scaled)

    def _run_backward(self, original: Callable[..., Any], roots: Any, starts: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the autograd engine; its arguments are (roots, gradients, retain_graph, create_graph, inputs, ...)."""
        now = self._now
        is_step = not is_in_backward() and (kwargs.get("accumulate_grad", True) or self.ends_in_weights(starts, *args))
        was_on, now.was_on = now.is_on or now.was_on, False
        self._off()
        if is_step:
            self._guard.run_hook(self._add_losses, roots, starts)
        try:
            return self._alone(original, roots, starts, *args, **kwargs)
        finally:
            keeps_graph = bool(args[0]) if args else False
            if was_on and (keeps_graph or not is_step or self._has_more()):
                self._on()

    def _add_losses(self, roots: Sequence[Any], starts: Sequence[Any]) -> None:
        now = self._now
        next(now.numbers)  # numbered like a call, so that a compiled function that runs it is not a single call
        if self._doubtful is not None:
            makers = (self._maker(root) for root in roots if isinstance(root, torch.Tensor))
            self.give_up_loss(but=_dependencies_of(now.calls, (made.call for made in makers if made is not None)))
        if now.has_stepped or now.is_stepping:  # is_stepping: an optimizer runs its closure again for new weights
            now.losses.clear()
            now.has_stepped = now.has_dropped = False
        self._stepped_before.clear()
        wrote = set[int]()
        for root, start in zip(roots, starts, strict=False):
            made = self._maker(root) if isinstance(root, torch.Tensor) else None
            made = next((Made(number, "") for number in now.compiled_calls), made)
            now.losses.append((made, start, wrote))
            now.trained_at |= self._called_at(made)
        now.has_gone = True
        now.scalars.clear()

    def _called_at(self, made: Made | None) -> set[Line | None]:
        """Return the lines of the module calls that a result depends on."""
        calls = self._now.calls
        behind = _dependencies_of(calls, [made.call]) if made is not None else set()
        return {calls[number].line for number in behind if calls[number].module is not None}

    def went_backward(self, wrote: Collection[int], cleared: Collection[int]) -> None:
        """Record by position the optimizers with gradients that the last backward pass ``wrote``. Earlier losses no
        longer count for optimizers with gradients that were ``cleared`` before this pass."""
        now, gone = self._now, {*cleared}
        now.losses, last = [one for one in now.losses if not one[2] or one[2] - gone], now.losses[-1:]
        for *_, optimizers in now.losses:
            optimizers.difference_update(gone)
        for *_, optimizers in last:
            optimizers.update(wrote)
        if now.runs_closure is not None:
            self._guard.run_hook(self._about_to_step, now.runs_closure, None)

    @contextlib.contextmanager
    def without_the_last_pass(self) -> Iterator[None]:
        """While entered, exclude the losses of the last backward pass. The next step gets its gradients."""
        losses = self._now.losses
        self._now.losses = [one for one in losses if one[2] is not losses[-1][2]]
        try:
            yield
        finally:
            self._now.losses = losses

    def _has_more(self) -> bool:
        """True if some module results with gradients are not part of any loss so far."""
        calls = self._now.calls.items()
        led = {n for n, call in calls if call.module is not None and call.has_gradients and call.live_results}
        gone = (made.call for made, *_ in self._now.losses if made is not None)
        return bool(led) and not led <= _dependencies_of(self._now.calls, gone)

    @uncompiled
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_paused() or threading.get_ident() in self._scaling or self._is_inside_a_step():
            return
        self._off()
        has_closure = any(map(callable, (*args[1:], *kwargs.values())))
        self._now.runs_closure = optimizer if has_closure else None
        if not has_closure:
            self._guard.run_hook(self._about_to_step, optimizer, None)
        self._now.has_stepped = self._now.is_stepping = True

    @uncompiled
    def _behind_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_inside_a_step():
            return
        self._now.is_stepping, self._now.runs_closure = False, None
        self._steps += 1
        self._stepped_before[id(optimizer)] = self._stepped.get(id(optimizer), 0)
        self._stepped[id(optimizer)] = self._steps

    def withheld(self, optimizer: Optimizer) -> None:
        """Undo the count of a step in which the optimizer wrote nothing, such as a fused optimizer that found inf."""
        if id(optimizer) in self._stepped_before:
            self._stepped[id(optimizer)] = self._stepped_before.pop(id(optimizer))

    def _root_call_begins(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        now = self._now
        is_again = not now.has_gone and now.modules[id(module)] > 0
        if is_again:  # a call on results of this pass continues the pass, such as a loss of each of two heads
            given = (one for one in _pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor))
            is_again = not any(one.requires_grad and self._maker(one) for one in given)
        if next(module.parameters(), None) is not None:
            now.trains = module.training
        is_behind = now.has_gone and not now.has_stepped
        if (is_again or is_behind) and torch.is_grad_enabled():
            self._on_pass_without_step()
        if now.has_gone and now.has_stepped:
            now.losses.clear()
            self._prune()
            now.earlier = min(len(now.calls), MOST_CALLS)
        elif now.has_gone or is_again or len(now.calls) >= now.prune_at or now.bytes >= now.prune_at_bytes:
            self._prune()
        if is_behind:
            self._drop_oldest_passes()
        now.has_gone = False

    def _counts_as_data(self, call: RecordedCall) -> bool:
        """True if every optimizer may have stepped since the call, so its results without gradients count as data."""
        return self._steps - call.steps > len(self._stepped)

    def _prune(self) -> None:
        """Forget the calls that no loss and no live tensor depends on. Also forget old calls with results that survive
        only as data, such as a running average. If many calls are kept, examine only newer calls until as many have
        been added."""
        now = self._now
        last = next(reversed(now.calls), -1)
        is_whole = len(now.calls) <= FEW_CALLS or last >= now.whole_at or now.bytes >= now.prune_at_bytes
        looked_at, now.pruned_to = -1 if is_whole else now.pruned_to, last
        later = {n: now.calls[n] for n in takewhile(lambda number: number > looked_at, reversed(now.calls))}

        def leads(call: RecordedCall, read: int) -> bool:
            return read in later and not (self._counts_as_data(later[read]) and call.takes_data_of(read))

        recent = {number: call for number, call in later.items() if not self._counts_as_data(call)}
        led_to = (n for n, call in recent.items() if any(one.requires_grad for one in call.live_results))
        needed = _dependencies_of(later, (*led_to, *(made.call for made, *_ in now.losses if made is not None)), leads)
        held = {number for number, call in recent.items() if call.live_results} - needed
        needed |= self._calls_of_live_data(held, needed, leads) if is_whole else _dependencies_of(later, held, leads)
        for number in later.keys() - needed:
            self._forget(number)
        now.scaled = {key: held for key, held in now.scaled.items() if held() is not None}
        if is_whole:
            now.made = {key: known for key, known in now.made.items() if known[0]() is not None}
            takers = ((id(one), number) for number, call in now.calls.items() for one, _ in call.inputs)
            now.takers.clear()
            for key, number in takers:
                now.takers[key].append(number)
            data = {id(one): one for call in now.calls.values() for one in call.data}
            now.counted, now.bytes = {*data}, sum(map(nbytes, data.values()))
            now.prune_at, now.prune_at_bytes = max(PRUNED_FROM, 2 * len(now.calls)), now.bytes + MOST_DATA_BYTES
            now.whole_at = last + len(now.calls)

    def _drop_oldest_passes(self) -> None:
        """Free the inputs of a step's oldest micro-batches while all take more than ``MOST_STEP_BYTES``."""
        now = self._now
        kept = [place for place, (made, *_) in enumerate(now.losses) if made is not None]
        while now.bytes > MOST_STEP_BYTES and len(kept) > 1:
            _, start, wrote = now.losses[oldest := kept.pop(0)]
            now.losses[oldest] = None, start, wrote
            now.has_dropped, now.whole_at = True, -1
            self._prune()

    def _forget(self, number: int) -> None:
        now, call = self._now, self._now.calls.pop(number)
        now.changed.pop(number, None)
        now.counted.difference_update(map(id, call.data))
        if call.module is not None:
            now.modules[id(call.module)] -= 1
            self.before.forget(number, call.module)
        for key in now.made.keys() & map(id, call.live_results):  # later calls take these results as data
            if now.made[key][1].call == number:
                del now.made[key]

    def _calls_of_live_data(
        self, held: Collection[int], known: Collection[int], leads: Callable[[RecordedCall, int], bool]
    ) -> set[int]:
        """Return the calls that led to live results without gradients. Results of the last module call come first, then
        earlier results while there is room. The remaining results count as plain data from now on."""
        calls, found, counted, room = self._now.calls, set[int](), set[int](), MOST_DATA_BYTES
        latest = max((number for number, call in calls.items() if call.module is not None), default=0)

        def leads_on(call: RecordedCall, read: int) -> bool:
            return not (read in found or read in known) and leads(call, read)

        for number in sorted(held, reverse=True):
            more = _dependencies_of(calls, [number], leads_on) - found
            kept = {id(one): one for each in more for one in calls[each].data if id(one) not in counted}
            room -= sum(map(nbytes, kept.values()))
            is_within = room >= 0 and len(found) + len(more) <= MOST_DATA_CALLS
            if not is_within and (number < latest or len(more) > ALWAYS_KEPT):
                break
            found |= more
            counted |= kept.keys()
        return found

    # The recorded step.

    @property
    def called(self) -> tuple[torch.nn.Module, ...]:
        """The outermost modules that were called, in order."""
        return tuple(module for call in self._now.calls.values() if (module := call.module) is not None)

    @property
    def trained(self) -> tuple[torch.nn.Module, ...]:
        """The called modules that have parameters and are in training mode."""
        return tuple(one for one in self.called if one.training and next(one.parameters(), None) is not None)

    @property
    def is_under_way(self) -> bool:
        """True if a step has begun and no backward pass has run in it. If modules were called, at least one needs
        parameters: a module without parameters may prepare the data of the next step."""
        now = self._now
        begun = 0 if now.has_gone else len(now.calls) - now.earlier
        calls = islice(reversed(now.calls.values()), max(begun, 0))
        has_weights = [next(one.module.parameters(), None) is not None for one in calls if one.module is not None]
        return begun > 0 and (not has_weights or any(has_weights))

    @property
    def has_losses(self) -> bool:
        """True if the losses of the last step are still recorded."""
        return bool(self._now.losses)

    @property
    def lost_loss(self) -> torch.Tensor | None:
        """The first live scalar since the last backward pass that is not finite, or None. On a GPU, only scalars that
        are already computed are read. Once a pass has trained, scalars of calls at lines that never trained, as in
        validation, are ignored."""
        self._off()
        held = [(result(), mark) for result, mark in self._now.scalars]
        losses = [scalar for scalar, mark in held if scalar is not None and mark.is_passed]
        values = read_aside([loss.detach() for loss in losses])
        trained_at = self._now.trained_at
        for loss, value in zip(losses, values, strict=True):
            if math.isfinite(value):
                continue
            if not trained_at or trained_at & self._called_at(self._maker(loss)):
                return loss
        return None

    def has_gradients_of(self, loss: torch.Tensor) -> bool:
        """True if the script has taken gradients of the loss, or of a value computed from it, with autograd.grad."""
        made, calls = self._maker(loss), self._now.calls
        grads = (number for number, call in calls.items() if call.function is torch.autograd.grad)
        return made is not None and made.call in _dependencies_of(calls, grads)

    def watch_given_up_loss(self, loss: torch.Tensor, on_given_up: Callable[[], None]) -> None:
        """Let the next backward pass call ``on_given_up`` unless it includes the loss."""
        made = self._maker(loss)
        self._doubtful = (-1 if made is None else made.call), on_given_up

    def give_up_loss(self, but: Collection[int] = ()) -> None:
        """Report the loss of :meth:`watch_given_up_loss` as given up, unless its call is in ``but``."""
        doubtful, self._doubtful = self._doubtful, None
        if doubtful is not None and doubtful[0] not in but:
            doubtful[1]()

    def awaits_decision(self, loss: torch.Tensor) -> bool:
        """True if the report of :meth:`watch_given_up_loss` is still due for this loss, or a value that led to it."""
        made = self._maker(loss)
        if made is None or self._doubtful is None:
            return False
        return self._doubtful[0] in _dependencies_of(self._now.calls, [made.call])

    def autocast_dtype(self, device: str) -> torch.dtype | None:
        """Return the autocast dtype of the last call under autocast on this device type, or None."""
        calls = reversed(self._now.calls.values())
        return next((call.lowers[device] for call in calls if device in call.lowers), None)

    def forget(self) -> None:
        """Drop all records of this thread."""
        now = self._now
        for held in (now.calls, now.modules, now.made, now.changed, now.scaled, now.losses, now.scalars):
            held.clear()

    def step(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[Optimizer],
        loss: torch.Tensor | None = None,
        of: Collection[int] = (),
        scale: float = math.nan,
        own_scale: float = 1.0,
    ) -> RecordedStep:
        """Return the whole step after its backward passes, or the calls that ``loss`` needs.

        Args:
            model: the model that the step trains.
            optimizers: the optimizers of the loop.
            loss: a loss computed since the last backward pass.
            of: the positions of the optimizers of the wanted losses; all losses if empty.
            scale: the loss scale of the scaler.
            own_scale: the known loss scale of the script itself; 1 if there is none.

        Raises:
            NotReplayableError: the calls do not show the whole step.
        """
        self._off()
        own = [(made, start) for made, start, wrote in self._now.losses if not (of and wrote) or wrote & {*of}]
        losses = [(self._maker(loss), None)] if loss is not None else own
        if not losses:
            raise NotReplayableError("no loss went backward in it")
        if any(made is None for made, _ in losses):
            raise NotReplayableError(TOO_LARGE if self._now.has_dropped else NOT_ALL_SEEN)
        calls = _Calls(self, optimizers)
        ends = [calls.end(made, start) for made, start in losses if made is not None]
        if not calls.at_scale(scale).isdisjoint(made.call for made in ends):
            raise NotReplayableError(OF_SCALED)
        unscaled, scales = zip(*(calls.unscaled(made, own_scale) for made in ends), strict=True)
        is_scaled_alike = len({*scales}) == 1 and not self._now.scaled  # beside a scaler, a factor is a loss weight
        step = self._made(calls, calls.parts_of(unscaled if is_scaled_alike else ends), model)
        return replace(step, own_scale=scales[0]) if is_scaled_alike else step

    def modules(self, model: torch.nn.Module, optimizers: Sequence[Optimizer], most: int = MOST_CALLS) -> RecordedStep:
        """Return at most ``most`` module calls since the last optimizer step, and the calls that compute their inputs.

        The step ends at the last modules: it excludes what the script computes from their outputs.

        Raises:
            NotReplayableError: no module call can be replayed.
        """
        self._off()
        calls = _Calls(self, optimizers)
        wanted = set[int]()
        called = {number: module for number, call in self._now.calls.items() if (module := call.module) is not None}
        for number, module in called.items():
            call = self._now.calls[number]
            is_got_over = not call.has_returned and number != max(self._now.calls)
            has_data = bool(call.reads) or next(module.parameters(), None) is not None
            if has_data and not is_got_over and not calls.why_not(number):
                wanted |= calls.leading_to(Made(number, ""))
            if len(wanted & called.keys()) >= most:
                break
        read = set().union(*(self._now.calls[number].reads for number in wanted))
        ends = sorted(wanted & called.keys() - read)
        if not ends:
            raise NotReplayableError(next(filter(None, map(calls.why_not, self._now.calls)), NOT_ALL_SEEN))
        part = wanted, tuple(Made(number, "") for number in ends)
        step = self._made(calls, [part], model)
        cut = {n: replace(step.calls[n], function=PassEnd(step.calls[n].function)) for n in ends}
        return replace(step, calls={**step.calls, **cut}, reach="modules")

    def _made(
        self, calls: _Calls, parts: Sequence[tuple[set[int], tuple[Made, ...]]], model: torch.nn.Module
    ) -> RecordedStep:
        numbers = sorted(set().union(*(part for part, _ in parts)))
        if not all(calls.takes_only_trained_outside_values(number, model) for number in numbers):
            raise NotReplayableError(NOT_ALL_SEEN)
        whys = [*map(calls.why_not, numbers)]  # check all calls: each check marks the inputs to copy from now on
        if why_not := next(filter(None, whys), ""):
            raise NotReplayableError(why_not)
        state = self.before.state(model, numbers)
        own = {id(tensor) for tensor in tensors_in(model, state.held)}  # not an output that it keeps
        given = tuple({n: calls.given(n, own) for n in sorted(part)} for part, _ in parts)
        modules = {id(module): module for n in numbers if (module := calls.calls[n].module) is not None}
        now = {id(tensor) for tensor in tensors_in(model)}
        beside = [module for module in modules.values() if now.isdisjoint(map(id, tensors_in(module)))]
        return RecordedStep(
            {n: calls.call(n) for n in numbers},
            {min(part): losses for part, losses in parts},
            given,
            state,
            tuple(self.before.state(module, numbers) for module in beside),
        )

    def _weights_written(self, optimizers: Sequence[Optimizer]) -> dict[int, int]:
        """Return the number of the last step that wrote each weight, by ``id``."""
        written: dict[int, int] = {}
        for optimizer in optimizers:
            times = self._stepped.get(id(optimizer), 0)
            weights = map(id, stepped_by(optimizer) if times else ())
            written |= {weight: max(times, written.get(weight, 0)) for weight in weights}
        return written


class _Calls:
    """The recorded calls as a graph: finds the calls that a loss needs, and why a call cannot be replayed."""

    def __init__(self, recorder: Recorder, optimizers: Sequence[Optimizer]) -> None:
        self.calls: dict[int, RecordedCall] = dict(recorder._now.calls)
        self._changed, self._written = recorder._now.changed, recorder._weights_written(optimizers)
        self._copied, self._before = recorder._copied, recorder.before
        self._latest = max((one.steps for one in self.calls.values()), default=0)
        self._whys: dict[int, str] = {}

    def end(self, made: Made, start: torch.Tensor | None) -> Made:
        """Return the loss of a backward pass: the result itself, or its product with the initial gradient."""
        if start is None or (start.numel() == 1 and float(start) == 1.0):
            return made
        number = max(self.calls) + 1
        weighs = replace(
            self.calls[made.call], function=weighted, name="", given=((made, start), {}), reads={made.call}
        )
        self.calls[number] = replace(weighs, inputs=[], past={}, writes=False, training=None, why_not="")
        return Made(number, "")

    def unscaled(self, made: Made, known: float) -> tuple[Made, float]:
        """Return the loss before the script multiplied it by its own loss scale, and that scale; else the loss and 1.

        The scale is at least ``SCALED_BY_HAND``, and is ``known``. Any other factor weights a loss.
        """
        call = self.calls[made.call]
        factors = [one for one in call.given[0] if type(one) in (int, float) and one >= SCALED_BY_HAND]
        losses = [one for one in call.given[0] if isinstance(one, Made)]
        is_product = call.name in PRODUCTS and len(factors) == len(losses) == 1
        if not is_product or factors[0] != known:
            return made, 1.0
        return losses[0], float(factors[0])

    def at_scale(self, scale: float) -> set[int]:
        """Return the calls with results that contain the loss scale: gradients of scaled losses, and values computed
        from them. A division by the loss scale ends the chain. Its divisor becomes a ``ScalePower`` for a replay."""
        found = set[int]()
        powers = {**dict.fromkeys(PRODUCTS, -1), **dict.fromkeys(QUOTIENTS, 1)}
        for number, call in self.calls.items():
            power = powers.get(call.name, 0) if call.reads & found else 0
            ways = [type(one) is float and one == scale**power for one in call.given[0]] if power else []
            if any(ways):
                args = (ScalePower(power) if way else one for way, one in zip(ways, call.given[0], strict=True))
                self.calls[number] = replace(call, given=(tuple(args), call.given[1]))
            elif call.function is scaled_gradients or call.reads & found:
                found.add(number)
        return found

    def why_not(self, number: int) -> str:
        """Return why a call cannot be replayed unchanged, or "" if it can."""
        unknown = _dependencies_of(self.calls, [number], lambda call, read: read not in self._whys) - self._whys.keys()
        for one in sorted(unknown):
            self._whys[one] = self._why_not(one)
        return self._whys.get(number, NOT_ALL_SEEN)

    def _why_not(self, number: int) -> str:
        call = self.calls[number]
        if call.why_not:
            return call.why_not
        changed = [place for place, (tensor, times) in enumerate(call.inputs) if times_written(tensor) != times]
        if changed:
            self._copied.update((call.line, str(place)) for place in changed)
            return f"an input of {_described(call)} was changed in place since; ampdbg copies it from now on"
        weights = call.module.parameters() if call.module is not None else ()
        if any(self._written.get(id(weight), -1) > call.steps for weight in weights):
            return f"an optimizer has stepped the weights of {_described(call)} since"
        if call.steps < self._latest and not self._before.is_known(number):
            return "what its module held has changed since"
        return next((why for read in call.reads if (why := self._why(read)) and not call.takes_data_of(read)), "")

    def _why(self, read: int) -> str:
        """Return why a call that another call reads cannot be replayed; the call may be forgotten."""
        return self._whys.get(read, "" if read in self.calls else NOT_ALL_SEEN)

    def takes_only_trained_outside_values(self, number: int, model: torch.nn.Module) -> bool:
        """True if the call's inputs from unrecorded graphs are finite and depend only on trained weights beside the
        model. An example is a temperature. No gradient of the model passes through such inputs."""
        weights = self._written.keys() - {id(one) for one in model.parameters()}
        return all(leaves <= weights and is_finite(value) for value, leaves in self.calls[number].outside_values)

    def parts_of(self, losses: Sequence[Made]) -> list[tuple[set[int], tuple[Made, ...]]]:
        """Return the calls that each loss needs, with that loss. If any losses share a call, all form one part, because
        one backward pass computes them together."""
        parts = [self.leading_to(loss) for loss in losses]
        every = set().union(*parts)
        if sum(map(len, parts)) != len(every):
            return [(every, tuple(losses))]
        return [(part, (loss,)) for part, loss in zip(parts, losses, strict=True)]

    def leading_to(self, loss: Made) -> set[int]:
        """Return the calls that a loss needs, and the calls that write into their results."""
        self.why_not(loss.call)
        needed = _dependencies_of(self.calls, [loss.call], self._leads)
        while more := {w for n in needed for w in self._changed.get(n, ()) if w < loss.call} - needed:
            needed |= _dependencies_of(self.calls, more, self._leads)
        return needed

    def _leads(self, call: RecordedCall, read: int) -> bool:
        return not self._why(read) or not call.takes_data_of(read)

    def given(self, number: int, own: Collection[int]) -> tuple[Any, Any]:
        """Return the arguments of a call with ``Own`` instead of tensors of the model."""
        call = self.calls[number]

        def each(value: Any) -> Any:
            if isinstance(value, Made):
                return call.past[value][0] if self._why(value.call) else value
            return Own(value) if isinstance(value, torch.Tensor) and id(value) in own else value

        given: tuple[Any, Any] = Copying(each).of(call.given)
        return given

    def call(self, number: int) -> RecordedCall:
        """Return a call that reads only from calls that can be replayed."""
        call = self.calls[number]
        return replace(call, reads={read for read in call.reads if not self._why(read)})


def _dependencies_of(
    calls: Mapping[int, RecordedCall],
    numbers: Iterable[int],
    leads: Callable[[RecordedCall, int], bool] = lambda call, read: True,
) -> set[int]:
    """Return these calls and all calls that they read from, as far as ``leads`` is true."""
    waiting, found = list(numbers), set[int]()
    while waiting:
        number = waiting.pop()
        if number not in found and number in calls:
            found.add(number)
            waiting += [read for read in calls[number].reads if leads(calls[number], read)]
    return found


class _ArgumentRecorder:
    """Converts the arguments of one call. ``made`` lists results of earlier calls, each with its version."""

    def __init__(self, recorder: Recorder, noted: RecordedCall, *, is_in_place: bool) -> None:
        self.made: list[tuple[Made, torch.Tensor, int]] = []
        self._recorder, self._noted, self._is_first = recorder, noted, is_in_place
        self._given = set[int]()

    def of(self, value: Any) -> Any:
        """Return the placeholder that is stored instead of the argument."""
        if isinstance(value, torch.Tensor):
            return self._taken(value)
        if type(value) in CONSTANTS:
            return value
        return Copying(lambda one: self._taken(one) if isinstance(one, torch.Tensor) else one).of(value)

    def is_new(self, tensor: torch.Tensor) -> bool:
        """True if the call itself put this tensor into its arguments, and the tensor has an autograd graph."""
        if tensor.grad_fn is None or id(tensor) in self._given:
            return False
        return self._recorder._maker(tensor) is None

    def _taken(self, tensor: torch.Tensor) -> Any:
        recorder, noted = self._recorder, self._noted
        self._given.add(id(tensor))
        is_first, self._is_first = self._is_first, False
        if is_first:
            recorder._copy_before_write(tensor)
        made, times = recorder._maker(tensor), times_written(tensor)
        if made is not None:
            self.made.append((made, tensor, times))
            noted.reads |= {made.call, *recorder._now.changed.get(made.call, ())}
            if not tensor.requires_grad:
                noted.past[made] = tensor, times
                recorder._now.count_bytes(tensor)
            return made
        if tensor.requires_grad and not tensor.is_leaf:  # detached, because it would keep its graph alive
            leaves, tensor = leaves_of_small_graph(tensor), tensor.detach()
            if leaves is None:
                noted.why_not = NOT_ALL_SEEN
                return None
            noted.outside_values.append((tensor, leaves))
        if is_first or (noted.line, str(len(noted.inputs))) in recorder._copied:
            tensor = duplicate(tensor.detach()).requires_grad_(tensor.requires_grad)
            times = times_written(tensor)
        noted.inputs.append((tensor, times))
        recorder._now.count_bytes(tensor)
        return tensor


def _draws(function: Callable[..., Any], name: str) -> bool:
    """True if the call may draw random numbers: a module, the script's own Function, or a random function of torch."""
    return isinstance(function, (torch.nn.Module, OwnFunction)) or _is_draw(name)


@functools.cache
def _is_draw(name: str) -> bool:
    return DRAWS.search(name) is not None


@functools.cache
def _is_in_place(name: str) -> bool:
    """True if the torch function of this name writes into its first argument."""
    return name in WRITES or (name.endswith("_") and not name.endswith("__"))


_Begun = tuple[int, RecordedCall, _ArgumentRecorder]
"""The number, the record and the arguments of a running call."""


def _described(call: RecordedCall) -> str:
    name = (call.name or type(call.function).__name__).strip("_")
    return f"{name} at {name_of_line(*call.line[:2])}" if call.line is not None else name


def _may_be_tracing() -> bool:
    """Return ``is_tracing()``, but evaluate it only after cheap checks, because a step has many functions."""
    is_any = torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None
    return (is_any or is_fx_tracing()) and is_tracing()


def _of_the_engine(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    *_: Any,
    **__: Any,
) -> tuple[Any, ...]:
    """Return what ``autograd.grad`` with these arguments gives the engine behind its outputs."""
    keeps_graph = create_graph if retain_graph is None else retain_graph
    return grad_outputs, keeps_graph, create_graph, (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)


def _tensors(args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments, and in lists and tuples among them."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (one for one in value if isinstance(one, torch.Tensor))


def _noting(original: Callable[..., Any], entered: Sequence[Recorder]) -> Callable[..., Any]:
    is_compiled = torch.compiler.is_dynamo_compiling

    def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # torch.compile traces only this check. Code that took a reference to this function keeps it for good.
        if is_compiled() or not entered or entered[0]._now.inside:
            return original(module, *args, **kwargs)
        return entered[0].run_call(original, module, args, kwargs)

    return call


def _compiling(original: Callable[..., Any], entered: Sequence[Recorder]) -> Callable[..., Any]:
    """Return a replacement for ``torch.compile``, whose compiled functions are recorded where they are called."""
    is_compiled = torch.compiler.is_dynamo_compiling

    def compiling(*args: Any, **kwargs: Any) -> Any:
        if entered:
            entered[0].looking = nullcontext
        compiled = original(*args, **kwargs)
        if not (isinstance(compiled, FunctionType) and hasattr(compiled, "_torchdynamo_orig_callable")):
            return compiled  # a module, whose calls are recorded, or a decorator, which calls this function again

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_compiled() or not entered:
                return compiled(*args, **kwargs)
            return entered[0].run_compiled(compiled, args, kwargs)

        return call

    return compiling


def _applied(entered: Sequence[Recorder], apply: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
    """Run an ``autograd.Function``, in the entered recorder if there is one."""
    return entered[0].run_application(apply, function, args, kwargs) if entered else apply(*args, **kwargs)


def _first(do: Callable[..., None], entered: Sequence[Recorder], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for a torch function that first calls ``do`` with the recorder and all arguments."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if entered and not torch.compiler.is_compiling():
            do(entered[0], *args, *kwargs.values())
        return original(*args, **kwargs)

    return call


def _is_wrapper(module: torch.nn.Module) -> bool:
    """True if the module is a wrapper, so that the call of its inner model is recorded instead. DistributedDataParallel
    and Fabric prepare each call for a backward pass. Without it the next call raises; Fabric rejects a foreign pass."""
    held = module._modules
    readies = (always or _is_of_ddp(held[name]) for name, always in WRAPPERS.items() if name in held)
    return _is_of_ddp(module) or any(readies)


def _is_of_ddp(module: torch.nn.Module | None) -> bool:
    return DistributedDataParallel in type(module).__mro__  # `isinstance` of an abstract class takes ten times as long
