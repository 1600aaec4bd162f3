"""A prepared run: a config's workload on its device, under its precision policy, seeded and pinned; and its pass.

The pass of a step is the forward and backward pass over its micro-batches, with one or several losses.
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
from ampdbg.probes.makings import Constructions
from ampdbg.replay.random_state import seeded
from ampdbg.source.ownership import Line
from ampdbg.workload.build import Workload, build_workload


@dataclass
class Tail:
    """The lines of a script between its modules and its losses, each with its calls, by :func:`name_of_line`.

    ``in_fp32`` are the calls that run in FP32 now, and ``scale`` is the loss scale of the losses.
    """

    lines: Mapping[str, tuple[Line, frozenset[int]]]
    in_fp32: frozenset[int] = frozenset()
    scale: float = 1.0

    def calls_of(self, names: Iterable[str]) -> frozenset[int]:
        """Return the calls of the lines among ``names``."""
        return frozenset(number for name in names if name in self.lines for number in self.lines[name][1])


def name_of_line(file: str, number: int) -> str:
    """Return the name of a line as a pin: ``train.py:41``."""
    return f"{PurePath(file).name}:{number}"


@dataclass(frozen=True)
class Run:
    """A workload on its device, with the config that trains it.

    ``makings`` records where the model was made. ``names`` held half tensors in code that no replay runs: in a script's
    loss function, since replays repeat only its calls.
    """

    config: Config
    workload: Workload
    device: torch.device
    mode: PrecisionMode
    started: float
    makings: Constructions = field(default_factory=Constructions)
    names: NamesByLine = field(default_factory=dict)
    tail: Tail = field(default_factory=lambda: Tail({}))

    @contextlib.contextmanager
    def pinned(self, pins: Iterable[str]) -> Iterator[None]:
        """Run the modules and tail lines named by ``pins`` in FP32 while entered."""
        names = list(pins)
        modules = [name for name in names if name not in self.tail.lines]
        before, self.tail.in_fp32 = self.tail.in_fp32, self.tail.calls_of(names)
        try:
            with self.mode.pinned(self.workload.model, modules):
                yield
        finally:
            self.tail.in_fp32 = before

    def scaler(self) -> torch.amp.GradScaler:
        """Return the loss scaler of the run; a dynamic one continues from the checkpoint's state."""
        scaler, state = self.mode.scaler(), self.workload.scaler_state
        if state is not None and self.config.continues_scale and isinstance(scaler, LossScaler):
            scaler.continue_from(state)
        return scaler

    @property
    def elapsed(self) -> float:
        """The seconds since the preparation of the run began."""
        return round(time.monotonic() - self.started, 3)


@contextlib.contextmanager
def prepared(config: Config) -> Iterator[Run]:
    """Build the workload. While this is entered, CUDA is emulated if necessary, and the pins are in force.

    Raises:
        WorkloadError: a target cannot be used, a pin does not name a module, or the device does not exist.
        UserCodeError: the user's code raised.
    """
    started, device = time.monotonic(), choose_device(config.train.device)
    with ExitStack() as stack:
        stack.enter_context(seeded(config.train.seed))
        if is_emulated(config, device):
            stack.enter_context(cuda_on_cpu())
        with Constructions() as makings:
            workload, mode = build_workload(config, device), mode_of(config.precision, device)
        # TorchScript's optimizer would write the autocast dtypes of one replay into the code of all later replays.
        stack.enter_context(optimized_execution(False))
        stack.enter_context(mode.converted(workload.model))
        stack.enter_context(mode.pinned(workload.model, config.precision.pins))
        if config.checkpoint and config.precision.has_half_weights and mode.updates_half_weights():
            for optimizer in workload.optimizers:
                if optimizer.state:  # convert a checkpoint's state, which fits weights of another dtype
                    optimizer.load_state_dict(optimizer.state_dict())
        with workload.user.reading("running the workload"):
            yield Run(config, workload, device, mode, started, makings)


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
    """Accumulate the gradients of one step's micro-batches, one loss after another.

    If there are as many optimizers as losses, each loss reaches only the parameters of its optimizer, in order. The two
    sides of a GAN are an example.

    Args:
        workload: computes losses from a batch.
        batches: one for each micro-batch, on the device; each has an equal share of the gradients.
        forward: returns the context of each forward pass and its losses.
        scaled: multiplies a loss by the loss scale.
        seen: called with the losses of each micro-batch and its share, before their backward pass.
        stops_at: returns True if no backward pass is needed from these losses on.

    Returns:
        The losses of each micro-batch, detached.

    Raises:
        WorkloadError: the result of the user's code has no usable loss.
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
            # ampdbg looks for NaN itself. The user's anomaly detection would end the run at the first NaN.
            with workload.user.running("the backward pass"), torch.autograd.set_detect_anomaly(False):
                part = scaled(loss * share if share != 1.0 else loss)
                part.backward(retain_graph=position < len(losses), inputs=_own_parameters(workload, losses, position))
    return tuple(every)


def _own_parameters(workload: Workload, losses: NamedLosses, position: int) -> list[torch.Tensor] | None:
    """Return the parameters of the optimizer for the loss at ``position``, from 1; None for all parameters."""
    optimizers = workload.optimizers
    if not len(losses) == len(optimizers) > 1:
        return None
    parameters = (each for group in optimizers[position - 1].param_groups for each in group["params"])
    return [each for each in parameters if each.requires_grad]


def loss_of(losses: Sequence[NamedLosses]) -> float:
    """Return the loss of a step: the mean over its micro-batches of the sum of their losses."""
    return sum(float(loss) for each in losses for loss in each.values()) / len(losses)
