"""Constants kept within the range of half: the edit, and that FP32 computes what it did."""

from __future__ import annotations

import pytest
import torch

from ampdbg.patch.constants import edit_constants

EDITS = {
    "masked_fill": ("x = x.masked_fill(m, -1e9)", "x = x.masked_fill(m, torch.finfo(x.dtype).min)"),
    "masked_fill by name": ("x = x.masked_fill(m, value=-1e9)", "x = x.masked_fill(m, value=torch.finfo(x.dtype).min)"),
    "masked_fill_": ("x.masked_fill_(m, -10**9)", "x.masked_fill_(m, torch.finfo(x.dtype).min)"),
    "a text": ('x = x.masked_fill(m, float("-1e20"))', "x = x.masked_fill(m, torch.finfo(x.dtype).min)"),
    "a product is filled": (
        "x = (x @ y).masked_fill(m, -1e9)",
        "x = (x @ y).masked_fill(m, torch.finfo(x.dtype).min)",
    ),
    "upwards": ("x = x.masked_fill(m, 1e9)", "x = x.masked_fill(m, torch.finfo(x.dtype).max)"),
    "an attribute": (
        "x = x.masked_fill(m, self.fill)",
        "x = x.masked_fill(m, max(self.fill, torch.finfo(x.dtype).min))",
    ),
    "a choice": (
        "x = x.masked_fill(m, -1e9 if self.training else -1e4)",
        "x = x.masked_fill(m, max(-1e9 if self.training else -1e4, torch.finfo(x.dtype).min))",
    ),
    "an item": (
        'x = x.masked_fill(m, FILLS["mask"])',
        'x = x.masked_fill(m, max(FILLS["mask"], torch.finfo(x.dtype).min))',
    ),
    "the lowest of FP32": (
        "x = x.masked_fill(m, torch.finfo(torch.float32).min)",
        "x = x.masked_fill(m, torch.finfo(x.dtype).min)",
    ),
    "the lowest of FP32, multiplied": (
        "x = x + (1.0 - y) * torch.finfo(torch.float).min",
        "x = x + (1.0 - y) * (torch.finfo(y.dtype).min / 2)",
    ),
    "where": ("x = torch.where(m, x, -1e9)", "x = torch.where(m, x, torch.finfo(x.dtype).min)"),
    "where, of a tensor": (
        "x = torch.where(m, x, torch.tensor(-1e9))",
        "x = torch.where(m, x, torch.tensor(torch.finfo(x.dtype).min))",
    ),
    "a tensor of its own": (
        "x = torch.where(m, x, torch.tensor(-1e9, dtype=x.dtype))",
        "x = torch.where(m, x, torch.tensor(torch.finfo(x.dtype).min, dtype=x.dtype))",
    ),
    "a full tensor": (
        "x = x + torch.full((4,), -1e9, dtype=x.dtype) * m",
        "x = x + torch.full((4,), torch.finfo(x.dtype).min, dtype=x.dtype) * m",
    ),
    "new_tensor": ("x = x.new_tensor(-1e9)", "x = x.new_tensor(torch.finfo(x.dtype).min)"),
    "an index": ("x[m] = -1e9", "x[m] = torch.finfo(x.dtype).min"),
    "full_like": ("x = torch.full_like(y, -1e9)", "x = torch.full_like(y, torch.finfo(y.dtype).min)"),
    "multiplied": ("x = x + (1.0 - y) * -1e9", "x = x + (1.0 - y) * (torch.finfo(y.dtype).min / 2)"),
    "taken away": ("x = x - 1e9 * (1.0 - y)", "x = x - (torch.finfo(y.dtype).max / 2) * (1.0 - y)"),
    "a mask that is cast": (
        "x = x + ((1.0 - m.float()) * -1e9).type_as(x)",
        "x = x + ((1.0 - m.float()) * -1e9).clamp(min=torch.finfo(x.dtype).min / 2).type_as(x)",
    ),
    "a mask by name that is cast": (
        "x = x + m.to(x.dtype)",
        "x = x + m.clamp(min=torch.finfo(x.dtype).min / 2).to(x.dtype)",
    ),
    "an attribute that is cast": (
        "x = x + self.bias[0].half()",
        "x = x + self.bias[0].clamp(min=torch.finfo(torch.float16).min / 2).half()",
    ),
    "filled and cast": (
        "x = (x @ y).masked_fill(m, -1e9).to(x.dtype)",
        "x = (x @ y).masked_fill(m, torch.finfo(x.dtype).min).to(x.dtype)",
    ),
    "an eps": ("x = x / (x.norm() + 1e-8)", "x = x / (x.norm() + max(1e-8, torch.finfo(x.dtype).tiny))"),
    "a named eps": (
        "x = x / (x.norm() + self.eps)",
        "x = x / (x.norm() + max(self.eps, torch.finfo(x.dtype).tiny))",
    ),
    "a least value": (
        "x = x / x.norm().clamp(min=1e-12)",
        "x = x / x.norm().clamp(min=max(1e-12, torch.finfo(x.dtype).tiny))",
    ),
    "a greatest value": (
        "x = torch.log(1 - x.sigmoid().clamp(1e-4, 1 - 1e-4))",
        "x = torch.log(1 - x.sigmoid().clamp(1e-4, min(1 - 1e-4, 1 - torch.finfo(x.dtype).eps)))",
    ),
    "a greatest value by name": (
        "x = torch.clamp(x.sigmoid(), min=1e-4, max=1 - self.eps)",
        "x = torch.clamp(x.sigmoid(), min=1e-4, max=1 - max(self.eps, torch.finfo(x.dtype).eps))",
    ),
    "a least value by torch": (
        "x = x / torch.clamp(x.norm(), min=1e-12)",
        "x = x / torch.clamp(x.norm(), min=max(1e-12, torch.finfo(x.dtype).tiny))",
    ),
    "a logarithm": ("x = torch.log(x + 1e-10)", "x = torch.log(x + max(1e-10, torch.finfo(x.dtype).tiny))"),
}


def source(line: str) -> str:
    return f"import torch\n\n\ndef forward(self, x, y, m):\n    {line}  # kept\n    return x\n"


@pytest.mark.parametrize("name", EDITS)
def test_a_constant_is_kept_within_range(name: str) -> None:
    before, after = EDITS[name]
    edited = edit_constants(source(before).encode(), [5], ("x", "y"))
    assert edited.source.decode() == source(after)
    assert (edited.changed, edited.refused) == (True, ())


@pytest.mark.parametrize(
    "line",
    [
        "x = x.masked_fill(m, -1e4)",
        'x = x.masked_fill(m, float("-inf"))',
        'x[m] = float("-inf")',
        "x = x[torch.tensor(y, dtype=torch.long)]",
        "x = x * 1e-8",
        "x = x + 1e-6",
        "x = torch.log(1 - x + 1e-8)",
        "x = torch.log(1.0 - x + self.eps)",
        "x = x.clamp(0.0, 0.99)",
        "x = x.clamp(max=1.0)",
        "x = 2.0 * x + 1e5",
        "x = 2.0 * x - 1e5",
        "x = x.masked_fill(m, -1e9 if self.training else -math.inf)",
        "x = x.masked_fill(m, torch.finfo(x.dtype).min)",
        "x = x + (1.0 - y) * torch.finfo(torch.float16).min",
        "x = self.mask(x)",
        "x = x + m.to(x.device)",
        "x = x + y.to(x.dtype)",
    ],
)
def test_what_half_can_hold_or_is_meant_is_left_alone(line: str) -> None:
    edited = edit_constants(source(line).encode(), [5], ("x", "y"))
    assert edited.source.decode() == source(line)
    assert [one.line for one in edited.refused] == [5]


def test_several_lines_are_edited_at_once() -> None:
    text = source("x = x.masked_fill(m, -1e9)\n    y = y.masked_fill(m, -1e9)")
    edited = edit_constants(text.replace("import torch", "import math").encode(), [5, 6], ("x", "y"))
    assert edited.source.count(b"torch.finfo") == 2


def test_torch_goes_by_the_name_that_it_has() -> None:
    text = source(EDITS["masked_fill"][0]).replace("import torch", "import torch as th")
    assert "th.finfo(x.dtype).min" in edit_constants(text.encode(), [5]).source.decode()
    hidden = source(EDITS["masked_fill"][0]).replace("import torch\n", "torch = None\n")
    (refused,) = edit_constants(hidden.encode(), [5]).refused
    assert "stands for something else" in refused.reason
    missing = source(EDITS["masked_fill"][0]).replace("import torch\n", "import math\n")
    assert edit_constants(missing.encode(), [5]).source.decode().startswith("import math\n\nimport torch\n")


@pytest.mark.parametrize(
    "name",
    ["masked_fill", "multiplied", "taken away", "a mask that is cast", "an eps", "a least value", "a greatest value"],
)
def test_fp32_computes_what_it_did(name: str) -> None:
    results = []
    for line in EDITS[name]:
        scope: dict[str, object] = {}
        exec(source(line), scope)
        forward = scope["forward"]
        assert callable(forward)
        x = torch.linspace(-2.0, 2.0, 12).reshape(3, 4)
        y = torch.tensor([[1.0, 0.0, 1.0, 1.0]]).expand(3, 4)
        results.append(forward(None, x.clone(), y, x > 1.0).softmax(dim=-1))
    assert torch.equal(*results)


def test_a_greatest_value_leaves_a_logarithm_finite_in_half() -> None:
    finite = []
    for line in EDITS["a greatest value"]:
        scope: dict[str, object] = {}
        exec(source(line), scope)
        forward = scope["forward"]
        assert callable(forward)
        finite.append(bool(forward(None, torch.full((2,), 12.0, dtype=torch.float16), None, None).isfinite().all()))
    assert finite == [False, True]


def test_a_mask_that_is_told_by_its_value_is_left_alone() -> None:
    text = source("x = x.masked_fill(m, -1e9)").replace("return x\n", "return x * (x > -1e8)\n")
    (refused,) = edit_constants(text.encode(), [5], ("x",)).refused
    assert "compares with a number that half cannot hold" in refused.reason
