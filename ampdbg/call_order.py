"""The order of calls that mixed precision needs, as a state machine over calls: which code each wrong one has.

Nothing here knows tensors: a loop is a sequence of :class:`Call`, what is wrong with it a sequence of
:class:`Hit`. What cannot be known, such as gradients that the loop itself has rewritten, is never blamed.
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
        kind: ``step`` is the scaler's, ``bare step`` the optimizer's own, inside of which no scaler has stepped what it
            holds. ``grad`` is ``torch.autograd.grad``.
        step: the optimizer step that was under way, counted from 0.
        optimizers: the places of the optimizers it is about; for ``backward`` those whose gradients it wrote.
        line: file, line number and function, where they are known.
        actor: which scaler, or for ``schedule`` which scheduler, counted from 1. 0 for a ``backward`` or
            ``grad`` from a loss that no scaler has scaled.
        rewritten: optimizers whose gradients were cleared, or written by unknown hands, since the last call.
        added: of a ``backward`` those optimizers whose gradients from before it has added to, and these were known not
            to be zero: nobody had cleared them in a way that is not seen. Looked at for :attr:`CallOrder.doubtful`.
        in_autocast: autocast was on.
        lowered_to: the 16-bit dtypes in the loss's graph; empty where nobody looked.
        is_plain: of a ``backward`` whose loss nobody has scaled in any way that can be seen, while a scaler is in use.
        creates_graph: the gradients can be part of a loss.
        skipped: the scaler withheld the step; for a ``bare step``, that it wrote gradients known to be non-finite.
        raised: what the call raised.
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
    """A misuse: its code and the call to blame, which may be an earlier one."""

    code: str
    call: Call


@dataclass
class GradientState:
    """What the calls so far say about the gradients of one optimizer.

    ``scaled`` is the backward pass that wrote them, while they still carry the scale; ``unscaled`` the
    ``unscale_`` that no step has followed; ``updated`` an ``update()`` that came while they were scaled, and
    ``mixed`` says that gradients of another scale were added since. ``half`` is an unscaled backward pass
    through FP16. ``kept`` says that the gradients of a skipped step are still there, ``stale`` is the
    backward pass that added to them. ``by_hand`` says that the loop has asked for the scale, and may have
    divided by it. ``used`` says that the scaler's step has used or withheld them, and that they are still there;
    ``piled`` is the backward pass that added scaled ones to those that a step had unscaled and used.
    ``plain`` is the first backward pass of those that wrote them, where all are plain; ``is_of_several`` says that
    another has written them too.
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
    piled: Call | None = None
    plain: Call | None = None
    is_of_several: bool = False


@dataclass
class StepCount:
    """One optimizer's steps: how many, and how many backward passes for it, which was skipped if the last was, and how
    often each scheduler has moved.

    ``bare`` is the last one that was its own, on gradients that the scaler had unscaled; None once the scaler has
    taken any.
    """

    steps: int = 0
    passes: int = 0
    by_scaler: bool = False
    bare: Call | None = None
    on_skip: int | None = None
    written_since: bool = False
    schedules: dict[int, int] = field(default_factory=dict)


class CallOrder:
    """The state machine; feed it each call in order."""

    def __init__(self) -> None:
        self.gradients: list[GradientState] = []
        self.progress: list[StepCount] = []
        self.doubtful: set[int] = set()
        """The optimizers stepped on gradients that seem to have been added to used ones: whether those were zero is
        worth a look from now on. For others, as a discriminator that a generator's loss reaches, it is not."""
        self.penalty: Call | None = None
        self.scale_is_known = False
        self.bare = False

    def add_optimizer(self) -> None:
        """Another one, whose place is behind the others."""
        self.gradients.append(GradientState())
        self.progress.append(StepCount())

    def hits(self, call: Call) -> tuple[Hit, ...]:
        """What is wrong with this call, or with an earlier one as this call shows."""
        return tuple(RULES[call.kind](self, call))

    def carries_scale(self, optimizer: int) -> int:
        """Which scaler's loss scale the gradients of an optimizer are known to carry, or 0."""
        held = self.gradients[optimizer]
        return held.scaled.actor if held.scaled and not held.by_hand else 0

    def clear(self, optimizer: int) -> None:
        """Forgets what is known of an optimizer's gradients: they are gone, or others'."""
        self.gradients[optimizer] = GradientState()

    def code_of_second_unscale(self, call: Call) -> str:
        """The same gradients twice; or those of a micro-batch, which are blamed already; or a step without update."""
        held = [self.gradients[index] for index in call.optimizers]
        if any(one.accumulated for one in held):
            return ""
        same = all(one.unscaled is not None for one in held)
        if not same and self.bare_instead(call):
            return BARE_STEP
        return "misuse-unscale-twice" if same else NO_UPDATE

    def bare_instead(self, call: Call) -> Call | None:
        """The optimizer's own step instead of the scaler's, behind which the scaler refuses a call."""
        return next((bare for index in call.optimizers if (bare := self.progress[index].bare) is not None), None)

    def code_of_late_unscale(self, call: Call) -> str:
        """New gradients since the step belong to the next step, and the update between them is missing."""
        new = any(self.progress[index].written_since for index in call.optimizers)
        return NO_UPDATE if new else "misuse-unscale-twice"

    def code_of_empty_update(self, call: Call) -> str:
        """An update that no gradient was checked for."""
        if self.bare:
            return ""
        waiting = any(self.carries_scale(index) == call.actor for index in range(len(self.gradients)))
        return "misuse-accumulate" if waiting else "misuse-many-updates"


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
        held.piled = call
    held.used = False
    if held.kept:
        held.stale = call
    if not call.actor:
        held.is_of_several |= not call.is_plain
        held.plain = None if held.is_of_several else held.plain or call
        held.scaled = None
        held.half = call if "float16" in call.lowered_to else held.half
        return
    if held.unscaled is not None:
        yield Hit("misuse-accumulate", held.unscaled)
        held.unscaled, held.accumulated = None, True
    held.mixed = held.updated is not None
    held.scaled, held.by_hand = call, False
    held.plain, held.is_of_several = None, True


def _grad(order: CallOrder, call: Call) -> Iterator[Hit]:
    """A penalty on these gradients is wrong unless the loop asks for the scale to divide by it."""
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
        if held.piled is not None:
            order.doubtful.add(index)
            if index in held.piled.added:
                yield Hit("misuse-accumulate", held.piled)
        order.gradients[index] = GradientState(kept=call.skipped, used=True)
        progress = order.progress[index]
        progress.by_scaler, progress.bare = True, None
        _count_step(progress, call.step if call.skipped else None)


def _scale_has_changed(held: GradientState) -> Iterator[Hit]:
    if held.updated is not None:
        yield Hit("misuse-accumulate" if held.mixed else "misuse-many-updates", held.updated)


def _bare_step(order: CallOrder, call: Call) -> Iterator[Hit]:
    for index in call.rewritten:
        order.clear(index)
    for index in call.optimizers:
        held = order.gradients[index]
        if held.used or order.carries_scale(index) or (held.unscaled is not None and call.skipped):
            order.bare = True
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
        if held.scaled is not None and held.scaled.actor == call.actor and held.updated is None:
            held.updated = call
    order.penalty, order.scale_is_known, order.bare = None, False, False
    yield from ()


def _get_scale(order: CallOrder, call: Call) -> Iterator[Hit]:
    order.penalty, order.scale_is_known = None, True
    for held in order.gradients:
        held.by_hand = True
    yield from ()


def _schedule(order: CallOrder, call: Call) -> Iterator[Hit]:
    """A scheduler that moves after more than half of the steps is no epoch's: it must leave out a skipped one."""
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
