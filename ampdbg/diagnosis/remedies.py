"""What cures a finding: its remedy at its op and its line of source, and what there is to do besides a pin.

A line of source tells whether a product is scaled only after it is made, and whether it takes a sum.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampdbg.ops import DIVISIONS, LOGARITHMS, MATRIX_PRODUCTS, POLES_ELSEWHERE, ROOTS, SCALINGS, SUMS, base_name
from ampdbg.record.codes import CODES, catalogued
from ampdbg.record.findings import place_of
from ampdbg.record.run import Producer, Record
from ampdbg.syntax_tree import UNPARSABLE, syntax_tree

OR = ", or "
"""Between alternatives: where a pin helps, the first is the pin."""

NEAR_ONE_TOO = "; where it is of 1 - p, clamp p to at most 0.9990: FP16 has no number between 0.9995 and 1"

NO_PRECISION = "no precision helps"

FORMULAS = (
    (LOGARITHMS, "change the formula: clamp the logarithm's argument above zero, use a safe where; " + NO_PRECISION),
    (
        DIVISIONS,
        "change the formula: keep the divisor away from zero (a mean over none is 0/0), use a safe where; "
        + NO_PRECISION,
    ),
    (ROOTS, "change the formula: clamp inside the square root, use a safe where; " + NO_PRECISION),
)
"""What cures a formula that has no value, by the kind of op that it fails in."""


def remedy_of(code: str, at: Producer | None) -> str:
    """What cures the code, with what the op and the line of source make possible besides."""
    known = CODES[code]
    if at is None:
        return known.remedy
    near_one = _are_from_one(at) if known.remedy_near_one else []
    if known.remedy_near_one and (pole_of(at) or (near_one and all(near_one))):
        return known.remedy_near_one
    # A gradient has the format of what it is of: where that is FP32, so was what the op was given.
    if known.remedy_behind_half and at.phase == "backward" and at.dtype == "float32":
        return known.remedy_behind_half
    of_op = [remedy for op, remedy in known.remedy_at if op in at.op]
    of_op += [remedy for ops, remedy in FORMULAS if known.is_of_a_formula and ops == formula_of(at)]
    alternatives = _at_its_line(at) if known.verdict == "precision" else ()
    return OR.join([next(iter(of_op), known.remedy) + NEAR_ONE_TOO * any(near_one), *alternatives])


def other_remedies(record: Record) -> tuple[str, ...]:
    """What to do besides a pin: one line each, with its place, labelled where it changes what the model computes.

    Findings that another one explains have none of their own.
    """
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
    """The function with a pole beside zero that the op is, or is the derivative of; "" where it is neither."""
    called = (name for node in _nodes(at.source.text if at.source else "") for name in _called(node))
    names = (base_name(at.op), *(called if at.phase == "backward" else ()))
    return next((name for name in names if name in POLES_ELSEWHERE), "")


def _called(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Call(ast.Name(name) | ast.Attribute(attr=name)):
            yield name.rstrip("_")


def formula_of(at: Producer) -> frozenset[str] | None:
    """The kind of op that has no value there, or no derivative; None where neither op nor line tell.

    Gradients, in a forward pass those of ``autograd.grad``, are made by ops of another kind than the line calls.
    """
    kinds = [ops for ops, _ in FORMULAS]
    own = next((ops for ops in kinds if base_name(at.op) in ops), None)
    called = {ops for node in _nodes(at.source.text if at.source else "") for ops in kinds if _is_of(ops, node)}
    if at.phase == "forward" and (own is None or own in called or not called):
        return own
    return called.pop() if len(called) == 1 else None


def _is_of(ops: frozenset[str], node: ast.AST) -> bool:
    match node:
        case ast.BinOp(op=ast.Div(), right=term) | ast.AugAssign(op=ast.Div(), value=term):
            return ops is DIVISIONS and not isinstance(term, ast.Constant)
        case ast.BinOp(op=ast.Pow(), right=ast.Constant(0.5)):
            return ops is ROOTS
    return any(name in ops for name in _called(node))


def scales_after_its_product(line: str) -> bool:
    """The line multiplies or divides what a product has made: ``(q @ k) * s``, ``torch.bmm(q, k).div(d)``.

    A line that is no whole statement tells nothing, and neither does a scaling that stands on another line.
    """
    return any(_is_product(part) for node in _nodes(line) for scaled in _scaled(node) for part in ast.walk(scaled))


def _are_from_one(at: Producer) -> list[bool]:
    """Of each term that the op may divide by, or take the logarithm of, whether it is taken from 1, as ``1 - p`` is.

    Where the line has several, nothing tells which of them the op is of.
    """
    nodes = _nodes(at.source.text if at.source else "")
    logarithms, divisors = ([term for node in nodes for term in of(node)] for of in (_logarithms, _divisors))
    # The derivative of a logarithm is a quotient.
    both = at.phase == "backward"
    terms = [*logarithms, *divisors] if both else logarithms if base_name(at.op) in LOGARITHMS else divisors
    terms = [term for term in terms if not isinstance(term, ast.Constant)]
    return [any(map(_is_from_one, ast.walk(term))) for term in terms]


def takes_a_sum(line: str) -> bool:
    """The line calls a ``sum``, or asks a loss to sum."""
    return any(map(_is_sum, _nodes(line)))


def _nodes(line: str) -> list[ast.AST]:
    try:
        return list(ast.walk(syntax_tree(line.strip())))
    except UNPARSABLE:
        return []


def _scaled(node: ast.AST) -> list[ast.AST]:
    match node:
        case ast.BinOp(dividend, ast.Div()):
            return [dividend]
        case ast.BinOp(one, ast.Mult(), other):
            return [one, other]
        case ast.Call(ast.Attribute(tensor, name)) if name.rstrip("_") in SCALINGS:
            return [tensor]
    return []


def _logarithms(node: ast.AST) -> list[ast.AST]:
    match node:
        case ast.Call(ast.Attribute(owner, name), arguments) if name.rstrip("_") in LOGARITHMS:
            return [*(arguments[:1] or [owner])]
        case ast.Call(ast.Name(name), [argument, *_]) if name in LOGARITHMS:
            return [argument]
    return []


def _divisors(node: ast.AST) -> list[ast.AST]:
    match node:
        case ast.BinOp(_, ast.Div(), term) | ast.AugAssign(_, ast.Div(), term):
            return [term]
        case ast.Call(ast.Attribute(owner, name), arguments) if name.rstrip("_") in {*DIVISIONS, "rsqrt"}:
            return [*(arguments[-1:] or [owner])]
    return []


def _is_from_one(node: ast.AST) -> bool:
    match node:
        case ast.BinOp(ast.Constant(value), ast.Sub(), other):
            return value == 1 and not isinstance(other, ast.Constant)
    return False


def _is_product(node: ast.AST) -> bool:
    match node:
        case ast.BinOp(op=ast.MatMult()):
            return True
    return any(name in MATRIX_PRODUCTS for name in _called(node))


def _is_sum(node: ast.AST) -> bool:
    match node:
        case ast.Call(ast.Name("sum") | ast.Attribute(attr="sum")) | ast.keyword("reduction", ast.Constant("sum")):
            return True
    return False
