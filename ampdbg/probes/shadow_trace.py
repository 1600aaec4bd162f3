"""The shadow: a trace of a step in bfloat16 instead of float16. It measures the values that FP16 would hold.

bfloat16 has the exponent range of float32, so nothing overflows and no inf hides a later overflow. Its dtype marks
exactly the tensors that are half in the real run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args
from unittest.mock import patch

import torch
from torch.amp import autocast_mode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from ampdbg.formats import BFLOAT16, FLOAT16, Exponents, headroom_bits, scale_ceiling, scale_floor
from ampdbg.probes.module_calls import ModulePaths
from ampdbg.probes.op_trace import OpPlace, PlacedOps, RunningOp, storage_of
from ampdbg.probes.seams import Seam, attached
from ampdbg.probes.source_lines import source_if_known
from ampdbg.probes.tensors import (
    HALVES,
    Magnitude,
    exponents_of,
    float_values,
    magnitude_of,
    magnitude_of_number,
    tensors_in,
    together,
)
from ampdbg.record.run import Site

_ROUNDS_BEYOND = 65408.0
"""bfloat16 rounds numbers from here on up to 65536. So it rounds 65504, float16's limit, which user code writes."""

_MASKS = 4.0
"""A multiplied mask holds 0 and 1, or whole numbers up to this limit if several masks were added."""

TRANSFORMS, COMPLEX = "Fourier transforms", "complex numbers"

_WIDENED: Mapping[Any, str] = {
    **{getattr(torch.fft, name): TRANSFORMS for name in dir(torch.fft) if name.endswith(("fft", "fft2", "fftn"))},
    **dict.fromkeys((torch.stft, torch.istft, torch.Tensor.stft, torch.Tensor.istft), TRANSFORMS),
    **dict.fromkeys((torch.complex, torch.polar, torch.view_as_complex), COMPLEX),
}
"""The functions that torch has for float16 and not for bfloat16."""

WIDENED_NOTE = (
    "{what} of half tensors ran in FP32, because bfloat16 has none: ampdbg measures neither those nor the ops up "
    "to the next one in half"
)

OverflowOrigin = Literal["", "carried", "starts"]

_OVERFLOWS: tuple[OverflowOrigin, ...] = get_args(OverflowOrigin)
"""In ascending priority. Several calls together have the last value that any of the calls has."""


@dataclass(frozen=True, slots=True)
class RangeSeen:
    """One op with an output that FP16 would hold.

    Attributes:
        output: The magnitude of the half outputs alone; ``exponents`` likewise.
        overflow: ``starts`` if values exceed FP16 first here, ``carried`` if an input or a constant already did, else
            "".
        is_noise: True if the terms of a gradient cancel to rounding error, as for an attention's key bias.
        is_gradient: True if the loss scale is in the output. A backward op may use forward values alone, such as a
            sign.
        made_half: The forward ops that made the tensor half, for a gradient that is cast back to half.
    """

    op: str
    place: OpPlace
    output: Magnitude
    exponents: Exponents
    overflow: OverflowOrigin
    is_noise: bool
    is_gradient: bool
    made_half: tuple[OpPlace, ...] = ()


class ShadowTrace(PlacedOps):
    """The trace of the shadow, for use with :func:`bfloat16_for_float16`. ``ranges`` is in order of execution.

    float16 appears only where user code writes into a half tensor from before the step.
    """

    def __init__(self, model: torch.nn.Module, paths: ModulePaths) -> None:
        super().__init__(model, paths)
        self.ranges: list[RangeSeen] = []
        # Storages of values beyond FP16 that are not an overflow of the op that reads them, such as constant buffers.
        self._lost = {storage_of(buffer) for buffer in model.buffers() if _is_beyond(magnitude_of(buffer))} - {0}
        self._forward: set[int] = set()
        """Storages without a gradient: made in the forward pass, or by backward ops from such storages alone."""

    def run(self, op: Any, args: Any, kwargs: Any, written: Sequence[torch.Tensor]) -> Any:
        """Run an op with bfloat16 instead of every float16, both in dtype arguments and in tensors."""
        args, kwargs = _converted((args, kwargs), torch.float16, torch.bfloat16, but=written)
        try:
            return op(*args, **kwargs)
        except RuntimeError as error:
            if written or "not implemented for 'BFloat16'" not in str(error):
                raise
            args, kwargs = _converted((args, kwargs), torch.bfloat16, torch.float32)
            return _converted(op(*args, **kwargs), torch.float32, torch.bfloat16)

    def before(self, op: RunningOp) -> tuple[bool, float, bool]:
        """Return three facts: True if FP16 would have lost an input already; the largest half input; True if an input
        may hold a gradient. Inputs wider than half are not measured."""
        low = [self.known.of(tensor) for tensor in op.given if tensor.dtype in HALVES]
        largest = max((magnitude.largest for magnitude in low), default=0.0)
        lost = (
            not op.given  # a constant that the user's code writes out, as are the lifted tensors and the numbers
            or op.traits.name.startswith("aten.lift")
            or any(map(_is_beyond, low))
            or (any(_is_beyond(magnitude_of_number(one)) for one in op.numbers) and not self._multiplies(op))
            or (bool(self._lost) and any(storage_of(tensor) in self._lost for tensor in op.given))
        )
        return lost, largest, not op.given or any(storage_of(tensor) not in self._forward for tensor in op.given)

    def _multiplies(self, op: RunningOp) -> bool:
        """True if a number input is a factor of values, not part of a mask. Factors of gradients come from the loss."""
        is_product = op.traits.name.startswith("aten.mul") and not all(map(self._may_be_a_mask, op.given))
        return is_product or self.is_inner_backward

    def _may_be_a_mask(self, tensor: torch.Tensor) -> bool:
        values = float_values(tensor)
        return values is None or (self.known.of(tensor).largest <= _MASKS and bool((values == values.round()).all()))

    def after(self, op: RunningOp) -> None:
        lost, largest_input, may_have_gradient = op.inputs
        is_gradient = op.place.phase == "backward" and may_have_gradient
        # ones_like makes the gradient of the loss itself, before the backward phase begins.
        is_of_forward = not is_gradient and not op.traits.name.startswith("aten.ones_like")
        for tensor in op.made:
            storage = storage_of(tensor)
            (self._forward.add if is_of_forward and storage else self._forward.discard)(storage)
            still_lost = storage and lost and _is_beyond(self.known.of(tensor))
            (self._lost.add if still_lost else self._lost.discard)(storage)
        low = [(tensor, self.known.of(tensor)) for tensor in op.made if tensor.dtype in HALVES and tensor.numel()]
        if low:
            output = together(magnitude for _, magnitude in low)
            exponents = sum((exponents_of(*one) for one in low), Exponents())
            origin: OverflowOrigin = "carried" if lost else "starts"
            overflow = origin if output.largest >= FLOAT16.overflow_threshold else ""
            is_noise = _is_noise(op, largest_input, output)
            makers = tuple(self.makers.of_gradient(op))
            self.ranges.append(
                RangeSeen(op.traits.name, op.place, output, exponents, overflow, is_noise, is_gradient, makers)
            )


def _is_noise(op: RunningOp, largest_input: float, output: Magnitude) -> bool:
    """True if a sum is smaller than one rounding error of its largest term, so the terms have canceled."""
    if op.place.phase != "backward" or not op.traits.name.startswith("aten.sum."):
        return False
    return output.largest < largest_input * 2.0**-BFLOAT16.precision


def _is_beyond(magnitude: Magnitude) -> bool:
    return magnitude.largest >= _ROUNDS_BEYOND or not magnitude.is_finite


def _converted(given: Any, old: torch.dtype, new: torch.dtype, but: Sequence[torch.Tensor] = ()) -> Any:
    """Replace the dtype ``old`` with ``new``, as an argument and in tensors, except in the tensors ``but``."""

    def converted(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype is old and not any(value is kept for kept in but):
            return value.to(new)
        return new if value is old else value

    return _pytree.tree_map(converted, given)


@contextlib.contextmanager
def bfloat16_for_float16() -> Iterator[WideTransforms]:
    """Make autocast regions that ask for float16 use bfloat16, and make ``torch.finfo`` of bfloat16 return float16's
    values. Masks and epsilons are then as in the real run."""
    autocast = autocast_mode.autocast
    with (
        patch.object(autocast, "__init__", _autocast_in_bfloat16(autocast.__init__)),
        patch.object(torch, "finfo", _finfo_of_float16(torch.finfo)),
        WideTransforms() as transforms,
        attached(transforms.around),
    ):
        yield transforms


class WideTransforms(TorchFunctionMode):
    """Runs Fourier transforms and complex constructors of bfloat16 in float32, because torch has them only for float16.
    ``have_run`` names the kinds that have run."""

    def __init__(self) -> None:
        super().__init__()
        self.have_run: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _WIDENED.get(function)
        if kind and any(tensor.dtype is torch.bfloat16 for tensor in tensors_in((*args, *kwargs.values()))):
            self.have_run += [kind] * (kind not in self.have_run)
            args, kwargs = _converted((args, kwargs), torch.bfloat16, torch.float32)
        return function(*args, **kwargs)

    def around(self, seam: Seam, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a torch function. Enter the mode again for the backward pass, where a checkpoint recomputes its function.
        Torch disables a mode while a function that it intercepts runs, such as ``Tensor.backward``."""
        with self if seam == "engine" else contextlib.nullcontext():
            return original(*args, **kwargs)


def _autocast_in_bfloat16(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.fast_dtype is torch.float16:
            self.fast_dtype = torch.bfloat16

    return init


def _finfo_of_float16(original: Callable[..., Any]) -> Callable[..., Any]:
    def finfo(*dtype: torch.dtype) -> Any:
        return original(*(torch.float16 if one is torch.bfloat16 else one for one in dtype))

    return finfo


def sites_of(ranges: Iterable[RangeSeen], dtype: str = "float16") -> tuple[Site, ...]:
    """Group ops by phase, module, op, source line and ``is_gradient``, in order of first execution.

    Args:
        ranges: The ops of one step.
        dtype: The dtype of the real run where the shadow has bfloat16.
    """
    gathered: dict[Any, list[RangeSeen]] = {}
    for seen in ranges:
        place = seen.place
        gathered.setdefault((place.phase, place.module, seen.op, place.line, seen.is_gradient), []).append(seen)
    return tuple(_site(order, ranges, dtype) for order, ranges in enumerate(gathered.values()))


def _site(order: int, ranges: Sequence[RangeSeen], dtype: str) -> Site:
    place = ranges[0].place
    output = together(seen.output for seen in ranges)
    exponents = sum((seen.exponents for seen in ranges), Exponents())
    is_gradient = ranges[0].is_gradient
    return Site(
        phase=place.phase,
        module=place.module,
        op=ranges[0].op,
        source=source_if_known(place.line),
        dtype=dtype,
        order=order,
        calls=len(ranges),
        call=max(ranges, key=lambda seen: seen.output.largest).place.call,
        size=output.size,
        inf=output.inf,
        nan=output.nan,
        abs_max=output.largest,
        # Two decimals suffice for a value that was rounded to eight bits.
        headroom_bits=round(headroom_bits(output.largest), 2),
        overflow=max((seen.overflow for seen in ranges), key=_OVERFLOWS.index),
        lowest_exponent=exponents.lowest,
        exponents=exponents.counts,
        scale_ceiling=scale_ceiling(output.largest) if is_gradient else None,
        scale_floor=scale_floor(exponents) if is_gradient else None,
        is_noise=all(seen.is_noise for seen in ranges),
    )
