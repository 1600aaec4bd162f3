"""Custom autograd functions and nested regions of autocast, as "Automatic Mixed Precision examples" has them.

What else is promised of custom functions stands in tests/precision/test_code_for_cuda.py and tests/zoo_misuse, of the
cache of weights in tests/precision/test_weight_cache.py.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
import torch

from ampdbg.errors import UserCodeError
from ampdbg.precision.emulation import cuda_on_cpu
from tests.promises.scanned import scanned

FUNCTION = """
import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd

class Square(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, gradient):
        [x] = ctx.saved_tensors
        return 2 * x * gradient

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        nn.init.constant_(self.body.bias, 300.0)

    def forward(self, x):
        return Square.apply(self.body(x))

def data():
    return list(torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(1)))

def step(model, batch):
    return model(batch).float().mean() * 1e-4
"""


def test_a_function_whose_inputs_are_cast_to_float32_does_not_overflow(tmp_path: Path) -> None:
    cast = scanned(tmp_path, FUNCTION, train={"steps": 4})
    assert (cast.verdict, cast.findings) == ("healthy", ())
    bare = scanned(tmp_path, re.sub("    @custom_.*\n", "", FUNCTION), train={"steps": 4})
    assert (bare.findings[0].code, bare.findings[0].op) == ("forward-overflow", "aten.mul.Tensor")
    assert bare.findings[0].source is not None
    assert (bare.findings[0].source.text, bare.findings[0].source.function) == ("return x * x", "forward")


REGION = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        nn.init.constant_(self.first.bias, 25000.0)
        nn.init.constant_(self.second.weight, 1.0)

    def forward(self, x):
        large = self.first(x)
        with REGION:
            total = self.second(LARGE)
        return total.float()

def data():
    return list(torch.rand(4, 8, 4, generator=torch.Generator().manual_seed(1)))

def step(model, batch):
    return model(batch).mean() * 1e-6
"""
OFF, ON = 'torch.autocast("cuda", enabled=False)', 'torch.autocast("cuda")'

REGIONS: dict[str, tuple[str, str, str]] = {
    "the same again": (ON, "large", "forward-overflow"),
    "off": (OFF, "large.float()", "healthy"),
    "off, and on again inside": (f"{OFF}, {ON}", "large.float()", "forward-overflow"),
    "bfloat16": ('torch.autocast("cuda", dtype=torch.bfloat16)', "large", "healthy"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REGIONS)
def test_the_innermost_region_decides_how_an_op_computes(name: str, tmp_path: Path) -> None:
    region, large, outcome = REGIONS[name]
    code = REGION.replace("REGION", region).replace("LARGE", large)
    record = scanned(tmp_path, code, precision={"loss_scale": {"init": 1024.0}}, train={"steps": 3})
    if outcome == "healthy":
        assert (record.verdict, record.findings) == ("healthy", ())
    else:
        assert (record.findings[0].code, record.findings[0].module) == (outcome, "second")


def test_a_region_that_is_off_needs_its_inputs_cast(tmp_path: Path) -> None:
    code = REGION.replace("REGION", OFF).replace("LARGE", "large")
    with pytest.raises(UserCodeError, match="same dtype") as raised:
        scanned(tmp_path, code, train={"steps": 3})
    assert "as with x.float()" in str(raised.value)
    assert "total = self.second(large)" in raised.value.user_traceback


def dtypes_in_nested_regions(device: str, *, caches: bool) -> list[torch.dtype]:
    """Of one weight's products in a region, in one of another dtype inside of it, and in the first again."""
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(2, 4)
    with torch.autocast(device, dtype=torch.float16, cache_enabled=caches):
        first = x @ weight
        with torch.autocast(device, dtype=torch.bfloat16, cache_enabled=caches):
            second = x @ weight
        return [first.dtype, second.dtype, (x @ weight).dtype]


def test_a_weight_that_an_outer_region_has_cast_is_of_no_use_in_another_dtype() -> None:
    """CUDA keeps a region's copies for those inside of it, whatever their dtype; so does the CPU's own autocast."""
    for emulated, device in ((contextlib.nullcontext, "cpu"), (cuda_on_cpu, "cuda")):
        with emulated(), pytest.raises(RuntimeError, match=r"same dtype.*BFloat16 != c10::Half"):
            dtypes_in_nested_regions(device, caches=True)
    with cuda_on_cpu():
        half, bfloat16 = torch.float16, torch.bfloat16
        assert dtypes_in_nested_regions("cuda", caches=False) == [half, bfloat16, half]


def test_regions_are_left_as_they_were_found_when_the_code_inside_raises() -> None:
    x = torch.randn(2, 2)
    with cuda_on_cpu(), torch.autocast("cuda"):
        for region in (torch.autocast("cuda", enabled=False), torch.autocast("cuda", dtype=torch.bfloat16)):
            with pytest.raises(ZeroDivisionError), region:
                raise ZeroDivisionError
            assert (x @ x).dtype is torch.float16
    assert (x @ x).dtype is torch.float32
