"""A scaler that steps in a file that never updates its scale."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampdbg.lint.facts import Facts
from ampdbg.lint.rule import BACKWARD, LOOP, STEP, Rule, RuleHit
from ampdbg.source.edits import Fix, below

CODE = "misuse-no-update"
_ASKING = (ast.Attribute, ast.If, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.IfExp)


def check(facts: Facts) -> Iterator[RuleHit]:
    """Check the last step of each scaler that only this file uses and never updates."""
    document = facts.document
    steps: dict[tuple[object, str], list[ast.Call]] = {}
    for call, scaler in facts.scaler_calls("step"):
        steps.setdefault(document.key(scaler), []).append(call)
    updated = {ast.unparse(name).rpartition(".")[2] for name in document.owners("update")}
    for key, calls in steps.items():
        # By this name, or by another name with the same ending.
        if key[1].rpartition(".")[2] not in updated and not _leaves(facts, key):
            yield RuleHit(CODE, calls[-1], fix=_fix(facts, calls))


def _leaves(facts: Facts, key: tuple[object, str]) -> bool:
    """True if other code may hold the scaler: a parameter, an argument, a returned, stored or inherited object."""
    document, home = facts.document, key[0]
    own = {"object", *(made.name for made in document.find(ast.ClassDef))}
    bases = home.bases if isinstance(home, ast.ClassDef) else []
    if any(ast.unparse(base) not in own and not document.origin(base).startswith("torch.") for base in bases):
        return True
    name = next((node for node in document.find(ast.Name) if document.key(node) == key), None)
    is_parameter = name is not None and any(isinstance(value, ast.arg) for value in document.binders(name))
    used = (document.parents[node] for node in document.loads() if document.key(node) == key)
    return is_parameter or not all(isinstance(one, _ASKING) for one in used)


def _fix(facts: Facts, calls: list[ast.Call]) -> Fix | None:
    """Return a fix that adds the update below the last step, if all steps are in one block."""
    document = facts.document
    statements = [document.statement(call) for call in calls]
    last = statements[-1]
    if (
        not set(statements) <= set(document.block(last))
        or not document.has_own_lines(last)
        or not isinstance(last, ast.Expr)
    ):
        return None
    scaler = ast.unparse(calls[-1].func.value)  # type: ignore[attr-defined]
    return Fix((below(document, last, f"{scaler}.update()"),))


RULE = Rule(
    (CODE,),
    ("GradScaler",),
    check,
    invalid=(f"{LOOP}{BACKWARD}        scaler.step(optimizer)  # <- misuse-no-update\n",),
    valid=(
        LOOP + BACKWARD + STEP,
        f"{LOOP}{BACKWARD}        scaler.step(optimizer)\n        after_step(scaler)\n",
        """
import torch

class Trainer:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, loss, optimizer):
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)

    def after(self):
        self.scaler.update()
""",
    ),
)
