"""An eps that float16 rounds to zero, added to a certainly half tensor, in a divisor, logarithm or root."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampdbg.formats import FLOAT16
from ampdbg.lint.facts import Facts
from ampdbg.lint.rule import Rule, RuleHit
from ampdbg.source.expressions import argument, given, method, number

CODE = "eps-underflow"
MESSAGE = "{value} is zero in this tensor's float16, so nothing keeps the {what} from zero"

PRODUCTS = frozenset(
    f"torch.{name}" for name in "matmul mm bmm einsum addmm baddbmm nn.functional.linear nn.functional.conv1d "
    "nn.functional.conv2d nn.functional.conv3d".split()
)  # fmt: skip
"""Functions that float16's autocast always computes in half."""
PRODUCT_MODULES = frozenset(f"torch.nn.{name}" for name in ("Linear", "Conv1d", "Conv2d", "Conv3d"))
KEEPS_DTYPE = frozenset("relu sigmoid tanh abs neg view reshape transpose permute squeeze unsqueeze contiguous t clone "
                        "flatten chunk detach mul div add sub amax amin max min".split())  # fmt: skip
"""Methods that keep the dtype of the tensor that they are called on, under autocast too."""
OF_A_DIVISOR = {"log": "logarithm's argument", "log2": "logarithm's argument", "log10": "logarithm's argument"} | {
    "rsqrt": "root's argument",
    "reciprocal": "divisor",
}


def check(facts: Facts) -> Iterator[RuleHit]:
    """Check ``a / (x + 1e-8)``, ``torch.log(x + 1e-8)``, ``x.clamp(min=1e-8).log()`` of a half ``x``."""
    document = facts.document
    for sum_ in document.find(ast.BinOp):
        if isinstance(sum_.op, ast.Add):
            for tensor, eps in ((sum_.left, sum_.right), (sum_.right, sum_.left)):
                yield from _hit(facts, sum_, tensor, eps)
    for call in document.calls:
        owner = method(call, "clamp", "clamp_min", "clip")
        if owner is not None and (least := argument(call, "min", 0)) is not None:
            yield from _hit(facts, call, owner, least)


def _hit(facts: Facts, node: ast.expr, tensor: ast.expr, eps: ast.expr) -> Iterator[RuleHit]:
    is_lost = 0.0 < (number(eps) or 0.0) <= FLOAT16.underflow_threshold
    what = _use(facts, node) if is_lost else ""
    if what and is_half(facts, tensor):
        yield RuleHit(CODE, node, MESSAGE.format(value=facts.document.source(eps), what=what))


def _use(facts: Facts, node: ast.expr) -> str:
    """Return the use of the sum: the right side of a division, or the argument of a logarithm or root; else ""."""
    match facts.document.parents[node]:
        case ast.BinOp(op=ast.Div(), right=divisor) if divisor is node:
            return "divisor"
        case ast.Attribute(attr=name):
            return OF_A_DIVISOR.get(name, "")
        case ast.Call(args=[first, *_]) as call if first is node:
            library, _, name = facts.document.call_origin(call).rpartition(".")
            return OF_A_DIVISOR.get(name, "") if library == "torch" else ""
    return ""


def is_half(facts: Facts, node: ast.AST | None, depth: int = 4) -> bool:
    """True if an expression is certainly a float16 tensor: cast to it, or a product under its autocast."""
    document = facts.document
    if not depth:
        return False
    if isinstance(node, ast.Name):
        return is_half(facts, document.last_value(node), depth - 1)
    if not isinstance(node, ast.Call):
        return False
    if method(node, "half") is not None and not node.args:
        return True
    if method(node, "to") is not None:
        return any(facts.dtype(one) == "float16" for one in given(node))
    is_module = facts.modules.get(document.key(node.func)) in PRODUCT_MODULES
    if facts.runs_in_half(node) and (is_module or document.call_origin(node) in PRODUCTS):
        return True
    owner = method(node, *KEEPS_DTYPE)
    return all(number(one) is not None for one in node.args) and is_half(facts, owner, depth - 1)


RULE = Rule(
    (CODE,),
    ("autocast|.half()|float16", "e-|E-|0.0000000"),
    check,
    invalid=(
        """
import torch
from torch import nn

def norm(x):
    x = x.half()
    return x / (x + 1e-8)  # <- eps-underflow

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        p = self.fc(x).sigmoid()
        return torch.log(p + 1e-12)  # <- eps-underflow

def train(x, scaler):
    head = Head().cuda()
    with torch.autocast("cuda"):
        loss = head(x).mean()
    scaler.scale(loss).backward()
""",
    ),
    valid=(
        """
def of_any_dtype(x):
    return x / (x + 1e-8)

def in_float32(x):
    x = x.half()
    return x.float() / (x.float() + 1e-8)

def within_half(x):
    x = x.half()
    return x / (x + 1e-6)
""",
    ),
    pattern=r"\d[eE]-0?(?:[89]|[1-9]\d)|0\.0000000",
)
