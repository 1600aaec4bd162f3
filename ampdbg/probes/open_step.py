"""The training step that each thread has under way, and the torch functions that the thread's loop is inside."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from ampdbg.probes.loss_graph import is_loss_scale
from ampdbg.probes.tensors import Mark, Scalar, is_on_device, read_aside, scalar_of
from ampdbg.record.run import GroupOverflow, Step, TensorCounts

DIVIDED = 0.01
"""Relative tolerance between the loss factor and the quotient of two gradient norms. Half precision rounds one norm."""

NormOfEach = tuple[tuple[tuple[int, int], ...], torch.Tensor]
"""The ``id`` and gradient version of each parameter, and the largest magnitudes of the gradients as a device vector."""


@dataclass
class Gradients:
    """The gradients of one optimizer as the backward pass left them.

    Attributes:
        norm: The 2-norm without the loss scale. None if the scaler's own check is enough.
        each: The largest magnitude of each gradient, while ``norm`` is on a GPU.
        groups: The parameter groups with inf or NaN, if ``norm`` is not finite.
        is_early: True if the gradients were measured before ``unscale_``, so they still carried the loss scale.
    """

    norm: Scalar | None = None
    each: NormOfEach | None = None
    groups: tuple[GroupOverflow, ...] | None = None
    is_early: bool = False


@dataclass(eq=False)
class OpenStep:
    """A step before it is closed. On a GPU the numbers are scalar tensors that are still on the device.

    Attributes:
        backward_losses: The losses of the backward passes, without a scaler's loss scale.
        mark: The point in the GPU's work after the last loss that is still on the GPU.
        losses: Losses with names, which count instead of ``backward_losses``.
        gradients: The gradients as the backward pass left them, by the ``id`` of their optimizer.
        norms: The gradient norms that remain after the step has ended.
        bare_step_facts: Facts from before each ``optimizer.step()`` that the loop calls, by the optimizer's ``id``.
        scaler: The enabled scaler that has scaled a loss; ``number`` is its number in the loop.
        optimizer: The number of the first optimizer that stepped.
        succeeds: The number of the scaler that ``scaler`` has replaced, else 0.
        repaired: Gradients were not finite after a backward pass, and the script has replaced them.
        running: The ``id`` of the optimizer during its bare step, else 0.
        before_closure: How many losses there were before the running step.
        first_closure: The losses of the first closure call in the running step.
        left_norms: The norms of an optimizer's gradients after each backward pass, by its ``id``. Measured for a loop
            that scales its loss itself, or that writes gradients after its passes.
        factor: The number by which such a loop has multiplied its loss.
        is_returned: The last backward pass has returned its gradients to the loop, as ``autograd.grad`` does.
    """

    backward_losses: list[Scalar] = field(default_factory=list)
    mark: Mark | None = None
    losses: dict[str, Scalar] = field(default_factory=dict)
    gradients: dict[int, Gradients] = field(default_factory=dict)
    norms: list[Scalar] = field(default_factory=list)
    groups: list[GroupOverflow] = field(default_factory=list)
    nonfinite: list[TensorCounts] = field(default_factory=list)
    bare_step_facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    scaler: GradScaler | None = None
    number: int = 0
    optimizer: int | None = None
    succeeds: int = 0
    scale: Scalar = 1.0
    skipped: bool = False
    stepped: bool = False
    repaired: bool = False
    running: int = 0
    before_closure: int = 0
    first_closure: list[Scalar] = field(default_factory=list)
    left_norms: dict[int, list[Scalar]] = field(default_factory=dict)
    factor: float = 1.0
    is_returned: bool = False

    def begin_bare(self, optimizer: int, **facts: Any) -> None:
        """Record that the loop itself calls ``step()`` of the optimizer with this ``id``, maybe with a closure. The
        ``facts`` are fields of the :class:`~ampdbg.call_order.Call`."""
        self.bare_step_facts[optimizer] = facts
        self.running = optimizer
        self.before_closure, self.first_closure = len(self.backward_losses), []

    def give_up_bare(self, optimizer: int) -> None:
        """Discard a bare step inside which a scaler steps the wrapped optimizer."""
        self.bare_step_facts.pop(optimizer, None)
        self.gradients.pop(optimizer, None)
        self.running = 0

    def add_losses(self, losses: list[Scalar]) -> None:
        """Add the losses of a backward pass. If a step runs its closure several times, the losses of the first call
        count: they belong to the weights before the step, and ``optimizer.step(closure)`` returns them. A non-finite
        loss of the last call replaces the first loss."""
        if self.running:
            self.first_closure = self.first_closure or losses
            del self.backward_losses[self.before_closure :]
            losses = list(map(_first_unless_lost, self.first_closure, losses))
        self.backward_losses += losses
        self.mark = Mark(losses[-1]) if losses and is_on_device(losses[-1]) else self.mark

    def has_finite_loss(self) -> bool:
        """True if all losses are finite. On a GPU this syncs."""
        return all(map(is_finite_scalar, self.backward_losses))

    def is_known_finite(self) -> bool:
        """True unless a loss on the host is not finite. Losses on a GPU count as finite, so this does not sync."""
        return all(map(is_finite_if_read, self.backward_losses))

    def has_left_finite(self) -> bool:
        """True if every measured gradient norm in ``left_norms`` is finite. On a GPU this syncs."""
        return all(map(is_finite_scalar, self._left))

    @property
    def _left(self) -> list[Scalar]:
        return [*chain.from_iterable(self.left_norms.values())]

    def is_known_sound(self) -> bool:
        """True unless a loss on the host or a measured gradient norm is not finite. On a GPU the norms sync."""
        return self.is_known_finite() and self.has_left_finite()

    def read_losses_aside(self) -> None:
        """Read the losses if the GPU has already computed them, without a wait for later GPU work."""
        if self.mark is not None and self.mark.is_passed:
            self.backward_losses, self.mark = list[Scalar](read_aside(self.backward_losses)), None

    def loss_scale(self) -> Scalar:
        """Return the current loss scale, without a sync and without the public ``get_scale``."""
        scale = self.scaler._get_scale_async() if self.scaler is not None else None
        return 1.0 if scale is None else scale

    def end(self) -> None:
        """Keep what :meth:`to_step` needs, and drop the gradients and the scaler."""
        self.note_scale()
        self.norms = [known.norm for known in self.gradients.values() if known.norm is not None]
        self.gradients.clear()

    def note_scale(self) -> None:
        """Keep the current loss scale, and drop the scaler."""
        scale = self.loss_scale()
        if isinstance(scale, torch.Tensor):
            self.scale = scalar_of(scale)  # a copy: the scaler changes it in place
        self.scaler = None

    def scalars(self) -> list[Scalar]:
        """Return every number that :meth:`to_step` needs, in the order in which it reads them."""
        return [
            *(self.losses.values() if self.losses else self.backward_losses),
            *self.norms,
            self.scale,
            *self._left[-1:],
        ]

    def to_step(
        self, index: int, iteration: Callable[[int], int], values: Iterator[float], *, has_own_scale: bool = False
    ) -> Step:
        """Return the Step with number ``index`` from the values of :meth:`scalars` on the host. ``iteration`` returns
        how many steps of an optimizer came before. ``has_own_scale`` says that the loop's factor on the losses may be
        a loss scale."""
        optimizer = self.optimizer or 0
        losses = {name: next(values) for name in self.losses}
        loss = sum(losses.values() if losses else (next(values) for _ in self.backward_losses), start=0.0)
        squares = [next(values) ** 2 for _ in self.norms]
        norm, scale = (sum(squares) ** 0.5 if squares else None), next(values)
        own = self._own_scale(norm or 0.0, next(values), is_known=has_own_scale) if self._left else 1.0
        return Step(
            step=index,
            loss=loss / own,
            scale=scale * own,
            found_inf=self.skipped or bool(self.groups),
            skipped=self.skipped,
            repaired=self.repaired,
            grad_norm=norm,
            groups=tuple(self.groups),
            nonfinite=tuple(self.nonfinite),
            losses=losses if len(losses) > 1 else {},
            scaler=self.number,
            succeeds=self.succeeds,
            optimizer=optimizer,
            others=index - iteration(optimizer),
            passes=1 if losses else max(1, len(self.backward_losses)),
        )

    def _own_scale(self, norm: float, left: float, *, is_known: bool) -> float:
        """Return the loss scale that the loop applies itself, else 1.

        A factor by which the loop has divided the gradients is a loss scale. One that leaves them as they are is a loss
        weight, such as the batch size. If the gradients show neither, the factor counts if ``is_known``. It must also
        be a large power of two, or the step withheld.
        """
        has_norm = 0.0 < norm < math.inf  # zero, inf and NaN are the same at any scale
        if has_norm and math.isclose(left, norm, rel_tol=DIVIDED):
            return 1.0
        is_divided = has_norm and math.isclose(left, norm * self.factor, rel_tol=DIVIDED)
        is_meant = is_known and (self.skipped or is_loss_scale(self.factor))
        return self.factor if is_divided or is_meant else 1.0


def _first_unless_lost(first: Scalar, last: Scalar) -> Scalar:
    """Return the first loss, or the last if it is not finite; this does not sync."""
    if isinstance(last, float):
        return first if math.isfinite(last) else last
    return torch.where(torch.isfinite(last), first, last)


def is_finite_if_read(value: Scalar) -> bool:
    """True if the value is finite, or still on a GPU."""
    return not isinstance(value, float) or math.isfinite(value)


def is_finite_scalar(norm: Scalar | None) -> bool:
    """True if the norm is finite or None. On a GPU this syncs."""
    return norm is None or math.isfinite(norm)


class Loop(threading.local):
    """The state of each thread's training loop; threads may train different models at the same time.

    Attributes:
        trained: The threads that have run a backward pass; all threads share this set.
        now: The step of the last losses or of the last optimizer call.
        open: The steps under way by optimizer place. Optimizers with gradients from the same losses share a step.
    """

    def __init__(self, trained: set[int]) -> None:
        self.trained = trained
        self.now = OpenStep()
        self.open: dict[int, OpenStep] = {}
        self.fired: set[int] = set()
        self.inside: list[tuple[str, int]] = []

    def step_of(self, place: int) -> OpenStep:
        """Return the open step of an optimizer, or the latest step if the optimizer has no losses yet."""
        return self.open.get(place, self.now)

    def add_losses(self, losses: list[Scalar]) -> None:
        """Add losses before their backward pass. The optimizers of the losses are known only after it."""
        if not self.now.running and self.now in self.open.values():
            self.now = OpenStep()
        self.now.add_losses(losses)

    def went_backward(self, losses: list[Scalar], wrote: Iterable[int], cleared: Iterable[int]) -> list[OpenStep]:
        """Assign the losses of a backward pass to the optimizers whose gradients it ``wrote``. Return the steps that
        the loop has abandoned: all their gradients were ``cleared`` before the pass."""
        going = self.now
        if going.running or going.stepped:  # this pass runs inside a step, or a step ran inside this pass
            return []
        given_up = [step for place in cleared if (step := self.open.pop(place, None)) is not None]
        sharing = defaultdict[OpenStep | None, list[int]](list)
        for place in wrote:
            sharing[self.open.get(place)].append(place)
        for shared, places in sharing.items():
            step = shared or OpenStep()
            if [*self.open.values()].count(step) > len(places):  # some optimizers of this step lack the new losses
                step = replace(step, backward_losses=[*step.backward_losses], gradients={})
            step.backward_losses += losses
            step.mark = going.mark or step.mark
            step.factor = going.factor
            step.scaler, step.number = going.scaler or step.scaler, going.number or step.number
            self.open.update(dict.fromkeys(places, step))
            self.now = step
        return [step for step in dict.fromkeys(given_up) if step not in self.open.values()]

    def close(self) -> OpenStep:
        """Remove and return the step that ends; all further steps stay open."""
        step, self.now = self.now, OpenStep()
        self.open = {place: other for place, other in self.open.items() if other is not step}
        return step

    def forget_early(self) -> None:
        """Discard measurements of still scaled gradients, because another backward pass adds to the gradients."""
        for step in (self.now, *self.open.values()):
            step.gradients = {key: known for key, known in step.gradients.items() if not known.is_early}

    @property
    def is_inside_a_scaler_step(self) -> bool:
        """True if a call of ``GradScaler.step`` is under way."""
        return any(seam == "step" for seam, _ in self.inside)
