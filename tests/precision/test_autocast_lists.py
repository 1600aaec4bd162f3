"""Each op of PyTorch's own CUDA autocast tests gives CUDA's dtype on a CPU (torch.testing._internal)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.testing._internal.autocast_test_lists import AutocastTestLists

from ampdbg.precision.emulation import cuda_on_cpu

UNRUNNABLE = {
    "cudnn_convolution": "its only kernel is cuDNN's",
    "cudnn_convolution_transpose": "its only kernel is cuDNN's",
}
"""Entries that no CPU can run, and why."""

NOT_CALLED_BY_PYTORCH = {
    "einsum": "a third element that is true means 'skip' to PyTorch's test; here it is the operands, of wrong shapes",
}
"""Entries that PyTorch's test leaves out too; they have a test of their own below."""

NON_DIFFERENTIABLE = frozenset("eq ge gt le lt ne __eq__ __ge__ __gt__ __le__ __lt__ __ne__ equal".split())

_LINALG: Any = getattr(torch._C, "_linalg")  # noqa: B009 - torch's type stubs leave it out
LISTS: tuple[tuple[str, Any, torch.dtype | None], ...] = (
    ("torch_fp16", torch, torch.float16),
    ("torch_fp32", torch, torch.float32),
    ("torch_need_autocast_promote", torch, torch.float32),
    ("torch_expect_builtin_promote", torch, None),
    ("methods_fp16", None, torch.float16),
    ("methods_fp32", None, torch.float32),
    ("methods_expect_builtin_promote", None, None),
    ("nn_fp16", torch._C._nn, torch.float16),
    ("nn_fp32", torch._C._nn, torch.float32),
    ("linalg_fp16", _LINALG, torch.float16),
)
"""A list of AutocastTestLists, the module of its ops, and the dtype it expects (None: each entry names its own)."""


@dataclass(frozen=True)
class Entry:
    """One entry of the lists; ``expected`` is the output's dtype on CUDA."""

    op: str
    args: tuple[Any, ...]
    expected: torch.dtype
    module: Any
    kwargs: dict[str, Any] = field(default_factory=dict)

    def spellings(self) -> Iterator[Any]:
        """What the op can be called as, with the arguments to give it: ``module.op`` and ``Tensor.op``."""
        for owner in (self.module, torch.Tensor):
            if owner is not None and hasattr(owner, self.op):
                yield getattr(owner, self.op)


def entries() -> Iterator[Entry]:
    torch.manual_seed(0)
    lists = AutocastTestLists("cpu")
    for name, module, dtype in LISTS:
        for op, args, *rest in getattr(lists, name):
            if op in NOT_CALLED_BY_PYTORCH:
                continue
            extra = rest[0] if rest else None
            expected = dtype or extra
            assert expected is not None
            yield Entry(op, args, expected, module, extra if isinstance(extra, dict) else {})


ENTRIES = tuple(entries())
RUNNABLE = [entry for entry in ENTRIES if entry.op not in UNRUNNABLE]


def cuda_autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.float16)


def differentiable(value: Any) -> Any:
    """The same arguments, each floating-point tensor a leaf that requires a gradient."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_() if value.is_floating_point() else value
    return type(value)(differentiable(item) for item in value) if isinstance(value, (list, tuple)) else value


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, (list, tuple)) else []


def unrunnable() -> Iterator[str]:
    for entry in ENTRIES:
        for call in entry.spellings():
            try:
                with cuda_autocast():
                    call(*entry.args, **entry.kwargs)
            except (RuntimeError, NotImplementedError):
                yield entry.op


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("entry", RUNNABLE, ids=lambda entry: entry.op)
def test_the_op_gives_the_dtype_it_gives_on_cuda_and_its_gradients_those_of_its_inputs(entry: Entry) -> None:
    calls = list(entry.spellings())
    assert calls, f"{entry.op} is found nowhere"
    with cuda_on_cpu():
        for call in calls:
            with cuda_autocast():
                outputs = leaves(call(*entry.args, **entry.kwargs))
            assert {output.dtype for output in outputs} <= {entry.expected}
            # `equal` alone gives a Python bool.
            assert outputs or entry.op == "equal"
            if entry.op in NON_DIFFERENTIABLE:
                continue
            args = differentiable(entry.args)
            with cuda_autocast():
                outputs = leaves(call(*args, **entry.kwargs))
            torch.autograd.backward([output.float().sum() for output in outputs])
            inputs = [leaf for leaf in leaves(args) if leaf.is_floating_point()]
            assert inputs
            assert all(leaf.grad is not None and leaf.grad.dtype is leaf.dtype for leaf in inputs)


def test_only_the_listed_ops_cannot_run_on_a_cpu() -> None:
    with cuda_on_cpu():
        assert set(unrunnable()) == set(UNRUNNABLE)


@pytest.mark.parametrize("terms", ["ij,jk", "bkhd,bqhd", "ij,jk,kl", "ii"])
def test_einsum_runs_in_half(terms: str) -> None:
    operands = [torch.randn([3] * len(term)) for term in terms.split(",")]
    with cuda_on_cpu(), cuda_autocast():
        assert torch.einsum(f"{terms}->", *operands).dtype is torch.float16


def test_the_banned_ops_raise_cudas_message() -> None:
    for op, args, module in AutocastTestLists("cpu").banned:
        with cuda_on_cpu(), cuda_autocast(), pytest.raises(RuntimeError, match="unsafe to autocast"):
            getattr(module, op)(*args)
        assert getattr(module, op)(*args).isfinite().all()


def test_autocast_that_is_disabled_inside_casts_nothing() -> None:
    matrix = torch.randn(4, 4)
    with cuda_on_cpu(), cuda_autocast(), torch.autocast("cpu", enabled=False):
        assert (matrix @ matrix).dtype is torch.float32
        assert matrix.half().exp().dtype is torch.float16


def test_float64_is_never_cast() -> None:
    matrix = torch.randn(4, 4, dtype=torch.float64)
    with cuda_on_cpu(), cuda_autocast():
        assert {(matrix @ matrix).dtype, matrix.exp().dtype, matrix.sum().dtype} == {torch.float64}


HALF, BFLOAT16, FLOAT32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("operands", "result"),
    [
        ((HALF, HALF, HALF), HALF),
        ((HALF, FLOAT32, HALF), FLOAT32),
        ((FLOAT32, BFLOAT16, FLOAT32), FLOAT32),
        ((HALF, FLOAT32, BFLOAT16), FLOAT32),
    ],
)
def test_an_op_that_promotes_takes_any_dtype_once_it_has_seen_a_float32(
    operands: tuple[torch.dtype, ...], result: torch.dtype
) -> None:
    with cuda_on_cpu(), cuda_autocast():
        assert torch.addcmul(*[torch.ones(2, dtype=dtype) for dtype in operands]).dtype is result


@pytest.mark.parametrize("operands", [(BFLOAT16, FLOAT32, FLOAT32), (HALF, BFLOAT16, FLOAT32)])
def test_before_a_float32_it_takes_only_what_autocast_lowers_to(operands: tuple[torch.dtype, ...]) -> None:
    with cuda_on_cpu(), cuda_autocast(), pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
        torch.addcmul(*[torch.ones(2, dtype=dtype) for dtype in operands])


def test_an_explicit_dtype_is_respected() -> None:
    half = torch.randn(4).half()
    with cuda_on_cpu(), cuda_autocast():
        assert half.sum(dtype=torch.float16).dtype is torch.float16
        assert half.softmax(0, dtype=torch.float64).dtype is torch.float64


def test_bfloat16_autocast_follows_the_same_lists() -> None:
    matrix = torch.randn(4, 4)
    with cuda_on_cpu(), torch.autocast("cpu", dtype=torch.bfloat16):
        product = matrix @ matrix
        assert product.dtype is torch.bfloat16
        assert {product.exp().dtype, product.sum().dtype, product.softmax(0).dtype} == {torch.float32}
