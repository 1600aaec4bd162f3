"""The emulated half kernels round where a GPU does, compared with the CPU's own kernels, float64, and a GPU if any."""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ampdbg.precision.emulation import cuda_on_cpu
from ampdbg.precision.half_kernels import ADDED_IN_HALF, EMULATED, HALVES, ROUNDED_ONCE, find_op, half_kernels
from ampdbg.precision.half_kernels import ran as half_kernels_that_ran

Shapes = Sequence[tuple[int, ...]]

SIZES = ((2, 7, 4, 9), (3, 24, 40, 33), (1, 17, 8, 6), (4, 12, 64, 10))
"""Batch, rows, inner dimension and columns, from which each case makes its ``shapes``."""


@dataclass(frozen=True)
class HalfCase:
    """One op on half operands.

    ``rounds_once``: every output and gradient is one product rounded once, so float64 gives the exact value.
    ``loud`` multiplies the first two operands so that some results overflow, or is 0 if none can.
    ``exact`` is the call in float64 if it differs from ``call``.
    """

    name: str
    call: Callable[..., Any]
    shapes: Callable[[int, int, int, int], Shapes]
    rounds_once: bool = True
    loud: float = 100.0
    exact: Callable[..., Any] | None = None

    def operands(self, scale: float = 1.0) -> Iterator[list[Tensor]]:
        """Random half operands, one list for each of SIZES. ``scale`` multiplies the first two."""
        random = torch.Generator().manual_seed(0)
        for size in SIZES:
            tensors = [torch.randn(shape, generator=random) for shape in self.shapes(*size)]
            yield [(t * scale if i < 2 else t).half() for i, t in enumerate(tensors)]


def results(call: Callable[..., Any], operands: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a call and the gradients of its operands, for a fixed output gradient in float16 precision."""
    leaves = [operand.detach().clone().requires_grad_() for operand in operands]
    result = call(*leaves)
    outputs = result if isinstance(result, tuple) else (result,)
    random = torch.Generator().manual_seed(1)
    gradients = [torch.randn(o.shape, generator=random).half().to(o.device, o.dtype) for o in outputs]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, leaves, gradients)]


def all_results(call: Callable[..., Any], operands: Iterator[Sequence[Tensor]]) -> list[Tensor]:
    """:func:`results` of several lists of operands, with each output and gradient joined to one vector."""
    runs = [results(call, tensors) for tensors in operands]
    return [torch.cat([tensor.flatten() for tensor in role]) for role in zip(*runs, strict=True)]


def exact_results(case: HalfCase, scale: float = 1.0) -> list[Tensor]:
    """The results in float64 on the half operands, rounded to float16 at the end."""
    wide = ([tensor.double() for tensor in one] for one in case.operands(scale))
    return [tensor.half() for tensor in all_results(case.exact or case.call, wide)]


def _attention(**options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


def _causal_mask(q: Tensor) -> Tensor:
    return torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()


def _masked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=_causal_mask(q))


class _FlashAttention(torch.autograd.Function):
    """Attention as in flash kernels: everything is wide, but the backward pass reads the rounded output."""

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
    """A whole recurrent layer on a batch. In torch's own calls the hidden state is the first argument after ``x``."""

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
        "einsum", lambda q, k: torch.einsum("bqhd,bkhd->bhqk", q, k), lambda b, m, k, n: ((b, m, 3, k), (b, n, 3, k))
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
        "conv_transpose2d-groups-stride", partial(F.conv_transpose2d, stride=2, groups=2), _transposed(2, groups=2)
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
"""If an FP32 sum cancels, the rest consists of rounding errors of its terms, which depend on the machine."""


def share_close(left: Tensor, right: Tensor, units: int = 1) -> float:
    """The share of elements within ``units`` in the last place of each other, or cancelled in both."""
    finite = right.float().where(right.isfinite(), torch.zeros(()))
    noise = NOISE * float(finite.abs().max()) if finite.numel() else 0.0
    cancelled = (left.float().abs() <= noise) & (right.float().abs() <= noise)
    return float(((units_apart(left, right) <= units) | cancelled).float().mean())


def same_overflow(left: Tensor, right: Tensor) -> bool:
    """Whether the same elements are infinite and the same are NaN.

    A sum at the threshold may round either way: 65504 and inf, one unit apart, count as the same.
    """
    differ = left.isinf() != right.isinf()
    return bool((units_apart(left, right)[differ] <= 1).all()) and torch.equal(left.isnan(), right.isnan())


def _ordered(tensor: Tensor) -> Tensor:
    """Integers in the order of the floats: after its sign bit, a float's bits are the rank of its magnitude."""
    bits = tensor.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


NATIVE_SHARE = 0.98
EXACT_SHARE = 0.99


def named(cases: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def emulated(case: HalfCase, scale: float = 1.0) -> list[Tensor]:
    with half_kernels():
        return all_results(case.call, case.operands(scale))


def native(case: HalfCase, scale: float = 1.0) -> list[Tensor]:
    """The CPU's own results, or the exact ones if this build of torch has no half kernel."""
    try:
        return all_results(case.call, case.operands(scale))
    except RuntimeError as error:
        if "not implemented for 'Half'" in str(error):
            return exact_results(case, scale)
        raise


def agrees(ours: Tensor, cpu: Tensor, exact: Tensor) -> bool:
    """Whether our result is the CPU's, or float64 agrees with ours and contradicts the CPU's.

    Native kernels without FP16 instructions scatter the gradient of a convolution in half and round the
    probabilities of attention. Every tenth element then loses its last bits.
    """
    if share_close(ours, cpu) >= NATIVE_SHARE:
        return True
    return share_close(ours, exact) >= EXACT_SHARE > share_close(cpu, exact)


@named(CASES)
def test_outputs_and_gradients_match_native_half_kernels_or_the_exact_values(case: HalfCase) -> None:
    for ours, cpu, exact in zip(emulated(case), native(case), exact_results(case), strict=True):
        assert ours.dtype is torch.float16
        assert agrees(ours, cpu, exact)
        assert not case.rounds_once or share_close(ours, exact) >= EXACT_SHARE


@named([case for case in CASES if case.loud])
def test_the_same_elements_overflow_as_in_native_kernels_or_the_exact_values(case: HalfCase) -> None:
    ours, cpu, exact = emulated(case, case.loud), native(case, case.loud), exact_results(case, case.loud)
    assert any(tensor.isinf().any() for tensor in ours)
    for one, other, truth in zip(ours, cpu, exact, strict=True):
        assert agrees(one, other, truth)
        # A native kernel with intermediate sums in half overflows where the sum does not.
        assert same_overflow(one, other) or (same_overflow(one, truth) and not same_overflow(other, truth))
        assert not case.rounds_once or same_overflow(one, truth)


def half(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).half()


Make = Callable[..., Tensor]
"""Makes an operand of a shape: :func:`half`, or :func:`wide` with equal values."""


def wide(*shape: int) -> Tensor:
    return half(*shape).float()


def rrelu(x: Tensor, inplace: bool = False) -> Tensor:
    torch.manual_seed(0)
    return F.rrelu(x, training=True, inplace=inplace)


def noise_of_rrelu(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    noise = torch.empty_like(x)
    torch.ops.aten.rrelu_with_noise(x, noise, 0.125, 0.333, True)
    return noise


WRITING: dict[str, Callable[[Make], Tensor]] = {
    "addmm_": lambda t: t(4, 5).addmm_(t(4, 6), t(6, 5)),
    "addmv_": lambda t: t(4).addmv_(t(4, 6), t(6)),
    "baddbmm_": lambda t: t(2, 4, 5).baddbmm_(t(2, 4, 6), t(2, 6, 5), beta=0.5),
    "mm.out": lambda t: torch.mm(t(4, 6), t(6, 5), out=t(4, 5)),
    "mm.out, to be resized": lambda t: torch.mm(t(4, 6), t(6, 5), out=t(0)),
    "mm.out, transposed": lambda t: torch.mm(t(4, 6), t(6, 5), out=t(5, 4).t()),
    "bmm.out": lambda t: torch.bmm(t(2, 4, 6), t(2, 6, 5), out=t(2, 4, 5)),
    "mv.out": lambda t: torch.mv(t(4, 6), t(6), out=t(4)),
    "dot.out": lambda t: torch.dot(t(6), t(6), out=t(1)[0]),
    "addmm.out": lambda t: torch.addmm(t(4, 5), t(4, 6), t(6, 5), out=t(4, 5)),
    "baddbmm.out": lambda t: torch.baddbmm(t(2, 4, 5), t(2, 4, 6), t(2, 6, 5), out=t(2, 4, 5)),
    "addmv.out": lambda t: torch.addmv(t(4), t(4, 6), t(6), out=t(4)),
    "rrelu_with_noise": lambda t: rrelu(t(64)),
    "rrelu_with_noise, its noise": lambda t: noise_of_rrelu(t(64)),
    "rrelu_with_noise_": lambda t: rrelu(t(64), inplace=True),
    "clamp_": lambda t: t(64).clamp_(0.1, 1e5),
    "clamp_min_": lambda t: t(64).clamp_min_(-1e9),
    "clamp_max_": lambda t: t(64).clamp_max_(-1e9),
    "hardtanh_": lambda t: F.hardtanh_(t(64), -1e5, 1e5),
}
"""Every emulated op that writes into an operand."""


@pytest.mark.parametrize("write", WRITING.values(), ids=WRITING.keys())
def test_an_op_that_writes_an_operand_writes_rounded_float32_values(write: Callable[[Make], Tensor]) -> None:
    with half_kernels():
        written = write(half)
    assert written.dtype is torch.float16
    assert torch.equal(written, write(wide).half())


def test_every_emulated_op_exists_in_torch_and_every_writing_op_is_tested() -> None:
    ops = {name: find_op(name) for name in EMULATED}
    assert [name for name, op in ops.items() if op is None] == []
    writing = {name for name, op in ops.items() if op is not None and op._schema.is_mutable}
    assert writing == {name.split(",")[0] for name in WRITING}


def test_an_in_place_op_returns_the_same_tensor_and_bumps_its_version() -> None:
    target = half(4, 5)
    before = target._version
    with half_kernels():
        assert target.addmm_(half(4, 6), half(6, 5)) is target
    assert target._version > before


MIXED: dict[str, Callable[[], Tensor]] = {
    "mm": lambda: torch.mm(half(2, 3), torch.randn(3, 2)),
    "linear": lambda: F.linear(half(2, 3), torch.randn(2, 3)),
    "linear's bias": lambda: F.linear(half(2, 3), half(2, 3), torch.randn(2)),
    "bmm": lambda: torch.bmm(half(1, 2, 3), torch.randn(1, 3, 2)),
    "dot": lambda: torch.dot(half(3), torch.randn(3)),
    "conv2d": lambda: F.conv2d(half(1, 2, 5, 5), torch.randn(2, 2, 3, 3)),
    "conv2d's bias": lambda: F.conv2d(half(1, 2, 5, 5), half(2, 2, 3, 3), torch.randn(2)),
    "the out tensor": lambda: torch.mm(half(2, 3), half(3, 2), out=torch.empty(2, 2)),
    "attention": lambda: F.scaled_dot_product_attention(half(1, 1, 4, 8), torch.randn(1, 1, 4, 8), half(1, 1, 4, 8)),
    "bfloat16 and half": lambda: torch.mm(half(2, 3), torch.randn(3, 2).bfloat16()),
    "shapes that do not fit": lambda: torch.mm(half(2, 3), half(2, 3)),
}


@pytest.mark.parametrize("call", MIXED.values(), ids=MIXED.keys())
def test_mismatched_operands_raise_the_message_of_torch(call: Callable[[], Tensor]) -> None:
    with pytest.raises((RuntimeError, IndexError)) as native_error:
        call()
    with half_kernels(), pytest.raises(native_error.type) as our_error:
        call()
    assert str(our_error.value) == str(native_error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_products_of_other_dtypes_keep_their_bits(dtype: torch.dtype) -> None:
    x, w = torch.randn(5, 16, dtype=dtype), torch.randn(7, 16, dtype=dtype)
    expected = x @ w.mT
    with half_kernels():
        assert torch.equal(x @ w.mT, expected)


class Trace(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[str, tuple[torch.dtype, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append((str(func), tuple(arg.dtype for arg in args if isinstance(arg, Tensor))))
        return func(*args, **(kwargs or {}))


def traced() -> tuple[list[tuple[str, tuple[torch.dtype, ...]]], list[torch.dtype], str]:
    """A step of a small half model: the ops that ran, the dtypes of saved tensors, and the autograd node."""
    model = torch.nn.Sequential(torch.nn.Conv1d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(32, 5)).half()
    saved: list[torch.dtype] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), Trace() as trace:
        output = model(half(2, 3, 10))
        output.sum().backward()
    assert output.grad_fn is not None
    return trace.ops, saved, output.grad_fn.name()


def test_the_emulation_is_invisible_to_dispatch_modes_and_autograd() -> None:
    expected = traced()
    assert "aten.addmm.default" in [op for op, _ in expected[0]]
    with half_kernels():
        assert traced() == expected


def test_flash_attention_keeps_its_log_sum_exp_in_float32() -> None:
    with half_kernels():
        output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*[half(1, 2, 4, 8)] * 3)
    assert (output.dtype, logsumexp.dtype) == (torch.float16, torch.float32)


def lstm(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    layer = torch.nn.LSTM(8, 4).half().to(x.dtype)
    return layer(x.view(8, 1, 8))[0]


def antialiased(x: Tensor, mode: str) -> Tensor:
    return F.interpolate(x.view(1, 1, 8, 8), size=(3, 5), mode=mode, antialias=True)


ONLY_ON_CUDA: dict[str, Callable[[Tensor], Tensor]] = {
    "avg_pool3d": lambda x: F.avg_pool3d(x.view(1, 1, 4, 4, 4), 2),
    "rrelu": rrelu,
    "rrelu, in place": lambda x: rrelu(x.clone(), inplace=True),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x.view(8, 8), torch.arange(8)),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x.view(8, 8), torch.arange(64).view(8, 8) % 8),
    "lstm": lstm,
    "interpolate, antialiased": lambda x: antialiased(x, "bilinear"),
    "interpolate, bicubic and antialiased": lambda x: antialiased(x, "bicubic"),
    "clamp": lambda x: x.clamp(0.1, 1e5),
    "clamp to what half cannot hold": lambda x: x.clamp(max=-1e5),
    "clamp_min": lambda x: x.clamp_min(-1e9),
    "clamp_max": lambda x: x.clamp_max(1e9),
    "hardtanh": lambda x: F.hardtanh(x, -1e5, 1e5),
}
ERROR = {"rrelu": 2**-12, "rrelu, in place": 2**-12, "lstm": 1e-3}
"""The allowed error of an element of about 1: rrelu's gradient uses rounded noise, and a recurrent layer rounds
each gate and state. The other ops round once."""


@pytest.mark.parametrize("name", ONLY_ON_CUDA)
def test_half_ops_missing_on_cpu_give_rounded_float32_values_and_gradients(name: str) -> None:
    results = []
    for x, context in ((half(64), half_kernels()), (wide(64), contextlib.nullcontext())):
        with context:
            leaf = x.requires_grad_()
            output = ONLY_ON_CUDA[name](leaf)
            (gradient,) = torch.autograd.grad(output.sum(), leaf)
        results.append((output.detach(), gradient))
    for ours, exact in zip(*results, strict=True):
        assert ours.dtype is torch.float16
        torch.testing.assert_close(ours, exact.half(), rtol=0, atol=ERROR.get(name, 0.0))


def test_clamps_with_limits_within_float16_run_on_the_kernels_of_the_cpu() -> None:
    with half_kernels():
        torch.stack((half(64).clamp(-1, 65504), F.relu6(half(64))))
        assert not half_kernels_that_ran
        half(64).clamp(-1, 65505)
        assert half_kernels_that_ran == {"clamp"}


ATEN = torch.ops.aten
SQUARE, PADDED = ((1, 4, 8, 8), (1, 4, 10, 10))
ONE_ROUNDING: dict[str, Callable[[Make], Tensor]] = {
    "_log_softmax": lambda t: F.log_softmax(t(64, 10) * 4, -1),
    "glu_backward": lambda t: ATEN.glu_backward(t(64, 8), t(64, 16) * 4, -1),
    "col2im": lambda t: F.fold(t(1, 36, 64), (10, 10), 3),
    "avg_pool2d_backward": lambda t: ATEN.avg_pool2d_backward(
        t(*SQUARE), t(*PADDED), [3, 3], [1, 1], [0, 0], False, True, None
    ),
    "max_pool2d_with_indices_backward": lambda t: ATEN.max_pool2d_with_indices_backward(
        t(*SQUARE),
        t(*PADDED),
        [3, 3],
        [1, 1],
        [0, 0],
        [1, 1],
        False,
        F.max_pool2d(t(*PADDED), 3, 1, return_indices=True)[1],
    ),
    "upsample_linear1d": lambda t: F.interpolate(t(2, 3, 10), size=23, mode="linear"),
    "upsample_bicubic2d": lambda t: F.interpolate(t(*SQUARE), size=(23, 17), mode="bicubic"),
    "upsample_trilinear3d": lambda t: F.interpolate(t(1, 3, 4, 5, 6), size=(7, 8, 9), mode="trilinear"),
}
"""A call of each op that CUDA rounds once. The CPU alone rounds more often."""


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ROUNDED_ONCE.split())
def test_ops_that_cuda_computes_in_float32_round_once_in_both_half_dtypes(name: str, dtype: torch.dtype) -> None:
    def narrow(*shape: int) -> Tensor:
        return half(*shape).to(dtype)

    exact = ONE_ROUNDING[name](lambda *shape: narrow(*shape).float()).to(dtype)
    with half_kernels():
        ours = ONE_ROUNDING[name](narrow)
        assert name in half_kernels_that_ran
    assert torch.equal(ours, exact)
    assert not torch.equal(ONE_ROUNDING[name](narrow), exact)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_cross_entropy_of_confident_logits_is_not_rounded_to_zero(dtype: torch.dtype) -> None:
    logits, target = torch.zeros(4, 10), torch.full((4,), 3)
    logits[:, 3] = 11.5  # in half, log(1 + 9 exp(-11.5)) is zero where an exponential is rounded before the logarithm
    with cuda_on_cpu(), torch.autocast("cuda", dtype=dtype):
        loss = F.cross_entropy(logits.to(dtype), target)
    assert float(loss) == pytest.approx(9.12e-5, rel=1e-2)


def added_one_by_one(target: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """``scatter_add`` with each sum rounded to the dtype."""
    result = target.clone()
    for place in torch.cartesian_prod(*map(torch.arange, index.shape)).tolist():
        to = tuple(int(index[tuple(place)]) if i == dim else at for i, at in enumerate(place))
        result[to] = result[to] + source[tuple(place)]
    return result


INDEX = torch.arange(2 * 40 * 4).view(2, 40, 4) * 7 % 5
ADDING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scatter_add": lambda x, src: x.scatter_add(-2, INDEX, src),
    "scatter_add_": lambda x, src: x.scatter_add_(1, INDEX, src),
    "scatter_reduce.two": lambda x, src: x.scatter_reduce(1, INDEX, src, "sum"),
    "scatter_reduce_.two": lambda x, src: x.scatter_reduce_(1, INDEX, src, "sum"),
    "index_add": lambda x, src: x.index_add(1, INDEX[0, :, 0], src[:, :40, :4], alpha=1),
    "index_add_": lambda x, src: x.index_add_(1, INDEX[0, :, 0], src[:, :40, :4]),
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ADDED_IN_HALF)
def test_ops_that_cuda_adds_with_atomics_round_each_add(name: str, dtype: torch.dtype) -> None:
    x, src = half(3, 5, 4).to(dtype), half(3, 50, 6).to(dtype)
    index = INDEX[:1, :, :1].expand(3, 40, 4) if "index" in name else INDEX
    expected = added_one_by_one(x, 1, index, src)
    with half_kernels():
        result = ADDING[name](x, src)
    assert torch.equal(result, expected)
    assert (result is x) == find_op(name)._schema.is_mutable  # type: ignore[union-attr]


COUNTING: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], float]] = {
    "a sum": (lambda zero, index, ones: zero.scatter_reduce(0, index, ones, "sum"), 2048.0),
    "a sum without the zero": (
        lambda zero, index, ones: zero.scatter_reduce(0, index, ones, "sum", include_self=False),
        2048.0,
    ),
    "a mean": (lambda zero, index, ones: zero.scatter_reduce(0, index, ones, "mean", include_self=False), 1.0),
    "a maximum": (lambda zero, index, ones: zero.scatter_reduce(0, index, ones, "amax"), 1.0),
    "the gradient of gather": (
        lambda zero, index, ones: torch.func.grad(lambda x: x.gather(0, index).sum())(zero),
        2048.0,
    ),
}


@pytest.mark.parametrize("name", COUNTING)
def test_a_float16_count_ends_at_2048_in_half_alone(name: str) -> None:
    call, expected = COUNTING[name]
    operands = torch.zeros(2), torch.zeros(6004, dtype=torch.long), torch.ones(6004)
    in_float32 = call(*operands)
    with half_kernels():
        in_half = call(operands[0].half(), operands[1], operands[2].half())
        assert torch.equal(call(*operands), in_float32)
    assert (in_half.dtype, float(in_half[0])) == (torch.float16, expected)
    assert float(in_float32[0]) == (6004.0 if expected > 1 else 1.0)


def test_deterministic_sums_are_added_up_in_float32() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with half_kernels():
            count = torch.zeros(1).half().scatter_add_(0, torch.zeros(6004, dtype=torch.long), torch.ones(6004).half())
    finally:
        torch.use_deterministic_algorithms(False)
    assert float(count) == 6004.0


BAD_INDICES: dict[str, Callable[[], Tensor]] = {
    "a negative index": lambda: half(4).scatter_add(0, torch.tensor([-1]), half(1)),
    "a missing dimension": lambda: half(4).scatter_add_(0, torch.zeros(1, 2, dtype=torch.long), half(4)),
    "an index out of range": lambda: half(4).index_add_(0, torch.tensor([9]), half(1)),
    "another dtype": lambda: half(4).index_add(0, torch.tensor([1]), wide(1)),
}


@pytest.mark.parametrize("call", BAD_INDICES.values(), ids=BAD_INDICES.keys())
def test_bad_indices_raise_the_message_of_torch(call: Callable[[], Tensor]) -> None:
    test_mismatched_operands_raise_the_message_of_torch(call)


def test_half_kernels_keep_no_tensor_alive_after_a_step() -> None:
    def live() -> int:
        gc.collect()
        # type() is needed: isinstance() reads __class__, which loads lazy modules.
        return sum(issubclass(type(item), Tensor) for item in gc.get_objects())

    with half_kernels():
        traced()
        before = live()
        traced()
        assert live() <= before  # tensors of other tests may be freed meanwhile


SPLIT = "conv2d-1x1", "conv_transpose2d-groups-stride"
UNITS = {**{case.name: 16 for case in ATTENTION}, **dict.fromkeys(SPLIT, 16)}
"""The default is one unit. A GPU's fused attention rounds its probabilities to half, like the CPU's own half attention
(98 % within 16 units of ours). cuDNN adds the parts of some sums in half (97 % within one unit, 99.7 % within 16, on
an H200)."""
LOUD = [case for case in CASES if case.loud and case not in RECURRENT]
"""A GPU's fused recurrent layers do not round their gates. With the weights of these cases a recurrence magnifies each
rounding until no two implementations agree. Only their dtypes are compared."""


def under_autocast(call: Callable[..., Any], device: str) -> Callable[..., Any]:
    def run(*operands: Tensor) -> Any:
        with torch.autocast(device, dtype=torch.float16, cache_enabled=False):
            return call(*operands)

    return run


def autocast_on(device: str, case: HalfCase, scale: float) -> list[Tensor]:
    """The results on float32 operands, the dtype of weights and inputs in a user's model."""
    operands = ([tensor.float().to(device) for tensor in one] for one in case.operands(scale))
    return [tensor.cpu() for tensor in all_results(under_autocast(case.call, device), operands)]


def on_gpu(case: HalfCase, scale: float = 1.0) -> list[Tensor]:
    allowed = torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    try:
        return autocast_on("cuda", case, scale)
    finally:
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = allowed


def on_cpu(case: HalfCase, scale: float = 1.0) -> list[Tensor]:
    with cuda_on_cpu():
        return autocast_on("cpu", case, scale)


@pytest.mark.gpu
@named(CASES)
def test_outputs_and_gradients_match_a_gpu(case: HalfCase) -> None:
    # Gradients of float32 operands are cast from half, so a comparison in half units is exact.
    for ours, theirs in zip(on_cpu(case), on_gpu(case), strict=True):
        assert ours.dtype is theirs.dtype
        assert case in RECURRENT or share_close(ours.half(), theirs.half(), UNITS.get(case.name, 1)) >= NATIVE_SHARE


WITHOUT_CUDNN = "conv2d", "conv2d-dilated", "conv3d"
"""On an H200 the kernels that cuDNN 9.19 chooses for these return only the bias if the sum is below -65504. The
overflow is then not an infinity but a number far from FP32's. Other convolutions overflow as without cuDNN."""


@pytest.mark.gpu
@named(LOUD)
def test_the_same_elements_overflow_as_on_a_gpu(case: HalfCase) -> None:
    with torch.backends.cudnn.flags(enabled=case.name not in WITHOUT_CUDNN):
        there = on_gpu(case, case.loud)
    for ours, theirs in zip(on_cpu(case, case.loud), there, strict=True):
        assert same_overflow(ours.half(), theirs.half())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROUNDED_ONCE.split())
def test_ops_that_round_once_match_a_gpu(name: str) -> None:
    with half_kernels():
        ours = ONE_ROUNDING[name](half)
    assert share_close(ours, ONE_ROUNDING[name](lambda *shape: half(*shape).cuda()).cpu()) >= NATIVE_SHARE


@pytest.mark.gpu
@pytest.mark.parametrize("name", COUNTING)
def test_a_float16_count_on_a_gpu_ends_where_the_emulated_count_does(name: str) -> None:
    call, expected = COUNTING[name]
    zero, index, ones = torch.zeros(2).half(), torch.zeros(6004, dtype=torch.long), torch.ones(6004).half()
    assert float(call(zero.cuda(), index.cuda(), ones.cuda())[0]) == expected
