"""The emulated half kernels round where a GPU's do: against the CPU's native half kernels and float64."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ampdbg.precision.half_kernels import EMULATED, find_op, half_kernels
from tests.precision.closeness import same_overflow, share_close
from tests.precision.half_cases import CASES, HalfCase, all_results, exact_results

NATIVE_SHARE = 0.98
EXACT_SHARE = 0.99

ROUNDS_ONCE = [case for case in CASES if case.rounds_once]
LOUD = [case for case in CASES if case.loud]


def named(cases: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def emulated(case: HalfCase, scale: float = 1.0) -> list[Tensor]:
    with half_kernels():
        return all_results(case.call, case.operands(scale))


def native(case: HalfCase, scale: float = 1.0) -> list[Tensor]:
    try:
        return all_results(case.call, case.operands(scale))
    except RuntimeError as error:
        if "not implemented for 'Half'" in str(error):
            pytest.skip(f"this CPU build of torch has no half kernel for {case.name}")
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
def test_outputs_and_gradients_are_those_of_native_half_kernels(case: HalfCase) -> None:
    for ours, cpu, exact in zip(emulated(case), native(case), exact_results(case), strict=True):
        assert ours.dtype is torch.float16
        assert agrees(ours, cpu, exact)


@named(ROUNDS_ONCE)
def test_outputs_and_gradients_are_the_exact_products_rounded_once(case: HalfCase) -> None:
    for ours, exact in zip(emulated(case), exact_results(case), strict=True):
        assert share_close(ours, exact) >= EXACT_SHARE


@named(LOUD)
def test_the_same_elements_overflow_as_natively(case: HalfCase) -> None:
    ours, cpu, exact = emulated(case, case.loud), native(case, case.loud), exact_results(case, case.loud)
    assert any(tensor.isinf().any() for tensor in ours)
    for one, other, truth in zip(ours, cpu, exact, strict=True):
        assert agrees(one, other, truth)
        # A native kernel that adds in half on the way overflows where the sum does not.
        assert same_overflow(one, other) or (same_overflow(one, truth) and not same_overflow(other, truth))


@named([case for case in ROUNDS_ONCE if case.loud])
def test_exactly_those_elements_overflow_whose_exact_value_does(case: HalfCase) -> None:
    for ours, exact in zip(emulated(case, case.loud), exact_results(case, case.loud), strict=True):
        assert same_overflow(ours, exact)


def test_every_emulated_op_is_one_that_this_torch_has() -> None:
    assert [name for name in EMULATED if find_op(name) is None] == []


def half(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).half()


IN_PLACE: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
    "addmm_": (lambda: half(4, 5).addmm_(half(4, 6), half(6, 5)), lambda: half(4, 5).addmm(half(4, 6), half(6, 5))),
    "addmv_": (lambda: half(4).addmv_(half(4, 6), half(6)), lambda: half(4).addmv(half(4, 6), half(6))),
    "baddbmm_": (
        lambda: half(2, 4, 5).baddbmm_(half(2, 4, 6), half(2, 6, 5), beta=0.5),
        lambda: half(2, 4, 5).baddbmm(half(2, 4, 6), half(2, 6, 5), beta=0.5),
    ),
    "mm.out": (lambda: torch.mm(half(4, 6), half(6, 5), out=half(4, 5)), lambda: half(4, 6) @ half(6, 5)),
    "mm.out, to be resized": (lambda: torch.mm(half(4, 6), half(6, 5), out=half(0)), lambda: half(4, 6) @ half(6, 5)),
    "mm.out, transposed": (
        lambda: torch.mm(half(4, 6), half(6, 5), out=half(5, 4).t()),
        lambda: half(4, 6) @ half(6, 5),
    ),
    "bmm.out": (
        lambda: torch.bmm(half(2, 4, 6), half(2, 6, 5), out=half(2, 4, 5)),
        lambda: half(2, 4, 6) @ half(2, 6, 5),
    ),
    "mv.out": (lambda: torch.mv(half(4, 6), half(6), out=half(4)), lambda: half(4, 6) @ half(6)),
    "dot.out": (lambda: torch.dot(half(6), half(6), out=half(1)[0]), lambda: half(6) @ half(6)),
    "addmm.out": (
        lambda: torch.addmm(half(4, 5), half(4, 6), half(6, 5), out=half(4, 5)),
        lambda: half(4, 5).addmm(half(4, 6), half(6, 5)),
    ),
}


@pytest.mark.parametrize(("write", "compute"), IN_PLACE.values(), ids=IN_PLACE.keys())
def test_what_is_written_in_place_is_what_the_functional_op_returns(
    write: Callable[[], Tensor], compute: Callable[[], Tensor]
) -> None:
    with half_kernels():
        written, computed = write(), compute()
    assert written.dtype is torch.float16
    assert torch.equal(written, computed)


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


class _Trace(TorchDispatchMode):
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

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), _Trace() as trace:
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


ONLY_ON_CUDA: dict[str, Callable[[Tensor], Tensor]] = {
    "avg_pool3d": lambda x: F.avg_pool3d(x.view(1, 1, 4, 4, 4), 2),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x.view(8, 8), torch.zeros(8, dtype=torch.long)),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x.view(8, 8), torch.zeros(8, 8, dtype=torch.long)),
    "lstm": lambda x: torch.nn.LSTM(8, 4).half()(x.view(8, 1, 8))[0],
}


@pytest.mark.parametrize("call", ONLY_ON_CUDA.values(), ids=ONLY_ON_CUDA.keys())
def test_ops_that_only_cuda_has_in_half_run_forward_and_backward(call: Callable[[Tensor], Tensor]) -> None:
    x = half(64).requires_grad_()
    with half_kernels():
        output = call(x)
        output.sum().backward()
    assert output.dtype is torch.float16
    assert x.grad is not None
    assert x.grad.dtype is torch.float16
    assert x.grad.isfinite().all()


def test_no_tensor_outlives_its_step() -> None:
    def live() -> int:
        gc.collect()
        # type(), since isinstance() asks lazy modules for their __class__ and so loads them.
        return sum(issubclass(type(item), Tensor) for item in gc.get_objects())

    with half_kernels():
        traced()
        before = live()
        traced()
        assert live() == before
