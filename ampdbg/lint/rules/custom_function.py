"""An autograd.Function that multiplies matrices, without custom_fwd and custom_bwd, applied under autocast."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from ampdbg.lint.facts import Facts
from ampdbg.lint.rule import Rule, RuleHit
from ampdbg.source.document import FUNCTIONS
from ampdbg.source.edits import Edit, Fix, above
from ampdbg.source.expressions import method

CODE = "misuse-custom-function"

FUNCTION = ("torch.autograd.Function", "torch.autograd.function.Function")
MULTIPLIES = frozenset("mm matmul bmm addmm baddbmm einsum linear bilinear conv1d conv2d conv3d addmv mv dot".split())
"""Ops that need operands of one dtype, and that autocast casts. The backward pass runs without autocast."""
DECORATORS = {"forward": 'custom_fwd(device_type="cuda")', "backward": 'custom_bwd(device_type="cuda")'}


def check(facts: Facts) -> Iterator[RuleHit]:
    """Check functions that multiply in both passes, applied under float16's autocast."""
    document = facts.document
    for function in document.find(ast.ClassDef):
        if not any(document.origin(base) in FUNCTION for base in function.bases):
            continue
        methods = {one.name: one for one in function.body if isinstance(one, FUNCTIONS)}
        passes = [methods[name] for name in DECORATORS if name in methods]
        owners = ((call, method(call, "apply")) for call in document.calls)
        applied = (call for call, one in owners if isinstance(one, ast.Name) and function in document.binders(one))
        if len(passes) == 2 and all(map(_mixes_dtypes, passes)) and any(map(facts.runs_in_half, applied)):
            yield RuleHit(CODE, function, fix=Fix(tuple(_decorated(facts, one) for one in passes), ("torch",)))


def _mixes_dtypes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True if the pass multiplies matrices, and no decorator sets the dtype."""
    if any(re.search("custom_|autocast", ast.unparse(one)) for one in function.decorator_list):
        return False
    return any(isinstance(node, ast.MatMult) or method(node, *MULTIPLIES) is not None for node in ast.walk(function))


def _decorated(facts: Facts, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Edit:
    """Return an edit that adds the decorator right above the function, below @staticmethod."""
    start, decorator = facts.document.offset(function.lineno, 0), DECORATORS[function.name]
    return replace(above(facts.document, function, f"@torch.amp.{decorator}"), start=start, end=start)


_CLASS = """
import torch

class Product(torch.autograd.Function):  # <- misuse-custom-function
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x
"""
_USE = """

def train(x, weight, scaler):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = Product.apply(x, weight).sum()
    scaler.scale(loss).backward()
"""

RULE = Rule(
    (CODE,),
    ("Function", "autocast", "ctx"),
    check,
    invalid=(_CLASS + _USE,),
    valid=(
        _CLASS.replace("  # <- misuse-custom-function", "") + _USE.replace("float16", "bfloat16, enabled=False"),
        _CLASS.replace("  # <- misuse-custom-function", "")
        .replace("def forward", '@torch.amp.custom_fwd(device_type="cuda")\n    def forward')
        .replace("def backward", '@torch.amp.custom_bwd(device_type="cuda")\n    def backward')
        + _USE,
        # A function that only returns its gradient has nothing to mix.
        """
import torch

class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient

def train(x, model):
    with torch.autocast("cuda"):
        return model(Reversed.apply(x))
""",
    ),
)
