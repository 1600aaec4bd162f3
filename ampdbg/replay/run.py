"""A prepared run: a config's workload on its device, under its precision policy, seeded and pinned; and its pass.

The pass of a step is forward and backward over its micro-batches, with one loss or several.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import torch
from torch.jit._fuser import optimized_execution

from ampdbg.config.schema import Config
from ampdbg.environment import choose_device, is_emulated
from ampdbg.precision.emulation import cuda_on_cpu
from ampdbg.precision.modes import LossScaler, PrecisionMode, mode_of
from ampdbg.probes.half_names import NamesByLine
from ampdbg.probes.makings import Makings
from ampdbg.replay.random_state import seeded
from ampdbg.source.ownership import Line
from ampdbg.workload.build import Workload, build_workload


@dataclass
class Tail:
    """The lines of a script between its modules and its losses, each with its calls, by :func:`name_of_line`.

    ``in_fp32`` are the calls that run in FP32 now, and ``scale`` is the loss scale that the losses are made at.
    """

    lines: Mapping[str, tuple[Line, frozenset[int]]]
    in_fp32: frozenset[int] = frozenset()
    scale: float = 1.0

    def calls_of(self, names: Iterable[str]) -> frozenset[int]:
        """The calls of the lines among these names."""
        return frozenset(number for name in names if name in self.lines for number in self.lines[name][1])


def name_of_line(file: str, number: int) -> str:
    """What a line is called among pins: ``train.py:41``."""
    return f"{PurePath(file).name}:{number}"


@dataclass(frozen=True)
class Run:
    """A workload on its device, and the config it is trained by.

    ``makings`` tell where the model was made. ``names`` are those that held half tensors in code which no replay runs:
    the loss of a script, whose calls alone are made again.
    """

    config: Config
    workload: Workload
    device: torch.device
    mode: PrecisionMode
    started: float
    makings: Makings = field(default_factory=Makings)
    names: NamesByLine = field(default_factory=dict)
    tail: Tail = field(default_factory=lambda: Tail({}))

    @contextlib.contextmanager
    def pinned(self, pins: Iterable[str]) -> Iterator[None]:
        """While this is entered, the modules and the lines behind them of these names run in FP32."""
        names = list(pins)
        modules = [name for name in names if name not in self.tail.lines]
        before, self.tail.in_fp32 = self.tail.in_fp32, self.tail.calls_of(names)
        try:
            with self.mode.pinned(self.workload.model, modules):
                yield
        finally:
            self.tail.in_fp32 = before

    def scaler(self) -> torch.amp.GradScaler:
        """The loss scaler of the run; a dynamic one goes on from the checkpoint's."""
        scaler, state = self.mode.scaler(), self.workload.scaler_state
        if state is not None and self.config.continues_scale and isinstance(scaler, LossScaler):
            scaler.continue_from(state)
        return scaler

    @property
    def elapsed(self) -> float:
        """Seconds since it began to be prepared."""
        return round(time.monotonic() - self.started, 3)


@contextlib.contextmanager
def prepared(config: Config) -> Iterator[Run]:
    """Builds the workload; while this is entered CUDA is emulated where it has to be, and the pins are in force.

    Raises:
        WorkloadError: a target cannot be used, a pin names no module, or the device is not there.
        UserCodeError: the user's code raised.
    """
    started, device = time.monotonic(), choose_device(config.train.device)
    with ExitStack() as stack:
        stack.enter_context(seeded(config.train.seed))
        if is_emulated(config, device):
            stack.enter_context(cuda_on_cpu())
        with Makings() as makings:
            workload, mode = build_workload(config, device), mode_of(config.precision, device)
        # TorchScript's optimizer writes the dtypes of autocast into the code: those of one replay into all that follow.
        stack.enter_context(optimized_execution(False))
        stack.enter_context(mode.converted(workload.model))
        stack.enter_context(mode.pinned(workload.model, config.precision.pins))
        if config.checkpoint and config.precision.has_half_weights and mode.updates_half_weights():
            _fit_states(workload.optimizers)
        with workload.user.reading("running the workload"):
            yield Run(config, workload, device, mode, started, makings)


def _fit_states(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """A checkpoint's states, that were fitted to weights of another dtype, get the one that the weights have now."""
    for optimizer in optimizers:
        if optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())


NamedLosses = Mapping[str, torch.Tensor]
"""The losses of one micro-batch by name, each of shape ()."""


def run_pass(
    workload: Workload,
    batches: Sequence[Any],
    forward: Callable[[], AbstractContextManager[Any]],
    *,
    scaled: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss,
    seen: Callable[[NamedLosses, float], None] = lambda losses, share: None,
    stops_at: Callable[[NamedLosses], bool] = lambda losses: False,
) -> tuple[NamedLosses, ...]:
    """Adds up the gradients of one step's micro-batches; several losses go backward one after another.

    Where there are as many optimizers as losses, as for the two sides of a GAN, each loss reaches the parameters of its
    own alone: the first loss those of the first optimizer.

    Args:
        workload: what makes losses of a batch.
        batches: one a micro-batch, on the device; each has an equal share of the gradients.
        forward: makes the context of each forward pass and its losses.
        scaled: multiplies a loss by the loss scale.
        seen: called with the losses of each micro-batch and its share, before they go backward.
        stops_at: whether no backward pass is needed from these losses on.

    Returns:
        The losses of each micro-batch, detached.

    Raises:
        WorkloadError: what the user's code returned holds no usable loss.
        UserCodeError: the user's code raised.
    """
    share = 1.0 / len(batches)
    every: list[NamedLosses] = []
    has_stopped = False
    for batch in batches:
        with forward():
            losses = workload.losses(batch)
        seen(losses, share)
        every.append({name: loss.detach() for name, loss in losses.items()})
        has_stopped = has_stopped or stops_at(losses)
        for position, loss in enumerate(() if has_stopped else losses.values(), start=1):
            # NaN is looked for here too: the user's own detection of anomalies would end the run at the first.
            with workload.user.running("the backward pass"), torch.autograd.set_detect_anomaly(False):
                part = scaled(loss * share if share != 1.0 else loss)
                part.backward(retain_graph=position < len(losses), inputs=_own_parameters(workload, losses, position))
    return tuple(every)


def _own_parameters(workload: Workload, losses: NamedLosses, position: int) -> list[torch.Tensor] | None:
    """The parameters that the loss at ``position``, from 1, has an optimizer of its own for; None for all."""
    optimizers = workload.optimizers
    if not len(losses) == len(optimizers) > 1:
        return None
    parameters = (each for group in optimizers[position - 1].param_groups for each in group["params"])
    return [each for each in parameters if each.requires_grad]


def loss_of(losses: Sequence[NamedLosses]) -> float:
    """The loss of a step: the mean over its micro-batches of the sum of their losses."""
    return sum(float(loss) for each in losses for loss in each.values()) / len(losses)
