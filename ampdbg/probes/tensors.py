"""Measurements of a tensor: counts of inf and NaN, the largest finite magnitude, and the exponents of its values.

Tensors may be dense or sparse, of any float dtype. They are neither changed nor kept alive.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

import torch
from torch._C import DisableTorchFunctionSubclass
from torch._subclasses.fake_tensor import FakeTensor
from torch.masked import MaskedTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ampdbg.formats import HIGHEST_EXPONENT, LOWEST_EXPONENT, Exponents
from ampdbg.probes.models import Models
from ampdbg.record.run import TensorCounts
from ampdbg.workload.batches import tensor_leaves

HALVES = (torch.float16, torch.bfloat16)

_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The classes of most tensors. Tensors of further classes may hold their values elsewhere."""

_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


def is_finite(tensor: torch.Tensor) -> bool:
    """True if every element is finite, in one pass over memory; True for integers and empty tensors. On a GPU this
    syncs.

    ``aminmax`` propagates NaN, so both ends are finite exactly when all elements are.
    """
    return magnitude_of(tensor).is_finite


@torch.no_grad()
def nonfinite(named: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Return the named tensors with inf or NaN. On a GPU one sync reads all results."""
    measured = [(pair, largest) for pair in named if (largest := _largest(pair[1])) is not None]
    values = to_host([largest for _, largest in measured])
    return [pair for (pair, _), value in zip(measured, values, strict=True) if not math.isfinite(value)]


def are_weights_spoilt(model: torch.nn.Module) -> bool:
    """True if trainable weights hold inf or NaN; a frozen parameter may be a mask. On a GPU this syncs."""
    return bool(nonfinite(pair for pair in model.named_parameters() if pair[1].requires_grad))


@torch.no_grad()
def hold_values(tensors: Iterable[torch.Tensor]) -> bool:
    """True if any tensor has a nonzero value, such as NaN. On a GPU one sync reads all results."""
    return any(value != 0.0 for value in to_host([one for one in map(_largest, tensors) if one is not None]))


def _largest(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the largest magnitude of a tensor, inf and NaN included, as a device scalar; None without values."""
    values = float_values(distinct(tensor))
    return None if values is None else torch.stack(torch.aminmax(values)).abs().amax()


@torch.no_grad()
def total_norm(tensors: Iterable[torch.Tensor], least: torch.dtype = torch.float32) -> torch.Tensor | None:
    """Return the 2-norm of all values of some tensors in float32, computed in ``least`` or wider; not synced.

    None if the tensors have no values. For a DTensor the part of this rank counts.
    """
    values = [value for value in map(float_values, tensors) if value is not None]
    norms = [torch.linalg.vector_norm(value, dtype=torch.promote_types(value.dtype, least)) for value in values]
    if not norms:
        return None
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device, least) for norm in norms]))
    return norm.float()


Scalar = float | torch.Tensor
"""A number, or its tensor on a GPU that the host has not waited for yet."""


def is_at_hand(tensor: torch.Tensor) -> bool:
    """True if the tensor is in main memory, so it can be read without a wait for a GPU."""
    return tensor.device.type == "cpu"


class Mark:
    """A point in the work of a tensor's GPU, right after the kernel that computes the tensor.

    A loop that branches on the value has waited for that point, even if the GPU has more work since. The mark is then
    passed, and :func:`read_aside` does not wait.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._is_at_hand = is_at_hand(tensor)
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    @property
    def is_passed(self) -> bool:
        return self._is_at_hand if self._event is None else bool(self._event.query())


def scalar_of(tensor: torch.Tensor) -> Scalar:
    """Return the current sum of a tensor's values: a loss is one value, or several values with one backward pass."""
    on_host = is_at_hand(tensor)
    if on_host and not tensor.ndim and tensor.is_floating_point():
        return float(tensor.item())
    value = tensor.detach().float().sum()
    return value.item() if on_host else value


def is_on_device(scalar: Scalar) -> TypeGuard[torch.Tensor]:
    """True if reading the value waits for a GPU."""
    return isinstance(scalar, torch.Tensor) and not is_at_hand(scalar)


def are_on_host(scalars: Sequence[Scalar]) -> bool:
    """True if all scalars can be read without a wait. Usually all are plain numbers, or all are on a GPU."""
    return set(map(type, scalars)) <= {float} or not any(map(is_on_device, scalars))


def to_host(scalars: Sequence[Scalar]) -> list[float]:
    """Return the values of scalars, with one transfer for all scalars on a device."""
    if are_on_host(scalars):
        return list(map(float, scalars))
    waiting = [scalar for scalar in scalars if is_on_device(scalar)]
    if len(waiting) == len(scalars) == 1:  # no stack, because each call costs time in a GPU's loop
        return [float(waiting[0])]
    device = waiting[0].device
    read = iter(torch.stack([scalar.reshape(()).to(device, torch.float64) for scalar in waiting]).tolist())
    return [float(next(read) if is_on_device(scalar) else scalar) for scalar in scalars]


def read_aside(scalars: Sequence[Scalar]) -> list[float]:
    """Return the values as :func:`to_host` does, for passed marks: without a wait for later work of the GPU."""
    device = next((scalar.device for scalar in scalars if isinstance(scalar, torch.Tensor) and scalar.is_cuda), None)
    with contextlib.nullcontext() if device is None else torch.cuda.stream(torch.cuda.Stream(device)):
        return to_host(scalars)


def float_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor's floating-point values as a dense tensor, or None without such values.

    A sparse gradient is coalesced first, as the scaler does, because the sum of finite entries can overflow. Complex
    numbers become pairs, masked values become zero.
    """
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_nested:
        tensor = stored(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or tensor.is_meta or isinstance(tensor, FakeTensor) or is_emptied(tensor):
        return None
    # Forward-mode AD makes zero tensors; in a dispatch mode they have no memory.
    if not tensor.numel() or tensor._is_zerotensor() or (type(tensor) not in _PLAIN and not _is_measurable(tensor)):
        return None
    # aminmax and isfinite have no kernels for 8-bit formats. No op supports formats with two numbers in a byte.
    with contextlib.suppress(NotImplementedError):
        return tensor.float() if tensor.element_size() == 1 else tensor
    return None


@torch.no_grad()
def _is_measurable(tensor: torch.Tensor) -> bool:
    """True if a user's tensor class supports measurement; it may implement only the ops that its model needs."""
    try:
        torch.stack(torch.aminmax(tensor)).abs().amax()
    except Exception:  # noqa: BLE001 - it may raise anything
        return False
    return True


def times_written(tensor: torch.Tensor) -> int:
    """Return how often a tensor has been written, or 0 if torch does not count, as in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of all entries. A sparse tensor has no ``nbytes``, and counts as if it were dense."""
    return tensor.numel() * tensor.element_size()


def wraps_others(tensor: Any) -> bool:
    """True if the tensor's class holds its values in inner tensors, as DTensor does."""
    return bool(is_traceable_wrapper_subclass(tensor))


def is_emptied(tensor: torch.Tensor) -> bool:
    """True if the tensor's memory was freed, as FSDP does to parameters. Reading it would crash the process."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    if type(tensor) not in _PLAIN and wraps_others(tensor):
        return False
    try:
        return tensor.untyped_storage().nbytes() == 0
    except NotImplementedError:  # a torch.func wrapper has no memory
        return False


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor without the repetitions of ``expand``, which can be copied and written."""
    if tensor.layout is not torch.strided or tensor.is_nested or 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values that a tensor stores as a dense tensor; return a dense tensor itself."""
    if not tensor.is_nested and wraps_others(tensor):  # a DTensor: this rank's part
        holder: Any = tensor
        held = (getattr(holder, name) for name in holder.__tensor_flatten__()[0])
        inner = [stored(value) for value in held if isinstance(value, torch.Tensor)]  # it may also hold a mesh
        return next((part for part in inner if part.is_floating_point()), torch.empty(0))
    if isinstance(tensor, MaskedTensor):
        tensor = tensor.to_tensor(0)
    elif type(tensor) not in _PLAIN and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        with DisableTorchFunctionSubclass():  # the class may refuse these calls
            tensor = tensor.detach().as_subclass(torch.Tensor)
    if tensor.is_mkldnn:
        return tensor.to_dense()
    if tensor.is_sparse:
        return tensor.coalesce().values()
    if tensor.is_nested or tensor.layout in _COMPRESSED:
        return tensor.values()
    return tensor


def nonfinite_in_batch(batch: Any) -> tuple[TensorCounts, ...]:
    """Return the leaves of a batch with inf or NaN, with the index of the first such element."""
    return tuple(_counts("batch", tensor_leaves(batch)))


def bad_data(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[TensorCounts, ...]:
    """Return the counts for the tensors that may be bad; see :func:`may_be_bad`."""
    return tuple(_counts("batch", [pair for pair in named if may_be_bad(pair[1])]))


def may_be_bad(tensor: torch.Tensor) -> bool:
    """True if the tensor holds NaN or inf and is not a mask. A mask holds -inf and at most one finite value."""
    values = float_values(distinct(tensor))
    if values is None or is_finite(values):
        return False
    finite = values[values.isfinite()]
    varies = finite.numel() > 1 and bool(finite.min() < finite.max())
    return varies or bool((values.isnan() | (values == math.inf)).any())


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    if isinstance(value, (list, tuple)):
        for item in value:  # runs for every op: most hold tensors and numbers
            if isinstance(item, torch.Tensor):
                found.append(item)
            elif isinstance(item, (list, tuple)):
                found += tensors_in(item)
    return found


def nonfinite_in_model(
    model: torch.nn.Module | Models, when: When = "before", but: Container[str] = ()
) -> tuple[TensorCounts, ...]:
    """Return a model's parameters and buffers with inf or NaN, except those named in ``but``; record ``when``."""
    parameters = (pair for pair in model.named_parameters() if pair[0] not in but)
    buffers = (pair for pair in model.named_buffers() if pair[0] not in but)
    return (*_counts("parameter", parameters, when), *_counts("buffer", buffers, when))


When = Literal["before", "after"]


def _counts(
    kind: Literal["batch", "parameter", "buffer"], named: Iterable[tuple[str, torch.Tensor]], when: When = "before"
) -> Iterator[TensorCounts]:
    for name, tensor in nonfinite(named):
        seen, frozen = magnitude_of(tensor), kind == "parameter" and not tensor.requires_grad
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield TensorCounts(kind, name, seen.inf, seen.nan, tensor.numel(), _first_index(tensor), when, frozen, dtype)


def _first_index(tensor: torch.Tensor) -> tuple[int, ...]:
    is_plain = tensor.layout is torch.strided and not tensor.is_nested and not isinstance(tensor, MaskedTensor)
    if not is_plain or wraps_others(tensor):
        return ()
    index = torch.nonzero(~torch.isfinite(distinct(tensor.detach())))[0]
    return tuple(int(number) for number in index)


@dataclass(frozen=True, slots=True)
class Magnitude:
    """The magnitude of one tensor, or of several together.

    Attributes:
        largest: The largest finite magnitude, 0 for an empty tensor.
        inf: The number of infinite elements out of ``size``; ``nan`` likewise.
        dtype: Torch's name without ``torch.``, empty if there was no float tensor.
    """

    largest: float = 0.0
    inf: int = 0
    nan: int = 0
    size: int = 0
    dtype: str = ""

    @property
    def is_finite(self) -> bool:
        return self.inf == 0 and self.nan == 0


NOTHING = Magnitude()


def magnitude_of(tensor: torch.Tensor) -> Magnitude:
    """Return the magnitude of a tensor of any dtype and layout, in one pass over memory for a finite tensor."""
    part = distinct(tensor)
    values = float_values(part)
    if values is None:
        return NOTHING
    values, repeats = values.detach(), tensor.numel() // part.numel()
    dtype = str(tensor.dtype)[len("torch.") :]
    smallest, greatest = torch.aminmax(values)
    low, high = smallest.item(), greatest.item()
    if low - low == 0.0 and high - high == 0.0:
        return Magnitude(max(abs(low), abs(high)), 0, 0, values.numel() * repeats, dtype)
    nan = int(torch.count_nonzero(values != values))
    finite = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    inf = int(torch.count_nonzero(values != finite)) - nan
    low, high = (end.item() for end in torch.aminmax(finite))
    return Magnitude(max(abs(low), abs(high)), inf * repeats, nan * repeats, values.numel() * repeats, dtype)


def magnitude_of_number(number: float) -> Magnitude:
    """Return the magnitude of a plain number, like a tensor of one element without a dtype."""
    if number - number == 0.0:
        return Magnitude(largest=abs(float(number)), size=1)
    is_nan = number != number
    return Magnitude(inf=int(not is_nan), nan=int(is_nan), size=1)


def together(parts: Iterable[Magnitude]) -> Magnitude:
    """Return the magnitude of several tensors as one, with the first dtype."""
    parts = [*parts]
    if len(parts) == 1:
        return parts[0]  # most ops have one part, and a trace keeps two per op
    largest, inf, nan, size, dtype = 0.0, 0, 0, 0, ""
    for part in parts:
        largest = max(largest, part.largest)
        inf, nan, size = inf + part.inf, nan + part.nan, size + part.size
        dtype = dtype or part.dtype
    return Magnitude(largest, inf, nan, size, dtype)


MAX_SAMPLE = 16_384
"""Count about this many evenly spaced elements. Below torch's grain size (32,768) an op stays on one thread. Here that
is 30 times faster than waking more threads. This many elements give a share of 1 % to within 0.1 %."""

_BIAS = 127  # of the exponent in bfloat16 and float32
_HIGHEST_FIELD = 254  # 255 is inf and NaN; 0 is zero (and subnormals in float32)


def exponents_of(tensor: torch.Tensor, magnitude: Magnitude) -> Exponents:
    """Count the exponents of a bfloat16 tensor of any strides.

    The largest value (``magnitude.largest``) always counts; each further sampled value represents its neighbors.
    """
    values = stored(tensor).detach().flatten()
    step = -(-values.numel() // MAX_SAMPLE)
    bits = values[::step].view(torch.int16)
    fields = torch.bincount((bits >> 7) & 0xFF, minlength=_HIGHEST_FIELD + 2).tolist()
    counts = [count * step for count in fields[: _HIGHEST_FIELD + 1]]
    if magnitude.largest > 0.0:
        field = max(0, _BIAS + math.frexp(magnitude.largest)[1] - 1)
        counts[field] = max(counts[field], 1)
    # Gather both tails into the outermost bins, and leave out the empty bins at the ends.
    first, last = LOWEST_EXPONENT + _BIAS, HIGHEST_EXPONENT + _BIAS
    kept = [sum(counts[1 : first + 1]), *counts[first + 1 : last], sum(counts[last:])]
    filled = [position for position, count in enumerate(kept) if count]
    if not filled:
        return Exponents()
    return Exponents(LOWEST_EXPONENT + filled[0], tuple(kept[filled[0] : filled[-1] + 1]))
