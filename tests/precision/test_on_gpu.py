"""The emulation against a real GPU, op by op: the same dtypes, overflows and values to the last bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ampdbg.precision.emulation import cuda_on_cpu
from tests.precision.half_cases import ATTENTION, CASES, RECURRENT, HalfCase, all_results, same_overflow, share_close

pytestmark = pytest.mark.gpu

SHARE = 0.98
SPLIT = "conv2d-1x1", "conv_transpose2d-groups-stride"
UNITS = {**{case.name: 16 for case in ATTENTION}, **dict.fromkeys(SPLIT, 16)}
"""One unit elsewhere. A GPU's fused attention rounds its probabilities to half, as the CPU's own half attention
does (98 % within 16 units of ours); cuDNN adds up the parts of some sums in half (97 % within one unit, 99.7 % within
16, on an H200)."""
LOUD = [case for case in CASES if case.loud and case not in RECURRENT]
"""A GPU's fused recurrent layers do not round their gates. With the weights of these cases a recurrence magnifies each
rounding, until no two implementations have the same numbers: of those only dtypes are compared."""


def under_autocast(call: Callable[..., Any], device: str) -> Callable[..., Any]:
    def run(*operands: Tensor) -> Any:
        with torch.autocast(device, dtype=torch.float16, cache_enabled=False):
            return call(*operands)

    return run


def operands_on(device: str, case: HalfCase, scale: float) -> list[Sequence[Tensor]]:
    """The case's operands in float32, as weights and inputs are in a user's model."""
    return [[tensor.float().to(device) for tensor in one] for one in case.operands(scale)]


def on_gpu(case: HalfCase, scale: float = 1.0) -> list[Tensor]:
    allowed = torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    try:
        results = all_results(under_autocast(case.call, "cuda"), iter(operands_on("cuda", case, scale)))
    finally:
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = allowed
    return [tensor.cpu() for tensor in results]


def on_cpu(case: HalfCase, scale: float = 1.0) -> list[Tensor]:
    with cuda_on_cpu():
        return all_results(under_autocast(case.call, "cpu"), iter(operands_on("cpu", case, scale)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outputs_and_gradients_are_those_of_a_gpu(case: HalfCase) -> None:
    # Gradients of float32 operands come from half ones, and lose nothing where units are counted in half.
    for ours, theirs in zip(on_cpu(case), on_gpu(case), strict=True):
        assert ours.dtype is theirs.dtype
        assert case in RECURRENT or share_close(ours.half(), theirs.half(), UNITS.get(case.name, 1)) >= SHARE


WITHOUT_CUDNN = "conv2d", "conv2d-dilated", "conv3d"
"""On an H200 the kernels that cuDNN 9.19 chooses for these give the bias alone where the sum is below -65504: what
overflows there is no infinity, and shows as a number far from FP32's. Other convolutions overflow as without it."""


@pytest.mark.parametrize("case", LOUD, ids=lambda case: case.name)
def test_the_same_elements_overflow_as_on_a_gpu(case: HalfCase) -> None:
    with torch.backends.cudnn.flags(enabled=case.name not in WITHOUT_CUDNN):
        there = on_gpu(case, case.loud)
    for ours, theirs in zip(on_cpu(case, case.loud), there, strict=True):
        assert same_overflow(ours.half(), theirs.half())
