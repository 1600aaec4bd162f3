"""Samples the magnitudes of half values at every n-th step: ops, modules, gradients and the loss scale."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch._C import DisableTorchFunction
from torch._C._functorch import peek_interpreter_stack
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from ampdbg.diagnosis.trend import is_constant, is_near, reached_at, what_of
from ampdbg.formats import FLOAT16
from ampdbg.ops import SHARES_MEMORY
from ampdbg.probes.module_calls import ModulePaths, module_paths
from ampdbg.probes.optimizers import stepped_by
from ampdbg.probes.seams import Seam, attached, is_in_backward, is_tracing
from ampdbg.probes.source_lines import innermost_line, source_if_known
from ampdbg.probes.tensors import float_values, to_host
from ampdbg.probes.watch import Watch
from ampdbg.quantities import counted, number, share
from ampdbg.record.findings import place_of
from ampdbg.record.run import Trend
from ampdbg.source.ownership import Line

MOST_SAMPLES = 64
"""In a longer run samples are merged in pairs, repeatedly. Each pair keeps its larger value."""

MOST_KEPT = 8
"""This many series go into the record: those that would reach their limit earliest, then the largest."""

VIEWS = SHARES_MEMORY | {"getitem", "get"}
"""Names of functions that may return a view of their input; further functions may return a view of their own result."""

SAMPLED = "trend: {steps} sampled, {ops} and {outputs} of modules in float16"
LARGEST = "; the largest, {value} of {place} at step {step}, is {share} of FP16's limit of 65,504"


class Key(NamedTuple):
    """The key of a series: see :class:`~ampdbg.record.run.Trend`."""

    kind: Literal["activation", "gradient", "scale"]
    name: str = ""
    op: str = ""
    line: Line | None = None


class TrendSamples:
    """Samples the steps of a watched loop; only sampled steps have hooks.

    Activations are float16 results of torch functions inside :meth:`looking`. If no function is visible, as in compiled
    modules, they are module outputs. Gradients are unscaled, and sampled in loops with a loss scale.

    Args:
        watcher: The watch of the loop.
        every: Sample one step in this many, from the second step on; 0 for none.
    """

    def __init__(self, watcher: Watch, every: int) -> None:
        self._watcher = watcher
        self._every = self._stride = every
        self._steps: list[int] = []
        self._series: dict[Key, dict[int, float]] = {}
        self._found: dict[Key, list[torch.Tensor]] = {}
        self._sampling: ExitStack | None = None
        self._functions = _Functions(self._note_op)
        self._paths: ModulePaths | None = None
        self._last: Callable[[], torch.Tensor | None] = lambda: None

    def step_ended(self) -> None:
        """Finish the sample of the ended step, and start one if the next step is due."""
        if self._sampling is not None:
            self.end()
            self._read()
        if self._every and self._watcher.log.closed() % self._stride == 0:
            self._begin()

    def end(self) -> None:
        sampling, self._sampling = self._sampling, None
        if sampling is not None:
            sampling.close()

    def looking(self) -> AbstractContextManager[Any]:
        """Return a context for each call that the loop makes, which samples torch functions during a sampled step.

        It is a function mode, because a dispatch mode would change the paths that some torch functions take.
        """
        return nullcontext() if self._sampling is None or self._is_outside_step() else self._functions

    def seen(self) -> tuple[Trend, ...]:
        """Return the most important series, each with its largest magnitude at the sampled steps."""
        return tuple(sorted(map(_trend, self._series.items()), key=_urgency)[:MOST_KEPT])

    def notes(self) -> Iterator[str]:
        """Yield one line about the samples and their distance from the limit; nothing if sampling is off."""
        if not self._every:
            return
        kept = [key for key in self._series if key.kind == "activation"]
        ops = sum(bool(key.op) for key in kept)
        steps, outputs = counted(len(self._steps), "step"), counted(len(kept) - ops, "other output")
        said = SAMPLED.format(steps=steps, ops=counted(ops, "op"), outputs=outputs)
        made = [trend for trend in map(_trend, self._series.items()) if trend.kind == "activation"]
        # A constant is shown only if there is nothing else.
        for trend in sorted(made, key=lambda trend: (is_constant(trend), -max(trend.values)))[:1]:
            value, place = max(trend.values), f"{what_of(trend)} ({place_of(trend.source)})".replace(" ()", "")
            step, part = trend.steps[trend.values.index(value)], share(value, FLOAT16.largest)
            said += LARGEST.format(value=number(value), place=place, step=f"{step:,}", share=part)
        yield said

    @property
    def count(self) -> int:
        return len(self._steps)

    def _begin(self) -> None:
        names = {id(module): name for name, module in self._watcher.models.named_modules()}
        self._found = {}

        def note(module: torch.nn.Module, args: Any, output: Any) -> None:
            name = names.get(id(module))
            if name is None or self._is_outside_step() or is_tracing():
                return
            with DisableTorchFunction():  # calls here are not functions of the module
                for tensor in filter(_is_half, _pytree.tree_leaves(output)):
                    if tensor is not self._last():
                        self._note(Key("activation", name), tensor)

        self._sampling = ExitStack()
        self._sampling.callback(register_module_forward_hook(note).remove)
        self._paths = self._sampling.enter_context(module_paths(self._watcher.models))
        self._sampling.enter_context(attached(self._around))

    def _note_op(self, function: Any, result: Any) -> None:
        """Sample the half results of a torch function, except views of its inputs."""
        name = getattr(function, "__name__", "").strip("_")
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if _is_half(tensor) and not (name in VIEWS and tensor._is_view()):
                self._watcher.guard.run_hook(self._note_made, name, tensor)

    def _note_made(self, name: str, tensor: torch.Tensor) -> None:
        if self._paths is not None and not is_tracing() and peek_interpreter_stack() is None:
            key = Key("activation", self._paths.current[0], name, innermost_line())
            self._last = weakref.ref(tensor)
            self._note(key, tensor)

    def _around(self, seam: Seam, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if seam in ("unscale_", "step") and not self._is_outside_step():
            self._note_gradients(args[1] if len(args) > 1 else kwargs["optimizer"])
        return original(*args, **kwargs)

    def _note_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Sample the gradients that a scaler is about to unscale, once a step."""
        trained = set(map(id, stepped_by(optimizer)))
        for name, parameter in self._watcher.models.named_parameters():
            key = Key("gradient", name)
            if id(parameter) in trained and parameter.grad is not None and key not in self._found:
                self._note(key, parameter.grad)

    def _is_outside_step(self) -> bool:
        """True if the running code is not part of the loop's step, or is recomputed in a backward pass."""
        return self._watcher.is_paused or is_in_backward()

    def _note(self, key: Key, tensor: torch.Tensor) -> None:
        values = float_values(tensor.detach())
        if values is not None:
            self._found.setdefault(key, []).extend(torch.aminmax(values))

    def _read(self) -> None:
        found, self._found = self._found, {}
        step = self._watcher.log.latest()
        self._steps.append(step.step)
        scale = step.scale if step.scaler else 0.0
        self._add(Key("scale"), step.step, scale)
        read = iter(to_host([end for ends in found.values() for end in ends]))
        for key, ends in found.items():
            largest = max(abs(next(read)) for _ in ends)
            self._add(key, step.step, largest if key.kind == "activation" else largest / (scale or math.inf))
        if len(self._steps) > MOST_SAMPLES:
            self._thin()

    def _thin(self) -> None:
        pairs = list(zip(self._steps[::2], [*self._steps[1::2], -1], strict=False))
        del self._steps[1::2]
        self._stride *= 2
        for key, values in self._series.items():
            both = ((first, max(values.get(first, 0.0), values.get(second, 0.0))) for first, second in pairs)
            self._series[key] = {first: value for first, value in both if value}

    def _add(self, key: Key, step: int, value: float) -> None:
        if math.isfinite(value) and value > 0:
            self._series.setdefault(key, {})[step] = value


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float16


class _Functions(TorchFunctionMode):
    """Passes the result of each torch function to ``note``."""

    def __init__(self, note: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self._note(function, result)
        return result


def _trend(series: tuple[Key, dict[int, float]]) -> Trend:
    key, values = series
    return Trend(key.kind, key.name, tuple(values), tuple(values.values()), key.op, source_if_known(key.line))


def _urgency(trend: Trend) -> tuple[bool, float, bool, float]:
    """Return the sort key: near the limit, then the earliest to reach it, then the largest; the loss scale last."""
    reached = reached_at(trend)
    return not is_near(trend), math.inf if reached is None else reached, trend.kind == "scale", -max(trend.values)
