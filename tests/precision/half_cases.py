"""Ops that CUDA runs in half, with operands of several shapes: what the kernels' tests compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Shapes = Sequence[tuple[int, ...]]

SIZES = ((2, 7, 4, 9), (3, 24, 40, 33), (1, 17, 8, 6), (4, 12, 64, 10))
"""Batch, rows, inner dimension and columns; what each case makes of them is up to its ``shapes``."""


@dataclass(frozen=True)
class HalfCase:
    """One op on half operands.

    ``rounds_once`` says that every output and gradient is one product rounded once, so that float64 knows
    the answer. ``loud`` multiplies the first two operands so that some results overflow; 0 where none can.
    ``exact`` is what to ask float64 where it is not ``call``.
    """

    name: str
    call: Callable[..., Any]
    shapes: Callable[[int, int, int, int], Shapes]
    rounds_once: bool = True
    loud: float = 100.0
    exact: Callable[..., Any] | None = None

    def operands(self, scale: float = 1.0) -> Iterator[list[Tensor]]:
        """Random half operands, one list for each of SIZES; ``scale`` is put on the first two."""
        random = torch.Generator().manual_seed(0)
        for size in SIZES:
            tensors = [torch.randn(shape, generator=random) for shape in self.shapes(*size)]
            yield [(t * scale if i < 2 else t).half() for i, t in enumerate(tensors)]


def results(call: Callable[..., Any], operands: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a call and the gradients of its operands, for a fixed gradient of half's precision."""
    leaves = [operand.detach().clone().requires_grad_() for operand in operands]
    result = call(*leaves)
    outputs = result if isinstance(result, tuple) else (result,)
    random = torch.Generator().manual_seed(1)
    gradients = [torch.randn(o.shape, generator=random).half().to(o.device, o.dtype) for o in outputs]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, leaves, gradients)]


def all_results(call: Callable[..., Any], operands: Iterator[Sequence[Tensor]]) -> list[Tensor]:
    """:func:`results` over several lists of operands, each output and each gradient joined to one vector."""
    runs = [results(call, tensors) for tensors in operands]
    return [torch.cat([tensor.flatten() for tensor in role]) for role in zip(*runs, strict=True)]


def exact_results(case: HalfCase, scale: float = 1.0) -> list[Tensor]:
    """The same in float64 on the half operands, rounded to half at the very end."""
    wide = ([tensor.double() for tensor in one] for one in case.operands(scale))
    return [tensor.half() for tensor in all_results(case.exact or case.call, wide)]


def _attention(**options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


def _causal_mask(q: Tensor) -> Tensor:
    return torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()


def _masked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=_causal_mask(q))


class _FlashAttention(torch.autograd.Function):
    """Attention as flash kernels define it: everything wide, but backward reads the output that was rounded."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
        scores = q @ k.mT * scale
        probabilities = (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1)
        output = probabilities @ v
        ctx.save_for_backward(q, k, v, probabilities, output.half().to(output.dtype))
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        q, k, v, probabilities, output = ctx.saved_tensors
        mean = (gradient * output).sum(-1, keepdim=True)
        scores = probabilities * (gradient @ v.mT - mean) * ctx.scale
        return scores @ k, scores.mT @ q, probabilities.mT @ gradient, None, None


def _flash(scale: float = 0.25, causal: bool = False) -> Callable[..., Tensor]:
    return lambda q, k, v: _FlashAttention.apply(q, k, v, scale, _causal_mask(q) if causal else None)


def _qkv(b: int, m: int, k: int, n: int) -> Shapes:
    return ((b, 3, m, 16), (b, 3, m, 16), (b, 3, m, 16))


def _cell(gates: int, states: int = 1) -> Callable[[int, int, int, int], Shapes]:
    def shapes(b: int, m: int, k: int, n: int) -> Shapes:
        weights = ((gates * n, k), (gates * n, n), (gates * n,), (gates * n,))
        return ((m, k), *[(m, n)] * states, *weights)

    return shapes


def _layer(kind: Callable[..., Any], gates: int, states: int = 1) -> tuple[Callable[..., Any], Any]:
    """A whole recurrent layer on a batch; the hidden state comes first in torch's own calls."""

    def call(x: Tensor, *rest: Tensor) -> Any:
        hidden = rest[0] if states == 1 else list(rest[:states])
        return kind(x, hidden, list(rest[states:]), True, 1, 0.0, True, False, False)

    def shapes(b: int, m: int, k: int, n: int) -> Shapes:
        weights = ((gates * n, k), (gates * n, n), (gates * n,), (gates * n,))
        return ((m, b, k), *[(1, b, n)] * states, *weights)

    return call, shapes


def _lstm_cell(x: Tensor, h: Tensor, c: Tensor, *weights: Tensor) -> Any:
    return torch.lstm_cell(x, (h, c), *weights)


def _conv(dims: int, kernel: int = 3, groups: int = 1) -> Callable[[int, int, int, int], Shapes]:
    side = {1: 30, 2: 11, 3: 6}[dims]
    return lambda b, m, k, n: ((b, k, *[side] * dims), (6, k // groups, *[kernel] * dims), (6,))


def _transposed(dims: int, groups: int = 1) -> Callable[[int, int, int, int], Shapes]:
    side = {1: 30, 2: 9, 3: 5}[dims]
    return lambda b, m, k, n: ((b, k, *[side] * dims), (k, 6 // groups, *[3] * dims), (6,))


MATRIX_PRODUCTS = (
    HalfCase("linear", F.linear, lambda b, m, k, n: ((m, k), (n, k), (n,))),
    HalfCase("linear-3d", F.linear, lambda b, m, k, n: ((b, m, k), (n, k), (n,))),
    HalfCase("linear-no-bias", F.linear, lambda b, m, k, n: ((b, m, k), (n, k))),
    HalfCase("mm", torch.mm, lambda b, m, k, n: ((m, k), (k, n))),
    HalfCase("mm-transposed", lambda x, y: x.t() @ y.t(), lambda b, m, k, n: ((k, m), (n, k))),
    HalfCase("mv", torch.mv, lambda b, m, k, n: ((m, k), (k,))),
    HalfCase("dot", torch.dot, lambda b, m, k, n: ((k,), (k,)), loud=200.0),
    HalfCase("bmm", torch.bmm, lambda b, m, k, n: ((b, m, k), (b, k, n))),
    HalfCase("addmm", partial(torch.addmm, beta=0.5, alpha=2), lambda b, m, k, n: ((m, n), (m, k), (k, n)), loud=1e4),
    HalfCase("addmv", partial(torch.addmv, beta=0.5, alpha=2), lambda b, m, k, n: ((m,), (m, k), (k,)), loud=2e4),
    HalfCase(
        "baddbmm",
        partial(torch.baddbmm, beta=0.5, alpha=2),
        lambda b, m, k, n: ((b, m, n), (b, m, k), (b, k, n)),
        loud=1e4,
    ),
    HalfCase("addbmm", torch.addbmm, lambda b, m, k, n: ((m, n), (b, m, k), (b, k, n)), rounds_once=False, loud=1e4),
    HalfCase("matmul-broadcast", torch.matmul, lambda b, m, k, n: ((2, 1, m, k), (3, k, n)), rounds_once=False),
    HalfCase(
        "einsum",
        lambda q, k: torch.einsum("bqhd,bkhd->bhqk", q, k),
        lambda b, m, k, n: ((b, m, 3, k), (b, n, 3, k)),
    ),
    HalfCase(
        "einsum-of-three",
        lambda *t: torch.einsum("ij,jk,kl->il", *t),
        lambda b, m, k, n: ((m, k), (k, n), (n, 5)),
        rounds_once=False,
    ),
    HalfCase("vecdot", torch.linalg.vecdot, lambda b, m, k, n: ((m, k), (m, k)), rounds_once=False),
    HalfCase("multi_dot", lambda *t: torch.linalg.multi_dot(t), lambda b, m, k, n: ((m, k), (k, n), (n, m)), False),
    HalfCase("bilinear", F.bilinear, lambda b, m, k, n: ((m, k), (m, n), (5, k, n), (5,)), rounds_once=False),
    HalfCase("addr", torch.addr, lambda b, m, k, n: ((m, n), (m,), (n,)), rounds_once=False, loud=1e4),
    HalfCase("prelu", F.prelu, lambda b, m, k, n: ((b, 5, m), (5,)), rounds_once=False, loud=300.0),
)
CONVOLUTIONS = (
    HalfCase("conv1d", F.conv1d, _conv(1)),
    HalfCase("conv1d-no-bias", F.conv1d, lambda b, m, k, n: _conv(1)(b, m, k, n)[:2]),
    HalfCase("conv2d", F.conv2d, _conv(2)),
    HalfCase("conv2d-1x1", F.conv2d, _conv(2, kernel=1)),
    HalfCase("conv2d-groups-stride", partial(F.conv2d, stride=2, padding=1, groups=2), _conv(2, groups=2)),
    HalfCase("conv2d-dilated", partial(F.conv2d, padding="same", dilation=2), _conv(2)),
    HalfCase("conv3d", F.conv3d, _conv(3)),
    HalfCase("conv_transpose1d", F.conv_transpose1d, _transposed(1)),
    HalfCase(
        "conv_transpose2d-groups-stride",
        partial(F.conv_transpose2d, stride=2, groups=2),
        _transposed(2, groups=2),
    ),
    HalfCase("conv_transpose3d", F.conv_transpose3d, _transposed(3)),
    HalfCase("conv_tbc", torch.conv_tbc, lambda b, m, k, n: ((m, b, k), (3, k, 6), (6,)), rounds_once=False),
)
ATTENTION = (
    HalfCase("attention", _attention(), _qkv, loud=0.0, exact=_flash()),
    HalfCase("attention-causal", _attention(is_causal=True), _qkv, loud=0.0, exact=_flash(causal=True)),
    HalfCase("attention-scaled", _attention(scale=0.5), _qkv, loud=0.0, exact=_flash(scale=0.5)),
    HalfCase("attention-masked", _masked_attention, _qkv, loud=0.0, exact=_flash(causal=True)),
)
"""Heads of 16 channels, so that torch's own scale is 0.25."""

RECURRENT = (
    HalfCase("lstm_cell", _lstm_cell, _cell(4, states=2), rounds_once=False, loud=0.0),
    HalfCase("gru_cell", torch.gru_cell, _cell(3), rounds_once=False, loud=0.0),
    HalfCase("rnn_tanh_cell", torch.rnn_tanh_cell, _cell(1), rounds_once=False, loud=0.0),
    HalfCase("rnn_relu_cell", torch.rnn_relu_cell, _cell(1), rounds_once=False, loud=1e4),
    HalfCase("lstm", *_layer(torch.lstm, 4, states=2), rounds_once=False, loud=0.0),
    HalfCase("gru", *_layer(torch.gru, 3), rounds_once=False, loud=0.0),
    HalfCase("rnn_tanh", *_layer(torch.rnn_tanh, 1), rounds_once=False, loud=0.0),
    HalfCase("rnn_relu", *_layer(torch.rnn_relu, 1), rounds_once=False),
)

CASES = (*MATRIX_PRODUCTS, *CONVOLUTIONS, *ATTENTION, *RECURRENT)


def units_apart(left: Tensor, right: Tensor) -> Tensor:
    """For each pair of float16 elements, how many representable numbers lie between them (int32).

    Infinity follows 65504, both zeros are one number, two NaNs are 0 apart.
    """
    assert left.dtype is right.dtype is torch.float16
    assert left.shape == right.shape
    distance = (_ordered(left) - _ordered(right)).abs()
    return distance.masked_fill(left.isnan() & right.isnan(), 0)


NOISE = 2.0**-20
"""Where a sum in FP32 cancels, what is left of it is a few roundings of its terms; which, depends on the machine."""


def share_close(left: Tensor, right: Tensor, units: int = 1) -> float:
    """The share of elements that are equal to within so many units in the last place, or cancelled in both."""
    finite = right.float().where(right.isfinite(), torch.zeros(()))
    noise = NOISE * float(finite.abs().max()) if finite.numel() else 0.0
    cancelled = (left.float().abs() <= noise) & (right.float().abs() <= noise)
    return float(((units_apart(left, right) <= units) | cancelled).float().mean())


def same_overflow(left: Tensor, right: Tensor) -> bool:
    """Whether the same elements are infinite and the same are NaN.

    A sum just at the threshold may round either way: 65504 and inf, one unit apart, count as the same.
    """
    differ = left.isinf() != right.isinf()
    return bool((units_apart(left, right)[differ] <= 1).all()) and torch.equal(left.isnan(), right.isnan())


def _ordered(tensor: Tensor) -> Tensor:
    """Integers in the order of the numbers: a float's bits are its magnitude's rank, behind a sign bit."""
    bits = tensor.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)
