"""A learning-rate scheduler that moves in every iteration, even if the scaler has skipped the step."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from ampdbg.lint.facts import Facts
from ampdbg.lint.rule import BACKWARD, LOOP, STEP, Rule, RuleHit
from ampdbg.source.expressions import given, is_none, method

CODE = "misuse-scheduler-on-skip"
MESSAGE = "the scheduler also steps when the scaler skips the optimizer's step; a few skips at the start do little harm"


def check(facts: Facts) -> Iterator[RuleHit]:
    """Check the block of a scaler's step, if the function never checks for a skipped step.

    The severity is info: no source shows how many steps are skipped.
    """
    document = facts.document

    @functools.cache  # a file may hold thousands of steps in one unit
    def asks(unit: ast.AST) -> bool:
        text = ast.unparse(unit)
        return any(word in text for word in ("get_scale", "found_inf", "._scale", "step_was_skipped"))

    firsts: dict[ast.stmt, ast.stmt] = {}  # the first step of each block, by the block's first statement
    for call, _ in facts.scaler_calls("step"):
        if not asks(document.unit(call)):
            statement = document.statement(call)
            firsts.setdefault(document.block(statement)[0], statement)
    for first in firsts.values():
        block = document.block(first)
        for statement in block[block.index(first) + 1 :]:
            moved = statement.value if isinstance(statement, ast.Expr) else None
            # A scheduler that takes a score or a position does not count steps.
            is_placed = isinstance(moved, ast.Call) and not all(map(is_none, given(moved)))
            if facts.is_scheduler(method(moved, "step")) and not is_placed:
                yield RuleHit(CODE, statement, MESSAGE, severity="info")


_SCHEDULER = "    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)\n    for"
_LOOP = LOOP.replace("    for", _SCHEDULER, 1) + BACKWARD

RULE = Rule(
    (CODE,),
    ("GradScaler|.scale(", ".step("),
    check,
    invalid=(f"{_LOOP}{STEP}        scheduler.step()  # <- misuse-scheduler-on-skip\n",),
    valid=(
        f"{_LOOP}        scale = scaler.get_scale()\n{STEP}        if scale <= scaler.get_scale(): scheduler.step()\n",
        f"{_LOOP}{STEP}    scheduler.step()\n",
        f"{_LOOP}{STEP}        scheduler.step(loss.item())\n",
    ),
)
