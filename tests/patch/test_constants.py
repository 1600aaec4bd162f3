"""Constants limited to the range of half: the edit of a line, and the unchanged result in FP32."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ampdbg.patch.constants import edit_constants

# Each line before and after the edit: ``<<before -> after>>``.
MARKED = {
    "masked_fill": "x = x.masked_fill(m, <<-1e9 -> torch.finfo(x.dtype).min>>)",
    "masked_fill by name": "x = x.masked_fill(m, value=<<-1e9 -> torch.finfo(x.dtype).min>>)",
    "masked_fill_": "x.masked_fill_(m, <<-10**9 -> torch.finfo(x.dtype).min>>)",
    "a text": 'x = x.masked_fill(m, <<float("-1e20") -> torch.finfo(x.dtype).min>>)',
    "a product is filled": "x = (x @ y).masked_fill(m, <<-1e9 -> torch.finfo(x.dtype).min>>)",
    "upwards": "x = x.masked_fill(m, <<1e9 -> torch.finfo(x.dtype).max>>)",
    "an attribute": "x = x.masked_fill(m, <<self.fill -> max(self.fill, torch.finfo(x.dtype).min)>>)",
    "a choice": "x = x.masked_fill(m, << -> max(>>-1e9 if self.training else -1e4<< -> , torch.finfo(x.dtype).min)>>)",
    "an item": 'x = x.masked_fill(m, <<FILLS["mask"] -> max(FILLS["mask"], torch.finfo(x.dtype).min)>>)',
    "the lowest of FP32": "x = x.masked_fill(m, torch.finfo(<<torch.float32 -> x.dtype>>).min)",
    "the lowest of FP32, multiplied": (
        "x = x + (1.0 - y) * <<torch.finfo(torch.float).min -> (torch.finfo(y.dtype).min / 2)>>"
    ),
    "where": "x = torch.where(m, x, <<-1e9 -> torch.finfo(x.dtype).min>>)",
    "where, of a tensor": "x = torch.where(m, x, torch.tensor(<<-1e9 -> torch.finfo(x.dtype).min>>))",
    "a tensor of its own": "x = torch.where(m, x, torch.tensor(<<-1e9 -> torch.finfo(x.dtype).min>>, dtype=x.dtype))",
    "a full tensor": "x = x + torch.full((4,), <<-1e9 -> torch.finfo(x.dtype).min>>, dtype=x.dtype) * m",
    "new_tensor": "x = x.new_tensor(<<-1e9 -> torch.finfo(x.dtype).min>>)",
    "an index": "x[m] = <<-1e9 -> torch.finfo(x.dtype).min>>",
    "full_like": "x = torch.full_like(y, <<-1e9 -> torch.finfo(y.dtype).min>>)",
    "multiplied": "x = x + (1.0 - y) * <<-1e9 -> (torch.finfo(y.dtype).min / 2)>>",
    "taken away": "x = x - <<1e9 -> (torch.finfo(y.dtype).max / 2)>> * (1.0 - y)",
    "a mask that is cast": (
        "x = x + ((1.0 - m.float()) * -1e9)<< -> .clamp(min=torch.finfo(x.dtype).min / 2)>>.type_as(x)"
    ),
    "a mask by name that is cast": "x = x + m<< -> .clamp(min=torch.finfo(x.dtype).min / 2)>>.to(x.dtype)",
    "an attribute that is cast": "x = x + self.bias[0]<< -> .clamp(min=torch.finfo(torch.float16).min / 2)>>.half()",
    "filled and cast": "x = (x @ y).masked_fill(m, <<-1e9 -> torch.finfo(x.dtype).min>>).to(x.dtype)",
    "an eps": "x = x / (x.norm() + <<1e-8 -> max(1e-8, torch.finfo(x.dtype).tiny)>>)",
    "a named eps": "x = x / (x.norm() + <<self.eps -> max(self.eps, torch.finfo(x.dtype).tiny)>>)",
    "a least value": "x = x / x.norm().clamp(min=<<1e-12 -> max(1e-12, torch.finfo(x.dtype).tiny)>>)",
    "a greatest value": (
        "x = torch.log(1 - x.sigmoid().clamp(1e-4, <<1 - 1e-4 -> min(1 - 1e-4, 1 - torch.finfo(x.dtype).eps)>>))"
    ),
    "a greatest value by name": (
        "x = torch.clamp(x.sigmoid(), min=1e-4, max=1 - <<self.eps -> max(self.eps, torch.finfo(x.dtype).eps)>>)"
    ),
    "a least value by torch": "x = x / torch.clamp(x.norm(), min=<<1e-12 -> max(1e-12, torch.finfo(x.dtype).tiny)>>)",
    "a logarithm": "x = torch.log(x + <<1e-10 -> max(1e-10, torch.finfo(x.dtype).tiny)>>)",
}
EDITS = {name: [re.sub(r"<<(.*?) -> (.*?)>>", part, line) for part in (r"\1", r"\2")] for name, line in MARKED.items()}


def source(line: str) -> str:
    return f"import torch\n\n\ndef forward(self, x, y, m):\n    {line}  # kept\n    return x\n"


@pytest.mark.parametrize("name", EDITS)
def test_a_constant_that_half_cannot_hold_is_edited_to_fit_the_dtype(name: str) -> None:
    before, after = EDITS[name]
    edited = edit_constants(source(before).encode(), [5], ("x", "y"))
    assert edited.source.decode() == source(after)
    assert edited.refused == ()


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
        "x = torch.log((1 - x).clamp(min=1e-8))",
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
def test_a_line_without_a_constant_to_limit_is_unchanged_and_refused(line: str) -> None:
    edited = edit_constants(source(line).encode(), [5], ("x", "y"))
    assert edited.source.decode() == source(line)
    assert [one.line for one in edited.refused] == [5]


def test_constants_on_several_lines_are_edited_in_one_call() -> None:
    text = source("x = x.masked_fill(m, -1e9)\n    y = y.masked_fill(m, -1e9)")
    edited = edit_constants(text.replace("import torch", "import math").encode(), [5, 6], ("x", "y"))
    assert edited.source.count(b"torch.finfo") == 2


@pytest.mark.parametrize(
    ("imported", "number"),
    [
        ("import numpy as np", "np.finfo(np.float32).min"),
        ("from numpy import finfo, float32", "float(finfo(float32).min)"),
        ("from torch import finfo", "-finfo(torch.bfloat16).max"),
    ],
)
def test_finfo_limits_are_recognized_under_every_imported_name(imported: str, number: str) -> None:
    before = source(f"x = x.masked_fill(m, {number})").replace("import torch\n", f"import torch; {imported}\n", 1)
    edited = edit_constants(before.encode(), [5], ("x", "y"))
    assert edited.source.decode() == before.replace(number, "torch.finfo(x.dtype).min")


def test_the_edit_uses_the_alias_of_torch_or_imports_torch_or_is_refused() -> None:
    text = source(EDITS["masked_fill"][0]).replace("import torch", "import torch as th")
    assert "th.finfo(x.dtype).min" in edit_constants(text.encode(), [5]).source.decode()
    hidden = source(EDITS["masked_fill"][0]).replace("import torch\n", "torch = None\n")
    (refused,) = edit_constants(hidden.encode(), [5]).refused
    assert "means something else" in refused.reason
    missing = source(EDITS["masked_fill"][0]).replace("import torch\n", "import math\n")
    assert edit_constants(missing.encode(), [5]).source.decode().startswith("import math\n\nimport torch\n")


@pytest.mark.parametrize(
    "name",
    ["masked_fill", "multiplied", "taken away", "a mask that is cast", "an eps", "a least value", "a greatest value"],
)
def test_an_edited_constant_leaves_the_fp32_result_unchanged(name: str) -> None:
    x = torch.linspace(-2.0, 2.0, 12).reshape(3, 4)
    y = torch.tensor([[1.0, 0.0, 1.0, 1.0]]).expand(3, 4)
    results = [forward(None, x.clone(), y, x > 1.0).softmax(dim=-1) for forward in map(forward_of, EDITS[name])]
    assert torch.equal(*results)


def forward_of(line: str) -> Callable[..., torch.Tensor]:
    scope: dict[str, Any] = {}
    exec(source(line), scope)
    return scope["forward"]


def test_an_edited_upper_clamp_keeps_a_logarithm_finite_in_half() -> None:
    x = torch.full((2,), 12.0, dtype=torch.float16)
    forwards = map(forward_of, EDITS["a greatest value"])
    assert [bool(forward(None, x, None, None).isfinite().all()) for forward in forwards] == [False, True]
