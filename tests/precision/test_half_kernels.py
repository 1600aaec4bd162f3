"""The emulated half kernels round where a GPU's do: against the CPU's native half kernels and float64."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ampdbg.precision.half_kernels import EMULATED, find_op, half_kernels
from ampdbg.precision.half_kernels import ran as half_kernels_that_ran
from tests.precision.closeness import same_overflow, share_close
from tests.precision.half_cases import CASES, HalfCase, all_results, exact_results

NATIVE_SHARE = 0.98
EXACT_SHARE = 0.99


def named(cases: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def emulated(case: HalfCase, scale: float = 1.0) -> list[Tensor]:
    with half_kernels():
        return all_results(case.call, case.operands(scale))


def native(case: HalfCase, scale: float = 1.0) -> list[Tensor]:
    """The CPU's own results; where a build of torch has no half kernel for them, what they are held against."""
    try:
        return all_results(case.call, case.operands(scale))
    except RuntimeError as error:
        if "not implemented for 'Half'" in str(error):
            return exact_results(case, scale)
        raise


def agrees(ours: Tensor, cpu: Tensor, exact: Tensor) -> bool:
    """Ours is the CPU's result; or the CPU's kernel is the one that float64 contradicts.

    Native kernels without FP16 instructions scatter a convolution's gradient in half and round the
    probabilities of attention, which costs them the last bits of every tenth element.
    """
    if share_close(ours, cpu) >= NATIVE_SHARE:
        return True
    return share_close(ours, exact) >= EXACT_SHARE > share_close(cpu, exact)


@named(CASES)
def test_outputs_and_gradients_are_those_of_native_half_kernels_and_exact_where_rounded_once(case: HalfCase) -> None:
    for ours, cpu, exact in zip(emulated(case), native(case), exact_results(case), strict=True):
        assert ours.dtype is torch.float16
        assert agrees(ours, cpu, exact)
        assert not case.rounds_once or share_close(ours, exact) >= EXACT_SHARE


@named([case for case in CASES if case.loud])
def test_the_same_elements_overflow_as_natively_and_as_the_exact_values_where_rounded_once(case: HalfCase) -> None:
    ours, cpu, exact = emulated(case, case.loud), native(case, case.loud), exact_results(case, case.loud)
    assert any(tensor.isinf().any() for tensor in ours)
    for one, other, truth in zip(ours, cpu, exact, strict=True):
        assert agrees(one, other, truth)
        # A native kernel that adds in half on the way overflows where the sum does not.
        assert same_overflow(one, other) or (same_overflow(one, truth) and not same_overflow(other, truth))
        assert not case.rounds_once or same_overflow(one, truth)


def test_every_emulated_op_is_one_that_this_torch_has() -> None:
    assert [name for name in EMULATED if find_op(name) is None] == []


def half(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).half()


Make = Callable[..., Tensor]
"""Makes an operand of a shape: :func:`half`, or :func:`wide` with the same values."""


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
def test_an_op_that_writes_gives_the_values_of_float32_rounded(write: Callable[[Make], Tensor]) -> None:
    with half_kernels():
        written = write(half)
    assert written.dtype is torch.float16
    assert torch.equal(written, write(wide).half())


def test_every_emulated_op_that_writes_is_checked() -> None:
    ops = {name: find_op(name) for name in EMULATED}
    writing = {name for name, op in ops.items() if op is not None and op._schema.is_mutable}
    assert writing == {name.split(",")[0] for name in WRITING}


def test_an_op_in_place_writes_into_the_very_tensor_and_bumps_its_version() -> None:
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
def test_a_mistake_raises_what_torch_raises(call: Callable[[], Tensor]) -> None:
    with pytest.raises(RuntimeError) as native_error:
        call()
    with half_kernels(), pytest.raises(RuntimeError) as our_error:
        call()
    assert str(our_error.value) == str(native_error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_other_dtypes_are_left_alone_bit_for_bit(dtype: torch.dtype) -> None:
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
    """A step of a small half model: the ops that ran, the dtypes that were saved, the autograd node."""
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


def test_the_emulation_is_invisible_to_dispatch_modes_and_to_autograd() -> None:
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
"""How far from the rounded value an element of about 1 may be: rrelu's gradient is by noise that was rounded,
and a recurrent layer rounds each gate and state. The others are rounded once."""


@pytest.mark.parametrize("name", ONLY_ON_CUDA)
def test_ops_that_only_cuda_has_in_half_give_the_values_and_gradients_of_float32_rounded(name: str) -> None:
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


def test_limits_that_half_holds_are_left_to_the_cpu() -> None:
    with half_kernels():
        torch.stack((half(64).clamp(-1, 65504), F.relu6(half(64))))
        assert not half_kernels_that_ran
        half(64).clamp(-1, 65505)
        assert half_kernels_that_ran == {"clamp"}


def test_no_tensor_outlives_its_step() -> None:
    def live() -> int:
        gc.collect()
        # type(), since isinstance() asks lazy modules for their __class__ and so loads them.
        return sum(issubclass(type(item), Tensor) for item in gc.get_objects())

    with half_kernels():
        traced()
        before = live()
        traced()
        assert live() <= before  # what other tests have left may go meanwhile
