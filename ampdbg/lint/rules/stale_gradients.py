"""Gradients of a skipped step that a loop keeps: it clears them only after taken steps, or leaves before it does."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Sequence

from ampdbg.lint.facts import Facts
from ampdbg.lint.rule import BACKWARD, LOOP, STEP, Rule, RuleHit
from ampdbg.lint.training_loops import training_loops
from ampdbg.source.document import LOOPS
from ampdbg.source.expressions import method

CODE = "misuse-stale-gradients"

KEPT = "the code clears the gradients only after a step that was taken; those of a skipped step stay inf"

_NOT_FINITE = re.compile(r"isnan|isinf|isfinite|is_nan|!= loss")


def check(facts: Facts) -> Iterator[RuleHit]:
    """Check every loop with a scaler's backward pass, and no call that may clear gradients unseen."""
    every = (call for loop in training_loops(facts) for call in loop.calls)
    unseen = {call.node for call in every if call.kind is None and not call.clears}
    for loop in facts.document.find(*LOOPS):
        calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call)]
        backward = [call for call in calls if facts.scaler_of(method(call, "backward"))]
        assigned = ((node, to) for node in ast.walk(loop) if isinstance(node, ast.Assign) for to in node.targets)
        clears: list[ast.AST] = [call for call in calls if method(call, "zero_grad")]
        clears += [node for node, to in assigned if isinstance(to, ast.Attribute) and to.attr == "grad"]
        around = (facts.document.nearest(call, *LOOPS) for call in backward)
        if clears and loop in around and unseen.isdisjoint(calls):
            if all(_after_taken_step(facts, node, loop) for node in clears):
                yield RuleHit(CODE, clears[0], KEPT)
            yield from _left_behind(facts, loop, backward[0], clears)


def _after_taken_step(facts: Facts, node: ast.AST, loop: ast.AST) -> bool:
    """True if a condition on the scale, false after a skipped step, guards the node."""
    inside = list(itertools.takewhile(lambda one: one is not loop, facts.document.around(node)))
    choices = ((one, below) for below, one in zip([node, *inside], inside, strict=False) if isinstance(one, ast.If))
    return any(below in one.body and _asks_for_no_skip(facts, one.test) for one, below in choices)


def _asks_for_no_skip(facts: Facts, test: ast.expr) -> bool:
    """True for ``scaler.get_scale() >= before``, which is true if the step was taken, and not otherwise."""
    # get_scale() is the old scale before update(), and the new scale after it: the names say which is which.
    match test:
        case ast.Compare(left=new, ops=[ast.GtE() | ast.Eq()]) if facts.is_scaler(method(new, "get_scale")):
            return True
        case ast.Compare(ops=[ast.LtE() | ast.Eq()], comparators=[new]):
            return facts.is_scaler(method(new, "get_scale"))
    return False


def _left_behind(facts: Facts, loop: ast.AST, backward: ast.AST, clears: Sequence[ast.AST]) -> Iterator[RuleHit]:
    """Check ``if loss.isnan(): continue`` after the backward pass, if gradients are cleared only further down."""
    document = facts.document
    body: Sequence[ast.stmt] = loop.body  # type: ignore[attr-defined]
    statement = document.statement(backward)
    if statement not in body:
        return
    before, behind = body[: body.index(statement)], body[body.index(statement) + 1 :]
    # Gradients that are cleared in the branch that leaves are not kept.
    ends = (one for one in behind if _holds(one, clears) or _leaves(one))
    end = next(ends, None)
    if end is None or any(_holds(one, clears) for one in (*before, end)):
        return
    if any(_holds(later, clears) for later in behind[behind.index(end) + 1 :]):
        message = "continue keeps the gradients of this backward pass, and the next pass adds to them"
        leaving = end.body[-1]  # type: ignore[attr-defined]
        yield RuleHit(CODE, leaving, message, "call optimizer.zero_grad() before continue")


def _leaves(statement: ast.stmt) -> bool:
    """True for ``if loss.isnan(): continue``."""
    is_asked = isinstance(statement, ast.If) and _NOT_FINITE.search(ast.unparse(statement.test)) is not None
    return is_asked and isinstance(statement.body[-1], ast.Continue)  # type: ignore[attr-defined]


def _holds(statement: ast.stmt, nodes: Sequence[ast.AST]) -> bool:
    return not set(nodes).isdisjoint(ast.walk(statement))


_CLEAR = "        optimizer.zero_grad()\n"
_LOOP = LOOP.replace(_CLEAR, "")
_BEFORE = "        before = scaler.get_scale()\n"
_TAKEN = "        if scaler.get_scale() >= before:\n            "
_NAN = "        if torch.isnan(loss):\n"

RULE = Rule(
    (CODE,),
    ("GradScaler|.scale(", "backward"),
    check,
    invalid=(
        f"{_LOOP}{BACKWARD}{_BEFORE}{STEP}{_TAKEN}optimizer.zero_grad()  # <- misuse-stale-gradients\n",
        f"{_LOOP}{BACKWARD}{_NAN}            continue  # <- misuse-stale-gradients\n{STEP}{_CLEAR}",
    ),
    valid=(
        f"{_LOOP}{BACKWARD}{STEP}{_CLEAR}",
        f"{_LOOP}{_NAN}            continue\n{_CLEAR}{BACKWARD}{STEP}",
        f"{_LOOP}{BACKWARD}{_NAN}    {_CLEAR}            continue\n{STEP}{_CLEAR}",
        f"{_LOOP}{_CLEAR}{BACKWARD}{_BEFORE}{STEP}{_TAKEN}scheduler.step()\n",
    ),
)
