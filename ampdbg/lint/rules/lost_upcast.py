"""A cast of a model's parameters that only rebinds the variable of a loop."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TypeGuard

from ampdbg.lint.facts import Facts
from ampdbg.lint.rule import Rule, RuleHit
from ampdbg.ops import CAST_METHODS
from ampdbg.source.expressions import method

CODE = "misuse-lost-upcast"
CASTS = (*CAST_METHODS, "to", "type")


def check(facts: Facts) -> Iterator[RuleHit]:
    """Check every ``p = p.float()`` in a loop over parameters that does not read ``p`` afterwards."""
    for loop in facts.document.find(ast.For):
        of_loop = loop.target.elts[-1] if isinstance(loop.target, ast.Tuple) else loop.target
        if method(loop.iter, "parameters", "named_parameters") is None or not isinstance(of_loop, ast.Name):
            continue
        inside = [node for statement in loop.body for node in ast.walk(statement)]
        names = [one for one in inside if isinstance(one, ast.Name) and one.id == of_loop.id]
        last = max((one.lineno for one in names if isinstance(one.ctx, ast.Load)), default=0)
        yield from (RuleHit(CODE, one) for one in inside if _is_cast_of(one, of_loop.id) and one.lineno >= last)


def _is_cast_of(node: ast.AST, name: str) -> TypeGuard[ast.Assign]:
    """True for ``p = p.float()``."""
    match node:
        case ast.Assign(targets=[ast.Name(id=bound)], value=cast):
            of = method(cast, *CASTS)
            return bound == name and isinstance(of, ast.Name) and of.id == name
    return False


_FOUND = """
for name, p in model.named_parameters():
    p = p.to(torch.float32)  # <- misuse-lost-upcast
"""

RULE = Rule(
    (CODE,),
    ("parameters()",),
    check,
    invalid=(
        _FOUND,
        _FOUND.replace("name, p in model.named_parameters()", "p in net.parameters()").replace(
            "to(torch.float32)", "float()"
        ),
        _FOUND.replace("    p =", "    if 'norm' in name:\n        p ="),
    ),
    valid=(
        _FOUND.replace("p = p", "p.data = p.data").replace("  # <- misuse-lost-upcast", ""),
        _FOUND.replace("  # <- misuse-lost-upcast", "\n    norms.append(p.norm())"),
        _FOUND.replace("model.named_parameters()", "found").replace("  # <- misuse-lost-upcast", ""),
    ),
)
