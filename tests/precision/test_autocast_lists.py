"""Each op of PyTorch's own CUDA autocast tests gives CUDA's dtype on a CPU (torch.testing._internal)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.autocast_test_lists import AutocastTestLists

from ampdbg.precision.autocast_policy import BANNED, BUILT_IN, FP32_APPEND_DTYPE, installed_lists, lists_of_header
from ampdbg.precision.emulation import cuda_on_cpu
from ampdbg.precision.half_kernels import find_op

UNRUNNABLE = {
    "cudnn_convolution": "its only kernel is cuDNN's",
    "cudnn_convolution_transpose": "its only kernel is cuDNN's",
}
"""Entries that no CPU can run, and why."""

NOT_CALLED_BY_PYTORCH = {
    "einsum": "a third element that is true means 'skip' to PyTorch's test; here it is the operands, of wrong shapes"
}
"""Entries that PyTorch's test leaves out too. They have their own test below."""

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
        """The callables of the op: ``module.op`` and ``Tensor.op``."""
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
    """The same arguments, with each floating-point tensor a leaf that requires grad."""
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
def test_an_op_returns_the_dtype_of_cuda_and_gradients_in_the_dtype_of_inputs(entry: Entry) -> None:
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
def test_einsum_runs_in_float16(terms: str) -> None:
    operands = [torch.randn([3] * len(term)) for term in terms.split(",")]
    with cuda_on_cpu(), cuda_autocast():
        assert torch.einsum(f"{terms}->", *operands).dtype is torch.float16


def test_banned_ops_raise_the_message_of_cuda() -> None:
    for op, args, module in AutocastTestLists("cpu").banned:
        with cuda_on_cpu(), cuda_autocast(), pytest.raises(RuntimeError, match="unsafe to autocast"):
            getattr(module, op)(*args)
        assert getattr(module, op)(*args).isfinite().all()


HALF, BFLOAT16, FLOAT32, FLOAT64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
MATRIX = torch.randn(4, 4)


def promoted(*operands: torch.dtype) -> torch.Tensor:
    return torch.addcmul(*[torch.ones(2, dtype=dtype) for dtype in operands])


def off(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return make()


RESULTS: dict[str, tuple[Callable[[], torch.Tensor], torch.dtype]] = {
    "float64 in a product": (lambda: MATRIX.double() @ MATRIX.double(), FLOAT64),
    "float64 in an exponential": (MATRIX.double().exp, FLOAT64),
    "float64 in a sum": (MATRIX.double().sum, FLOAT64),
    "an explicit dtype of a sum": (lambda: MATRIX.half().sum(dtype=HALF), HALF),
    "an explicit dtype of a softmax": (lambda: MATRIX.half().softmax(0, dtype=FLOAT64), FLOAT64),
    "a product where autocast is off": (lambda: off(lambda: MATRIX @ MATRIX), FLOAT32),
    "an exponential where autocast is off": (lambda: off(MATRIX.half().exp), HALF),
    # A promoting op accepts any dtype after a float32, and before it only the dtype that autocast lowers to.
    "three halves": (lambda: promoted(HALF, HALF, HALF), HALF),
    "a float32 among halves": (lambda: promoted(HALF, FLOAT32, HALF), FLOAT32),
    "bfloat16 behind a float32": (lambda: promoted(FLOAT32, BFLOAT16, FLOAT32), FLOAT32),
    "bfloat16 behind half and a float32": (lambda: promoted(HALF, FLOAT32, BFLOAT16), FLOAT32),
}


@pytest.mark.parametrize("name", RESULTS)
def test_the_emulation_returns_the_dtype_of_cuda_for(name: str) -> None:
    make, dtype = RESULTS[name]
    with cuda_on_cpu(), cuda_autocast():
        assert make().dtype is dtype


@pytest.mark.parametrize("operands", [(BFLOAT16, FLOAT32, FLOAT32), (HALF, BFLOAT16, FLOAT32)])
def test_a_promoting_op_refuses_bfloat16_before_float32(operands: tuple[torch.dtype, ...]) -> None:
    with cuda_on_cpu(), cuda_autocast(), pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
        promoted(*operands)


def test_bfloat16_autocast_follows_the_lists_of_float16() -> None:
    with cuda_on_cpu(), torch.autocast("cpu", dtype=BFLOAT16):
        product = MATRIX @ MATRIX
        assert product.dtype is BFLOAT16
        assert {product.exp().dtype, product.sum().dtype, product.softmax(0).dtype} == {FLOAT32}


TORCH = Path(torch.__file__).parent
HEADER = TORCH / "include" / "ATen" / "autocast_mode.h"
TABLE_MADE_FROM = (2, 13)

has_header = pytest.mark.skipif(not HEADER.exists(), reason="this build of torch ships no headers")


@has_header
def test_the_autocast_lists_are_read_from_the_installed_header() -> None:
    lists = installed_lists(TORCH)
    assert lists is not BUILT_IN
    assert {"linear", "mm", "conv2d", "einsum"} <= lists["LOWER_PRECISION_FP"]
    assert {"exp", "layer_norm", "pow.Tensor_Scalar"} <= lists["FP32"]
    assert {"softmax.int", "sum.dim_IntList"} <= lists["FP32_SET_OPT_DTYPE"]
    assert {"addcmul", "index_put"} <= lists["PROMOTE"]
    assert sum(map(len, lists.values())) == len(frozenset().union(*lists.values())), "an op stands in two lists"


def test_every_listed_or_hand_registered_op_exists() -> None:
    listed = frozenset().union(*installed_lists(TORCH).values())
    by_hand = [*FP32_APPEND_DTYPE, *FP32_APPEND_DTYPE.values(), *BANNED]
    assert [name for name in (*sorted(listed), *by_hand) if find_op(name) is None] == []


@has_header
@pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) != TABLE_MADE_FROM,
    reason="the built-in table is that of torch 2.13",
)
def test_the_built_in_table_equals_the_header_of_its_torch() -> None:
    assert installed_lists(TORCH) == BUILT_IN


MINIATURE = r"""
#define AT_FORALL_LOWER_PRECISION_FP(_) \
  _(mm)                                 \
  _(conv_transpose2d, input)

#define AT_FORALL_FP32(_) \
  _(exp)                  \
  _(pow, Tensor_Scalar)

#define AT_FORALL_FP32_SET_OPT_DTYPE(_) \
  _(sum)

#define AT_FORALL_PROMOTE(_) _(dot)
"""


def test_an_entry_with_an_overload_is_named_with_a_dot() -> None:
    lists = lists_of_header(MINIATURE)
    assert dict(lists or {}) == {
        "LOWER_PRECISION_FP": {"mm", "conv_transpose2d.input"},
        "FP32": {"exp", "pow.Tensor_Scalar"},
        "FP32_SET_OPT_DTYPE": {"sum"},
        "PROMOTE": {"dot"},
    }


@pytest.mark.parametrize("text", [None, "#pragma once\n", MINIATURE.replace("AT_FORALL_PROMOTE", "AT_FORALL_WIDEST")])
def test_the_built_in_table_is_used_without_a_readable_header(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        header = tmp_path / "include" / "ATen" / "autocast_mode.h"
        header.parent.mkdir(parents=True)
        header.write_text(text, encoding="utf-8")
    assert installed_lists(tmp_path) is BUILT_IN
