"""Parameters in float16 with a GradScaler, or with an Adam whose eps is zero in float16."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampdbg.formats import FLOAT16
from ampdbg.lint.facts import Facts
from ampdbg.lint.rule import Rule, RuleHit
from ampdbg.source.expressions import argument, given, method, number, takes_stars, unmoved

SCALED, EPS = "misuse-half-parameters", "optimizer-underflow"
ADAMS = frozenset(f"torch.optim.{name}" for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax"))
"""The torch optimizers that divide by a root and an eps, which is their fourth argument."""
DEFAULT_EPS = 1e-8


def check(facts: Facts) -> Iterator[RuleHit]:
    """Check optimizers over the parameters of a model that the same function has made half before."""
    document = facts.document
    for call in document.calls:
        origin = document.call_origin(call)
        model = method(argument(call, "params", 0) or call, "parameters")
        if model is None or not facts.is_optimizer(document.target(call) or call):
            continue
        made_half = _made_half(facts, model, call)
        if made_half is None:
            continue
        if _is_scaled(facts, call):
            yield RuleHit(SCALED, made_half)
        elif origin in ADAMS and not takes_stars(call) and _is_lost(argument(call, "eps", 3)):
            message = "the optimizer's eps is zero in the parameters' float16: an update of 0/0 is NaN"
            yield RuleHit(EPS, call, message)


def _made_half(facts: Facts, model: ast.expr, before: ast.Call) -> ast.AST | None:
    """Return the call that certainly makes the model half before the optimizer; None if a later call undoes it."""
    document = facts.document
    unit, key = document.unit(before), document.key(model)
    found: ast.AST | None = None
    for call in document.calls:
        owner = method(call, "half", "float", "to", "bfloat16", "double")
        is_before = call.lineno < before.lineno and document.unit(call) is unit
        if owner is not None and is_before and _is_of(facts, owner, key, call):
            named = ast.unparse(call.func).rpartition(".")[2]
            name = next(filter(None, map(facts.dtype, given(call))), "") if named == "to" else named
            block = document.block(document.statement(call))
            is_on_every_way = any(one in block for one in (document.statement(before), *document.around(before)))
            found = (call if name in ("half", "float16") and is_on_every_way else None) if name else found
    return found


def _is_of(facts: Facts, owner: ast.AST, key: tuple[object, str], call: ast.Call) -> bool:
    """True for ``model.half()``, ``model = model.cuda().half()``, ``model = Net().half()``."""
    document, owner = facts.document, unmoved(owner)
    if isinstance(owner, (ast.Name, ast.Attribute)) and document.key(owner) == key:
        return True
    match document.statement(call):
        case ast.Assign(targets=[target], value=whole) if isinstance(owner, ast.Call):
            return document.key(target) == key and call in _moves(whole)
    return False


def _moves(whole: ast.AST) -> Iterator[ast.AST]:
    """Yield the value, and what it moves or sets to training: ``Net().half()`` of ``Net().half().cuda()``."""
    inner: ast.AST | None = whole
    while inner is not None:
        yield inner
        inner = method(inner, "to", "cuda", "train", "eval")


def _is_scaled(facts: Facts, optimizer: ast.Call) -> bool:
    """True if an enabled scaler steps or unscales the optimizer."""
    document, target = facts.document, facts.document.target(optimizer)
    key = document.key(target) if target is not None else None
    by = (scaler for call, scaler in facts.scaler_calls("step", "unscale_") if document.key(call.args[0]) == key)
    made = map(document.values, by)
    return any(each and all(isinstance(one, ast.Call) and facts.is_surely_on(one) for one in each) for each in made)


def _is_lost(eps: ast.expr | None) -> bool:
    """True if the eps, or the default if none is given, is zero in float16."""
    value = number(eps) if eps is not None else DEFAULT_EPS
    return value is not None and value < FLOAT16.underflow_threshold


RULE = Rule(
    (SCALED, EPS),
    (".half()|float16|torch.half", "optim", ".parameters()"),
    check,
    invalid=(
        """
import torch

def scaled(loader):
    model = Net().cuda()
    model.half()  # <- misuse-half-parameters
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x.half()).float().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

def unscaled(loader):
    model = Net().to("cuda", dtype=torch.float16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # <- optimizer-underflow
    for x in loader:
        model(x).backward()
        optimizer.step()
""",
    ),
    valid=(
        """
import torch

def back_in_float32(loader):
    model = Net().cuda()
    model.half()
    model.float()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        scaler.scale(model(x).mean()).backward()
        scaler.step(optimizer)
        scaler.update()

def with_a_larger_eps():
    model = Net().half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)

def perhaps(pure_half):
    model = Net()
    if pure_half:
        model.half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
""",
    ),
)
