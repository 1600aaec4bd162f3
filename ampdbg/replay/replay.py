"""Replays: one step run again under another precision or loss scale, leaving everything as it was."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ampdbg.errors import AmpdbgError
from ampdbg.precision.modes import DTYPES
from ampdbg.precision.widening import LIFTS, Alteration, lifted, rounding_to, widening
from ampdbg.probes.module_calls import ModulePaths
from ampdbg.probes.op_trace import OpTrace, placed
from ampdbg.probes.steps import to_host
from ampdbg.probes.tensors import float_values, is_finite
from ampdbg.record.run import Replay
from ampdbg.replay.copies import altered_batch, duplicate
from ampdbg.replay.passes import loss_of, run_pass
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import Snapshot, rewound
from ampdbg.replay.state import altered_model, held_by

TraceKind = Callable[[torch.nn.Module, ModulePaths], OpTrace]


HALF_A_UNIT = 2.0**-25
"""An update that is a smaller share of a float32 weight does not change it."""


@dataclass(frozen=True)
class Manner:
    """How a step is run again.

    ``dtype`` is what autocast lowers to; ``float32`` and ``float64`` run without autocast. When ``is_lifted``
    the half tensors that the code or the model itself asks for are that wide too; else all is as in the
    run. Weights and batch are first rounded to ``rounds_to``, where it is set.
    """

    dtype: str
    scale: float = 1.0
    is_lifted: bool = True
    rounds_to: str = ""

    @property
    def alterations(self) -> tuple[Alteration, ...]:
        """What is done to the tensors of the model and the batch, in order."""
        rounding = (rounding_to(DTYPES[self.rounds_to]),) if self.rounds_to else ()
        return (*rounding, widening(LIFTS[self.dtype])) if self.is_lifted and self.dtype in LIFTS else rounding


FP32 = Manner("float32")
"""The replay that others are held against."""


@dataclass(frozen=True)
class Replayed:
    """A replay with what is too large for the record: its trace, and a copy of its unscaled gradients by name.

    ``idle`` names, of a replay in FP32, the parameters that their gradients could not move: such a gradient may be
    lost without harm.
    ``seconds`` is the time of its forward and backward pass, without that of putting everything back.
    """

    replay: Replay
    trace: OpTrace | None = None
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    seconds: float = 0.0
    idle: frozenset[str] = frozenset()


def replay_step(
    run: Run,
    snapshot: Snapshot,
    manner: Manner,
    *,
    traced: TraceKind | None = None,
    keep_gradients: bool = False,
    stops_at_loss: bool = False,
) -> Replayed:
    """Runs the forward and backward pass of a step once more.

    Args:
        run: the workload; its weights must still be those of the step.
        snapshot: the step.
        manner: its precision and loss scale.
        traced: the kind of trace that notes every op.
        keep_gradients: return a copy of the gradients, in float32 and unscaled.
        stops_at_loss: run no backward pass behind a loss that is not finite.

    Returns:
        What was seen. An error of the user's code is noted in the replay and not raised: code that works
        in FP16 may name a dtype and fail in another.
    """
    model = run.workload.model
    with rewound(model, snapshot), _altered(model, manner):
        with placed(model, traced) if traced else contextlib.nullcontext() as trace:
            _wait(run.device)
            started = time.perf_counter()
            loss, error = _try(run, snapshot, manner, stops_at_loss=stops_at_loss)
            _wait(run.device)
            seconds = time.perf_counter() - started
        if error:
            failed = Replay(manner.dtype, manner.scale, math.nan, math.nan, error=error)
            return Replayed(failed, trace, seconds=seconds)
        replay = Replay(
            dtype=manner.dtype,
            scale=manner.scale,
            loss=loss,
            grad_norm=_unscaled_norm(model, manner.scale),
            gradients=tuple(_nonfinite_gradients(model)),
            buffers=tuple(_newly_nonfinite_buffers(model, snapshot.state.buffers)),
            rounded=bool(manner.rounds_to),
        )
        gradients = dict(_copied_gradients(model, manner.scale)) if keep_gradients else {}
        idle = frozenset(_idle(run, gradients)) if manner == FP32 else frozenset()
        return Replayed(replay, trace, gradients, seconds, idle)


def _idle(run: Run, gradients: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """The parameters whose update, as far as the optimizer's ``eps`` leaves one, is below FP32's rounding."""
    names = {parameter: name for name, parameter in run.workload.model.named_parameters()}
    groups = [group for optimizer in run.workload.optimizers for group in optimizer.param_groups]
    held = [(names.get(parameter, ""), parameter.detach(), group) for group in groups for parameter in group["params"]]
    moved = [one for one in held if one[0] in gradients and one[1].numel()]
    largest = iter(to_host([part.abs().max() for name, weight, _ in moved for part in (gradients[name], weight)]))
    for name, _, group in moved:
        gradient, weight, eps = next(largest), next(largest), group.get("eps")
        rate = float(group.get("lr") or group.get("initial_lr") or 1.0)
        if rate * (gradient / (gradient + eps) if eps else gradient) < HALF_A_UNIT * weight:
            yield name


def continued_in_fp32(run: Run, snapshot: Snapshot, steps: int) -> tuple[float, ...]:
    """The losses of so many FP32 steps on the batch of ``snapshot``, from the weights of now.

    Weights, optimizer state, buffers and random state are restored. It ends early at a loss that is not
    finite or an error of the user's code.
    """
    if any(parameter.dtype in LIFTS["float32"] for parameter in run.workload.model.parameters()):
        return ()  # The optimizer's state is of the parameters' own dtype.
    with rewound(run.workload.model, snapshot):
        held = held_by(run.workload.optimizers)
        try:
            return tuple(_fp32_losses(run, snapshot, steps))
        finally:
            held.restore()


def _fp32_losses(run: Run, snapshot: Snapshot, steps: int) -> Iterator[float]:
    for _ in range(steps):
        for optimizer in run.workload.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss, error = _try(run, replace(snapshot, batches=duplicate(snapshot.batches)), FP32)
        if error:
            return
        yield loss
        if not math.isfinite(loss):
            return
        try:
            with run.workload.user.running("the optimizer's step"):
                for optimizer in run.workload.optimizers:
                    optimizer.step()
        except AmpdbgError:
            return


@contextlib.contextmanager
def _altered(model: torch.nn.Module, manner: Manner) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for alter in manner.alterations:
            stack.enter_context(altered_model(model, alter))
        yield


def _try(run: Run, snapshot: Snapshot, manner: Manner, *, stops_at_loss: bool = False) -> tuple[float, str]:
    """The loss, or the first line of the error that the user's code raised."""
    try:
        with lifted(manner.dtype) if manner.is_lifted else contextlib.nullcontext():
            return _forward_and_backward(run, snapshot, manner, stops_at_loss), ""
    except AmpdbgError as error:
        return math.nan, str(error).partition("\n")[0] or type(error).__name__


def _forward_and_backward(run: Run, snapshot: Snapshot, manner: Manner, stops_at_loss: bool) -> float:
    as_it_was = not manner.is_lifted and manner.dtype == run.mode.format.name
    batches = [run.mode.cast(batch) for batch in snapshot.batches] if as_it_was else snapshot.batches
    losses = run_pass(
        run.workload,
        [functools.reduce(altered_batch, manner.alterations, batch) for batch in batches],
        run.mode.forward if as_it_was else functools.partial(_autocast, run.device, manner.dtype),
        scaled=lambda loss: loss.float() * manner.scale,
        stops_at=lambda losses: stops_at_loss and not math.isfinite(sum(loss.item() for loss in losses.values())),
    )
    return loss_of(losses)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _autocast(device: torch.device, dtype: str) -> contextlib.AbstractContextManager[Any]:
    if dtype in ("float32", "float64"):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[dtype])


def _nonfinite_gradients(model: torch.nn.Module) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not is_finite(parameter.grad):
            yield name


def _newly_nonfinite_buffers(model: torch.nn.Module, before: Mapping[str, torch.Tensor]) -> Iterator[str]:
    for name, buffer in model.named_buffers():
        if not is_finite(buffer) and name in before and is_finite(before[name]):
            yield name


def _unscaled_norm(model: torch.nn.Module, scale: float) -> float:
    values = [float_values(p.grad) for p in model.parameters() if p.grad is not None]
    squares = to_host([value.detach().double().square().sum() for value in values if value is not None])
    return math.sqrt(sum(squares)) / scale


def _copied_gradients(model: torch.nn.Module, scale: float) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.detach()
            yield name, (gradient.to_dense() if gradient.layout is not torch.strided else gradient).float() / scale
