"""Mask constants that float16 cannot hold, written into scores."""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Iterator
from typing import TypeGuard

from ampdbg.formats import FLOAT16
from ampdbg.lint.facts import Facts
from ampdbg.lint.rule import Rule, RuleHit
from ampdbg.source.edits import Fix, replaced
from ampdbg.source.expressions import argument, method, number

CODE = "mask-constant"
MESSAGE = "{value} is beyond what float16 can hold (65504): torch refuses to write it into half scores"

_SOFTMAX = re.compile(r"(?i)softmax|logsumexp|cross_?entropy")
_NAME = re.compile(r"[\w.]+")


def check(facts: Facts) -> Iterator[RuleHit]:
    """Check ``scores.masked_fill(mask, -1e9)`` if a softmax of the same function, or a loss with one, reads the scores.
    The same holds for ``torch.masked_fill``.

    The source shows half scores only if the call is in a region. Elsewhere the hit counts in a project that trains in
    half.
    """
    document = facts.document
    for call in document.calls:
        owner, value = method(call, "masked_fill", "masked_fill_"), argument(call, "value", 1)
        if document.call_origin(call) == "torch.masked_fill":
            owner, value = argument(call, "input", 0), argument(call, "value", 2)
        is_beyond = -math.inf < (number(value) or 0.0) <= -FLOAT16.overflow_threshold
        if owner is None or value is None or not is_beyond:
            continue
        region = facts.region(call)
        is_off = region is not None and (region.enabled is False or region.dtype in ("bfloat16", "float32"))
        if is_off or _is_wide(facts, owner) or not _goes_into_softmax(facts, call):
            continue
        message = MESSAGE.format(value=document.source(value))
        instead = replaced(document, value, f"torch.finfo({ast.unparse(owner)}.dtype).min")
        # Only scores that have a name can be queried for their dtype: a call of the model would run twice.
        fix = Fix((instead,), ("torch",)) if _NAME.fullmatch(ast.unparse(owner)) else None
        yield RuleHit(CODE, call, message, fix=fix, in_half_only=not facts.runs_in_half(call))


def _is_wide(facts: Facts, owner: ast.expr) -> bool:
    """True if the scores are cast to FP32 before: in the expression, or in the name's last assignment."""
    last = facts.document.last_value(owner) if isinstance(owner, ast.Name) else None
    return any(
        method(node, "float", "double") is not None
        or (isinstance(node, (ast.Attribute, ast.Name)) and facts.dtype(node) in ("float32", "bfloat16"))
        for value in filter(None, (owner, last))
        for node in ast.walk(value)
    )


def _goes_into_softmax(facts: Facts, call: ast.Call) -> bool:
    """True if a softmax takes the result: around the call, by the name of the result, or in place."""
    document = facts.document
    statement = document.statement(call)
    around = itertools.takewhile(lambda one: one is not statement, document.around(call))
    if any(_is_softmax(one, facts) and call is not one.func for one in around):
        return True
    match statement:
        case ast.Assign(targets=[target]):
            text = ast.unparse(target)
        case ast.Expr():
            text = ast.unparse(call.func.value)  # type: ignore[attr-defined]
        case _:
            return False
    later = (node for node in ast.walk(document.unit(call)) if _is_softmax(node, facts) and node.lineno > call.lineno)
    return any(text in map(ast.unparse, [*node.args, getattr(node.func, "value", node.func)]) for node in later)


def _is_softmax(node: ast.AST, facts: Facts) -> TypeGuard[ast.Call]:
    """True for a call of a function or a module that takes a softmax, also for ``criterion(scores, y)``."""
    if not isinstance(node, ast.Call):
        return False
    text = ast.unparse(node.func)
    is_variable = isinstance(node.func, (ast.Name, ast.Attribute))
    return _SOFTMAX.search(facts.modules.get(facts.document.key(node.func), text) if is_variable else text) is not None


RULE = Rule(
    (CODE,),
    ("masked_fill",),
    check,
    invalid=(
        """
import torch
import torch.nn.functional as F

def attend(scores, v, mask):
    scores = scores.masked_fill(mask, -1e9)  # <- mask-constant
    return F.softmax(scores, dim=-1) @ v

def in_place(scores, v, mask):
    scores.masked_fill_(mask == 0, float("-1e30"))  # <- mask-constant
    return scores.softmax(-1) @ v

def train(scores, v, mask):
    with torch.autocast("cuda"):
        return attend(scores, v, mask) + in_place(scores, v, mask)
""",
        """
import torch
import torch.nn.functional as F

criterion = torch.nn.CrossEntropyLoss()

def train(model, x, y, mask):
    with torch.autocast("cuda", dtype=torch.float16):
        a = F.cross_entropy(model(x).masked_fill(mask, -1e9), y)  # <- mask-constant
        b = torch.masked_fill(model(x), mask, -1e9).softmax(-1)  # <- mask-constant
        z = model(x).logits.masked_fill(mask, value=-1e9)  # <- mask-constant
        return criterion(z, y) + a + b
""",
    ),
    valid=(
        """
import torch
import torch.nn.functional as F

def by_its_dtype(scores, v, mask):
    scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
    return F.softmax(scores, dim=-1) @ v

def within_half(scores, v, mask):
    scores = scores.masked_fill(mask, -1e4)
    return F.softmax(scores, dim=-1) @ v

def in_float32(scores, v, mask):
    scores = scores.float().masked_fill(mask, -1e9)
    return F.softmax(scores, dim=-1).to(v.dtype) @ v

def infinite(scores, v, mask):
    scores = scores.masked_fill(mask, float("-inf"))
    return F.softmax(scores, dim=-1) @ v

def of_a_model_within_half(model, x, y, mask):
    with torch.autocast("cuda"):
        loss = F.cross_entropy(model(x).masked_fill(mask, -1e4), y)
        return loss + F.cross_entropy(torch.masked_fill(model(x).float(), mask, -1e9), y)

def of_labels_which_are_no_scores(labels, mask, model):
    with torch.autocast("cuda"):
        labels = labels.masked_fill(mask, -100000)
        return model(labels)
""",
        # No file of the project trains in half.
        "def attend(scores, mask):\n    scores = scores.masked_fill(mask, -1e9)\n    return scores.softmax(-1)\n",
    ),
    pattern=r"(?s)masked_fill_?\(.{0,160}?(?:-\s*\d+\.?\d*[eE]\+?\d|-\s*\d{5}|\*\*|float\(\s*[\"']-\d)",
)
