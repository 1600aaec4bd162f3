"""The calls of a training loop whose order matters under mixed precision, noted without keeping a tensor.

Autograd tells without a sync which scaler scaled a loss, which dtypes it went through and who wrote gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from inspect import signature
from itertools import count
from typing import Any

import torch
from torch._C import is_autocast_enabled  # as it is, where an emulated GPU has other names
from torch.amp.grad_scaler import GradScaler
from torch.utils.weak import WeakIdKeyDictionary

from ampdbg.call_order import Call, CallKind, CallOrder, Hit
from ampdbg.errors import text_of
from ampdbg.probes.loss_graph import forward_dtypes, is_one, is_plain, is_scaled_by_hand, is_scaling, scaler_of
from ampdbg.probes.optimizers import Originals, Stepped, stepped_by
from ampdbg.probes.source_lines import innermost_line, source_if_known
from ampdbg.probes.tensors import hold_values
from ampdbg.probes.torch_errors import misuse_of_error, misuse_of_refusal
from ampdbg.record.run import Misuse
from ampdbg.source.ownership import Line, line_of_error

FEW = 16
"""The line is looked up for so many calls of each kind, and for every one that is a misuse."""

MISUSES_KEPT = 50
"""So many misuses, told apart by code and line, go into the record."""

SAMPLE = 8
"""So many parameters of each optimizer are looked at. What they do not show is not blamed."""


class Calls:
    """The calls seen so far, and what is wrong with their order."""

    def __init__(self, step: Callable[[], int]) -> None:
        self._places: dict[int, int] = {}
        self._owners: dict[int, int] = {}
        self._marks: list[GradientMarks] = []
        self._originals: dict[int, tuple[Originals, GradientMarks]] = {}
        self._order = CallOrder()
        self._step = step
        self.lowered: set[str] = set()
        """The 16-bit dtypes in the graphs of the losses so far; ``compiled`` where a graph shows none of its own."""
        self.computed: dict[int, torch.dtype] = {}
        """By the ``id`` of a parameter, in which dtype those graphs compute with it."""
        self.wrote: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        """Of the last backward pass: the places of the optimizers whose gradients it has written, and of those whose
        gradients were cleared before it."""
        self.graphs = 0
        """So many losses' graphs were looked into for them."""
        self.scalers: dict[int, str] = {}
        """By ``id``, those that were given losses: the kind of device that each is for; "" for one that is off."""
        self.scales_gradients = False
        """``autograd.grad`` has made a graph of what a scaler had scaled."""
        self.clip_grad_norm: float | None = None
        """What the loop clips the norm of its gradients to; None where it does not."""
        self._actors: dict[int, weakref.ref[Any]] = {}
        self._numbers = WeakIdKeyDictionary()
        self._count = count(1)
        self._stepped_by: dict[int, int] = {}
        self._times: dict[CallKind, int] = {}
        self._lines: dict[tuple[CallKind, tuple[int, ...]], Line | None] = {}
        self._found: dict[tuple[str, Line | None], Misuse] = {}
        self._explained = 0
        self._looks = 0

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Another one, whose place is behind the others; held weakly, as all that is noted here."""
        place = self._places[id(optimizer)] = len(self._marks)
        self._owners.update((id(one), place) for one in stepped_by(optimizer))
        self._marks.append(GradientMarks(optimizer))
        self._order.add_optimizer()

    def add_originals(self, optimizer: torch.optim.Optimizer, weights: Iterable[torch.Tensor]) -> None:
        """The optimizer steps copies of these weights, whose gradients the last backward pass has written."""
        originals, place = Originals(weights), self._places[id(optimizer)]
        self._originals[place] = originals, GradientMarks(originals)
        self.wrote = (*self.wrote[0], place), self.wrote[1]

    def written_for(self, optimizer: torch.optim.Optimizer) -> Stepped:
        """What backward passes write the gradients of for an optimizer: the originals of what it steps, or itself."""
        originals, _ = self._originals.get(self._places[id(optimizer)], (optimizer, None))
        return originals

    @property
    def misuses(self) -> tuple[Misuse, ...]:
        """What was wrong so far, the first first."""
        return tuple(self._found.values())

    def rewritten(self) -> tuple[int, ...]:
        """The optimizers whose gradients were cleared, or written by unknown hands, since the last call."""
        return self._rewritten(self._marks_now())

    def by_scaler(self, kind: CallKind, scaler: Any) -> None:
        """A call of the scaler's that is about no optimizer."""
        self._note(kind, actor=self.number_of(scaler))

    def by_optimizer(self, kind: CallKind, optimizer: torch.optim.Optimizer, **facts: Any) -> None:
        """A call about one optimizer, whose gradients are now as the call has left them."""
        place = self._places.get(id(optimizer))
        if place is not None:
            self._note(kind, (place,), **facts)
            self._marks[place].renew()

    def unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients are unscaled: those of every optimizer that has no others, as the one that another one wraps."""
        held = {id(one) for one in stepped_by(optimizer)}
        places = tuple(place for place, marks in enumerate(self._marks) if marks.are_within(held))
        self._note("unscale", places)
        for place in places:
            self._marks[place].renew()

    def succeeded_by(self, scaler: Any, optimizer: torch.optim.Optimizer) -> int:
        """The number of the scaler that this one, which steps an optimizer, has taken the place of; 0 of none."""
        place, number = self._places.get(id(optimizer), -1), self.number_of(scaler)
        before = self._stepped_by.get(place, number)
        self._stepped_by[place] = number
        return before if before != number else 0

    def scheduled(self, scheduler: Any, *told: Any) -> None:
        """A learning-rate scheduler of one of the optimizers is about to move by a step; its start does not count.

        One that is ``told`` something counts no steps: a score, as ReduceLROnPlateau, or the place it is to move to.
        """
        if any(one is not None for one in told) or _takes_score(type(scheduler).step):
            return
        place = self._places.get(id(getattr(scheduler, "optimizer", None)))
        if place is not None and getattr(scheduler, "_step_count", 1) > 0:
            self._note("schedule", (place,), actor=self.number_of(scheduler))

    def refused(self, kind: CallKind, optimizer: Any, actor: Any, error: Exception) -> None:
        """The scaler has raised."""
        place = self._places.get(id(optimizer))
        if self._note(kind, () if place is None else (place,), actor=self.number_of(actor), raised=text_of(error)):
            self._explained = id(error)

    def failed(self, error: BaseException) -> None:
        """The loop has raised; some errors say of themselves which misuse they are."""
        code, line = misuse_of_error(error), line_of_error(error)
        if code and id(error) != self._explained:
            self._explained = id(error)
            self._report(Hit(code, Call("backward", self._step(), line=line, raised=text_of(error))), line)

    def explains(self, error: BaseException | None) -> bool:
        """A misuse is what raised this error."""
        return error is not None and id(error) == self._explained

    def scaler_of(self, optimizer: torch.optim.Optimizer) -> Any:
        """The scaler whose loss scale the gradients of this optimizer still carry; None where none is known."""
        return self._actor(self._order.carries_scale(self._places[id(optimizer)]))

    def is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """``unscale_`` was called for this optimizer, and no step since."""
        return self._order.gradients[self._places[id(optimizer)]].unscaled is not None

    def backward(
        self,
        scaled_by: Any,
        engine: Callable[..., Any],
        roots: Sequence[Any],
        starts: Sequence[torch.Tensor | None],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Runs a backward pass from ``roots`` and notes whose gradients it has written; it ``starts`` with these.

        ``scaled_by`` is the scaler of what goes backward, or None; the other arguments are the engine's own.
        """
        scaler, halves = 0 if scaled_by is None else self.number_of(scaled_by), self._halves(roots)
        is_off = "" in self.scalers.values()  # the loop has decided to do without
        if not scaler and halves and (is_off or is_scaled_by_hand(roots) or not all(map(is_one, starts))):
            halves = ()
        is_plain = not scaler and self._is_plain(roots, starts)
        devices = [root.device.type for root in roots if isinstance(root, torch.Tensor)]
        in_autocast, before = any(map(is_autocast_enabled, devices[:1])), self._marks_now()
        rewritten = self._rewritten(before)
        filled = self._filled(rewritten) if scaler else ()
        originals = [(place, marks, marks.now()) for place, (_, marks) in self._originals.items()]
        cleared = [place for place, marks, state in originals if marks.are_rewritten(state)]
        try:
            result = engine(roots, starts, *args, **kwargs)
        except Exception as error:
            self.failed(error)
            raise
        written, added = [], []
        for place, (marks, state) in enumerate(zip(self._marks, before, strict=False)):
            marks.renew()
            if marks.noted != state:
                written.append(place)
                if place in filled and marks.have_grown(state):
                    added.append(place)
        copied = [place for place, marks, state in originals if marks.now() != state]
        for _, marks, _ in originals:
            marks.renew()
        self.wrote = (*written, *copied), (*rewritten, *cleared)
        if not scaler and any(self._marks[place].holds(torch.float16) for place in written):
            halves = ()  # a scaler refuses gradients in half, so the lack of one is no misuse
        self._note(
            "backward",
            tuple(written),
            actor=scaler,
            rewritten=rewritten,
            added=tuple(added),
            in_autocast=in_autocast,
            lowered_to=halves,
            is_plain=is_plain,
        )
        return result

    def grad(self, roots: Sequence[Any], creates_graph: bool) -> None:
        """``torch.autograd.grad`` is about to run."""
        scaler = scaler_of(roots)
        if scaler is not None:
            self.scales_gradients |= creates_graph
            self._note("grad", actor=self.number_of(scaler), creates_graph=creates_graph)

    def clipped(self, run: Callable[[], Any], parameters: Sequence[torch.Tensor], limit: Any) -> Any:
        """Clips gradients and notes whose; a limit beyond the loss scale itself is meant for scaled ones."""
        places = self.owners(parameters)
        held = [self._order.carries_scale(place) for place in places]
        scalers = [scaler for scaler in map(self._actor, held) if scaler is not None]
        meant = any(float(limit) >= float(scaler._get_scale_async()) for scaler in scalers)
        if not meant:
            self._note("clip", places, rewritten=self.rewritten())
        result = run()
        for place in places:
            self._marks[place].renew()
        return result

    def place_of(self, optimizer: torch.optim.Optimizer) -> int:
        """In which order it was added, from 0."""
        return self._places[id(optimizer)]

    def owners(self, parameters: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The places of the optimizers that hold any of these parameters."""
        return tuple(sorted({self._owners[id(one)] for one in parameters if id(one) in self._owners}))

    def _note(self, kind: CallKind, optimizers: tuple[int, ...] = (), **facts: Any) -> tuple[Hit, ...]:
        times = self._times[kind] = self._times.get(kind, 0) + 1
        if times <= FEW:
            self._lines[kind, optimizers] = innermost_line()
        call = Call(kind, self._step(), optimizers, self._lines.get((kind, optimizers)), **facts)
        hits = misuse_of_refusal(self._order, call) if call.raised else self._order.hits(call)
        for hit in hits:
            self._report(hit, innermost_line() if hit.call is call else hit.call.line)
        return hits

    def _report(self, hit: Hit, line: Line | None) -> None:
        key = (hit.code, line)
        known = self._found.get(key)
        raised = hit.call.raised.partition("\n")[0]
        if known is not None:
            self._found[key] = replace(known, count=known.count + 1, raised=known.raised or raised)
        elif len(self._found) < MISUSES_KEPT:
            self._found[key] = Misuse(hit.code, hit.call.step, 1, source_if_known(line), raised)

    def _marks_now(self) -> list[Marks]:
        return [marks.now() for marks in self._marks]

    def _rewritten(self, now: Sequence[Marks]) -> tuple[int, ...]:
        """Whose gradients were cleared, or written by someone, since they were noted."""
        pairs = enumerate(zip(self._marks, now, strict=False))
        return tuple(place for place, (marks, state) in pairs if marks.are_rewritten(state))

    def _filled(self, rewritten: Sequence[int]) -> tuple[int, ...]:
        """Of the optimizers in doubt, those whose gradients a step has used, and which are still there."""
        used = (place for place in tuple(self._order.doubtful) if self._order.gradients[place].used)
        return tuple(place for place in used if place not in rewritten and not self._marks[place].are_cleared())

    def _is_plain(self, roots: Sequence[Any], starts: Sequence[torch.Tensor | None]) -> bool:
        """A scaler is in use, and nothing may have scaled these losses; few are looked at."""
        actors = () if self._looks == FEW else tuple(self._actors.values())
        scalers = [actor for actor in (alive() for alive in actors) if isinstance(actor, GradScaler)]
        self._looks += bool(scalers)
        return any(map(is_scaling, scalers)) and is_plain(roots, starts)

    def _halves(self, roots: Sequence[Any]) -> tuple[str, ...]:
        """Looks into the graph at the 1st, 2nd, 4th, 8th … backward pass: a loop seldom changes its precision."""
        times = self._times.get("backward", 0) + 1
        if times & (times - 1):
            return ()
        found, computed = forward_dtypes(roots)
        self.graphs, self.lowered = self.graphs + 1, self.lowered | set(found)
        self.computed.update(computed)
        return found

    def number_of(self, actor: Any) -> int:
        """A number for a scaler or scheduler, from 1, which no other gets when this one has gone."""
        number: int = self._numbers.get(actor, 0)
        if not number:
            number = self._numbers.setdefault(actor, next(self._count))  # in one step: threads may ask at once
            self._actors[number] = weakref.ref(actor)
        return number

    def _actor(self, number: int) -> Any:
        """Whose number that is; None of 0, and of one that has gone."""
        alive = self._actors.get(number)
        return None if alive is None else alive()


@lru_cache(maxsize=64)
def _takes_score(step: Callable[..., Any]) -> bool:
    """A class of schedulers must be told something at each ``step``: one that a script makes while it is
    watched is seen only where that calls the base's, and may hand on nothing."""
    try:
        _, *others = signature(step).parameters.values()
    except (TypeError, ValueError):  # none of Python's own, or a function that takes nothing
        return False
    return any(one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in others)


Marks = tuple[tuple[int, int] | None, ...]


class GradientMarks:
    """The state of a sample of one optimizer's gradients: that of now, and the one that was last noted."""

    def __init__(self, optimizer: Stepped) -> None:
        self._parameters = tuple(map(weakref.ref, _sample(optimizer)))
        self.noted = self.now()
        """The state that was last noted."""
        self._is_cleared_unseen = False

    def now(self) -> Marks:
        """The identity and version of each gradient of the sample; None where there is none."""
        found: list[tuple[int, int] | None] = []
        for alive in self._parameters:  # several times in each step: a loop costs least
            gradient = getattr(alive(), "grad", None)
            found.append(None if gradient is None else (id(gradient), gradient._version))
        return tuple(found)

    def are_within(self, parameters: Collection[int]) -> bool:
        """Those are gradients of these parameters alone, given by ``id``."""
        return bool(self._parameters) and all(id(alive()) in parameters for alive in self._parameters)

    def holds(self, dtype: torch.dtype) -> bool:
        """Some are of a parameter, and so themselves, of this dtype."""
        return any(getattr(alive(), "dtype", None) is dtype for alive in self._parameters)

    def renew(self) -> None:
        """From here on the gradients are those of now."""
        self.noted = self.now()

    def are_rewritten(self, now: Marks) -> bool:
        """The gradients of ``now`` were cleared, or written by someone, since they were noted."""
        return now != self.noted or not any(now)

    def are_cleared(self) -> bool:
        """The gradients are zero though nobody was seen to write them, as by ``p.grad.data.zero_()`` or by the
        optimizer's own step: a loop that clears them so once does so always. On a GPU this syncs, until it is so."""
        if not self._is_cleared_unseen:
            found = (getattr(alive(), "grad", None) for alive in self._parameters)
            self._is_cleared_unseen = not hold_values(gradient for gradient in found if gradient is not None)
        return self._is_cleared_unseen

    def have_grown(self, before: Marks) -> bool:
        """Any gradient that was there before has been written since, as one that is added to."""
        return any(old is not None and old != new for old, new in zip(before, self.noted, strict=True))


def _sample(optimizer: Stepped) -> tuple[torch.Tensor, ...]:
    parameters = stepped_by(optimizer)
    # A discriminator's are frozen while its generator trains, and the optimizers are learnt then.
    trained = [parameter for parameter in parameters if parameter.requires_grad] or parameters
    return tuple(trained[:: max(1, -(-len(trained) // SAMPLE))])
