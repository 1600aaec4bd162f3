"""A learning-rate scheduler that moves in every iteration, whether the scaler has skipped the step or not."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from ampdbg.lint.expressions import method
from ampdbg.lint.facts import Facts
from ampdbg.lint.rule import Rule, RuleHit

CODE = "misuse-scheduler-on-skip"
MESSAGE = "the scheduler moves on in a step that the scaler skips; a few skips at the start do little harm"


def check(facts: Facts) -> Iterator[RuleHit]:
    """In the block of a scaler's step, where nothing of the function asks whether it was skipped.

    For information alone: how many steps are skipped no source tells.
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
            scheduler = method(moved, "step") if moved is not None else None
            if scheduler is not None and facts.is_scheduler(scheduler) and not _is_told(moved):
                yield RuleHit(CODE, statement, MESSAGE, severity="info")


def _is_told(call: ast.expr | None) -> bool:
    """Whether the scheduler is told a score or the place it is to move to: then it counts no steps."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)] if isinstance(call, ast.Call) else []
    return any(not (isinstance(one, ast.Constant) and one.value is None) for one in given)


_HEAD = """
import torch

def train(model, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda")
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
"""

RULE = Rule(
    (CODE,),
    ("GradScaler|.scale(", ".step("),
    check,
    invalid=(_HEAD + "        scaler.update()\n        scheduler.step()  # <- misuse-scheduler-on-skip\n",),
    valid=(
        _HEAD
        + """
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= before:
            scheduler.step()
""",
        _HEAD + "        scaler.update()\n    scheduler.step()\n",
        _HEAD + "        scaler.update()\n        scheduler.step(loss.item())\n",
    ),
)
