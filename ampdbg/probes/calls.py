"""Records the calls of a training loop that mixed precision needs in a fixed order, without keeping a tensor.

The autograd graph shows, without a GPU sync, which scaler scaled a loss and which dtypes computed it. The version
counters of gradients show who wrote them. A misuse is a call in the wrong order, such as clipping before ``unscale_``.
An optimizer's place is its position in the order of registration.
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
from torch._C import is_autocast_enabled  # the original, which an emulated GPU does not patch
from torch.amp.grad_scaler import GradScaler
from torch.utils.weak import WeakIdKeyDictionary

from ampdbg.call_order import Call, CallKind, CallOrder, Hit
from ampdbg.errors import text_of
from ampdbg.probes.loss_graph import forward_dtypes, is_one, is_plain, is_scaled_by_hand, is_scaling, scaler_of
from ampdbg.probes.optimizers import Originals, Stepped, stepped_by
from ampdbg.probes.source_lines import innermost_line, source_if_known
from ampdbg.probes.tensors import hold_values, stored
from ampdbg.probes.torch_errors import misuse_of_error, misuse_of_refusal
from ampdbg.record.run import Misuse
from ampdbg.source.ownership import Line, line_of_error

FEW = 16
"""Look up the source line for this many calls of each kind, and for every misuse. Copy as many values of a gradient."""

MISUSES_KEPT = 50
"""Maximum number of misuses in the record; misuses with equal code and line count once."""

SAMPLE = 8
"""Number of parameters sampled from each optimizer. A misuse that the sample does not show is not reported."""


class Calls:
    """The calls recorded so far, and the misuses among them."""

    def __init__(self, step: Callable[[], int]) -> None:
        self._places: dict[int, int] = {}
        self._owners: dict[int, int] = {}
        self._marks: list[GradientMarks] = []
        self._originals: dict[int, tuple[Originals, GradientMarks]] = {}
        self._order = CallOrder()
        self._step = step
        self.lowered: set[str] = set()
        """The 16-bit dtypes in the losses' graphs; ``compiled`` for a compiled function, which hides its dtypes."""
        self.computed: dict[int, torch.dtype] = {}
        """The dtype in which the graphs compute with each parameter, by the parameter's ``id``."""
        self.last_pass_places: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        """Two groups of optimizer places: gradients written by the last pass, and gradients cleared before it."""
        self.last_moved = set[int]()
        """The places whose gradients the script moved to copies of the weights before the last pass. It may add them up
        there, so they do not count as cleared."""
        self.graphs = 0
        """The number of loss graphs searched for dtypes."""
        self.scalers: dict[int, str] = {}
        """The device type of each scaler that received a loss, by the scaler's ``id``; "" for a disabled scaler."""
        self.scales_gradients = False
        """True if ``autograd.grad`` ran with ``create_graph`` on a scaled loss."""
        self.clip_grad_norm: float | None = None
        """The loop's limit for the gradient norm; None if the loop does not clip it."""
        self._actors: dict[int, weakref.ref[Any]] = {}
        self._numbers = WeakIdKeyDictionary()
        self._count = count(1)
        self._stepped_by: dict[int, int] = {}
        self._times: dict[CallKind, int] = {}
        self._lines: dict[tuple[CallKind, tuple[int, ...]], Line | None] = {}
        self._found: dict[tuple[str, Line | None], Misuse] = {}
        self._explained = 0
        self._looks = 0
        self._at_reading: dict[int, torch.Tensor] = {}
        """Values of the gradients of each optimizer when the loop read the scale."""

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Register an optimizer at the next place; this class holds every object weakly."""
        place = self._places[id(optimizer)] = len(self._marks)
        self._owners.update((id(one), place) for one in stepped_by(optimizer))
        self._marks.append(GradientMarks(optimizer))
        self._order.add_optimizer()

    def add_originals(self, optimizer: torch.optim.Optimizer, weights: Iterable[torch.Tensor]) -> None:
        """Record that the optimizer steps copies of ``weights``, which got gradients in the last backward pass."""
        originals, place = Originals(weights), self._places[id(optimizer)]
        self._originals[place] = originals, GradientMarks(originals)
        self.last_pass_places = (*self.last_pass_places[0], place), self.last_pass_places[1]

    def written_for(self, optimizer: torch.optim.Optimizer) -> Stepped:
        """Return the owner of the gradients that passes write: the optimizer, or the originals of its copies."""
        originals, _ = self._originals.get(self._places[id(optimizer)], (optimizer, None))
        return originals

    @property
    def misuses(self) -> tuple[Misuse, ...]:
        """The misuses so far, in the order of their first occurrence."""
        return tuple(self._found.values())

    def rewritten(self) -> tuple[int, ...]:
        """Return the places of optimizers with gradients cleared or written outside the recorded calls."""
        return tuple(place for place, marks in enumerate(self._marks) if marks.are_rewritten())

    def by_scaler(self, kind: CallKind, scaler: Any) -> None:
        """Record a scaler call that takes no optimizer."""
        for place, marks in enumerate(self._marks) if kind == "get_scale" else ():
            if self._order.carries_scale(place):
                self._at_reading[place] = marks.values()
        self._note(kind, actor=self.number_of(scaler))

    def by_optimizer(self, kind: CallKind, optimizer: torch.optim.Optimizer, **facts: Any) -> None:
        """Record a finished call for one optimizer, and the state in which the call left its gradients."""
        place = self._places.get(id(optimizer))
        if place is not None:
            self._carries_scale(place)
            self._note(kind, (place,), **facts)
            self._marks[place].renew()

    def unscaled(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        """Record ``unscale_`` for each optimizer that holds only parameters of this one, as inside a wrapper."""
        held = {id(one) for one in stepped_by(optimizer)}
        places = tuple(place for place, marks in enumerate(self._marks) if marks.are_within(held))
        self._note("unscale", places, actor=self.number_of(scaler))
        for place in places:
            self._marks[place].renew()

    def succeeded_by(self, scaler: Any, optimizer: torch.optim.Optimizer) -> int:
        """Return the number of the scaler that stepped the optimizer before ``scaler``; 0 if none did."""
        place, number = self._places.get(id(optimizer), -1), self.number_of(scaler)
        before = self._stepped_by.get(place, number)
        self._stepped_by[place] = number
        return before if before != number else 0

    def scheduled(self, scheduler: Any, *told: Any) -> None:
        """Record that a learning-rate scheduler is about to step; its initial step does not count.

        A call with an argument is ignored: a score, as for ReduceLROnPlateau, or an epoch counts no steps.
        """
        if any(one is not None for one in told) or _takes_score(type(scheduler).step):
            return
        place = self._places.get(id(getattr(scheduler, "optimizer", None)))
        if place is not None and getattr(scheduler, "_step_count", 1) > 0:
            self._note("schedule", (place,), actor=self.number_of(scheduler))

    def refused(self, kind: CallKind, optimizer: Any, actor: Any, error: Exception) -> None:
        """Record that the scaler raised ``error`` in a call of this kind."""
        place = self._places.get(id(optimizer))
        if self._note(kind, () if place is None else (place,), actor=self.number_of(actor), raised=text_of(error)):
            self._explained = id(error)

    def failed(self, error: BaseException) -> None:
        """Record the misuse that the loop's error names, if it names one."""
        code, line = misuse_of_error(error), line_of_error(error)
        if code and id(error) != self._explained:
            self._explained = id(error)
            self._report(Hit(code, Call("backward", self._step(), line=line, raised=text_of(error))), line)

    def explains(self, error: BaseException | None) -> bool:
        """True if a recorded misuse raised this error."""
        return error is not None and id(error) == self._explained

    def scaler_of(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the scaler whose loss scale the optimizer's gradients still carry; None if no scaler is known."""
        return self._actor(self._carries_scale(self._places[id(optimizer)]))

    def _carries_scale(self, place: int) -> int:
        """Return the number of the scaler whose scale the optimizer's gradients carry, or 0. The loop may have read the
        scale for a log or a checkpoint, and not to divide by it. Then a GPU syncs."""
        before, held = self._at_reading.pop(place, torch.empty(0)), self._order.gradients[place]
        if held.by_hand and before.any() and before.equal(self._marks[place].values()):
            held.by_hand = False
        return self._order.carries_scale(place)

    def is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if ``unscale_`` was called for this optimizer after its last step."""
        return self._order.gradients[self._places[id(optimizer)]].unscaled is not None

    def backward(
        self,
        scaled_by: Any,
        engine: Callable[..., Any],
        takes: Sequence[Any],
        roots: Sequence[Any],
        starts: Sequence[torch.Tensor | None],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a backward pass from the losses ``roots``, and record which optimizers' gradients it wrote.

        ``scaled_by`` is the losses' scaler, or None. Of the weights that it ``takes``, the pass returns gradients, with
        which the loop replaces the optimizer's. The rest goes to the engine; ``starts`` are the first gradients.
        """
        scaler, halves = 0 if scaled_by is None else self.number_of(scaled_by), self._halves(roots)
        is_off = "" in self.scalers.values()  # a disabled scaler: the loop runs without scaling on purpose
        if not scaler and halves and (is_off or is_scaled_by_hand(roots) or not all(map(is_one, starts))):
            halves = ()
        is_plain = not scaler and self._is_plain(roots, starts)
        devices = [root.device.type for root in roots if isinstance(root, torch.Tensor)]
        in_autocast, before = any(map(is_autocast_enabled, devices[:1])), [marks.now() for marks in self._marks]
        returned = self.owners(takes)
        rewritten = tuple({*self.rewritten(), *returned})
        filled = self._filled(rewritten) if scaler else ()
        originals = [(place, marks, marks.now()) for place, (_, marks) in self._originals.items()]
        cleared = {place for place, marks, _ in originals if marks.are_rewritten()}
        self.last_moved = {place for place in cleared if any(before[place])}
        cleared |= set(rewritten).difference(self._originals, returned)
        try:
            result = engine(roots, starts, *args, **kwargs)
        except Exception as error:
            self.failed(error)
            raise
        for marks in (*self._marks, *(marks for _, marks, _ in originals)):
            marks.renew()
        written = [place for place, state in enumerate(before) if self._marks[place].noted != state]
        written += returned
        added = [place for place in written if place in filled and self._marks[place].have_grown(before[place])]
        copied = [place for place, marks, state in originals if marks.noted != state]
        self.last_pass_places = (*written, *copied), tuple(sorted(cleared - self.last_moved))
        if not scaler and any(self._marks[place].holds(torch.float16) for place in written):
            halves = ()  # a scaler rejects FP16 gradients, so its absence is not a misuse
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
        scaler = scaler_of(roots)
        if scaler is not None:
            self.scales_gradients |= creates_graph
            self._note("grad", actor=self.number_of(scaler), creates_graph=creates_graph)

    def clipped(self, run: Callable[[], Any], parameters: Sequence[torch.Tensor], limit: Any) -> Any:
        """Clip gradients with ``run``, and record the call. A limit of at least the loss scale is meant for scaled
        gradients, and is not recorded."""
        places = self.owners(parameters)
        held = [self._carries_scale(place) for place in places]
        scalers = [scaler for scaler in map(self._actor, held) if scaler is not None]
        meant = any(float(limit) >= float(scaler._get_scale_async()) for scaler in scalers)
        if not meant:
            self._note("clip", places, rewritten=self.rewritten())
        result = run()
        for place in places:
            self._marks[place].renew()
        return result

    def place_of(self, optimizer: torch.optim.Optimizer) -> int:
        return self._places[id(optimizer)]

    def owners(self, parameters: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Return the places of the optimizers that hold any of these parameters."""
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
        if line is None:  # no more lines are looked up: count it with an earlier one of its kind
            key = next((one for one in self._found if one[0] == hit.code), key)
        known = self._found.get(key)
        raised = hit.call.raised.partition("\n")[0]
        if known is not None:
            self._found[key] = replace(known, count=known.count + 1, raised=known.raised or raised)
        elif len(self._found) < MISUSES_KEPT:
            self._found[key] = Misuse(hit.code, hit.call.step, 1, source_if_known(line), raised)

    def _filled(self, rewritten: Sequence[int]) -> tuple[int, ...]:
        """Return the optimizers in :attr:`CallOrder.doubtful` with gradients that a step used and nothing cleared."""
        doubtful = self._order.doubtful.difference(rewritten)
        used = [place for place in doubtful if self._order.gradients[place].used]
        self._order.doubtful.difference_update(used)
        return tuple(place for place in used if not self._marks[place].are_cleared())

    def _is_plain(self, roots: Sequence[Any], starts: Sequence[torch.Tensor | None]) -> bool:
        """True if a scaler is in use but nothing can have scaled these losses; checks at most ``FEW`` passes."""
        actors = () if self._looks == FEW else tuple(self._actors.values())
        scalers = [actor for actor in (alive() for alive in actors) if isinstance(actor, GradScaler)]
        self._looks += bool(scalers)
        return any(map(is_scaling, scalers)) and is_plain(roots, starts)

    def _halves(self, roots: Sequence[Any]) -> tuple[str, ...]:
        """Return the 16-bit dtypes in the losses' graphs, in passes 1, 2, 4, 8 … only: precision seldom changes."""
        times = self._times.get("backward", 0) + 1
        if times & (times - 1):
            return ()
        found, computed = forward_dtypes(roots)
        self.graphs, self.lowered = self.graphs + 1, self.lowered | set(found)
        self.computed.update(computed)
        return found

    def number_of(self, actor: Any) -> int:
        """Return the number of a scaler or scheduler, from 1; a number is never used twice."""
        number: int = self._numbers.get(actor, 0)
        if not number:
            number = self._numbers.setdefault(actor, next(self._count))  # atomic: threads may call this at once
            self._actors[number] = weakref.ref(actor)
        return number

    def _actor(self, number: int) -> Any:
        """Return the scaler or scheduler with this number; None for 0, and after it was deleted."""
        return self._actors.get(number, lambda: None)()


@lru_cache(maxsize=64)
def _takes_score(step: Callable[..., Any]) -> bool:
    """True if a scheduler's ``step`` requires an argument, such as a score. A class that the script defines later is
    seen only when it calls the base's ``step``, perhaps without the score."""
    try:
        _, *others = signature(step).parameters.values()
    except (TypeError, ValueError):  # no signature, or no parameter at all
        return False
    return any(one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in others)


Marks = tuple[tuple[int, int] | None, ...]


class GradientMarks:
    """The current and the last recorded state of a sample of one optimizer's gradients."""

    def __init__(self, optimizer: Stepped) -> None:
        parameters = stepped_by(optimizer)
        # A discriminator is frozen while its generator trains, which may be when ampdbg finds the optimizers.
        trained = [parameter for parameter in parameters if parameter.requires_grad] or parameters
        self._parameters = tuple(map(weakref.ref, trained[:: max(1, -(-len(trained) // SAMPLE))]))
        self.noted = self.now()
        self._is_cleared_unseen = False

    def now(self) -> Marks:
        """Return the ``id`` and version of each sampled gradient; None for a parameter without a gradient."""
        found: list[tuple[int, int] | None] = []
        for alive in self._parameters:  # several times per step: a plain loop is fastest
            gradient = getattr(alive(), "grad", None)
            found.append(None if gradient is None else (id(gradient), gradient._version))
        return tuple(found)

    def values(self) -> torch.Tensor:
        """Return a copy of some values of the sampled gradients."""
        found = (getattr(alive(), "grad", None) for alive in self._parameters)
        dense = (one for one in found if one is not None and one.layout is torch.strided)
        parts = [stored(one.detach()).flatten()[:FEW] for one in dense]
        alike = [one for one in parts if (one.dtype, one.device) == (parts[0].dtype, parts[0].device)]
        return torch.cat(alike) if alike else torch.empty(0)

    def are_within(self, parameters: Collection[int]) -> bool:
        """True if every sampled parameter is in ``parameters``, given by ``id``."""
        return bool(self._parameters) and all(id(alive()) in parameters for alive in self._parameters)

    def holds(self, dtype: torch.dtype) -> bool:
        """True if any sampled parameter, and so its gradient, has this dtype."""
        return any(getattr(alive(), "dtype", None) is dtype for alive in self._parameters)

    def renew(self) -> None:
        self.noted = self.now()

    def are_rewritten(self) -> bool:
        """True if the gradients were cleared or written since the last record."""
        now = self.now()
        return now != self.noted or not any(now)

    def are_cleared(self) -> bool:
        """True if the gradients are zero but no version changed, as by ``p.grad.data.zero_()`` or the optimizer's own
        step. A loop that clears them so once does it always: the first True is kept. Until then a GPU syncs."""
        if not self._is_cleared_unseen:
            found = (getattr(alive(), "grad", None) for alive in self._parameters)
            self._is_cleared_unseen = not hold_values(gradient for gradient in found if gradient is not None)
        return self._is_cleared_unseen

    def have_grown(self, before: Marks) -> bool:
        """True if any gradient that existed in ``before`` was written since, as by accumulation."""
        return any(old is not None and old != new for old, new in zip(before, self.noted, strict=True))
