"""A backward pass inside the block of autocast, which belongs around the forward pass and the loss only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampdbg.lint.facts import Facts
from ampdbg.lint.rule import BACKWARD, LOOP, STEP, Rule, RuleHit
from ampdbg.source.edits import Fix, dedented, is_movable
from ampdbg.source.expressions import method

CODE = "misuse-backward-in-autocast"


def check(facts: Facts) -> Iterator[RuleHit]:
    """Check every ``loss.backward()`` in a ``with`` of enabled autocast."""
    document = facts.document
    for call in document.calls:
        loss = method(call, "backward")
        is_loss = loss is not None and (not call.args or isinstance(loss, ast.Name)) and document.origin(loss) == ""
        region = facts.region(call) if is_loss else None
        if region is not None and region.enabled is not False and not _is_in_function(facts, call):
            yield RuleHit(CODE, call, fix=_fix(facts, call))


def _is_in_function(facts: Facts, call: ast.Call) -> bool:
    """True for the backward of an autograd.Function, or a module's own method."""
    bases = map(facts.document.origin, getattr(facts.document.class_of(call), "bases", ()))
    is_self = ast.unparse(call.func) in ("self.backward", "super().backward", "self.model.backward")
    return is_self or any(base.startswith("torch.autograd") for base in bases)


_COMPUTES = re.compile(r"(model|net|forward|loss_fn|criterion)$")


def _fix(facts: Facts, call: ast.Call) -> Fix | None:
    """Return a fix that moves the backward pass and the rest of its block out, if all can leave."""
    document = facts.document
    statement = document.statement(call)
    match document.parents[statement]:
        case ast.With(items=[item], body=[first, *_]) as block if first is not statement:
            moved = document.block(statement)[document.block(statement).index(statement) :]
        case _:
            return None
    # A later forward pass must stay in the region.
    calls = [ast.unparse(node.func) for one in moved for node in ast.walk(one) if isinstance(node, ast.Call)]
    stays = facts.autocast_of(item.context_expr) is None or any(map(_COMPUTES.search, calls))
    if stays or document.nearest(block, ast.With) is not None or not is_movable(document, moved):
        return None
    return Fix(tuple(dedented(document, moved, document.indent_unit(statement))))


RULE = Rule(
    (CODE,),
    ("autocast", ".backward("),
    check,
    invalid=(f"{LOOP}            scaler.scale(loss).backward()  # <- misuse-backward-in-autocast\n{STEP}",),
    valid=(
        LOOP + BACKWARD + STEP,
        f"{LOOP}            with torch.autocast('cuda', enabled=False):\n        {BACKWARD}{STEP}",
    ),
)
