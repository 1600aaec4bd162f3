"""Replays: one step run again under another precision or loss scale, leaving everything as it was."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from ampdbg.errors import AmpdbgError
from ampdbg.precision.levels import DTYPES
from ampdbg.probes.nonfinite import float_values, is_finite
from ampdbg.probes.ops import OpSeen, trace_ops
from ampdbg.record import Replay
from ampdbg.training.run import Run
from ampdbg.training.snapshot import Snapshot, rewound


@dataclass(frozen=True)
class Replayed:
    """A replay with what is too large for the record: its ops, and a copy of its unscaled gradients by name."""

    replay: Replay
    ops: tuple[OpSeen, ...] = ()
    gradients: Mapping[str, torch.Tensor] = None  # type: ignore[assignment]


def replay_step(
    run: Run, snapshot: Snapshot, dtype: str, scale: float = 1.0, *, traced: bool = False, keep_gradients: bool = False
) -> Replayed:
    """Runs the forward and backward pass of a step once more.

    Args:
        run: the workload; its weights must still be those of the step.
        snapshot: the step.
        dtype: what autocast lowers to; ``float32`` runs without autocast, ``float64`` in float64 throughout.
        scale: the loss scale of the backward pass.
        traced: note every op.
        keep_gradients: return a copy of the gradients, in float32 and unscaled.

    Returns:
        What was seen. An error of the user's code is noted in the replay and not raised: code that works
        in FP16 may name a dtype and fail in another.
    """
    model = run.workload.model
    with rewound(model, snapshot), contextlib.ExitStack() as stack:
        if dtype == "float64":
            stack.enter_context(_in_double(model))
        trace = stack.enter_context(trace_ops(model)) if traced else None
        try:
            loss = _forward_and_backward(run, snapshot, dtype, scale)
        except AmpdbgError as error:
            replay = Replay(dtype, scale, math.nan, math.nan, error=str(error).partition("\n")[0])
            return Replayed(replay, tuple(trace.ops) if trace else (), {})
        ops = tuple(trace.ops) if trace else ()
        if trace is not None:
            stack.pop_all().close()
        return Replayed(
            Replay(dtype, scale, loss, _unscaled_norm(model, scale), tuple(_nonfinite_gradients(model))),
            ops,
            dict(_copied_gradients(model, scale)) if keep_gradients else {},
        )


def continued_in_fp32(run: Run, snapshot: Snapshot, steps: int) -> tuple[float, ...]:
    """The losses of so many FP32 steps on the batch of ``snapshot``, from the weights of now.

    Weights, optimizer state, buffers and random state are put back. It ends early at a loss that is not
    finite or an error of the user's code.
    """
    losses: list[float] = []
    with rewound(run.workload.model, snapshot), _weights_kept(run):
        for _ in range(steps):
            for optimizer in run.workload.optimizers:
                optimizer.zero_grad(set_to_none=True)
            try:
                losses.append(_forward_and_backward(run, snapshot, "float32", 1.0))
            except AmpdbgError:
                break
            if not math.isfinite(losses[-1]):
                break
            for optimizer in run.workload.optimizers:
                optimizer.step()
    return tuple(losses)


def _forward_and_backward(run: Run, snapshot: Snapshot, dtype: str, scale: float) -> float:
    share = 1.0 / len(snapshot.batches)
    total = 0.0
    for batch in snapshot.batches:
        given = _to_double(batch) if dtype == "float64" else batch
        with _autocast(run.device, dtype):
            losses = run.workload.losses(given)
        total += share * sum(float(loss.detach()) for loss in losses.values())
        with run.workload.user.running("the backward pass"):
            for position, loss in enumerate(losses.values(), start=1):
                (loss * (scale * share)).backward(retain_graph=position < len(losses))
    return total


def _autocast(device: torch.device, dtype: str) -> contextlib.AbstractContextManager[Any]:
    if dtype in ("float32", "float64"):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[dtype])


def _nonfinite_gradients(model: torch.nn.Module) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not is_finite(parameter.grad):
            yield name


def _unscaled_norm(model: torch.nn.Module, scale: float) -> float:
    values = [float_values(p.grad) for p in model.parameters() if p.grad is not None]
    squares = [float(value.detach().double().square().sum()) for value in values if value is not None]
    return math.sqrt(sum(squares)) / scale if squares else 0.0


def _copied_gradients(model: torch.nn.Module, scale: float) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.detach()
            yield name, (gradient.to_dense() if gradient.layout is not torch.strided else gradient).float() / scale


@contextlib.contextmanager
def _in_double(model: torch.nn.Module) -> Iterator[None]:
    """The model's floating-point parameters and buffers in float64; afterwards the very same tensors again."""
    tensors = [tensor for tensor in _tensors(model) if tensor.is_floating_point()]
    kept = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.double()
        yield
    finally:
        for tensor, data in zip(tensors, kept, strict=True):
            tensor.grad = None
            tensor.data = data


@contextlib.contextmanager
def _weights_kept(run: Run) -> Iterator[None]:
    """Parameters and optimizer states are copied, and put back afterwards."""
    parameters = [(parameter, parameter.detach().clone()) for parameter in run.workload.model.parameters()]
    states = [(optimizer, _copied(optimizer.state_dict())) for optimizer in run.workload.optimizers]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in parameters:
                parameter.copy_(value)
        for optimizer, state in states:
            optimizer.load_state_dict(state)


def _copied(value: Any) -> Any:
    return _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), value)


def _tensors(model: torch.nn.Module) -> Iterable[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _to_double(batch: Any) -> Any:
    def widened(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    return _pytree.tree_map_only(torch.Tensor, widened, batch)
