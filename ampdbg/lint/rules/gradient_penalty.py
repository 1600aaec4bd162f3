"""A penalty on gradients of the scaled loss, in a function that never reads the scale."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampdbg.lint.facts import Facts
from ampdbg.lint.rule import BACKWARD, LOOP, STEP, Rule, RuleHit
from ampdbg.source.expressions import argument, constant, given

CODE = "misuse-gradient-penalty"


def check(facts: Facts) -> Iterator[RuleHit]:
    """Check ``torch.autograd.grad(scaler.scale(loss), …, create_graph=True)``."""
    document = facts.document
    for call in document.calls:
        outputs = argument(call, "outputs", 0) if document.call_origin(call) == "torch.autograd.grad" else None
        parts = outputs.elts if isinstance(outputs, (ast.List, ast.Tuple)) else [outputs]
        is_scaled = bool(parts) and all(map(facts.scaler_of, parts))
        if is_scaled and constant(argument(call, "create_graph", 4)) is True:
            unit = document.unit(call)
            handed = (one for other in document.calls if document.unit(other) is unit for one in given(other))
            asks = any(word in ast.unparse(unit) for word in ("get_scale", "._scale", "inv_scale"))
            if not asks and not any(map(facts.is_scaler, handed)):  # code that takes the scaler may divide by its scale
                yield RuleHit(CODE, call)


_REST = f"""
        with torch.autocast("cuda"):
            penalty = sum(one.pow(2).sum() for one in grads).sqrt()
            loss = loss + penalty
{BACKWARD}{STEP}
"""
_GRADS = "        grads = torch.autograd.grad({}, model.parameters(), create_graph=True)"

RULE = Rule(
    (CODE,),
    ("autograd", "grad(", ".scale("),
    check,
    invalid=(f"{LOOP}{_GRADS.format('scaler.scale(loss)')}  # <- misuse-gradient-penalty{_REST}",),
    valid=(
        f"{LOOP}{_GRADS.format('scaler.scale(loss)')}\n        grads = [g / scaler.get_scale() for g in grads]{_REST}",
        f"{LOOP}{_GRADS.format('loss')}{_REST}",
    ),
)
