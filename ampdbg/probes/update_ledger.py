"""The ledger of updates: compares the updates of half parameters with updates of float32 masters.

A window is ten steps of one optimizer. Meanwhile some entries of each half parameter have a float32 master and float32
copies of the optimizer's states. The same optimizer class steps the masters, with the same options on the same
gradients.

Results are from the windows after an optimizer's first one, if there are any. Adam's first steps are as large as the
learning rate, and later steps about a third of that. The movement of an entry is summed over windows before it is
squared. So oscillation cancels out, as it does over a run. The ledger writes no tensor of the loop and draws no random
number. It waits for a GPU at most when a window begins.
"""

from __future__ import annotations

import copy
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ampdbg.errors import named_error
from ampdbg.probes.averages import Averages, sample_of
from ampdbg.probes.dtype_contract import names_and_kinds, names_of
from ampdbg.probes.models import Models
from ampdbg.probes.optimizer_twin import (
    BY_OTHERS,
    KEEPS_THE_REST,
    NoTwinError,
    TwinEntries,
    by_parameter,
    differs,
    keeps_the_rest,
    step_twin,
    take_options,
    twin_of,
    why_no_twin,
)
from ampdbg.probes.optimizers import stepped_by
from ampdbg.probes.seams import is_captured
from ampdbg.probes.step_hooks import is_torchs, name_of
from ampdbg.probes.still_values import Names, StillValues, half_parameters
from ampdbg.probes.tensors import HALVES, stored, times_written, to_host
from ampdbg.quantities import listed
from ampdbg.record.run import FrozenParameter, KindUpdates, StuckMoment, Updates

WINDOW = 10
"""The number of steps in a window."""

SETTLES = 20
"""An optimizer's second window begins after this many steps at the earliest."""

SHARE = 0.02
"""The share of a loop's time that windows may take, beyond each optimizer's first window."""

FROZEN = 0.9
"""A parameter is frozen if it loses a larger share of its movement than this."""

MATTERS = 2e-4
"""Frozen parameters are harmless if they cost a smaller share of the first-order loss decrease than this.

Of eleven small runs beside float32 masters one had a smaller share: its loss fell by 0.2 % less. In the remaining runs
it fell by up to 9 % less, 2 % in the median. The cost of frozen parameters grows with each step.
"""

MANY = 16
"""Measure gradient accumulation from this many gradients a step. Fewer lose less than 0.5 % of their sum."""

APART = 4.0
"""A second moment this many times as large as in float32 halves the updates."""

ROUNDING = 0.1
"""If a step is as small as a weight decay, a smaller share of it may be float32's own rounding."""

TRACE = 4.0
"""A squared gradient this many times the second moment changes the moment in half too, for a beta2 of 0.999."""

LARGEST_WHOLE, MOST_WHOLE = 2**20, 2**22
"""If whole parameters are sampled, the number of entries of the largest, and of all together."""

FOREIGN = "a hook or the loop writes weights of that optimizer too, maybe from float32 copies"
"""Why updates are not judged if code outside the optimizer's step writes the parameter."""

WITHOUT_GRADIENT = "the step writes it without a gradient of its own, as sparse embeddings do"
"""Why updates are not judged if the optimizer takes the gradient from elsewhere."""

SECOND_MOMENT = "exp_avg_sq"
"""The state key of the second moment in Adam and its variants."""


class Sums(NamedTuple):
    """Sums over entries, parameters and windows. An entry moves by D over its windows in float32, and by G in half.

    Attributes:
        wanted: The sum of D·D; ``got`` is the sum of D·G.
        gradient: As ``wanted``, for the gradient's part of the movement; ``got_gradient`` as ``got``.
        decay: As ``wanted``, for a decoupled weight decay's part; ``got_decay`` as ``got``.
        descent: The loss decrease to first order, gradient times update; ``got_descent`` uses the half updates.
        moved: The number of entries with a new value at the end of any window.
        still: The share of steps without a change, summed over entries.
        bits: Summed log2 of the rates at which the mean update is half a last-place unit, over ``sized`` entries.
        foreign: The number of entries that code outside the optimizer's step may have written.
        added: Summed squares of accumulated gradients in float32; ``misadded`` sums the squared errors of half.
    """

    wanted: float = 0.0
    got: float = 0.0
    gradient: float = 0.0
    got_gradient: float = 0.0
    decay: float = 0.0
    got_decay: float = 0.0
    descent: float = 0.0
    got_descent: float = 0.0
    entries: float = 0.0
    moved: float = 0.0
    still: float = 0.0
    bits: float = 0.0
    sized: float = 0.0
    foreign: float = 0.0
    added: float = 0.0
    misadded: float = 0.0

    @staticmethod
    def of(several: Iterable[Sums]) -> Sums:
        return Sums(*map(sum, zip(*several, strict=True)))

    @property
    def harm(self) -> float:
        """The part of the first-order loss decrease that half updates miss."""
        return self.descent - self.got_descent

    @property
    def lost(self) -> float | None:
        """The lost share of the movement, or None without movement."""
        return _lost(self.got, self.wanted)

    @property
    def lost_gradient(self) -> float | None:
        """The lost share of the gradient's part, or None if float32's own rounding may explain that part."""
        return _lost(self.got_gradient, self.gradient) if self.gradient > ROUNDING * self.wanted else None

    @property
    def lost_decay(self) -> float | None:
        return _lost(self.got_decay, self.decay)


class SecondMoment(NamedTuple):
    """A parameter's second moment, summed over sampled entries: as ``kept``, and the float32 bounds ``most`` and
    ``least``. It approaches the mean ``squares`` of the gradients, decays by ``beta``, and has the relative spacing
    ``eps``. The optimizer had taken ``step`` steps."""

    kept: float
    squares: float
    most: float
    least: float
    beta: float
    eps: float
    step: float

    @staticmethod
    def of(column: Sequence[float], entries: int) -> SecondMoment:
        """Return the moment from a column of :meth:`SampledRow.second_moments` over this many entries."""
        return SecondMoment(*column[:-3], *(value / entries for value in column[-3:]))

    @property
    def sticks(self) -> bool:
        """True if a step's decay rounds to nothing: it is below half a unit in the last place, which is eps/4 to eps/2
        of a value. At a decay between these the moment sticks once its mantissa is small enough."""
        return 1.0 - self.beta < self.eps / 2

    @property
    def apart(self) -> float:
        """The factor between the kept value and the float32 bounds, at least 1; 1 if it is unknown."""
        return max(self.kept / self.most, self.least / self.kept, 1.0) if self.most and self.kept else 1.0


class SampledParameter(NamedTuple):
    """The results of a parameter; ``sums`` covers the sampled entries."""

    member: Sample
    sums: Sums
    second: SecondMoment

    @property
    def stands_still(self) -> bool:
        """True if the parameter loses nearly all its movement, but not by oscillation, which moves most entries.

        With momentum, some entries move only in steps after the sampled ones."""
        return (self.sums.lost or 0.0) > FROZEN and self.sums.moved <= self.member.entries / 2

    @property
    def whole(self) -> Sums:
        """The sums extrapolated to all entries of the parameter."""
        return Sums(*(self.member.size / self.member.entries * value for value in self.sums))


class Sample(NamedTuple):
    """A sampled half parameter: ``entries`` of its ``size`` values."""

    name: str
    kind: str
    entries: int
    size: int


SampledSums = tuple[Sequence[Sample], torch.Tensor]
"""The results of a window for several parameters, as :meth:`SampledRow.sums` returns them."""


class Moments(NamedTuple):
    """The second moments of entries after a step: ``kept`` in half, and float32 bounds ``most`` and ``least``.

    Between two windows the mean ``squares`` of the gradients in both give the bounds. Gradients too large for that
    leave a trace in the kept moments, which is added.
    """

    step: int
    kept: torch.Tensor
    squares: torch.Tensor
    most: torch.Tensor
    least: torch.Tensor


class Movements(NamedTuple):
    """The movements of entries over windows: ``wanted`` in float32 and ``got`` in half, with ``decay`` and
    ``got_decay`` from weight decay. ``moved`` is True for entries with a new value at the end of any window."""

    wanted: torch.Tensor
    got: torch.Tensor
    decay: torch.Tensor
    got_decay: torch.Tensor
    moved: torch.Tensor

    @staticmethod
    def begun(moved: torch.Tensor) -> Movements:
        """Return zero movements for entries, with their ``moved`` so far."""
        return Movements._make((*torch.zeros(4, len(moved), device=moved.device), moved))

    @property
    def products(self) -> tuple[torch.Tensor, ...]:
        """The products of each entry for the first fields of ``Sums``, up to ``got_decay``."""
        gradient, got_gradient = self.wanted - self.decay, self.got - self.got_decay
        pairs = ((self.wanted, self.got), (gradient, got_gradient), (self.decay, self.got_decay))
        return tuple(aim.double() * way for aim, to in pairs for way in (aim, to))


class FirstValues(NamedTuple):
    """The entries of a row before its first window. ``read`` reads those of one parameter."""

    members: Sequence[Sample]
    parameters: Sequence[weakref.ref[Any]]
    values: torch.Tensor
    read: Callable[[torch.Tensor], torch.Tensor]

    @property
    def changed(self) -> Iterator[tuple[str, int]]:
        """The name of each parameter that is alive, with the number of its entries that differ from then."""
        parts = self.values.split([one.entries for one in self.members])
        for member, parameter, part in zip(self.members, self.parameters, parts, strict=True):
            alive = parameter()
            if alive is not None:
                yield member.name, int((self.read(alive) != part).sum())


class SampledRow:
    """The sampled entries of parameters in one group with equal step counts, each time stepped as one vector.

    Or all entries of one parameter, stepped in its shape, if ``is_whole``."""

    def __init__(
        self, optimizer: Optimizer, group: dict[str, Any], alike: Sequence[tuple[Sample, Any]], *, is_whole: bool
    ) -> None:
        self.optimizer, self.group = optimizer, group
        self.members, self.parameters = zip(*alike, strict=True)
        self.key = tuple(map(id, self.parameters))
        self._shape = self.parameters[0].shape if is_whole else None
        self._entries_of = _entries_of if is_whole else sample_of
        self._start = self._last = self._read(self.parameters)
        self.master = self._start.float()
        self._stepped = self._shaped(self.master)
        self._origin, self.gradient = self.master.clone(), self.master
        counts = torch.tensor([one.entries for one in self.members])
        self._owners = torch.arange(len(counts)).repeat_interleave(counts).to(self.master.device)
        self._path, self._second, self._decay, self._got_decay, *others = self.master.new_zeros(9, len(self.master))
        self._descent, self._got_descent, self._still = others[:3]
        self._added = torch.stack(others[3:])
        self._foreign = torch.zeros_like(self._owners, dtype=torch.bool)
        self.states = {key: _in_float32(self._state(key)) for key in self._state_keys}
        self._began_second = self.states[SECOND_MOMENT].clone() if self._beta else torch.zeros_like(self.master)
        self._steps = 0

    def _read(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return a copy of the row's entries of tensors that are shaped like its parameters, as one vector."""
        return torch.cat([self._entries_of(one) for one in tensors])

    @property
    def first_values(self) -> FirstValues:
        """The entries before the row's window, in half."""
        parameters = [weakref.ref(one) for one in self.parameters]
        return FirstValues(self.members, parameters, self._origin.to(self._last.dtype), self._entries_of)

    def _shaped(self, vector: torch.Tensor) -> torch.Tensor:
        """Return a view in which an optimizer steps the row."""
        return vector if self._shape is None else vector.view(self._shape)

    @property
    def _state_keys(self) -> Sequence[str]:
        return tuple(self.optimizer.state.get(self.parameters[0], {}))

    def _state(self, key: str) -> Any:
        """Return the optimizer's state of the entries for this key. Step counts are in main memory."""
        values = [self.optimizer.state[one][key] for one in self.parameters]
        if not isinstance(values[0], torch.Tensor):
            return copy.deepcopy(values[0])
        if key != "step" and values[0].shape == self.parameters[0].shape:
            return self._shaped(self._read(values))
        return values[0].detach().clone() if values[0].numel() > 1 else values[0].detach().clone().cpu()

    @property
    def master_entries(self) -> TwinEntries:
        """The entries in float32, with their states in float32."""
        return TwinEntries(self._stepped, self.states, self.group)

    def half_entries(self) -> TwinEntries:
        """Return copies of the entries as they are before a step, with their gradients and their states."""
        values = self._shaped(self._start.clone())
        values.grad = self._shaped(self._read(one.grad for one in self.parameters))
        return TwinEntries(values, {key: self._state(key) for key in self._state_keys}, self.group)

    def differs_from(self, twin: TwinEntries) -> torch.Tensor:
        """Return a bool tensor: True if the step has written other values than its twin's on ``half_entries``."""
        return differs(self._last, twin.values.flatten(), self._start)

    def keeps_the_rest(self, before: Mapping[str, Any]) -> bool:
        """True if the states hold what rounding took. ``before`` are the states before the row's first step."""
        after = {key: self._state(key) for key in self._state_keys}
        return keeps_the_rest(before, after, self._stepped, self._shaped(self._last))

    @property
    def rounds(self) -> bool:
        """True if rounding has taken anything from the entries since the masters began."""
        return bool((self.master != self._last).any())

    def before(self) -> None:
        """Read weights and gradients right before a step, so that the master can be stepped."""
        self._start = self._read(self.parameters)
        self._foreign |= self._is_rewritten(self._start)
        self.gradient = self._read(one.grad for one in self.parameters).float()
        self._stepped.grad = self._shaped(self.gradient)
        self._previous = self.master.clone()

    def written(self) -> None:
        """Read the weights right after the step; a later difference is not the optimizer's."""
        self._last = self._read(self.parameters)
        self.master = self._stepped.flatten()  # a step may replace the memory of what it steps

    def is_rewritten(self) -> torch.Tensor:
        """Return a bool tensor: True if any entry has been written since the step."""
        return self._is_rewritten(self._read(self.parameters)).any()

    def _is_rewritten(self, now: torch.Tensor) -> torch.Tensor:
        return now.view(torch.int16) != self._last.view(torch.int16)  # compare bits, so that NaN equals NaN

    def after(self, is_rewritten: torch.Tensor) -> None:
        """Add the step to the sums. ``is_rewritten`` is True if the optimizer's own hooks have written weights."""
        self._steps += 1
        self._foreign |= is_rewritten.to(self._foreign.device)
        start, update = self._start.float(), self.master - self._previous
        self._path += update.abs()
        self._descent.addcmul_(update, self.gradient, value=-1.0)
        self._got_descent.addcmul_(self._last - start, self.gradient, value=-1.0)
        self._still += self._last == self._start
        self._note_decay(start, update)
        if self._beta:
            self._second.mul_(self._beta).addcmul_(self.gradient, self.gradient, value=1.0 - self._beta)

    @property
    def _beta(self) -> float:
        """The decay of the second moment, or 0 without a second moment."""
        is_adam = is_torchs(self.optimizer.step) and SECOND_MOMENT in self._state_keys
        return float(self.group["betas"][1]) if is_adam else 0.0

    def _note_decay(self, start: torch.Tensor, update: torch.Tensor) -> None:
        """Add a decoupled weight decay before and after rounding. A fused kernel rounds once, after both parts of an
        update."""
        rate = float(self.group.get("lr", 0.0)) * self.group.get("weight_decay", 0.0)
        if rate and self.group.get("decoupled_weight_decay", isinstance(self.optimizer, torch.optim.AdamW)):
            dtype, decay = self._last.dtype, -rate * self._previous
            by_gradient, together = (update - decay, update) if self.group.get("fused") else (0.0, -rate * start)
            self._decay += decay
            self._got_decay += (start + together).to(dtype).float() - (start + by_gradient).to(dtype).float()

    def listen(self, hooks: ExitStack, is_in_a_pass: Callable[[], bool]) -> None:
        """Accumulate the gradients of the loop's backward passes, in float32 and in half for comparison."""
        parts = self._added.split([one.entries for one in self.members], dim=1)

        def add(index: int, gradient: torch.Tensor) -> None:
            if is_in_a_pass():
                values = self._read([gradient]).float()
                parts[index][0].add_(values)
                parts[index][1].copy_((parts[index][1] + values).to(self._last.dtype))

        for index, parameter in enumerate(self.parameters):
            hooks.callback(parameter.register_hook(partial(add, index)).remove)

    def spoilt(self) -> list[str]:
        """Return the float16 parameters that the last step made inf or NaN, if gradients and masters are finite."""
        if self._last.dtype is not torch.float16 or bool(self._last.isfinite().all()):
            return []
        is_sound = bool((self._start.isfinite() & self.master.isfinite() & self.gradient.isfinite()).all())
        return [self.members[owner].name for owner in self._owners[~self._last.isfinite()].unique() if is_sound]

    def moments(self, before: Moments | None, step: int) -> Moments:
        """Return the second moments after the window's last step; ``before`` is from the end of the previous window.

        In a row made after the last step they are the current moments, with that step's gradients.
        """
        window = self._beta**self._steps
        kept = self._state(SECOND_MOMENT).float() if self._beta else self._second
        start = self._began_second
        squares = self._second / (1.0 - window) if self._steps else self.gradient.square()
        known = before or Moments(step - self._steps, start, squares, start, start)
        gap = self._beta ** (step - self._steps - known.step)
        both = torch.stack([squares, known.squares])
        without_trace = torch.where(both > TRACE * start, 0.0, both).amax(0)
        most = gap * known.most + (1.0 - gap) * without_trace + (start - known.kept).clamp(min=0.0)
        least = gap * known.least + (1.0 - gap) * both.amin(0)
        return Moments(step, kept, squares, window * most + self._second, window * least + self._second)

    def ways(self, before: Movements | None) -> tuple[Movements, Movements]:
        """Return the movements before and after the window."""
        wanted, got = self.master - self._origin, self._last - self._origin
        known = before or Movements.begun(torch.zeros_like(self._foreign))
        *pairs, moved = zip(known, (wanted, got, self._decay, self._got_decay, got != 0), strict=True)
        return known, Movements._make((*(was + more for was, more in pairs), torch.logical_or(*moved)))

    def sums(self, before: Movements | None, moments: Moments) -> torch.Tensor:
        """Return a column for each parameter: the window's contribution to its ``Sums``, and its ``SecondMoment``."""
        known, now = self.ways(before)
        products = (more - less for more, less in zip(now.products, known.products, strict=True))
        eps = torch.finfo(self._last.dtype).eps
        half = torch.ldexp(torch.full_like(self.master, eps / 4), torch.frexp(self._origin)[1])
        rate = float(self.group["lr"]) if is_torchs(self.optimizer.step) else math.nan  # the step may scale it again
        bits = (rate * self._steps * half / self._path).log2()
        is_sized = bits.isfinite() & (self._origin != 0.0)  # any update moves a zero
        lines: tuple[torch.Tensor, ...] = (  # in the order of Sums
            *products, self._descent, self._got_descent, torch.ones_like(half), now.moved ^ known.moved,
            self._still / self._steps, torch.where(is_sized, bits, 0.0), is_sized, self._foreign,
            self._added[0].square(), (self._added[1] - self._added[0]).square(),
        )  # fmt: skip
        return torch.cat([self._by_parameter(lines), self.second_moments(moments)])

    def second_moments(self, moments: Moments) -> torch.Tensor:
        """Return a column for each parameter: its ``SecondMoment``, summed over its entries."""
        eps = torch.finfo(self._last.dtype).eps
        constants = (torch.full_like(self.master, constant) for constant in (self._beta, eps, float(moments.step)))
        return self._by_parameter((*moments[1:], *constants))

    def _by_parameter(self, lines: Sequence[torch.Tensor]) -> torch.Tensor:
        stacked = torch.stack([line.double() for line in lines])
        return stacked.new_zeros(len(stacked), len(self.members)).index_add_(1, self._owners, stacked)


def _in_float32(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in HALVES
    return value.float() if is_half else value


def _entries_of(tensor: torch.Tensor) -> torch.Tensor:
    return stored(tensor.detach()).flatten()


class UpdateWindow:
    """Some steps of an optimizer, which a twin optimizer repeats on float32 masters.

    If ``is_checked``, a second twin repeats each step on half entries. Only if it writes the same values, the entries
    show the optimizer's own updates.
    """

    def __init__(self, optimizer: Optimizer, rows: Sequence[SampledRow], *, is_checked: bool) -> None:
        self.rows, self.steps, self.is_checked, self._optimizer = rows, 0, is_checked, optimizer
        self._twin = twin_of(optimizer, [row.master_entries for row in rows])
        self.is_undecided = False
        """True if the first step shows nothing of what the optimizer keeps, as with a learning rate of zero."""
        self._half_entries: list[TwinEntries] = []
        self._half_states: list[dict[str, Any]] = []

    @property
    def has_gradients(self) -> bool:
        """True if all parameters still have gradients, as at the start of the window."""
        return all(parameter.grad is not None for row in self.rows for parameter in row.parameters)

    def before(self) -> None:
        for row in self.rows:
            row.before()
        take_options(self._twin, self._optimizer)
        if self.is_checked:
            self._half_states = [row.half_entries().state for row in self.rows] if self.steps == 0 else []
            self._half_entries = [row.half_entries() for row in self.rows]
            step_twin(twin_of(self._optimizer, self._half_entries))
        step_twin(self._twin)

    def written(self) -> None:
        for row in self.rows:
            row.written()
        self.is_undecided = self.is_checked and self.steps == 0 and not any(row.rounds for row in self.rows)
        pairs = list(zip(self.rows, self._half_entries, strict=True)) if self.is_checked else []
        if any(to_host([row.differs_from(entries) for row, entries in pairs])):
            raise NoTwinError(BY_OTHERS)
        if any(row.keeps_the_rest(before) for row, before in zip(self.rows, self._half_states, strict=False)):
            raise NoTwinError(KEEPS_THE_REST)

    def after(self) -> None:
        """Add the step to the sums; call this after the optimizer's own hooks."""
        self.steps += 1
        device = self.rows[0].master.device
        # A hook may write equal values from float32 copies. So a hook that changes some weights counts for all.
        is_rewritten = torch.stack([row.is_rewritten().to(device) for row in self.rows]).any()
        for row in self.rows:
            row.after(is_rewritten)


class OptimizerLedger:
    """The ledger's data of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.of, self.name = weakref.ref(optimizer), name_of(optimizer)
        self.steps, self.cost, self.passes, self.added = 0, 0.0, 0, 0
        self.windows = self.sampled = 0
        """The number of ended windows, and the number of steps in windows that count."""
        self.window: UpdateWindow | None = None
        self.first: list[SampledSums] = []
        self.first_values: dict[tuple[int, ...], FirstValues] = {}
        self.moments: dict[tuple[int, ...], Moments] = {}
        self.ways: dict[tuple[int, ...], Movements] = {}
        self.is_kept, self.why_not = any(one.dtype in HALVES for one in stepped_by(optimizer)), ""
        self.is_whole = by_parameter(optimizer)
        """True if whole parameters are sampled, since the update of an entry depends on others of its parameter."""
        self.still = StillValues()
        """Used if the optimizer is not sampled."""
        self.without_gradient: set[str] = set()
        """The half tensors without a gradient that the optimizer's first step has written."""
        halves = ((place, one) for place, one in enumerate(stepped_by(optimizer)) if one.dtype in HALVES)
        self._versions = [(place, one, times_written(one)) for place, one in halves if one.grad is None]

    def after_first(self, names: Callable[[], Mapping[int, tuple[str, str]]]) -> None:
        """Note what the first step has written without a gradient; call this after each step."""
        written = [(place, one) for place, one, version in self._versions if times_written(one) > version]
        self._versions = []
        if written:
            known = names()
            every = (
                known.get(id(one), (f"tensor {place} of {self.name.replace('__main__.', '')}", ""))
                for place, one in written
            )
            self.without_gradient = {name for name, _ in every}

    def judge(self, optimizer: Optimizer) -> None:
        """Check again if the optimizer can be sampled: its step may be replaced or get a hook at any time."""
        self.why_not = why_no_twin(optimizer) if self.is_kept else self.why_not
        if self.why_not:
            self.is_kept, self.window = False, None
            self.name = name_of(optimizer)

    def failed(self, error: BaseException) -> None:
        """End the window, as a twin does not follow the optimizer. If it stepped entries, try whole parameters next."""
        is_checked = self.window is not None and self.window.is_checked
        if is_checked and not (self.is_whole or self.windows):
            self.is_whole, self.steps = True, 0
        else:
            self.is_kept = False
            is_named = isinstance(error, NoTwinError)
            self.why_not = str(error) if is_named else f"on float32 copies it raises {named_error(error)}"
        self.window = None

    def columns(self) -> list[SampledSums]:
        rows = self.window.rows if self.window is not None and self.window.steps else ()
        return [(row.members, row.sums(self.ways.get(row.key), self._moments_of(row))) for row in rows]

    def second_moments(self, names: Names) -> Iterator[tuple[str, SecondMoment]]:
        """Yield the current second moments by name, for parameters with a past window and with gradients. Yield nothing
        if the optimizer is not judged any more."""
        optimizer = self.of()
        rows = _rows(optimizer, names, is_whole=self.is_whole) if optimizer is not None and self.is_kept else ()
        for row in rows:
            if row.key in self.moments:
                row.before()
                columns = row.second_moments(self._moments_of(row)).T.tolist()
                for member, column in zip(row.members, columns, strict=True):
                    yield member.name, SecondMoment.of(column, member.entries)

    def _moments_of(self, row: SampledRow) -> Moments:
        return row.moments(self.moments.get(row.key), self.steps)

    def end(self, window: UpdateWindow) -> list[SampledSums]:
        columns, self.windows = self.columns(), self.windows + 1
        self.moments.update({row.key: self._moments_of(row) for row in window.rows})
        self.first_values = {**{row.key: row.first_values for row in window.rows}, **self.first_values}
        ways = {row.key: row.ways(self.ways.get(row.key))[1] for row in window.rows}
        # The movements of a first window are kept apart.
        self.ways.update(ways if self.first else {key: Movements.begun(one.moved) for key, one in ways.items()})
        self.window = None
        return columns


class UpdateLedger:
    """Samples the updates of a loop's half parameters, if there are any.

    Args:
        models: The source of parameter names.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._books: dict[int, OptimizerLedger] = {}
        self._spent, self._elapsed, self._latest = 0.0, 0.0, math.inf
        self._unread: list[SampledSums] = []
        self._read: Mapping[str, SampledParameter] = {}
        self.hooks = ExitStack()
        """The hooks on parameters that accumulate gradients."""
        self.passes = self._most_passes = 0
        """The number of backward passes that the loop has run."""
        self._is_in_a_pass = False
        self._spoilt: tuple[str, ...] = ()
        self._spoilt_step: int | None = None
        self._eps: float | None = None
        self.averages = Averages(partial(names_of, models))

    def pause(self) -> None:
        """Remove the hooks, and do not count the time until the next step as the loop's."""
        self.hooks.close()
        self.averages.end()
        self._latest = math.inf

    def before(self, optimizer: Optimizer) -> None:
        """Begin or continue a window; call this right before a step of the optimizer."""
        self.averages.end()
        book = self._books.get(id(optimizer))
        if book is None or book.of() is not optimizer:
            book = self._books[id(optimizer)] = OptimizerLedger(optimizer)
        book.judge(optimizer)
        if book.is_kept and is_captured():
            book.window = None  # ops that run now would become part of a CUDA graph
        elif book.is_kept:
            now = time.perf_counter()
            self._elapsed += max(0.0, now - self._latest)
            self._latest = now
            self._timed(book, self._before, optimizer)
        elif book.why_not:
            with torch.no_grad(), suppress(Exception):  # a custom optimizer may hold any kind of tensor
                book.still.before(optimizer, partial(names_and_kinds, self._models))

    def written(self, optimizer: Optimizer) -> None:
        """Read the weights; call this right after the step, before the optimizer's own hooks."""
        book = self._books.get(id(optimizer))
        if book is not None and book.window is not None:
            self._timed(book, lambda _, window: window.written(), book.window)
        self.averages.stepped(optimizer)

    def after(self, optimizer: Optimizer, step: int) -> None:
        """Add the step of this number to the window, after the optimizer's own hooks and before ``zero_grad``."""
        book = self._books.get(id(optimizer))
        if book is None:
            return
        book.after_first(partial(names_and_kinds, self._models))
        book.added, book.passes = self.passes - book.passes, self.passes
        if book.window is not None:
            self._timed(book, self._after, step)

    def in_a_pass(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass of the loop's own. Gradients of replays are not accumulated."""
        self.averages.end()
        self.passes, self._is_in_a_pass = self.passes + 1, True
        try:
            return original(*args, **kwargs)
        finally:
            self._is_in_a_pass = False

    def _timed(self, book: OptimizerLedger, turn: Callable[[OptimizerLedger, Any], None], given: Any) -> None:
        window, began = book.window, time.perf_counter()
        try:
            with torch.no_grad():
                turn(book, given)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an optimizer may raise anything on float32 copies
            book.failed(error)
        spent = (time.perf_counter() - began) * any((window, book.window))  # a step between windows costs them nothing
        if book.moments:  # the first window is free of the time limit
            self._spent += spent
        book.cost += spent

    def _before(self, book: OptimizerLedger, optimizer: Optimizer) -> None:
        book.steps += 1
        self.hooks.close()
        if book.window is not None and not book.window.has_gradients:
            book.window = None
        if book.window is None and self._may_begin(book, optimizer):
            rows = tuple(_rows(optimizer, names_and_kinds(self._models), is_whole=book.is_whole))
            is_checked = book.is_whole or not is_torchs(optimizer.step)
            book.window = UpdateWindow(optimizer, rows, is_checked=is_checked) if rows else None
            book.cost = 0.0
        if book.window is not None:
            book.window.before()

    def _may_begin(self, book: OptimizerLedger, optimizer: Optimizer) -> bool:
        """True if there is time for another window; False if the optimizer's kernel unscales the gradients."""
        is_time = book.steps > SETTLES and self._spent + book.cost <= SHARE * self._elapsed
        return (is_time or book.steps == 1) and getattr(optimizer, "grad_scale", None) is None

    def _after(self, book: OptimizerLedger, step: int) -> None:
        window = book.window
        assert window is not None
        if window.is_undecided:  # the next step begins another
            book.window, book.steps = None, 0
            return
        window.after()
        book.sampled += 1
        if book.added >= MANY and window.steps == 1:
            self._most_passes = max(book.added, self._most_passes)
            for row in window.rows:
                row.listen(self.hooks, lambda: self._is_in_a_pass)
        spoilt = tuple(name for row in window.rows for name in row.spoilt())
        if spoilt and all(row.gradient.isfinite().all() for row in window.rows):
            self._spoilt, self._spoilt_step, self._eps = spoilt, step, _vanishing_eps(window.rows)
            book.is_kept, book.window = False, None
        elif window.steps == WINDOW:
            ended = book.end(window)
            if not book.first:
                book.first = ended
            else:
                self._unread += ended
            if book.windows == 2:  # the first window no longer counts
                book.sampled -= WINDOW

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the updates that are not sampled or not judged, with the reason. On a GPU this syncs."""
        left_out = {
            (f"updates by {book.name.replace('__main__.', '')}", book.why_not)
            for book in self._books.values()
            if book.why_not
        }
        for book in self._books.values():
            left_out |= {(f"updates of {name}", WITHOUT_GRADIENT) for name in book.without_gradient}
        foreign = [name for name, one in self._known()[1].items() if one.sums.foreign]
        left_out |= {(f"updates of {listed(foreign)}", FOREIGN)} if foreign else set()
        return tuple(f"ampdbg does not compare {what} with float32's: {why}" for what, why in sorted(left_out))

    def _known(self) -> tuple[dict[str, SampledParameter], dict[str, SampledParameter]]:
        """Return the results of later windows, or else of the first, by parameter; and the results of all windows."""
        unread, self._unread = self._unread, []
        self._read = _added(self._read, unread)
        first = [each for book in self._books.values() for each in book.first or book.columns()]
        return {**_added({}, first), **self._read}, _added(self._read, first)

    @property
    def _first_values(self) -> Iterator[FirstValues]:
        return chain.from_iterable(book.first_values.values() for book in self._books.values())

    @property
    def seen(self) -> Updates | None:
        """The results of ended windows and of an optimizer's current first window, or None. On a GPU this syncs."""
        later, every = self._known()
        sound = {name for name, one in every.items() if math.isfinite(sum(one.sums)) and not one.sums.foreign}
        whole = {name: every[name] for name in later if name in sound}
        known = [later[name] for name in whole]
        changed = dict(chain.from_iterable(one.changed for one in self._first_values))
        for name in whole.keys() & changed.keys():
            sums = whole[name].sums
            whole[name] = whole[name]._replace(sums=sums._replace(moved=max(sums.moved, changed[name])))
        names = partial(names_and_kinds, self._models)
        averages = self.averages.seen
        others = [book.still.names for book in self._books.values() if book.why_not != KEEPS_THE_REST]
        others += [book.without_gradient for book in self._books.values()]
        half = len(every.keys() | {name for names in others for name in names})
        if not (half or averages or self._spoilt):
            return None
        total, descent = (Sums.of((Sums(), *(one.whole for one in those))) for those in (known, whole.values()))
        kinds: dict[str, list[SampledParameter]] = {}
        for one in known:
            kinds.setdefault(one.member.kind, []).append(one)
        moments = {name: second for book in self._books.values() for name, second in book.second_moments(names())}
        still: list[SampledParameter] = []
        for kind in kinds:
            frozen = [one for one in whole.values() if one.member.kind == kind and one.stands_still]
            if sum(one.whole.harm for one in frozen) > MATTERS * abs(descent.descent):
                still += frozen
        harm, whole_descent = sum(one.whole.harm for one in still), descent.descent or 1.0
        return Updates(
            steps=max((book.sampled for book in self._books.values()), default=0),
            half=half,
            judged=len(known),
            kinds=tuple(_of_kind(kind, [one.whole for one in of_it], total) for kind, of_it in kinds.items()),
            lost=total.lost,
            lost_gradient=total.lost_gradient,
            lost_decay=total.lost_decay,
            decay=total.decay / (total.wanted or 1.0),
            lost_accumulation=math.sqrt(total.misadded / total.added) if total.added else None,
            passes=self._most_passes,
            frozen=tuple(
                FrozenParameter(
                    one.member.name, one.member.entries, round(one.sums.moved), round(one.sums.lost or 0.0, 4)
                )
                for one in still
            ),
            cost=max(0.0, descent.harm, harm) / whole_descent if len(known) == half else None,
            cost_of_still=harm / whole_descent if len(known) == half else None,
            stuck=tuple(
                StuckMoment(
                    one.member.name, second.beta, round(second.apart, 2), second.kept > second.most, round(second.step)
                )
                for one in known
                if (second := moments.get(one.member.name, one.second)).apart > APART and second.sticks
            ),
            still=tuple(one for book in self._books.values() for one in book.still.still),
            averages=averages,
            vanishing_eps=self._eps,
            spoilt_step=self._spoilt_step,
            spoilt=self._spoilt,
            times=round(total.got / total.wanted, 2) if total.wanted else 1.0,
        )


def _added(known: Mapping[str, SampledParameter], columns: Iterable[SampledSums]) -> dict[str, SampledParameter]:
    """Return the results of parameters, with the results of windows added."""
    added, count = dict(known), len(Sums._fields)
    for members, values in columns:
        for member, column in zip(members, values.T.tolist(), strict=True):
            before = added[member.name].sums if member.name in added else Sums()
            second = SecondMoment.of(column[count:], member.entries)
            added[member.name] = SampledParameter(member, Sums.of((before, Sums(*column[:count]))), second)
    return added


def _of_kind(kind: str, of_each: Sequence[Sums], total: Sums) -> KindUpdates:
    sums = Sums.of(of_each)
    return KindUpdates(
        kind=kind,
        parameters=len(of_each),
        lost=sums.lost,
        lost_gradient=sums.lost_gradient,
        lost_decay=sums.lost_decay,
        unmoved=sums.still / sums.entries,
        descent=sums.descent / total.descent if total.descent > 0.0 else 0.0,
        freezes_below=2.0 ** (sums.bits / sums.sized) if sums.sized else None,
    )


def _lost(got: float, wanted: float) -> float | None:
    return min(1.0, max(0.0, 1.0 - got / wanted)) if wanted else None


def _vanishing_eps(rows: Iterable[SampledRow]) -> float | None:
    """Return the optimizer's eps if float16 rounds it to zero."""
    constants = (float(row.group["eps"]) for row in rows if isinstance(row.group.get("eps"), (int, float)))
    return next((eps for eps in constants if eps and not torch.tensor(eps, dtype=torch.float16).item()), None)


def _rows(optimizer: Optimizer, names: Names, *, is_whole: bool) -> Iterator[SampledRow]:
    """Yield rows of half parameters with a gradient. A row shares device, dtype, state keys and step count."""
    alike: dict[Any, list[tuple[Sample, Any]]] = {}
    left = MOST_WHOLE
    for number, (group, name, kind, parameter) in enumerate(half_parameters(optimizer, names)):
        state, size = optimizer.state.get(parameter, {}), stored(parameter.detach()).numel()
        if not size or (is_whole and size > min(left, LARGEST_WHOLE)):
            continue
        left -= size
        of_its_own = number if is_whole else None
        key = (group, parameter.device, parameter.dtype, tuple(state), float(state.get("step", 0)), of_its_own)
        entries = size if is_whole else len(sample_of(parameter))
        alike.setdefault(key, []).append((Sample(name, kind, entries, size), parameter))
    for (group, *_), members in alike.items():
        yield SampledRow(optimizer, optimizer.param_groups[group], members, is_whole=is_whole)
