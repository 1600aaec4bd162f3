"""The step that a loop has under way, and which of torch's functions it is inside of."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from ampdbg.probes.loss_graph import is_loss_scale
from ampdbg.probes.tensors import Mark, Scalar, is_on_device, read_aside, scalar_of
from ampdbg.record.run import GroupOverflow, Step, TensorCounts

DIVIDED = 0.01
"""How near to the factor of the loss the quotient of two norms comes, where half has rounded one of them."""

NormOfEach = tuple[tuple[tuple[int, int], ...], torch.Tensor]
"""The parameters by ``id`` with the version of each gradient, and their largest magnitudes: a vector on the device."""


@dataclass
class Gradients:
    """What the backward pass has left in the gradients of one optimizer.

    ``norm`` is theirs without the loss scale; None where a scaler knows whether they are finite, and nobody has asked
    for more. Where it is on a GPU still, ``each`` has the norm of each; where it is not finite ``groups`` are those.
    It ``is_early`` where the gradients still carried the scale.
    """

    norm: Scalar | None = None
    each: NormOfEach | None = None
    groups: tuple[GroupOverflow, ...] | None = None
    is_early: bool = False


@dataclass(eq=False)
class OpenStep:
    """What is known of a step before it is closed. On a GPU the numbers are still there, as scalar tensors.

    ``mark`` stands behind the last of the losses that are there still.
    ``scaler`` is the enabled one that has scaled a loss, ``number`` tells it from others, ``optimizer`` is that of the
    first that stepped, ``bare`` holds what was known before it of each own step of an optimizer (by ``id``) that the
    loop itself has called, and inside of which no scaler has stepped; of the one whose step is ``running``, else 0,
    ``before_closure`` says how many losses there were when it began, and ``first_closure`` has those of the first time
    that it has run its closure.

    Where the loop scales its loss itself, ``left`` are the norms of what its backward passes have left, and ``factor``
    is what it has multiplied the loss by before that. The
    ``gradients`` are known as the backward pass left them, by the ``id`` of their optimizer; ``norms`` is what is kept
    of that when the step has ended.
    """

    scaled: list[Scalar] = field(default_factory=list)
    mark: Mark | None = None
    losses: dict[str, Scalar] = field(default_factory=dict)
    gradients: dict[int, Gradients] = field(default_factory=dict)
    norms: list[Scalar] = field(default_factory=list)
    groups: list[GroupOverflow] = field(default_factory=list)
    nonfinite: list[TensorCounts] = field(default_factory=list)
    bare: dict[int, dict[str, Any]] = field(default_factory=dict)
    scaler: GradScaler | None = None
    number: int = 0
    optimizer: int | None = None
    succeeds: int = 0
    scale: Scalar = 1.0
    skipped: bool = False
    stepped: bool = False
    running: int = 0
    before_closure: int = 0
    first_closure: list[Scalar] = field(default_factory=list)
    left: list[Scalar] = field(default_factory=list)
    factor: float = 1.0

    def begin_bare(self, optimizer: int, **facts: Any) -> None:
        """The loop calls the own step of the optimizer of this ``id``, which may run a closure; the ``facts`` are those
        of the :class:`~ampdbg.call_order.Call`."""
        self.bare[optimizer] = facts
        self.running = optimizer
        self.before_closure, self.first_closure = len(self.scaled), []

    def give_up_bare(self, optimizer: int) -> None:
        """The step that was begun so is none: a scaler steps what that optimizer holds."""
        self.bare.pop(optimizer, None)
        self.gradients.pop(optimizer, None)
        self.running = 0

    def add_losses(self, losses: list[Scalar]) -> None:
        """Adds what goes backward.

        Of all the times that an optimizer's step runs its closure the first counts: that is the loss of the weights
        before the step, and what ``optimizer.step(closure)`` returns. But a last one that is not finite is what the
        step ends in.
        """
        if self.running:
            self.first_closure = self.first_closure or losses
            del self.scaled[self.before_closure :]
            losses = list(map(_first_unless_lost, self.first_closure, losses))
        self.scaled += losses
        self.mark = Mark(losses[-1]) if losses and is_on_device(losses[-1]) else self.mark

    def has_finite_loss(self) -> bool:
        """All losses are finite. On a GPU this syncs."""
        return all(map(is_finite_scalar, self.scaled))

    def is_known_finite(self) -> bool:
        """As :meth:`has_finite_loss`, and without a sync: what is not on the host may be."""
        return all(not isinstance(loss, float) or math.isfinite(loss) for loss in self.scaled)

    def has_left_finite(self) -> bool:
        """What its backward passes have left is finite, as far as it was measured. On a GPU this syncs."""
        return all(map(is_finite_scalar, self.left))

    def read_losses_aside(self) -> None:
        """Brings the losses to the host, where the loop may have done so itself: nothing waits for them any more."""
        if self.mark is not None and self.mark.is_passed:
            self.scaled, self.mark = list[Scalar](read_aside(self.scaled)), None

    def loss_scale(self) -> Scalar:
        """The loss scale of now, not synced; without asking for it as the loop would."""
        scale = self.scaler._get_scale_async() if self.scaler is not None else None
        return 1.0 if scale is None else scale

    def end(self) -> None:
        """Keeps what :meth:`to_step` needs, and lets go of the rest."""
        self.note_scale()
        self.norms = [known.norm for known in self.gradients.values() if known.norm is not None]
        self.gradients.clear()

    def note_scale(self) -> None:
        """Keeps the loss scale of now, and lets go of the scaler."""
        scale = self.loss_scale()
        if isinstance(scale, torch.Tensor):
            self.scale = scalar_of(scale)  # a copy: the scaler changes it in place
        self.scaler = None

    def scalars(self) -> list[Scalar]:
        """Every number that :meth:`to_step` needs, in its order."""
        return [*(self.losses.values() if self.losses else self.scaled), *self.norms, self.scale, *self.left[-1:]]

    def to_step(
        self, index: int, iteration: Callable[[int], int], values: Iterator[float], *, has_own_scale: bool = False
    ) -> Step:
        """The Step, with the values of :meth:`scalars` on the host; ``iteration`` tells how many steps of an optimizer
        lie before it, and the loop ``has_own_scale`` where it has shown one before."""
        optimizer = self.optimizer or 0
        losses = {name: next(values) for name in self.losses}
        loss = sum(losses.values() if losses else (next(values) for _ in self.scaled), start=0.0)
        squares = [next(values) ** 2 for _ in self.norms]
        norm, scale = (sum(squares) ** 0.5 if squares else None), next(values)
        own = self._own_scale(norm or 0.0, next(values), is_known=has_own_scale) if self.left else 1.0
        return Step(
            step=index,
            loss=loss / own,
            scale=scale * own,
            found_inf=self.skipped or bool(self.groups),
            skipped=self.skipped,
            grad_norm=norm,
            groups=tuple(self.groups),
            nonfinite=tuple(self.nonfinite),
            losses=losses if len(losses) > 1 else {},
            scaler=self.number,
            succeeds=self.succeeds,
            optimizer=optimizer,
            others=index - iteration(optimizer),
            passes=1 if losses else max(1, len(self.scaled)),
        )

    def _own_scale(self, norm: float, left: float, *, is_known: bool) -> float:
        """The loss scale of the loop's own, else 1: a factor that is a large power of two, or that the loop has divided
        the gradients by again, or has done so before this step, which it withholds. Any other weighs the loss."""
        is_withheld = self.skipped and is_known
        has_norm = 0.0 < norm < math.inf  # what is zero or lost is so at any scale
        is_divided = has_norm and math.isclose(left, norm * self.factor, rel_tol=DIVIDED)
        return self.factor if is_loss_scale(self.factor) or is_withheld or is_divided else 1.0


def _first_unless_lost(first: Scalar, last: Scalar) -> Scalar:
    """Not synced."""
    if isinstance(last, float):
        return first if math.isfinite(last) else last
    return torch.where(torch.isfinite(last), first, last)


def is_finite_scalar(norm: Scalar | None) -> bool:
    """A norm is finite, or there is none. On a GPU this syncs."""
    return norm is None or math.isfinite(norm)


_SEAM = itemgetter(0)


class Loop(threading.local):
    """Where the loop of a thread is; other threads may train other models meanwhile.

    ``trained`` are the threads that have gone backward, for all threads one set. ``now`` is the step that the last
    losses or the last call of an optimizer were for; ``open`` has those that are under way by the place of their
    optimizers, which share one where the same losses have written their gradients.
    """

    def __init__(self, trained: set[int]) -> None:
        self.trained = trained
        self.now = OpenStep()
        self.open: dict[int, OpenStep] = {}
        self.fired: set[int] = set()
        self.inside: list[tuple[str, int]] = []

    def step_of(self, place: int) -> OpenStep:
        """The open step of an optimizer; the last one where no losses are known to be its own."""
        return self.open.get(place, self.now)

    def add_losses(self, losses: list[Scalar]) -> None:
        """Adds losses that are about to go backward: whose they are is known behind that."""
        if not self.now.running and self.now in self.open.values():
            self.now = OpenStep()
        self.now.add_losses(losses)

    def went_backward(self, losses: list[Scalar], wrote: Iterable[int], cleared: Iterable[int]) -> list[OpenStep]:
        """Gives the losses that have gone backward to the optimizers whose gradients that ``wrote``. Returns the steps
        that the loop has given up: all of their gradients were ``cleared`` before it."""
        going = self.now
        if going.running or going.stepped:  # inside of the backward pass
            return []
        given_up = [step for place in cleared if (step := self.open.pop(place, None)) is not None]
        sharing = defaultdict[OpenStep | None, list[int]](list)
        for place in wrote:
            sharing[self.open.get(place)].append(place)
        for shared, places in sharing.items():
            step = shared or OpenStep()
            if [*self.open.values()].count(step) > len(places):  # others have not all of these losses
                step = replace(step, scaled=[*step.scaled], gradients={})
            step.scaled += losses
            step.mark = going.mark or step.mark
            step.factor = going.factor
            step.scaler, step.number = going.scaler or step.scaler, going.number or step.number
            self.open.update(dict.fromkeys(places, step))
            self.now = step
        return [step for step in dict.fromkeys(given_up) if step not in self.open.values()]

    def close(self) -> OpenStep:
        """The step that ends; others stay open."""
        step, self.now = self.now, OpenStep()
        self.open = {place: other for place, other in self.open.items() if other is not step}
        return step

    def forget_early(self) -> None:
        """More gradients are to come: what was measured of those that still carry the scale is not all."""
        for step in (self.now, *self.open.values()):
            step.gradients = {key: known for key, known in step.gradients.items() if not known.is_early}

    def is_inside(self, name: str) -> bool:
        """A call of this seam's is under way."""
        return name in map(_SEAM, self.inside)
