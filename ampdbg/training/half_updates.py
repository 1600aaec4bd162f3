"""Updates of half parameters, each held against the same optimizer step on float32 copies: lost, or not finite."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from ampdbg.errors import AmpdbgError
from ampdbg.precision.widening import LIFTS, altered, widening
from ampdbg.probes.tensors import is_finite
from ampdbg.record.run import HalfUpdates
from ampdbg.replay.comparison import MOST_OF_IT
from ampdbg.replay.random_state import RandomState
from ampdbg.replay.run import Run
from ampdbg.replay.state import Held, held_by

_wider = widening(LIFTS["float32"])


class ComparedUpdates:
    """Compares every update of a run's float16 parameters, until one of them is no longer finite.

    It does nothing where there are none, and where the loss is scaled: a scaler refuses half gradients.
    """

    def __init__(self, run: Run) -> None:
        scaled = run.mode.dtype is torch.float16
        named = [] if scaled else run.workload.model.named_parameters()
        self._half = {name: value for name, value in named if value.dtype is torch.float16 and value.requires_grad}
        self._run = run
        self._before: Held | None = None
        self._start: dict[str, torch.Tensor] = {}
        self._energy = dict.fromkeys(self._half, 0.0)
        self._lost = dict.fromkeys(self._half, 0.0)
        self._steps = 0
        self._spoilt: tuple[int, tuple[str, ...]] | None = None

    def before_update(self) -> None:
        """To be called right before the optimizers' step."""
        wanted = bool(self._half) and self._spoilt is None
        self._before = held_by(self._run.workload.optimizers) if wanted else None
        self._start = {name: value.detach().clone() for name, value in self._half.items()} if wanted else {}

    def after_update(self, step: int) -> None:
        """To be called right after it, while the gradients are still there; leaves everything as it is."""
        before, self._before = self._before, None
        gradients = (parameter.grad for parameter in self._half.values() if parameter.grad is not None)
        if before is None or not all(map(is_finite, gradients)):
            return
        wide = _float32_update(self._run, before, self._half)
        if not wide or not all(map(is_finite, wide.values())):
            return
        self._steps += 1
        spoilt = tuple(name for name, parameter in self._half.items() if not is_finite(parameter))
        if spoilt:
            self._spoilt = step, spoilt
            return
        for name, parameter in self._half.items():
            start = self._start[name]
            squares = (wide[name].double() - start.double()).square()
            self._energy[name] += float(squares.sum())
            self._lost[name] += float(squares[parameter.detach() == start].sum())

    @property
    def seen(self) -> HalfUpdates | None:
        """What came of the comparisons; None where none was made."""
        if not self._steps:
            return None
        total = sum(self._energy.values())
        step, names = self._spoilt or (None, ())
        return HalfUpdates(
            steps=self._steps,
            lost_energy=sum(self._lost.values()) / total if total else None,
            lost=tuple(name for name, lost in self._lost.items() if lost > MOST_OF_IT * self._energy[name]),
            vanishing_eps=_vanishing_eps(self._run),
            spoilt_step=step,
            spoilt=names,
        )


def _float32_update(run: Run, before: Held, half: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """The half parameters as an update in float32 leaves them; none where the optimizer cannot make it."""
    after, random_state = held_by(run.workload.optimizers), RandomState.now()
    try:
        before.restore()
        with _widened(run), run.workload.user.running("the optimizer's step"):
            for optimizer in run.workload.optimizers:
                optimizer.step()
            return {name: parameter.data for name, parameter in half.items()}
    except AmpdbgError:
        return {}
    finally:
        after.restore()
        random_state.restore()


@contextlib.contextmanager
def _widened(run: Run) -> Iterator[None]:
    """Half parameters, their gradients and the optimizers' states in float32; gradients and weights come back."""
    gradients = [(parameter, parameter.grad) for parameter in run.workload.model.parameters()]
    try:
        with altered(run.workload.model.parameters(), _wider):
            for parameter, gradient in gradients:
                parameter.grad = None if gradient is None else _wider(gradient)
            for state in (state for optimizer in run.workload.optimizers for state in optimizer.state.values()):
                state.update({key: _wider(item) for key, item in state.items() if isinstance(item, torch.Tensor)})
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _vanishing_eps(run: Run) -> float | None:
    """The optimizers' eps, where float16 rounds it to zero."""
    groups = (group for optimizer in run.workload.optimizers for group in optimizer.param_groups)
    constants = (float(group["eps"]) for group in groups if isinstance(group.get("eps"), (int, float)))
    return next((eps for eps in constants if eps and not torch.tensor(eps, dtype=torch.float16).item()), None)
