"""The ways through a piece of code: which of its statements run after each other, by what its conditions are.

The same condition has the same value wherever it stands on one way; what changes from one round of a loop to the next
is asked again in each.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from ampdbg.lint.document import FUNCTIONS, LOOPS

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
"""The statements after which nothing of their block runs."""

MOST_WAYS = 128
"""Where there are more, the code is left alone."""

_SAME_EACH_ROUND = frozenset("is_enabled isinstance hasattr len getattr get_rank is_main_process is_available".split())


class TooManyWays(Exception):  # noqa: N818 - no error of the user's
    """There are more ways than are looked at."""


@dataclass(frozen=True)
class Way(Generic[EventT]):
    """One way: its events in order, what the conditions were, and how it ends."""

    events: tuple[EventT, ...]
    values: Values
    ending: BranchEnd = ""


def ways(statements: Sequence[ast.stmt], events_of: EventsOf[EventT], values: Values) -> list[Way[EventT]]:
    """Every way through statements, under what is known of their conditions.

    Args:
        statements: a block.
        events_of: the events of a simple statement or an expression, in order; nothing else of a way is kept.
        values: conditions whose value is known, by their text.

    Raises:
        TooManyWays: there are more than :data:`MOST_WAYS`.
    """
    found: list[Way[EventT]] = [Way((), values)]
    for statement in statements:
        ended = [way for way in found if way.ending]
        found = ended + [
            Way(way.events + after.events, after.values, after.ending)
            for way in found
            if not way.ending
            for after in _through(statement, events_of, way.values)
        ]
        if len(found) > 1:  # a long way costs as much to compare as it has events
            found = list({(way.events, tuple(sorted(way.values.items())), way.ending): way for way in found}.values())
        if len(found) > MOST_WAYS:
            raise TooManyWays
    return found


def _through(statement: ast.stmt, events_of: EventsOf[EventT], values: Values) -> Iterator[Way[EventT]]:
    if isinstance(statement, LOOPS):
        yield from _rounds(statement, events_of, values)
    elif isinstance(statement, ast.If):
        yield from _branches(statement, events_of, values)
    elif isinstance(statement, (ast.With, ast.AsyncWith)):
        entered = tuple(event for item in statement.items for event in events_of(item.context_expr))
        for way in ways(statement.body, events_of, values):
            yield Way(entered + way.events, way.values, way.ending)
    elif isinstance(statement, ast.Try):
        yield from ways([*statement.body, *statement.orelse, *statement.finalbody], events_of, values)
    elif isinstance(statement, (*FUNCTIONS, ast.ClassDef, ast.Match)):
        yield Way((), values)
    else:
        yield Way(tuple(events_of(statement)), values, ENDINGS.get(type(statement), ""))


def _branches(statement: ast.If, events_of: EventsOf[EventT], values: Values) -> Iterator[Way[EventT]]:
    asked = tuple(events_of(statement.test))
    if not (asked or _matters(statement, events_of)):
        yield Way((), values)
        return
    for is_true, known in outcomes(statement.test, values):
        for way in ways(statement.body if is_true else statement.orelse, events_of, known):
            yield Way(asked + way.events, way.values, way.ending)


def _matters(statement: ast.AST, events_of: EventsOf[EventT]) -> bool:
    """A branch of the condition has events, or leaves the block."""
    return any(
        isinstance(node, tuple(ENDINGS)) or (isinstance(node, ast.Call) and events_of(node))
        for node in ast.walk(statement)
    )


def _rounds(
    loop: ast.For | ast.AsyncFor | ast.While, events_of: EventsOf[EventT], values: Values
) -> Iterator[Way[EventT]]:
    """An inner loop, run through twice."""
    if not _matters(loop, events_of):
        yield Way((), values)
        return
    changing = changed_names(loop)
    for first, second in rounds(loop.body, events_of, values, changing):
        known = lasting(second.values, changing)
        yield Way(first.events + second.events, known, "leave" if second.ending == "leave" else "")


def rounds(
    body: Sequence[ast.stmt],
    events_of: EventsOf[EventT],
    values: Values,
    changing: frozenset[str],
) -> Iterator[tuple[Way[EventT], Way[EventT]]]:
    """Every pair of ways through a loop's body, one after the other.

    A round that leaves the loop is its last; so the first of a pair never does.
    """
    for first in ways(body, events_of, lasting(values, changing)):
        if first.ending not in ("break", "leave"):
            for second in ways(body, events_of, lasting(first.values, changing)):
                yield first, second


def lasting(values: Values, changing: frozenset[str]) -> dict[str, bool]:
    """The conditions that another round of a loop does not change."""
    return {text: value for text, value in values.items() if is_lasting(text, changing)}


def is_lasting(condition: str, changing: frozenset[str]) -> bool:
    """A condition depends on nothing that a loop assigns, and calls nothing whose answer may change."""
    nodes = list(ast.walk(ast.parse(condition, mode="eval")))
    named = {ast.unparse(node) for node in nodes if isinstance(node, (ast.Name, ast.Attribute))}
    called = {ast.unparse(node.func).rpartition(".")[2] for node in nodes if isinstance(node, ast.Call)}
    return named.isdisjoint(changing) and called <= _SAME_EACH_ROUND


def changed_names(loop: ast.AST) -> frozenset[str]:
    """Names and attributes that a loop assigns."""
    return frozenset(
        ast.unparse(node)
        for node in ast.walk(loop)
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store)
    )


def outcomes(test: ast.expr, values: Values) -> Iterator[tuple[bool, Values]]:
    """What a condition may be, and what is known of conditions then."""
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
    """A condition's text without its negation: ``x is not None`` is taken for ``x``, ``a != b`` for no ``a == b``."""
    match test:
        case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as op], comparators=[ast.Constant(value=None)]):
            return ast.unparse(left), isinstance(op, ast.IsNot)
        case ast.Compare(left=left, ops=[ast.NotEq()], comparators=[right]):
            return ast.unparse(ast.Compare(left, [ast.Eq()], [right])), False
    return ast.unparse(test), True
