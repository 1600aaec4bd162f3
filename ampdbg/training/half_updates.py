"""Updates of half parameters, each held against the same optimizer step on float32 copies: lost, or not finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from ampdbg.errors import AmpdbgError
from ampdbg.precision.widening import LIFTS, widen
from ampdbg.probes.tensors import HALVES, nonfinite
from ampdbg.record.run import FrozenParameter, HalfUpdates
from ampdbg.replay.comparison import MOST_OF_IT
from ampdbg.replay.random_state import RandomState
from ampdbg.replay.run import Run
from ampdbg.replay.state import Held, held_by


class ComparedUpdates:
    """Compares every update of a run's half parameters, until one of them is no longer finite.

    It does nothing where there are none, and where the loss is scaled: a scaler refuses float16 gradients. Nor with an
    optimizer that is not torch's own: that may round stochastically, compensate, or keep float32 copies of its own.
    """

    def __init__(self, run: Run) -> None:
        are_known = all(type(each).step.__module__.startswith("torch.") for each in run.workload.optimizers)
        is_compared = are_known and run.mode.updates_half_weights()
        named = run.workload.model.named_parameters() if is_compared else ()
        self._half = {name: value for name, value in named if value.dtype in HALVES and value.requires_grad}
        self._run = run
        self._before: Held | None = None
        self._start: dict[str, torch.Tensor] = {}
        self._sums: dict[str, torch.Tensor] = {}
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
        gradients = ((name, value.grad) for name, value in self._half.items() if value.grad is not None)
        if before is None or nonfinite(gradients):
            return
        wide = _float32_update(self._run, before, self._half)
        if not wide or nonfinite(wide.items()):
            return
        self._steps += 1
        spoilt = tuple(name for name, _ in nonfinite(self._half.items()))
        if spoilt:
            self._spoilt = step, spoilt
            return
        decays = dict(_decoupled_decays(self._run))
        for name, parameter in self._half.items():
            sums = _sums_of_update(self._start[name], wide[name], parameter.detach(), decays.get(parameter, 0.0))
            self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    @property
    def seen(self) -> HalfUpdates | None:
        """What came of the comparisons; None where none was made."""
        if not self._steps:
            return None
        by_name = {name: UpdateSums(*sums.tolist()) for name, sums in self._sums.items()}
        total = UpdateSums(*map(sum, zip(*by_name.values(), strict=True))) if by_name else UpdateSums()
        is_float16 = {name: parameter.dtype is torch.float16 for name, parameter in self._half.items()}
        lost = [name for name, sums in by_name.items() if sums.lost > MOST_OF_IT * sums.energy]
        step, names = self._spoilt or (None, ())
        return HalfUpdates(
            steps=self._steps,
            lost_energy=total.lost / total.energy if total.energy else None,
            lost_gradient=total.lost_gradient / total.gradient if total.decay and total.gradient else None,
            lost_decay=total.lost_decay / total.decay if total.decay else None,
            lost=tuple(name for name in lost if is_float16[name]),
            frozen=tuple(
                FrozenParameter(name, int(sums.still), round(sums.unmoved / self._steps, 4))
                for name, sums in by_name.items()
                if name in lost and not is_float16[name]
            ),
            vanishing_eps=_vanishing_eps(self._run) if any(is_float16.values()) else None,
            spoilt_step=step,
            spoilt=names,
        )


class UpdateSums(NamedTuple):
    """Sums over the updates of a parameter: of squares, all and those of entries that did not move.

    ``still`` counts updates that moved no entry, ``unmoved`` adds up the share of entries that each did not move.
    """

    energy: float = 0.0
    lost: float = 0.0
    gradient: float = 0.0
    lost_gradient: float = 0.0
    decay: float = 0.0
    lost_decay: float = 0.0
    still: float = 0.0
    unmoved: float = 0.0


def _sums_of_update(start: torch.Tensor, wide: torch.Tensor, now: torch.Tensor, decay: float) -> torch.Tensor:
    """The ``UpdateSums`` of one update, as a tensor, so that a GPU need not be waited for."""
    before, unmoved = start.double(), now == start
    update = wide.double() - before
    by_decay = -decay * before
    parts = [part.square() for part in (update, update - by_decay, by_decay)]
    sums = [each for squares in parts for each in (squares.sum(), (squares * unmoved).sum())]
    return torch.stack([*sums, unmoved.all().double(), unmoved.double().mean()])


def _decoupled_decays(run: Run) -> Iterator[tuple[torch.nn.Parameter, float]]:
    """What share of each parameter an update takes off by itself."""
    for optimizer in run.workload.optimizers:
        for group in optimizer.param_groups:
            if group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)):
                yield from ((parameter, group["lr"] * group.get("weight_decay", 0.0)) for parameter in group["params"])


def _float32_update(run: Run, before: Held, half: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """The half parameters as an update in float32 leaves them; none where the optimizer cannot make it."""
    after, random_state = held_by(run.workload.optimizers), RandomState.now()
    try:
        before.restore()
        for tensor in before.tensors:
            widen(tensor, LIFTS["float32"])
        with run.workload.user.running("the optimizer's step"):
            for optimizer in run.workload.optimizers:
                optimizer.step()
        return {name: parameter.data for name, parameter in half.items()}
    except AmpdbgError:
        return {}
    finally:
        after.restore()
        random_state.restore()


def _vanishing_eps(run: Run) -> float | None:
    """The optimizers' eps, where float16 rounds it to zero."""
    groups = (group for optimizer in run.workload.optimizers for group in optimizer.param_groups)
    constants = (float(group["eps"]) for group in groups if isinstance(group.get("eps"), (int, float)))
    return next((eps for eps in constants if eps and not torch.tensor(eps, dtype=torch.float16).item()), None)
