"""Probabilities in binary cross-entropy under autocast, which refuses them; and a sigmoid that logits make needless."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampdbg.lint.edits import replaced
from ampdbg.lint.expressions import argument, method, takes_stars, unmoved
from ampdbg.lint.facts import Facts
from ampdbg.lint.rule import Edit, Fix, Rule, RuleHit

CODE = "misuse-bce"
FUNCTION, MODULE = "torch.nn.functional.binary_cross_entropy", "torch.nn.BCELoss"
LOGITS = "logits"
"""What a variable is called that no sigmoid is applied to any more."""
SIGMOIDS = ("torch.sigmoid", "torch.nn.functional.sigmoid", "torch.special.expit")


def check(facts: Facts) -> Iterator[RuleHit]:
    """Every call that surely runs under half's autocast: ``criterion(p, y)``, ``nn.BCELoss()(p, y)``."""
    document = facts.document
    for call in document.calls:
        made = map(unmoved, document.values(call.func) or [call.func])
        is_module = all(document.call_origin(value) == MODULE for value in made)
        if not is_module and document.call_origin(call) != FUNCTION:
            continue
        region = facts.region(call)
        is_on = region is not None and region.enabled is True and region.device == "cuda"
        is_lowered = region is not None and region.dtype in ("float16", "bfloat16")
        if (is_on and is_lowered) or (region is None and facts.runs_in_half(call)):
            yield RuleHit(CODE, call, fix=_fix(facts, call, is_module=is_module))


def _fix(facts: Facts, call: ast.Call, *, is_module: bool) -> Fix | None:
    """Where the sigmoid is to be seen, and nothing else reads what it gives."""
    given = argument(call, "input", 0)
    logits = _logits(facts, given) if given is not None and not takes_stars(call) else None
    if logits is None:
        return None
    if is_module:
        function = _module_edit(facts, call)
    elif isinstance(call.func, ast.Attribute):  # else its import would have to change too
        function = replaced(facts.document, call.func, f"{facts.document.source(call.func)}_with_logits")
    else:
        function = None
    return Fix((*logits, function)) if function is not None else None


def _logits(facts: Facts, node: ast.expr) -> tuple[Edit, ...] | None:
    """Edits that leave the sigmoid out."""
    document = facts.document
    if (inner := _of_sigmoid(facts, node)) is not None:
        return (replaced(document, node, document.source(inner)),)
    binders = document.binders(node) if isinstance(node, ast.Name) else []
    inner = _of_sigmoid(facts, binders[0]) if len(binders) == 1 else None
    if inner is None or not isinstance(node, ast.Name) or document.read(node.id, document.home(node)) != [node]:
        return None
    # What the value is assigned to is then called by what it is, unless the file has that name already.
    target, is_taken = document.target(binders[0]), any(one.id == LOGITS for one in document.find(ast.Name))
    if not isinstance(target, ast.Name) or target.id != node.id or is_taken:
        return None
    value = replaced(document, binders[0], document.source(inner))
    return value, replaced(document, node, LOGITS), replaced(document, target, LOGITS)


def _of_sigmoid(facts: Facts, node: ast.AST) -> ast.expr | None:
    """``x`` of ``torch.sigmoid(x)`` and ``x.sigmoid()``."""
    if not isinstance(node, ast.Call):
        return None
    if facts.document.call_origin(node) in SIGMOIDS and len(node.args) == 1 and not node.keywords:
        return node.args[0]
    owner = method(node, "sigmoid")
    return owner if owner is not None and not node.args and facts.document.origin(owner) != "torch" else None


def _module_edit(facts: Facts, call: ast.Call) -> Edit | None:
    """Of a criterion that this call alone uses."""
    document = facts.document
    made: list[ast.AST] = [call.func]
    uses = [call]
    if isinstance(call.func, (ast.Name, ast.Attribute)):
        made = [unmoved(value) for value in document.values(call.func)]
        key, named = document.key(call.func), (one for one in document.calls if isinstance(one.func, type(call.func)))
        uses = [one for one in named if document.key(one.func) == key]
    loss = made[0]
    if len(uses) != 1 or len(made) != 1 or not isinstance(loss, ast.Call) or not isinstance(loss.func, ast.Attribute):
        return None
    return replaced(document, loss.func, f"{document.source(loss.func)[: -len('BCELoss')]}BCEWithLogitsLoss")


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
