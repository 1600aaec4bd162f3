"""The remedies of findings: for an op and its source line, and remedies besides pins. A source line shows whether
the code scales a product only after the product, and whether it takes a sum."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ampdbg.ops import DIVISIONS, LOGARITHMS, MATRIX_PRODUCTS, POLES_ELSEWHERE, ROOTS, SCALINGS, SUMS, base_name
from ampdbg.record.codes import CODES, catalogued
from ampdbg.record.findings import place_of
from ampdbg.record.run import Producer, Record
from ampdbg.syntax_tree import UNPARSABLE, syntax_tree

OR = ", or "
"""Separator between alternatives. If a pin helps, the pin comes first."""

NEAR_ONE_TOO = "; where it is of 1 - p, clamp p to at most 0.9990: FP16 has no number between 0.9995 and 1"

NO_PRECISION = "no precision helps"

FORMULAS: Mapping[frozenset[str], str] = {
    LOGARITHMS: "change the formula: clamp the logarithm's argument above zero, use a safe where; " + NO_PRECISION,
    DIVISIONS: "change the formula: keep the divisor away from zero (a mean over none is 0/0), use a safe where; "
    + NO_PRECISION,
    ROOTS: "change the formula: clamp inside the square root, use a safe where; " + NO_PRECISION,
}
"""Remedies for a formula without a value, by the kind of op that fails."""

OPERATORS: Mapping[type[ast.operator], str] = {ast.Div: "div", ast.Mult: "mul", ast.MatMult: "matmul"}
"""Operators by the name of the equivalent function."""

DIVISORS = DIVISIONS | {"rsqrt"}
"""Ops that divide by their last operand, or by its root."""


class Applied(NamedTuple):
    """An op on a source line, by the name of its function. ``tensor`` is the object of the method or the left
    operand, and ``operand`` the last operand. A single operand is both."""

    name: str
    tensor: ast.AST
    operand: ast.AST

    @property
    def scaled(self) -> tuple[ast.AST, ...]:
        """The operands that the op multiplies or divides."""
        return {"mul": (self.tensor, self.operand)}.get(self.name, (self.tensor,)) if self.name in SCALINGS else ()


def remedy_of(code: str, at: Producer | None) -> str:
    """Return the remedy of a code, with alternatives that fit the op and its source line."""
    known = CODES[code]
    if at is None:
        return known.remedy
    near_one = _are_from_one(at) if known.remedy_near_one else []
    instead = {
        known.remedy_near_one: pole_of(at) or (bool(near_one) and all(near_one)),
        # A gradient has the dtype of its tensor: if that is FP32, so was the input of the op.
        known.remedy_behind_half: at.phase == "backward" and at.dtype == "float32",
    }
    for remedy in filter(None, instead):
        if instead[remedy]:
            return remedy
    of_op = [remedy for op, remedy in known.remedy_at if op in at.op]
    of_op += [remedy for kind, remedy in FORMULAS.items() if known.is_of_a_formula and kind == formula_of(at)]
    alternatives = _at_its_line(at) if known.verdict == "precision" else ()
    return OR.join([next(iter(of_op), known.remedy) + NEAR_ONE_TOO * any(near_one), *alternatives])


def other_remedies(record: Record) -> tuple[str, ...]:
    """Return the remedies besides pins, one line each, with their places. A label marks remedies that change what
    the model computes. A finding that follows from another one has no own remedy."""
    lines: dict[str, None] = {}
    for finding in record.faults:
        code = catalogued(finding.code)
        is_pin = code.pin_helps and code.verdict == "precision"
        text = finding.remedy.partition(OR)[2] if is_pin else finding.remedy
        if text and finding.root is None:
            label = " (changes the model's function)" if code.changes_function else ""
            place = f"{place_of(finding.source)}: " if finding.source else ""
            lines[f"{place}{text}{label}"] = None
    return tuple(lines)


def _at_its_line(at: Producer) -> Iterator[str]:
    line, name = at.source.text if at.source else "", base_name(at.op)
    if name in MATRIX_PRODUCTS and scales_after_its_product(line):
        yield "scale before the product: (q * s) @ k instead of (q @ k) * s"
    if name in SUMS:
        yield "add up in FP32: sum(..., dtype=torch.float32)"
    if at.phase == "backward" and takes_a_sum(line):
        yield "take a mean instead of the sum (this scales the loss, and with it the learning rate that fits)"


def pole_of(at: Producer) -> str:
    """Return the function with a pole away from zero that the op is, or is the derivative of; else ""."""
    called = (one.name for one in _ops_of(at) if at.phase == "backward")
    return next((name for name in (base_name(at.op), *called) if name in POLES_ELSEWHERE), "")


def formula_of(at: Producer) -> frozenset[str] | None:
    """Return the kind of op with an undefined value or derivative, or None if neither op nor line shows it. Gradient
    ops, also those of ``autograd.grad`` in a forward pass, differ from the ops on the line."""
    named = [one.name for one in _ops_of(at) if not isinstance(one.operand, ast.Constant)]
    own = next((ops for ops in FORMULAS if base_name(at.op) in ops), None)
    called = {ops for ops in FORMULAS if not ops.isdisjoint(named)}
    if at.phase == "forward" and (own is None or own in called or not called):
        return own
    return called.pop() if len(called) == 1 else None


def scales_after_its_product(line: str) -> bool:
    """True if the line scales the result of a product: ``(q @ k) * s``, ``torch.bmm(q, k).div(d)``. An incomplete
    statement is False, and so is a scaling on another line."""
    scaled = (part for one in _ops(line) for part in one.scaled)
    return any(inner.name in MATRIX_PRODUCTS for part in scaled for inner in _applied(part))


def takes_a_sum(line: str) -> bool:
    """True if the line calls ``sum``, or a loss with ``reduction="sum"``."""
    return any(one.name == "sum" for one in _ops(line))


def _are_from_one(at: Producer) -> list[bool]:
    """Return, for each possible divisor or logarithm argument, whether it is a difference from 1, as in ``1 - p``.
    If the line has several, the op may belong to any. The derivative of a logarithm is a quotient."""
    kinds = {"backward": LOGARITHMS | DIVISORS}.get(
        at.phase, LOGARITHMS if base_name(at.op) in LOGARITHMS else DIVISORS
    )
    terms = [one.operand for one in _ops_of(at) if one.name in kinds and not isinstance(one.operand, ast.Constant)]
    return [any(map(_is_from_one, ast.walk(term))) for term in terms]


def _is_from_one(node: ast.AST) -> bool:
    match node:
        case ast.BinOp(ast.Constant(value), ast.Sub(), other):
            return value == 1 and not isinstance(other, ast.Constant)
    return False


def _ops_of(at: Producer) -> list[Applied]:
    return _ops(at.source.text) if at.source else []


def _ops(line: str) -> list[Applied]:
    try:
        return [*_applied(syntax_tree(line.strip()))]
    except UNPARSABLE:
        return []


def _applied(tree: ast.AST) -> Iterator[Applied]:
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(base, ast.Pow(), ast.Constant(0.5)):
                yield Applied("sqrt", base, base)
            case ast.BinOp(left, operator, right) | ast.AugAssign(left, operator, right):
                yield Applied(OPERATORS.get(type(operator), ""), left, right)
            case ast.Call(ast.Attribute(owner, name), arguments):
                yield Applied(name.rstrip("_"), owner, [owner, *arguments][-1])
            case ast.Call(ast.Name(name), arguments):
                yield Applied(name.rstrip("_"), node, [node, *arguments][-1])
            case ast.keyword("reduction", ast.Constant("sum") as asked):
                yield Applied("sum", node, asked)
