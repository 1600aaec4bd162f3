"""The order of calls that mixed precision needs, as a state machine over calls, with the code of each misuse.

The module knows no tensors: a loop is a sequence of :class:`Call`, and its misuses are a sequence of :class:`Hit`. It
never reports what it cannot know, such as the effect of a loop that rewrites gradients itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

UNSCALED_LOSS, BARE_STEP, NO_UPDATE = "misuse-unscaled-loss", "misuse-bare-step", "misuse-no-update"

CallKind = Literal["backward", "grad", "clip", "unscale", "step", "bare step", "update", "get_scale", "schedule"]


class Call(NamedTuple):
    """One call of the training loop.

    Args:
        kind: ``step`` is the scaler's. ``bare step`` is the optimizer's own, within which no scaler has stepped its
            parameters. ``grad`` is ``torch.autograd.grad``.
        step: the current optimizer step, counted from 0.
        optimizers: the places of the optimizers that the call uses; for ``backward`` those that it wrote gradients of.
        line: file, line number and function, if they are known.
        actor: the number of the scaler, or for ``schedule`` of the scheduler, counted from 1. 0 for a ``backward`` or
            ``grad`` from a loss that no scaler has scaled.
        rewritten: optimizers whose gradients were cleared, or written by unknown code, since the last call.
        added: for ``backward``, the optimizers to whose earlier gradients it has added. These gradients were known not
            to be zero, so no unseen code had cleared them. Only checked for :attr:`CallOrder.doubtful`.
        in_autocast: autocast was on.
        lowered_to: the 16-bit dtypes in the loss's graph; empty if the graph was not searched.
        is_plain: for ``backward``, no visible code has scaled the loss, while a scaler is in use.
        creates_graph: the gradients can be part of a loss.
        skipped: the scaler withheld the step; a ``bare step`` wrote gradients known to be non-finite.
        raised: the message of the exception that the call raised.
    """

    kind: CallKind
    step: int = 0
    optimizers: tuple[int, ...] = ()
    line: tuple[str, int, str] | None = None
    actor: int = 0
    rewritten: tuple[int, ...] = ()
    added: tuple[int, ...] = ()
    in_autocast: bool = False
    lowered_to: tuple[str, ...] = ()
    is_plain: bool = False
    creates_graph: bool = False
    skipped: bool = False
    raised: str = ""


@dataclass(frozen=True)
class Hit:
    """A misuse: its code and the call to blame, which may be an earlier call."""

    code: str
    call: Call


@dataclass
class GradientState:
    """The state of one optimizer's gradients after the calls so far.

    Attributes:
        scaled: the backward pass that wrote them, while they still carry the loss scale.
        unscaled: the ``unscale_`` that no step has followed.
        updated: an ``update()`` that was called while they were scaled, or after an ``unscale_`` that it forgets.
        mixed: gradients of another scale were added since that ``update()``.
        accumulated: a backward pass added scaled gradients after ``unscale_``.
        half: an unscaled backward pass through FP16.
        kept: the gradients of a skipped step are still there.
        stale: the backward pass that added to such gradients.
        by_hand: the loop has read the scale, and may have divided them by it.
        used: the scaler's step has used or withheld them, and they are still there.
        added_after_use: the backward pass that added scaled gradients to gradients that a step had unscaled and used.
        plain: the first backward pass that wrote them, if every pass that did is plain (:attr:`Call.is_plain`).
        has_scaled_pass: a pass that is not plain has written them.
    """

    scaled: Call | None = None
    unscaled: Call | None = None
    updated: Call | None = None
    mixed: bool = False
    accumulated: bool = False
    half: Call | None = None
    kept: bool = False
    stale: Call | None = None
    by_hand: bool = False
    used: bool = False
    added_after_use: Call | None = None
    plain: Call | None = None
    has_scaled_pass: bool = False


@dataclass
class StepCount:
    """The steps and backward passes of one optimizer, and the moves of each scheduler.

    ``bare`` is the last step of the optimizer's own on gradients that the scaler or the loop had unscaled; None once
    the scaler has stepped it. ``on_skip`` is the number of the last step if the scaler skipped it.
    """

    steps: int = 0
    passes: int = 0
    by_scaler: bool = False
    bare: Call | None = None
    on_skip: int | None = None
    written_since: bool = False
    schedules: dict[int, int] = field(default_factory=dict)


class CallOrder:
    """The state machine, which takes each call in order."""

    def __init__(self) -> None:
        self.gradients: list[GradientState] = []
        self.progress: list[StepCount] = []
        self.doubtful: set[int] = set()
        """The optimizers with used gradients that the caller should check for zeros: once for each, and again after a
        step on gradients that a backward pass seemed to add to used ones. It checks no others: a generator's loss fills
        a discriminator's gradients without a step."""
        self.penalty: Call | None = None
        self.scale_is_known = False
        self.bare_step_reported = False

    def add_optimizer(self) -> None:
        """Add an optimizer; its place is the number of optimizers before it."""
        self.doubtful.add(len(self.gradients))
        self.gradients.append(GradientState())
        self.progress.append(StepCount())

    def hits(self, call: Call) -> tuple[Hit, ...]:
        """Return the misuses that this call reveals, of itself or of an earlier call."""
        return tuple(RULES[call.kind](self, call))

    def carries_scale(self, optimizer: int) -> int:
        """Return the number of the scaler whose scale the optimizer's gradients are known to carry, or 0."""
        held = self.gradients[optimizer]
        return held.scaled.actor if held.scaled and not held.by_hand else 0

    def clear(self, optimizer: int) -> None:
        """Forget the state of an optimizer's gradients, which were cleared or rewritten."""
        self.gradients[optimizer] = GradientState()

    def rewrite(self, optimizer: int) -> None:
        """Note that code has written an optimizer's gradients. If it has read the scale, it has unscaled them."""
        held = self.gradients[optimizer]
        self.gradients[optimizer] = GradientState(unscaled=held.scaled if held.by_hand else None)

    def code_of_second_unscale(self, call: Call) -> str:
        """Return the code of a refused second ``unscale_``; "" if an accumulated micro-batch was already reported."""
        held = [self.gradients[index] for index in call.optimizers]
        if any(one.accumulated for one in held):
            return ""
        same = all(one.unscaled is not None for one in held)
        if not same and self.bare_instead(call):
            return BARE_STEP
        return "misuse-unscale-twice" if same else NO_UPDATE

    def bare_instead(self, call: Call) -> Call | None:
        """Return the optimizer's own step that replaced the scaler's, after which the scaler refuses ``call``. A call
        for no single optimizer may follow a step of any."""
        of_each = (self.progress[index].bare for index in call.optimizers or range(len(self.progress)))
        return next(filter(None, of_each), None)

    def code_of_late_unscale(self, call: Call) -> str:
        """Return the code of a refused ``unscale_`` after the step; with new gradients, an ``update()`` is missing."""
        new = any(self.progress[index].written_since for index in call.optimizers)
        return NO_UPDATE if new else "misuse-unscale-twice"

    def code_of_empty_update(self, call: Call) -> str:
        """Return the code of an ``update()`` that no gradient was checked for; "" if a bare step was already
        reported."""
        if self.bare_step_reported:
            return ""
        waiting = any(self.carries_scale(index) == call.actor for index in range(len(self.gradients)))
        without_bare = "misuse-accumulate" if waiting else "misuse-many-updates"
        return without_bare if self.bare_instead(call) is None else BARE_STEP


def _backward(order: CallOrder, call: Call) -> Iterator[Hit]:
    for index in call.rewritten:
        order.clear(index)
    if call.in_autocast:
        yield Hit("misuse-backward-in-autocast", call)
    if call.actor and "bfloat16" in call.lowered_to and "float16" not in call.lowered_to:
        yield Hit("misuse-scaler-bfloat16", call)
    if call.actor and order.penalty is not None:
        yield Hit("misuse-gradient-penalty", order.penalty)
        order.penalty = None
    for index in call.optimizers:
        order.progress[index].written_since = True
        order.progress[index].passes += 1
        yield from _written(order.gradients[index], call)


def _written(held: GradientState, call: Call) -> Iterator[Hit]:
    if held.used and not held.kept and call.actor:
        held.added_after_use = call
    held.used = False
    if held.kept:
        held.stale = call
    if not call.actor:
        held.has_scaled_pass |= not call.is_plain
        held.plain = None if held.has_scaled_pass else held.plain or call
        held.scaled = None
        held.half = call if "float16" in call.lowered_to else held.half
        return
    if held.unscaled is not None:
        yield Hit("misuse-accumulate", held.unscaled)
        held.unscaled, held.updated, held.accumulated = None, None, True
    held.mixed = held.updated is not None
    held.scaled, held.by_hand = call, False
    held.plain, held.has_scaled_pass = None, True


def _grad(order: CallOrder, call: Call) -> Iterator[Hit]:
    """Note a possible gradient penalty, which is wrong unless the loop reads the scale to divide by it."""
    if call.actor and call.creates_graph and not order.scale_is_known:
        order.penalty = call
    yield from ()


def _clip(order: CallOrder, call: Call) -> Iterator[Hit]:
    for index in call.rewritten:
        order.clear(index)
    if any(order.carries_scale(index) for index in call.optimizers):
        yield Hit("misuse-clip-scaled", call)


def _unscale(order: CallOrder, call: Call) -> Iterator[Hit]:
    for index in call.optimizers:
        held = order.gradients[index]
        yield from _scale_has_changed(held)
        held.scaled = held.updated = None
        held.unscaled, held.mixed = call, False


def _step(order: CallOrder, call: Call) -> Iterator[Hit]:
    for index in call.optimizers:
        held = order.gradients[index]
        yield from _scale_has_changed(held)
        if held.plain is not None and not held.by_hand and not order.scale_is_known:
            yield Hit(UNSCALED_LOSS, held.plain)
        if call.skipped and held.stale is not None:
            yield Hit("misuse-stale-gradients", held.stale)
        if held.added_after_use is not None:
            order.doubtful.add(index)
            if index in held.added_after_use.added:
                yield Hit("misuse-accumulate", held.added_after_use)
        order.gradients[index] = GradientState(kept=call.skipped, used=True)
        progress = order.progress[index]
        progress.by_scaler, progress.bare = True, None
        _count_step(progress, call.step if call.skipped else None)


def _scale_has_changed(held: GradientState) -> Iterator[Hit]:
    if held.updated is not None:
        yield Hit("misuse-accumulate" if held.mixed else "misuse-many-updates", held.updated)


def _bare_step(order: CallOrder, call: Call) -> Iterator[Hit]:
    for index in call.rewritten:
        order.rewrite(index)
    for index in call.optimizers:
        held = order.gradients[index]
        if held.used or order.carries_scale(index) or (held.unscaled is not None and call.skipped):
            order.bare_step_reported = True
            yield Hit(BARE_STEP, call)
        elif held.half is not None:
            yield Hit("misuse-no-scaler", held.half)
        progress = order.progress[index]
        progress.bare = call if held.unscaled is not None and not progress.by_scaler else None
        order.clear(index)
        _count_step(order.progress[index], None)


def _count_step(progress: StepCount, skipped_at: int | None) -> None:
    progress.steps += 1
    progress.on_skip, progress.written_since = skipped_at, False


def _update(order: CallOrder, call: Call) -> Iterator[Hit]:
    for held in order.gradients:
        of_scaler = held.scaled or held.unscaled
        if of_scaler is not None and of_scaler.actor == call.actor and held.updated is None:
            held.updated = call
    order.penalty, order.scale_is_known, order.bare_step_reported = None, False, False
    yield from ()


def _get_scale(order: CallOrder, call: Call) -> Iterator[Hit]:
    order.penalty, order.scale_is_known = None, True
    for held in order.gradients:
        held.by_hand = True
    yield from ()


def _schedule(order: CallOrder, call: Call) -> Iterator[Hit]:
    """Report a move on a skipped step. A scheduler that moves on at most half of the steps counts epochs."""
    for index in call.optimizers:
        progress = order.progress[index]
        moved = progress.schedules[call.actor] = progress.schedules.get(call.actor, 0) + 1
        if progress.on_skip is not None and 2 * moved > progress.steps:
            yield Hit("misuse-scheduler-on-skip", call._replace(step=progress.on_skip))
        progress.on_skip = None


RULES: Mapping[CallKind, Callable[[CallOrder, Call], Iterator[Hit]]] = {
    "backward": _backward,
    "grad": _grad,
    "clip": _clip,
    "unscale": _unscale,
    "step": _step,
    "bare step": _bare_step,
    "update": _update,
    "get_scale": _get_scale,
    "schedule": _schedule,
}
