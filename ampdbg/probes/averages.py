"""Running averages of trained weights that a script keeps in half precision, as EMA and SWA do.

After some optimizer steps, until the next module call, a dispatch mode traces half tensors shaped like a parameter. It
repeats their ops in float64 on twins of each tensor: one of zeros, one of ones. If the twins become c and c + d, the
script keeps the share d of the old values. If c is also 1 - d times a trained parameter, the tensor is an average. A
tensor in a parameter's own memory is not an average. The trace never writes to the script's tensors.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.weak import WeakIdKeyDictionary

from ampdbg.ops import CASTS, base_name
from ampdbg.probes.models import live_in_process
from ampdbg.probes.op_trace import storage_of, traits_of, written_by
from ampdbg.probes.optimizers import stepped_by
from ampdbg.probes.seams import is_captured, is_tracing, replaced
from ampdbg.probes.tensors import HALVES, stored, tensors_in
from ampdbg.record.run import KeptAverage

FIRST = 2
"""Search for averages from this step on: some scripts create them only after the first step. Optimizers that step one
after the other share a step. A new one begins where one of them steps again."""

TRIES = 32
"""Consecutive steps to trace without a find, because some averages are updated every few steps only. The next trace
then waits until the number of steps has doubled."""

LOOKS_AGAIN = 30.0
"""If no tensor can be an average, seconds until the next search of all tensors. Later waits last as long as the loop
has run so far."""

NEAR = 2.0**-6
"""Upper bound of the relative error when a parameter is rounded to half on the way to its average."""

WHOLE, WHOLE_VECTOR, SAMPLE = 4096, 65_536, 1024
"""Tensors of at most ``WHOLE`` entries are compared in full, and so are 1-D tensors of at most ``WHOLE_VECTOR``: the
gains of a norm, but not the flat parameter of a sharded model. Of larger tensors about ``SAMPLE`` entries are compared.
"""

MemoryPlace = tuple[int, int, int]
"""Storage address, offset and number of entries: equal for all views of the whole tensor."""

Shapes = Mapping[int, torch.Size]
"""The shapes of the stepped tensors by ``id``, in the order of the optimizers."""


class WrittenValues(NamedTuple):
    """The result of a script's ops on one tensor: ``values`` holds n sampled values. ``twin``, of shape (2, n), holds
    the same ops' results from zeros and from ones."""

    twin: torch.Tensor
    values: torch.Tensor
    dtype: torch.dtype
    shape: torch.Size


class AverageTrace(TorchDispatchMode):
    """Traces ops on half tensors of the given ``shapes``, and on their results, by place in memory.

    Storages at the addresses ``but`` are ignored.
    """

    def __init__(self, shapes: set[torch.Size], but: set[int]) -> None:
        super().__init__()
        self._shapes, self._but, self.is_over = shapes, but, False
        self.given: dict[MemoryPlace, WrittenValues] = {}
        self._new: set[MemoryPlace] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, traits, twins = kwargs or {}, traits_of(op), list[torch.Tensor]()
        # For item() on a twin, which has several values, torch 2.6 reads raw memory instead of raising.
        makes_nothing = traits.is_view or (traits.is_number and not traits.written)
        if self.is_over or makes_nothing or is_captured():
            return op(*args, **kwargs)
        with suppress(Exception):  # on twins, which are vectors, an op may raise anything
            twins = self._twins(op, args, kwargs)
        result = op(*args, **kwargs)
        try:
            self._keep(tensors_in([written_by(traits, args, kwargs), result]), twins)
        except Exception:  # noqa: BLE001 - no tensor of the script may stop it
            self.is_over = True
            self.given.clear()
        return result

    def may_begin(self, tensor: torch.Tensor) -> bool:
        """True for a half tensor of one of the shapes; False if its class raises on attribute access."""
        with suppress(Exception):
            part = stored(tensor) if tensor.dtype in HALVES else tensor
            is_of_shape = part.dtype in HALVES and part.shape in self._shapes
            return is_of_shape and storage_of(part) not in {0, *self._but}
        return False

    def _is_followed(self, tensor: torch.Tensor) -> bool:
        """True if the tensor has a twin, or if it is older than the trace and needs a twin."""
        place = place_of(tensor)
        return place in self.given or (place not in self._new and self.may_begin(tensor))

    def _twins(self, op: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Return the twins of the tensors that the op writes, then of the tensors that it returns."""
        if not any(map(self._is_followed, map(stored, tensors_in([args, *kwargs.values()])))):
            return []
        args, kwargs = _pytree.tree_map_only(torch.Tensor, self._twin, (args, kwargs))
        if base_name(str(op)) in CASTS:
            return [tensors_in(args)[-1].to(kwargs.get("device", args[0].device))] * 2
        result = op(*args, **kwargs)
        return tensors_in([written_by(traits_of(op), args, kwargs), result])

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = stored(tensor)
        if place_of(tensor) in self.given:
            return self.given[place_of(tensor)].twin
        if self._is_followed(tensor):
            values = sample_of(tensor).double()
            return torch.stack([torch.zeros_like(values), torch.ones_like(values)])
        if not tensor.is_floating_point():
            return tensor
        return sample_of(tensor).double().repeat(2, 1) if tensor.numel() > 1 else tensor.detach().double().reshape(())

    def _keep(self, made: Sequence[torch.Tensor], twins: Sequence[torch.Tensor]) -> None:
        made = list(map(stored, made))
        for place in map(place_of, made):  # freed tensors may have used the same memory
            self.given.pop(place, None)
            self._new.add(place)
        for tensor, twin in zip(made, twins, strict=False):
            values = sample_of(tensor).double()
            self.given[place_of(tensor)] = WrittenValues(twin, values, tensor.dtype, tensor.shape)


def place_of(tensor: torch.Tensor) -> MemoryPlace:
    """Return the tensor's place in memory; the address is 0 if the tensor has no memory of its own."""
    storage = storage_of(tensor)
    return storage, int(tensor.storage_offset()) if storage else 0, tensor.numel()


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return some values of a tensor, always at the same positions. Their distance is odd, so no column is missed."""
    values = stored(tensor.detach()).flatten()
    whole = WHOLE_VECTOR if tensor.ndim < 2 else WHOLE
    return values if len(values) <= whole else values[:: len(values) // SAMPLE | 1]


def is_dense(gradient: torch.Tensor | None) -> bool:
    """True for a gradient that stores a value for each value of its parameter, so that both can be sampled."""
    return gradient is not None and gradient.layout is torch.strided


class FoundAverage(NamedTuple):
    """An average of the parameter whose ``id`` is ``of``, after an update. Each update moves it by 1 - ``decay`` of its
    distance to the parameter's values, ``aim``."""

    of: int
    decay: float
    aim: torch.Tensor
    given: WrittenValues


def found_in(
    trace: AverageTrace, trained: Mapping[int, torch.Tensor], own: Collection[int] = ()
) -> Iterator[FoundAverage]:
    """Yield the averages that a trace saw: for each parameter the first tensor that fits. Tensors in the parameters'
    ``own`` storages are skipped."""
    free = dict(trained)
    for given in (given for place, given in trace.given.items() if place[0] not in own):
        rest, whole = given.twin
        decays = whole - rest
        low, high = torch.stack(torch.aminmax(decays)).tolist() if decays.numel() else (1.0, 0.0)
        if given.dtype not in HALVES or not 0.0 < low <= high < 1.0 or high - low > 1e-6:
            continue
        aim = rest / (1.0 - low)
        of = next((key for key, one in free.items() if one.shape == given.shape and _is_near(aim, one)), None)
        if of is not None:
            del free[of]
            yield FoundAverage(of, low, aim, given)


def _is_near(aim: torch.Tensor, parameter: torch.Tensor) -> bool:
    values = sample_of(parameter).to(aim)
    return bool((aim - values).abs().amax() < NEAR * values.abs().amax())


class FollowedAverage:
    """The average of one parameter, followed from each find to the next beside a float32 twin.

    Attributes:
        first, last: The first and the latest find.
        steps: The steps between them.
        every: The update interval in steps: the distance of the first two finds, 0 before the second find.
        twin: The values that the average would have in float32, sampled and in float64.
    """

    def __init__(self, found: FoundAverage, step: int) -> None:
        self.first = self.last = found
        self.step, self.steps, self.every = step, 0, 0
        self.twin = found.given.values.clone()
        self._has_moved = torch.zeros_like(self.twin, dtype=torch.bool)

    def add(self, now: FoundAverage, step: int) -> None:
        self.every = self.every or step - self.step
        # If the decay changed in between, take the larger one: float32 moves at least that far.
        decay = max(self.last.decay, now.decay)
        self.twin.lerp_((self.last.aim + now.aim) / 2.0, 1.0 - decay ** ((step - self.step) / self.every))
        self._has_moved |= now.given.values != self.first.given.values
        self.steps, self.last, self.step = self.steps + step - self.step, now, step

    def kept(self, name: str, kind: str) -> KeptAverage | None:
        """Return the movement since the first find, or None without movement in float32. On a GPU this syncs.

        Values closer to their parameter than a unit in the last place do not count: half cannot show their movement.
        """
        start, now = self.first.given.values, self.last.given.values
        counts = (self.last.aim - start).abs() > torch.finfo(self.last.given.dtype).eps * start.abs()
        way = counts * (self.twin - start)
        sums = [counts.sum(), (counts & self._has_moved).sum(), way.square().sum(), (way * (now - start)).sum()]
        entries, moved, wanted, made = torch.stack([one.double() for one in sums]).tolist()
        if not wanted:
            return None
        return KeptAverage(
            name,
            kind,
            str(self.last.given.dtype).removeprefix("torch."),
            decay=round(self.last.decay, 6),
            steps=self.steps,
            entries=int(entries),
            moved=int(moved),
            lost=round(min(1.0, max(0.0, 1.0 - made / wanted)), 4),
            way=wanted,
            first_decay=round(self.first.decay, 6),
        )


class Averages:
    """The half-precision averages of a training loop; traces nothing while no tensor can be an average.

    Args:
        names_of: returns the name and the kind of each stepped tensor, by ``id``.
    """

    def __init__(self, names_of: Callable[[Shapes], Mapping[int, tuple[str, str]]]) -> None:
        self._names_of = names_of
        self._kept: dict[int, FollowedAverage] = {}
        self._optimizers: MutableMapping[Optimizer, None] = WeakIdKeyDictionary()  # some optimizers have no hash
        self._parameters: list[torch.Tensor] = []
        self._names: dict[int, tuple[str, str]] = {}
        self._trained: dict[int, torch.Tensor] = {}
        self._stretch = ExitStack()
        self._thread = 0
        self._trace: AverageTrace | None = None
        self._in_step = set[int]()
        self._steps, self._tried_since = 1, 0
        self._next: float = FIRST
        self._has_candidates, self._began, self._next_search = False, time.monotonic(), 0.0

    def stepped(self, optimizer: Optimizer) -> None:
        """Start a trace, if one is due, which lasts until :meth:`end`. Call this right after each optimizer step,
        before the optimizer's own hooks."""
        self.end()
        if id(optimizer) in self._in_step:
            self._in_step.clear()
            self._steps += 1
        self._in_step.add(id(optimizer))
        self._optimizers[optimizer] = None  # a script may average a generator after its critic's step
        is_due = self._steps >= self._next and (self._has_candidates or time.monotonic() >= self._next_search)
        if is_due and self._trace is None and not (_get_current_dispatch_mode_stack() or is_tracing()):
            self._guarded(self._begin, [*self._optimizers])

    def _begin(self, stepped: Sequence[Optimizer]) -> None:
        parameters = [one for each in stepped for one in stepped_by(each)]
        states = [value for each in stepped for of_one in each.state.values() for value in of_one.values()]
        self._parameters = parameters
        self._trained = {id(one): stored(one.detach()) for one in parameters}
        own = map(stored, tensors_in([states, [one.grad for one in parameters]]))
        shapes = {one.shape for one in self._trained.values()}
        trace = AverageTrace(shapes, set(map(storage_of, (*self._trained.values(), *own))))
        if self._find_candidates(trace):
            self._thread, self._trace = threading.get_ident(), trace
            whole = {id(one): one.shape for one in parameters}
            if whole.keys() - self._names.keys():
                found = self._names_of(whole)
                self._names = {key: found.get(key, ("a parameter", "other weights")) for key in whole} | self._names
            trace.__enter__()
            self._stretch.enter_context(replaced(torch.nn.Module, "__call__", self._ending))

    def _find_candidates(self, trace: AverageTrace) -> bool:
        if not self._has_candidates:
            now = time.monotonic()
            self._next_search = max(now + LOOKS_AGAIN, 2.0 * now - self._began)
            self._has_candidates = any(map(trace.may_begin, live_in_process(torch.Tensor)))
        return self._has_candidates

    def _ending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.end()
            return original(*args, **kwargs)

        return call

    def end(self) -> None:
        """End the trace; call this before code that does not update averages. If the script has since entered a
        dispatch mode, tracing stops now, and a later call exits the trace's mode."""
        trace = self._trace
        if trace is None or self._thread != threading.get_ident():
            return
        trace.is_over = True
        if _get_current_dispatch_mode_stack()[-1:] == [trace]:
            trace.__exit__(None, None, None)
            self._trace = None
            self._stretch.close()
            self._guarded(self._note, trace)
            self._trained, self._parameters = {}, []

    def _guarded(self, part: Callable[[Any], None], given: Any) -> None:
        """Call ``part``, which runs inside the script's call; after an error, search for averages no more."""
        try:
            with torch.no_grad():
                part(given)
        except Exception:  # noqa: BLE001 - no tensor of the script may stop it
            self._next = math.inf

    def _note(self, trace: AverageTrace) -> None:
        own = {storage_of(stored(one.detach())) for one in self._parameters}
        found = list(found_in(trace, self._trained, own))
        known = [one for one in found if one.of in self._kept and self._kept[one.of].step < self._steps]
        if known or self._steps - self._tried_since >= TRIES:
            self._next = self._tried_since = 2 * self._steps
        elif found:  # no pause after a first find: the second shows the interval
            self._tried_since = self._steps
        for one in known:
            self._kept[one.of].add(one, self._steps)
        self._kept |= {one.of: FollowedAverage(one, self._steps) for one in found if one.of not in self._kept}

    @property
    def seen(self) -> tuple[KeptAverage, ...]:
        """The averages that would have moved in float32."""
        kept = (one.kept(*self._names[of]) for of, one in self._kept.items() if one.steps)
        return tuple(one for one in kept if one is not None)
