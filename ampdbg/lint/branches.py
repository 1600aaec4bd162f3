"""The control-flow paths ("ways") through a piece of code, given the values of its conditions.

On one path a condition has the same value everywhere. Conditions that a loop can change are evaluated again in each
round of the loop.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from ampdbg.source.document import FUNCTIONS, LOOPS

EventT = TypeVar("EventT")
BranchEnd = Literal["", "continue", "break", "leave"]
Values = Mapping[str, bool]
EventsOf = Callable[[ast.AST], Sequence[EventT]]

ENDINGS: Mapping[type[ast.stmt], BranchEnd] = {
    ast.Continue: "continue",
    ast.Break: "break",
    ast.Return: "leave",
    ast.Raise: "leave",
}
"""Statements after which the rest of their block does not run."""

MOST_WAYS = 128
"""Code with more paths is not checked."""

_SAME_EACH_ROUND = frozenset("is_enabled isinstance hasattr len getattr get_rank is_main_process is_available".split())


class TooManyWays(Exception):  # noqa: N818 - no error of the user's
    """The code has more than :data:`MOST_WAYS` paths."""


@dataclass(frozen=True)
class FlowPath(Generic[EventT]):
    """One path: its events in order, the values of its conditions, and its ending."""

    events: tuple[EventT, ...]
    values: Values
    ending: BranchEnd = ""


def flow_paths(statements: Sequence[ast.stmt], events_of: EventsOf[EventT], values: Values) -> list[FlowPath[EventT]]:
    """Return every path through ``statements``, given the known values of conditions.

    Args:
        statements: a block.
        events_of: returns the events of a simple statement or an expression, in order; a path keeps only these.
        values: the known values of conditions, by the text of the condition.

    Raises:
        TooManyWays: there are more than :data:`MOST_WAYS`.
    """
    found: list[FlowPath[EventT]] = [FlowPath((), values)]
    for statement in statements:
        ended = [way for way in found if way.ending]
        found = ended + [
            FlowPath(way.events + after.events, after.values, after.ending)
            for way in found
            if not way.ending
            for after in _through(statement, events_of, way.values)
        ]
        if len(found) > 1:  # the comparison costs time for each event
            found = list({(way.events, tuple(sorted(way.values.items())), way.ending): way for way in found}.values())
        if len(found) > MOST_WAYS:
            raise TooManyWays
    return found


def _through(statement: ast.stmt, events_of: EventsOf[EventT], values: Values) -> Iterator[FlowPath[EventT]]:
    if isinstance(statement, LOOPS):
        yield from _rounds(statement, events_of, values)
    elif isinstance(statement, ast.If):
        yield from _branches(statement, events_of, values)
    elif isinstance(statement, (ast.With, ast.AsyncWith)):
        entered = tuple(event for item in statement.items for event in events_of(item.context_expr))
        for way in flow_paths(statement.body, events_of, values):
            yield FlowPath(entered + way.events, way.values, way.ending)
    elif isinstance(statement, ast.Try):
        yield from flow_paths([*statement.body, *statement.orelse, *statement.finalbody], events_of, values)
    elif isinstance(statement, (*FUNCTIONS, ast.ClassDef, ast.Match)):
        yield FlowPath((), values)
    else:
        yield FlowPath(tuple(events_of(statement)), values, ENDINGS.get(type(statement), ""))


def _branches(statement: ast.If, events_of: EventsOf[EventT], values: Values) -> Iterator[FlowPath[EventT]]:
    asked = tuple(events_of(statement.test))
    if not (asked or _matters(statement, events_of)):
        yield FlowPath((), values)
        return
    for is_true, known in outcomes(statement.test, values):
        for way in flow_paths(statement.body if is_true else statement.orelse, events_of, known):
            yield FlowPath(asked + way.events, way.values, way.ending)


def _matters(statement: ast.AST, events_of: EventsOf[EventT]) -> bool:
    """True if a branch of the statement has events, or leaves the block."""
    return any(
        isinstance(node, tuple(ENDINGS)) or (isinstance(node, ast.Call) and events_of(node))
        for node in ast.walk(statement)
    )


def _rounds(
    loop: ast.For | ast.AsyncFor | ast.While, events_of: EventsOf[EventT], values: Values
) -> Iterator[FlowPath[EventT]]:
    """Yield the paths through two rounds of an inner loop."""
    if not _matters(loop, events_of):
        yield FlowPath((), values)
        return
    changing = changed_names(loop)
    for first, second in rounds(loop.body, events_of, values, changing):
        known = lasting(second.values, changing)
        yield FlowPath(first.events + second.events, known, "leave" if second.ending == "leave" else "")


def rounds(
    body: Sequence[ast.stmt],
    events_of: EventsOf[EventT],
    values: Values,
    changing: frozenset[str],
) -> Iterator[tuple[FlowPath[EventT], FlowPath[EventT]]]:
    """Yield every pair of paths through two rounds of a loop's body.

    A round that leaves the loop is its last, so the first of a pair never does.
    """
    for first in flow_paths(body, events_of, lasting(values, changing)):
        if first.ending not in ("break", "leave"):
            for second in flow_paths(body, events_of, lasting(first.values, changing)):
                yield first, second


def lasting(values: Values, changing: frozenset[str]) -> dict[str, bool]:
    """Return the values of the conditions that another round of a loop cannot change."""
    return {text: value for text, value in values.items() if is_lasting(text, changing)}


def is_lasting(condition: str, changing: frozenset[str]) -> bool:
    """True if a condition reads nothing that a loop assigns, and calls only functions with a constant result."""
    nodes = list(ast.walk(ast.parse(condition, mode="eval")))
    named = {ast.unparse(node) for node in nodes if isinstance(node, (ast.Name, ast.Attribute))}
    called = {ast.unparse(node.func).rpartition(".")[2] for node in nodes if isinstance(node, ast.Call)}
    return named.isdisjoint(changing) and called <= _SAME_EACH_ROUND


def changed_names(loop: ast.AST) -> frozenset[str]:
    """Return the names and attributes that a loop assigns."""
    return frozenset(
        ast.unparse(node)
        for node in ast.walk(loop)
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store)
    )


def outcomes(test: ast.expr, values: Values) -> Iterator[tuple[bool, Values]]:
    """Yield each value that a condition can have, and the values of conditions that it implies."""
    match test:
        case ast.Constant(value=value):
            yield bool(value), values
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            yield from ((not is_true, known) for is_true, known in outcomes(inner, values))
        case ast.BoolOp(op=op, values=[first, *rest]):
            ends_with = isinstance(op, ast.Or)
            for is_true, known in outcomes(first, values):
                if is_true is ends_with or not rest:
                    yield is_true, known
                else:
                    yield from outcomes(ast.BoolOp(op, rest), known)
        case _:
            text, is_plain = _atom(test)
            for value in (values[text],) if text in values else (True, False):
                yield value is is_plain, {**values, text: value}


def _atom(test: ast.expr) -> tuple[str, bool]:
    """Return a condition without its negation, and False if it had one; ``x is not None`` counts as ``x``."""
    match test:
        case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as op], comparators=[ast.Constant(value=None)]):
            return ast.unparse(left), isinstance(op, ast.IsNot)
        case ast.Compare(left=left, ops=[ast.NotEq()], comparators=[right]):
            return ast.unparse(ast.Compare(left, [ast.Eq()], [right])), False
    return ast.unparse(test), True
