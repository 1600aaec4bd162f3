"""Binary cross-entropy of probabilities, which autocast refuses; a fix takes logits and drops the sigmoid."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampdbg.lint.facts import Facts
from ampdbg.lint.rule import Rule, RuleHit
from ampdbg.source.edits import Fix, replaced
from ampdbg.source.expressions import argument, takes_stars, unmoved

CODE = "misuse-bce"
FUNCTION, MODULE = "torch.nn.functional.binary_cross_entropy", "torch.nn.BCELoss"
SIGMOIDS = ("torch.sigmoid", "torch.nn.functional.sigmoid", "torch.special.expit")


def check(facts: Facts) -> Iterator[RuleHit]:
    """Check every call that certainly runs under half's autocast: ``criterion(p, y)``, ``nn.BCELoss()(p, y)``."""
    document = facts.document
    for call in document.calls:
        made = map(unmoved, document.values(call.func) or [call.func])
        is_module = all(document.call_origin(value) == MODULE for value in made)
        if not is_module and document.call_origin(call) != FUNCTION:
            continue
        region = facts.region(call)
        is_lowered = facts.runs_in_half(call)
        if region is not None:
            known = (region.device, region.enabled, region.dtype)
            is_lowered = known in (("cuda", True, "float16"), ("cuda", True, "bfloat16"))
        if is_lowered:
            yield RuleHit(CODE, call, fix=_fix(facts, call, is_module=is_module))


def _fix(facts: Facts, call: ast.Call, *, is_module: bool) -> Fix | None:
    """Return a fix for the function if the sigmoid is in the call itself: a criterion may be used elsewhere too."""
    document, given = facts.document, argument(call, "input", 0)
    logits = _of_sigmoid(facts, given) if given is not None and not takes_stars(call) else None
    # A function imported by its name would need another import.
    if given is None or logits is None or is_module or not isinstance(call.func, ast.Attribute):
        return None
    function = replaced(document, call.func, f"{document.source(call.func)}_with_logits")
    return Fix((replaced(document, given, document.source(logits)), function))


def _of_sigmoid(facts: Facts, node: ast.AST) -> ast.expr | None:
    """Return ``x`` of ``torch.sigmoid(x)`` and ``x.sigmoid()``."""
    match node:
        case ast.Call(args=[inner], keywords=[]) if facts.document.call_origin(node) in SIGMOIDS:
            return inner
        case ast.Call(func=ast.Attribute(attr="sigmoid", value=owner), args=[], keywords=[]):
            return owner
    return None


_IMPORTS = """
import torch
import torch.nn.functional as F
from torch import nn

criterion = nn.BCELoss()
"""

RULE = Rule(
    (CODE,),
    ("BCELoss|binary_cross_entropy", "autocast"),
    check,
    invalid=(
        _IMPORTS
        + """
def by_function(model, x, y):
    with torch.autocast("cuda"):
        return F.binary_cross_entropy(torch.sigmoid(model(x)), y)  # <- misuse-bce

def by_module(model, x, y):
    with torch.autocast("cuda"):
        p = model(x).sigmoid()
        return criterion(p, y)  # <- misuse-bce

class Net(nn.Module):
    def forward(self, x, y):
        return F.binary_cross_entropy(x, y)  # <- misuse-bce

def within_a_module(x, y):
    net = Net().cuda()
    with torch.autocast("cuda"):
        return net(x, y)
""",
    ),
    valid=(
        _IMPORTS
        + """
def behind_the_region(model, x, y):
    with torch.autocast("cuda"):
        logits = model(x)
    return criterion(torch.sigmoid(logits.float()), y)

def where_it_is_off(model, x, y):
    with torch.autocast("cuda"):
        logits = model(x)
        with torch.autocast("cuda", enabled=False):
            return F.binary_cross_entropy(torch.sigmoid(logits.float()), y)

def of_logits(model, x, y):
    with torch.autocast("cuda"):
        return F.binary_cross_entropy_with_logits(model(x), y)

def without_any(model, x, y):
    F.binary_cross_entropy(model(x).sigmoid(), y).backward()
""",
    ),
)
