"""Random numbers that are the same in every replay of a step: what is drawn depends on the dtype that it is drawn in.

Noise is drawn as the step has drawn it, and widened then: float64 takes more random bits a number than float32, and on
a CPU half takes others where their count is no multiple of 16.

CUDA's kernel of dropout takes as many random numbers at a time as fit its vector loads, four of float32 and eight of
half, so that one random state makes two masks. What a step was seen to drop in half is dropped in FP32 too. Of fused
attention, which keeps its mask to itself, nobody can tell what it has dropped: replays draw that anew, all of them the
same.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from ampdbg.probes.seams import Function, replaced

NoiseKind = Literal["made", "written", "scaled", "picked"]

NOISE: Mapping[str, NoiseKind] = {
    **dict.fromkeys(("rand", "randn", "rand_like", "randn_like"), "made"),
    **dict.fromkeys(("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_"), "written"),
    "normal": "scaled",
    **dict.fromkeys(("multinomial", "poisson"), "picked"),
}
"""Torch's ops that draw: a new tensor, into a tensor, by a mean and a deviation, or by what they are given."""


@dataclass(eq=False)
class Draws:
    """The dtypes of what one step drew in, in order, as its first replay has noted them.

    Where ``every`` is set, all of them draw as for that one.
    """

    dtypes: list[torch.dtype] = field(default_factory=list)
    are_noted: bool = False
    every: torch.dtype | None = None


@contextlib.contextmanager
def drawn_alike(draws: Draws, *, notes: bool, wider: Mapping[torch.dtype, torch.dtype] | None = None) -> Iterator[None]:
    """While this is entered this thread draws the noise that it has drawn in the step, and on a GPU dropout drops the
    same.

    Args:
        draws: of the step.
        notes: the step is run again as it was: what it draws from is noted, where that is not known yet.
        wider: what each dtype of the step is in this replay; itself where it is not in it.
    """
    drawing = _Drawing(draws, notes=notes and not draws.are_noted)
    if not draws.are_noted:  # what a replay has noted that raised is of no other
        draws.dtypes.clear()
    with contextlib.ExitStack() as stack:
        dropouts = ((owner, name, drawing.dropout) for owner in (torch._VF, torch) for name in ("dropout", "dropout_"))
        for owner, name, instead in (*dropouts, (F, "scaled_dot_product_attention", drawing.attention)):
            if hasattr(owner, name):  # a script may have removed it
                stack.enter_context(replaced(owner, name, instead))
        if draws.every is None:
            stack.enter_context(_Noise(drawing, wider or {}))
        yield
    draws.are_noted |= notes


def depends_on_dtype(tensor: torch.Tensor) -> bool:
    """Other random numbers are drawn for a tensor of its shape in another dtype."""
    return tensor.is_cuda


def mask_of(like: torch.Tensor, dtype: torch.dtype, p: float) -> torch.Tensor:
    """What dropout keeps of a tensor of this shape and layout in a dtype, as bool; draws as it does."""
    given = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=like.device)
    return torch.native_dropout(given, p, True)[1]


_attention = torch._C._nn.scaled_dot_product_attention  # as it is, where F has another one


class _Drawing:
    def __init__(self, draws: Draws, *, notes: bool) -> None:
        self._draws = draws
        self.notes = notes
        """What is drawn in is noted."""
        self._thread = threading.get_ident()
        self._number = 0

    @property
    def is_here(self) -> bool:
        """This is the thread that draws."""
        return self._thread == threading.get_ident()

    def dropout(self, original: Function) -> Function:
        """What stands for ``torch.dropout(input, p, train)``, or its in-place form: the same ops in every dtype, so
        that what FP32 reaches in one can be held against it."""
        is_in_place = original.__name__.endswith("_")

        def call(input: torch.Tensor, p: float, train: bool) -> Any:  # noqa: A002 - it may be named
            if not (train and 0.0 < p < 1.0) or not self._is_drawn_anew(input):
                return original(input, p, train)
            dtype = self.noted(input.dtype)
            with torch.no_grad(), _disable_current_modes():  # it is none of the step's ops
                kept = mask_of(input, dtype, p)
            scale = 1.0 / (1.0 - p)
            return input.mul_(kept).mul_(scale) if is_in_place else input * kept * scale

        return call

    def noted(self, dtype: torch.dtype) -> torch.dtype:
        """What the step drew in, where this draws in a dtype."""
        if self.notes:
            self._draws.dtypes.append(dtype)
            return dtype
        number, self._number = self._number, self._number + 1
        if self._draws.every is not None:
            return self._draws.every
        return self._draws.dtypes[number] if number < len(self._draws.dtypes) else dtype

    def attention(self, original: Function) -> Function:
        """What stands for ``F.scaled_dot_product_attention``."""

        def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            dropped = kwargs.get("dropout_p", args[1] if len(args) > 1 else 0.0)
            if dropped > 0.0 and self._is_drawn_anew(query):
                return attention(query, key, value, *args, **kwargs)
            return original(query, key, value, *args, **kwargs)

        return call

    def _is_drawn_anew(self, given: Any) -> bool:
        return type(given) is torch.Tensor and self.is_here and depends_on_dtype(given)


class _Noise(TorchDispatchMode):
    """Draws noise as the step has drawn it, in the dtype of that, and gives it in the dtype of the replay."""

    def __init__(self, drawing: _Drawing, wider: Mapping[torch.dtype, torch.dtype]) -> None:
        super().__init__()
        self._drawing, self._wider = drawing, wider

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = NOISE.get(op.overloadpacket.__name__)
        if kind is None or "out" in kwargs or not self._drawing.is_here:
            return op(*args, **kwargs)
        if self._drawing.notes:
            result = op(*args, **kwargs)
            self._drawing.noted(args[0].dtype if kind == "picked" else result.dtype)
            return result
        given = next((one.dtype for one in args if isinstance(one, torch.Tensor)), torch.get_default_dtype())
        dtype = self._drawing.noted(kwargs.get("dtype") or given)
        with torch.no_grad(), _disable_current_modes():  # it is none of the step's ops
            drawn = _drawn(kind, op, dtype, args, kwargs)
            wide = drawn.to(self._wider.get(drawn.dtype, drawn.dtype))
            return args[0].copy_(wide) if kind == "written" else wide


def _drawn(kind: NoiseKind, op: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> torch.Tensor:
    """What an op draws in a dtype."""
    drawn: torch.Tensor
    match kind:
        case "written":
            drawn = op(torch.empty_like(args[0], dtype=dtype), *args[1:], **kwargs)
        case "picked":
            drawn = op(args[0].to(dtype), *args[1:], **kwargs)
        case "scaled" if any(isinstance(one, torch.Tensor) for one in args):
            drawn = op(*(one.to(dtype) if isinstance(one, torch.Tensor) else one for one in args), **kwargs)
        case _:
            drawn = op(*args, **{**kwargs, "dtype": dtype})
    return drawn


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``F.scaled_dot_product_attention`` as fused kernels compute it, with a mask of dropout that float32 draws.

    Scores are float32, as in a fused kernel, whatever is given; what comes out is of the dtype that is given, or that
    autocast lowers to.
    """
    kind = query.device.type
    is_lowered = torch.is_autocast_enabled(kind) and query.dtype is not torch.float64
    dtype = torch.get_autocast_dtype(kind) if is_lowered else query.dtype
    wide = torch.promote_types(dtype, torch.float32)

    def widened(given: Any) -> Any:
        is_float = isinstance(given, torch.Tensor) and given.is_floating_point()
        return given.to(dtype).to(wide) if is_float else given  # autocast lowers a mask as well

    given = tree_map(widened, ((query, key, value, *args), kwargs))
    with torch.autocast(kind, enabled=False), sdpa_kernel(SDPBackend.MATH):
        return _attention(*given[0], **given[1]).to(dtype)
