"""A cast of a model's parameters that binds a name of a loop, and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampdbg.lint.expressions import method
from ampdbg.lint.facts import Facts
from ampdbg.lint.rule import Rule, RuleHit
from ampdbg.ops import CAST_METHODS

CODE = "misuse-lost-upcast"
CASTS = (*CAST_METHODS, "to", "type")


def check(facts: Facts) -> Iterator[RuleHit]:
    """Every ``p = p.float()`` in a loop over parameters in whose body that name is not read any more."""
    for loop in facts.document.find(ast.For):
        of_loop = loop.target.elts[-1] if isinstance(loop.target, ast.Tuple) else loop.target
        if method(loop.iter, "parameters", "named_parameters") is None or not isinstance(of_loop, ast.Name):
            continue
        inside = [node for statement in loop.body for node in ast.walk(statement)]
        reads = [one for one in inside if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)]
        for cast in inside:
            if isinstance(cast, ast.Assign) and _names(cast.targets, of_loop.id):
                is_of_it = _names([method(cast.value, *CASTS)], of_loop.id)
                if is_of_it and not any(one.id == of_loop.id and one.lineno > cast.lineno for one in reads):
                    yield RuleHit(CODE, cast)


def _names(found: list[ast.expr] | list[ast.expr | None], name: str) -> bool:
    return [one.id if isinstance(one, ast.Name) else "" for one in found] == [name]


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
