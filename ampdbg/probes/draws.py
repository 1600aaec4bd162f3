"""Makes every replay of a step use the same random numbers, although random ops depend on their dtype.

A replay draws noise in the dtype of the original step, then widens it. float64 takes more random bits a number than
float32. On a CPU, half dtypes use other random numbers if the count is not a multiple of 16.

CUDA's dropout kernel draws as many random numbers at a time as its vector loads hold: four in float32, eight in half.
So one random state makes two masks, and a replay in FP32 computes the mask in the step's dtype. Fused attention does
not expose its dropout mask. Replays draw their own mask for it, the same in all of them.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map, tree_map_only

from ampdbg.probes.seams import Function, replaced

NoiseKind = Literal["made", "written", "scaled", "picked"]

NOISE: Mapping[str, NoiseKind] = {
    **dict.fromkeys(("rand", "randn", "rand_like", "randn_like"), "made"),
    **dict.fromkeys(("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_"), "written"),
    "normal": "scaled",
    **dict.fromkeys(("multinomial", "poisson"), "picked"),
}
"""Random ops by kind. They return a new tensor, write into one, take mean and deviation, or sample from an input."""


@dataclass(eq=False)
class Draws:
    """The dtypes of one step's random draws, in order, as its first replay records them.

    If ``every`` is set, all draws use that dtype.
    """

    dtypes: list[torch.dtype] = field(default_factory=list)
    are_noted: bool = False
    every: torch.dtype | None = None


@contextlib.contextmanager
def same_random_numbers(
    draws: Draws, *, notes: bool, wider: Mapping[torch.dtype, torch.dtype] | None = None
) -> Iterator[None]:
    """Make this thread draw the step's noise, and its dropout masks on a GPU, inside the ``with`` block.

    Args:
        draws: the dtypes of the step's draws.
        notes: this replay uses the step's own precision, so record its dtypes, if no replay has.
        wider: maps a dtype of the step to its dtype in this replay; other dtypes stay.
    """
    drawing = _Drawing(draws, notes and not draws.are_noted, wider or {})
    if not draws.are_noted:  # discard the dtypes from a replay that raised
        draws.dtypes.clear()
    with contextlib.ExitStack() as stack:
        dropouts = ((owner, name, drawing.dropout) for owner in (torch._VF, torch) for name in ("dropout", "dropout_"))
        for owner, name, instead in (*dropouts, (F, "scaled_dot_product_attention", drawing.attention)):
            if hasattr(owner, name):  # a script may have removed it
                stack.enter_context(replaced(owner, name, instead))
        if draws.every is None:
            stack.enter_context(drawing)
        yield
    draws.are_noted |= notes


def depends_on_dtype(tensor: torch.Tensor) -> bool:
    """True if dropout on a tensor of this shape draws other random numbers in another dtype."""
    return tensor.is_cuda


def mask_of(like: torch.Tensor, dtype: torch.dtype, p: float) -> torch.Tensor:
    """Return dropout's bool mask of kept entries for a tensor like ``like`` in ``dtype``; draws as dropout does."""
    given = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=like.device)
    return torch.native_dropout(given, p, True)[1]


_attention = torch._C._nn.scaled_dot_product_attention  # the original, while F holds the replacement


class _Drawing(TorchDispatchMode):
    """Draws noise in the dtype of the step, and returns it in the dtype of the replay."""

    def __init__(self, draws: Draws, notes: bool, wider: Mapping[torch.dtype, torch.dtype]) -> None:
        super().__init__()
        self._draws, self._notes, self._wider = draws, notes, wider
        self._dtypes = iter(draws.dtypes) if draws.every is None else itertools.repeat(draws.every)
        self._thread = threading.get_ident()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = NOISE.get(op.overloadpacket.__name__)
        if kind is None or "out" in kwargs or self._thread != threading.get_ident():
            return op(*args, **kwargs)
        if self._notes:
            result = op(*args, **kwargs)
            self._noted(args[0].dtype if kind == "picked" else result.dtype)
            return result
        given = next((one.dtype for one in args if isinstance(one, torch.Tensor)), torch.get_default_dtype())
        dtype = self._noted(kwargs.get("dtype") or given)
        with torch.no_grad(), _disable_current_modes():  # op traces must not see this
            drawn = _drawn(kind, op, dtype, args, kwargs)
            wide = drawn.to(self._wider.get(drawn.dtype, drawn.dtype))
            return args[0].copy_(wide) if kind == "written" else wide

    def dropout(self, original: Function) -> Function:
        """Return a replacement of ``torch.dropout(input, p, train)``, or its in-place form, with the same ops in every
        dtype. So ampdbg can compare each op with its FP32 run."""
        is_in_place = original.__name__.endswith("_")

        def call(input: torch.Tensor, p: float, train: bool) -> Any:  # noqa: A002 - it may be named
            if not (train and 0.0 < p < 1.0) or not self._is_drawn_anew(input):
                return original(input, p, train)
            dtype = self._noted(input.dtype)
            with torch.no_grad(), _disable_current_modes():  # op traces must not see this
                kept = mask_of(input, dtype, p)
            scale = 1.0 / (1.0 - p)
            return input.mul_(kept).mul_(scale) if is_in_place else input * kept * scale

        return call

    def attention(self, original: Function) -> Function:
        """Return a replacement of ``F.scaled_dot_product_attention``."""

        def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            dropped = kwargs.get("dropout_p", args[1] if len(args) > 1 else 0.0)
            run = attention if dropped > 0.0 and self._is_drawn_anew(query) else original
            return run(query, key, value, *args, **kwargs)

        return call

    def _noted(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the step's next draw; ``dtype`` itself while recording, or after the step's last draw."""
        if self._notes:
            self._draws.dtypes.append(dtype)
            return dtype
        return next(self._dtypes, dtype)

    def _is_drawn_anew(self, given: Any) -> bool:
        return type(given) is torch.Tensor and self._thread == threading.get_ident() and depends_on_dtype(given)


def _drawn(kind: NoiseKind, op: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> torch.Tensor:
    """Run a random op in ``dtype``."""
    drawn: torch.Tensor
    if kind == "written":
        drawn = op(torch.empty_like(args[0], dtype=dtype), *args[1:], **kwargs)
    elif kind != "made" and any(isinstance(one, torch.Tensor) for one in args):
        drawn = op(*tree_map_only(torch.Tensor, lambda one: one.to(dtype), args), **kwargs)
    else:
        drawn = op(*args, **{**kwargs, "dtype": dtype})
    return drawn


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return ``F.scaled_dot_product_attention`` as fused kernels compute it, with a dropout mask drawn in float32.

    Scores are at least float32, as in a fused kernel. The result has the dtype of ``query``, or the autocast dtype.
    """
    kind = query.device.type
    is_lowered = torch.is_autocast_enabled(kind) and query.dtype is not torch.float64
    dtype = torch.get_autocast_dtype(kind) if is_lowered else query.dtype
    wide = torch.promote_types(dtype, torch.float32)

    def widened(given: Any) -> Any:
        is_float = isinstance(given, torch.Tensor) and given.is_floating_point()
        return given.to(dtype).to(wide) if is_float else given  # autocast casts a mask too

    given = tree_map(widened, ((query, key, value, *args), kwargs))
    with torch.autocast(kind, enabled=False), sdpa_kernel(SDPBackend.MATH):
        return _attention(*given[0], **given[1]).to(dtype)
