"""How large activations, gradients and the loss scale are, sampled at one step of every so many."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import _pytree

from ampdbg.diagnosis.trend import reached_at
from ampdbg.probes.seams import Seam, attached, only_follows
from ampdbg.probes.tensors import float_values, to_host
from ampdbg.probes.watch import Watch
from ampdbg.record.run import Trend

MOST_SAMPLES = 64
"""Of a longer run every other sample is left out, again and again."""

MOST_KEPT = 8
"""So many series go into the record: those that would reach their limit first, and then the largest."""

Key = tuple[Literal["activation", "gradient", "scale"], str]

SCALE: Key = ("scale", "")


class TrendSamples:
    """Samples the steps of a watched loop; nothing but the sampled steps has hooks.

    Activations are the outputs of modules in float16, which that limits; gradients are unscaled, of loops with a loss
    scale.

    Args:
        watcher: of the loop.
        every: one step of so many is sampled, from the second one on; 0 for none.
    """

    def __init__(self, watcher: Watch, every: int) -> None:
        self._watcher = watcher
        self._every = self._stride = every
        self._steps: list[int] = []
        self._series: dict[Key, dict[int, float]] = {}
        self._found: dict[Key, torch.Tensor] = {}
        self._sampling: ExitStack | None = None

    def step_ended(self) -> None:
        """To be called when a step has ended."""
        if self._sampling is not None:
            self.end()
            self._read()
        if self._every and self._watcher.log.closed() % self._stride == 0:
            self._begin()

    def end(self) -> None:
        """Leaves torch as it was."""
        sampling, self._sampling = self._sampling, None
        if sampling is not None:
            sampling.close()

    def seen(self) -> tuple[Trend, ...]:
        """The series that matter most, each with its largest magnitude at the sampled steps."""
        made = [Trend(*key, tuple(values), tuple(values.values())) for key, values in self._series.items() if values]
        return tuple(sorted(made, key=_urgency)[:MOST_KEPT])

    @property
    def count(self) -> int:
        """How many samples there are."""
        return len(self._steps)

    def _begin(self) -> None:
        names = {id(module): name for name, module in self._watcher.models.named_modules()}
        self._found = {}

        def note(module: torch.nn.Module, args: Any, output: Any) -> None:
            name = names.get(id(module))
            if name is not None and not self._is_of_none() and not only_follows():
                for tensor in _pytree.tree_leaves(output):
                    if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float16:
                        self._note(("activation", name), tensor)

        self._sampling = ExitStack()
        self._sampling.callback(register_module_forward_hook(note).remove)
        self._sampling.enter_context(attached(self._around))

    def _around(self, seam: Seam, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if seam in ("unscale_", "step") and not self._is_of_none():
            self._note_gradients(args[1] if len(args) > 1 else kwargs["optimizer"])
        return original(*args, **kwargs)

    def _note_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes the gradients that a scaler is about to unscale, where it has not yet."""
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self._watcher.models.named_parameters():
            if id(parameter) in trained and parameter.grad is not None and ("gradient", name) not in self._found:
                self._note(("gradient", name), parameter.grad)

    def _is_of_none(self) -> bool:
        """Whether what runs is no step of the loop's own, or one that a backward pass computes again."""
        return self._watcher.is_paused or torch._C._current_graph_task_id() != -1

    def _note(self, key: Key, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            values = float_values(tensor.detach())
            if values is not None and values.numel():
                largest = values.abs().amax().float()
                before = self._found.get(key)
                self._found[key] = largest if before is None else torch.maximum(before, largest)

    def _read(self) -> None:
        """Reads what the step that has ended has shown."""
        found, self._found = self._found, {}
        step = self._watcher.log.latest()
        self._steps.append(step.step)
        scale = step.scale if step.scaler else 0.0
        self._add(SCALE, step.step, scale)
        for key, largest in zip(found, to_host(list(found.values())), strict=True):
            self._add(key, step.step, largest if key[0] == "activation" else largest / (scale or math.inf))
        if len(self._steps) > MOST_SAMPLES:
            del self._steps[1::2]
            self._stride *= 2
            for key, values in self._series.items():
                self._series[key] = {number: values[number] for number in self._steps if number in values}

    def _add(self, key: Key, step: int, value: float) -> None:
        if math.isfinite(value) and value > 0:
            self._series.setdefault(key, {})[step] = value


def _urgency(trend: Trend) -> tuple[float, float]:
    reached = reached_at(trend)
    return math.inf if reached is None else reached, -trend.values[-1]
