"""The calls of a training loop in execution order, on every path through it, for :mod:`ampdbg.call_order` to check.

On one path a condition has the same value everywhere. Conditions that a loop can change are evaluated again in each
round of the loop.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from ampdbg.call_order import Call, CallKind, CallOrder
from ampdbg.lint.facts import Facts
from ampdbg.source.document import FUNCTIONS, LOOPS, Document
from ampdbg.source.expressions import argument, given, is_none

KINDS: Mapping[str, CallKind] = {"unscale_": "unscale", "step": "step", "update": "update", "get_scale": "get_scale"}
"""The kind of call in the call order, by the scaler's method."""

STEPS = ("step", "bare step")

PathEnd = Literal["", "continue", "break", "leave"]
Values = Mapping[str, bool]
"""The known values of conditions, by the text of the condition."""

ENDINGS: Mapping[type[ast.stmt], PathEnd] = {
    ast.Continue: "continue",
    ast.Break: "break",
    ast.Return: "leave",
    ast.Raise: "leave",
}
"""Statements after which the rest of their block does not run."""

BLOCKS = (*LOOPS, *FUNCTIONS, ast.If, ast.ClassDef, ast.Match)
"""Statements that run nothing of the path themselves, except for a loop or a branch with calls."""

MOST_PATHS = 128
"""A loop with more paths is not checked."""


class _TooManyPaths(Exception):  # noqa: N818 - no error of the user's
    """There are more than :data:`MOST_PATHS` paths."""


@dataclass(frozen=True)
class LoopCall:
    """A call of a training loop. ``optimizers`` is the source of its optimizers; ``clears``: it clears gradients.

    After a call of ``kind`` None nothing is known of gradients: it clears them, or is user code that may do anything.
    """

    node: ast.Call
    kind: CallKind | None
    optimizers: tuple[str, ...] = ()
    scaler: str = ""
    clears: bool = False


@dataclass(frozen=True)
class FlowPath:
    """One path through code: its calls in order, the values of its conditions, and its ending."""

    calls: tuple[LoopCall, ...]
    values: Values
    ending: PathEnd = ""


Rounds = tuple[FlowPath, FlowPath]
"""The paths of two rounds of a loop. A round that leaves the loop is its last, so the first one never does."""


@dataclass(frozen=True)
class LoopHit:
    """A misuse: its code, and the call to blame."""

    code: str
    call: LoopCall


@dataclass(frozen=True, eq=False)
class TrainingLoop:
    """The smallest code with all the calls of a function: a loop, or the whole function."""

    facts: Facts
    unit: ast.AST
    node: ast.AST
    calls: tuple[LoopCall, ...]

    @property
    def body(self) -> Sequence[ast.stmt]:
        body: Sequence[ast.stmt] = self.node.body  # type: ignore[attr-defined]
        return body

    @cached_property
    def optimizers(self) -> tuple[str, ...]:
        """The optimizers that it steps or unscales."""
        known = (text for call in self.calls if call.kind in (*STEPS, "unscale") for text in call.optimizers)
        return tuple(dict.fromkeys(known))

    def hits(self, of_windows: str) -> Iterator[LoopHit]:
        """Yield misuses on every path with the call to blame; ``of_windows`` is the code of accumulation windows."""
        named = {text.partition(".")[0] for call in self.calls for text in (*call.optimizers, call.scaler)}
        changing = _changed_names(self.node)
        if named & changing:
            return  # one name for several optimizers in turn
        try:
            every = [*self._rounds(self.body, {}, changing)]
        except _TooManyPaths:
            return
        yield from dict.fromkeys(hit for group in _with_amp(every, changing) for hit in self._sure(group, of_windows))

    def _paths(self, statements: Sequence[ast.stmt], values: Values) -> list[FlowPath]:
        """Return every path through a block, given the known values of conditions.

        Raises:
            _TooManyPaths: there are more than :data:`MOST_PATHS`.
        """
        found = [FlowPath((), values)]
        for statement in statements:
            found = [path for path in found if path.ending] + [
                replace(after, calls=path.calls + after.calls)
                for path in found
                if not path.ending
                for after in self._through(statement, path.values)
            ]
            if len(found) > 1:  # the comparison costs time for each call
                found = list(
                    {(one.calls, tuple(sorted(one.values.items())), one.ending): one for one in found}.values()
                )
            if len(found) > MOST_PATHS:
                raise _TooManyPaths
        return found

    def _through(self, statement: ast.stmt, values: Values) -> Iterator[FlowPath]:
        match statement:
            case ast.For() | ast.AsyncFor() | ast.While() if self._matters(statement):
                yield from self._through_loop(statement, values)
            case ast.If(test=test) if (asked := tuple(self._calls_in(test))) or self._matters(statement):
                for is_true, known in _outcomes(test, values):
                    for path in self._paths(statement.body if is_true else statement.orelse, known):
                        yield replace(path, calls=asked + path.calls)
            case ast.With() | ast.AsyncWith():
                entered = tuple(call for item in statement.items for call in self._calls_in(item.context_expr))
                for path in self._paths(statement.body, values):
                    yield replace(path, calls=entered + path.calls)
            case ast.Try():
                yield from self._paths([*statement.body, *statement.orelse, *statement.finalbody], values)
            case _:
                calls = [] if isinstance(statement, BLOCKS) else self._calls_in(statement)
                yield FlowPath(tuple(calls), values, ENDINGS.get(type(statement), ""))

    def _through_loop(self, loop: ast.For | ast.AsyncFor | ast.While, values: Values) -> Iterator[FlowPath]:
        """Yield the paths through two rounds of an inner loop."""
        changing = _changed_names(loop)
        for first, second in self._rounds(loop.body, values, changing):
            known = _lasting(second.values, changing)
            yield FlowPath(first.calls + second.calls, known, "leave" if second.ending == "leave" else "")

    def _matters(self, statement: ast.AST) -> bool:
        """True if a branch of the statement has calls, or leaves the block."""
        return any(isinstance(node, tuple(ENDINGS)) or id(node) in self._places for node in ast.walk(statement))

    def _rounds(self, body: Sequence[ast.stmt], values: Values, changing: frozenset[str]) -> Iterator[Rounds]:
        """Yield every pair of paths through two rounds of a loop's body, which changes these names."""
        for first in self._paths(body, _lasting(values, changing)):
            if first.ending not in ("break", "leave"):
                for second in self._paths(body, _lasting(first.values, changing)):
                    yield first, second

    def _calls_in(self, node: ast.AST) -> list[LoopCall]:
        places = sorted(place for one in ast.walk(node) for place in self._places.get(id(one), ()))
        return [self.calls[place] for place in places]

    @cached_property
    def _places(self) -> dict[int, list[int]]:
        """The indices of the calls at each node, by its id."""
        found: dict[int, list[int]] = {}
        for place, call in enumerate(self.calls):
            found.setdefault(id(call.node), []).append(place)
        return found

    def _sure(self, pairs: Sequence[Rounds], of_windows: str) -> Iterator[LoopHit]:
        """Yield the hits on every path with the call to blame; for an accumulation window, those on any path."""
        runs = [(self._judged(first.calls + second.calls), set(second.calls)) for first, second in pairs]
        for hit in dict.fromkeys(hit for hits, _ in runs for hit in hits):
            ran = [hits for hits, calls in runs if hit.call in calls]
            accumulates = hit.code == of_windows and self._is_counted(hit.call.node)
            if accumulates or (ran and all(hit in hits for hits in ran)):
                yield hit

    def _is_counted(self, node: ast.AST) -> bool:
        """True if the loop steps by the count of its micro-batches."""
        document, above = self.facts.document, set(self.facts.document.around(node))
        around = (one for call in self.calls if call.kind in STEPS for one in document.around(call.node))
        tests = [ast.unparse(one.test) for one in around if isinstance(one, ast.If) and one not in above]
        return any("%" in test or "accum" in test.lower() for test in tests)

    def _judged(self, calls: Sequence[LoopCall]) -> list[LoopHit]:
        """Return the hits of the call order in a sequence of calls."""
        order = CallOrder()
        places = {text: place for place, text in enumerate(self.optimizers)}
        scalers = {text: place for place, text in enumerate(dict.fromkeys(call.scaler for call in self.calls), start=1)}
        for _ in places:
            order.add_optimizer()
        found: list[LoopHit] = []
        cleared: set[int] = set()
        for number, call in enumerate(calls):
            optimizers = tuple(places[text] for text in call.optimizers if text in places)
            if call.kind is None:
                gone = set(optimizers if call.clears and call.optimizers else places.values())
                cleared |= gone
                for one in gone:
                    order.clear(one)
                continue
            rewritten: set[int] = set()
            if call.kind == "backward":
                optimizers = _written_by(calls[number + 1 :], places)
                rewritten = cleared & set(optimizers)
                cleared -= rewritten
            elif call.kind == "clip" and len(places) == 1:
                optimizers = tuple(places.values())
            line = ("", number, "")
            made = Call(
                call.kind, 0, optimizers, line, scalers.get(call.scaler, 0) if call.scaler else 0, tuple(rewritten)
            )
            if call.kind == "unscale" and optimizers and all(order.gradients[one].unscaled for one in optimizers):
                found.append(LoopHit(order.code_of_second_unscale(made), call))
            found += [LoopHit(hit.code, calls[hit.call.line[1]]) for hit in order.hits(made) if hit.call.line]
        return found


def _written_by(after: Sequence[LoopCall], places: dict[str, int]) -> tuple[int, ...]:
    """Return the optimizers that a backward pass writes gradients of: those used before the next backward pass."""
    if len(places) < 2:
        return tuple(places.values())
    until = list(itertools.takewhile(lambda call: call.kind != "backward", after))
    done = (one for call in until if call.kind in (*STEPS, "unscale") for one in call.optimizers if one in places)
    return tuple(dict.fromkeys(places[text] for text in done))


def _with_amp(pairs: Sequence[Rounds], changing: frozenset[str]) -> Iterator[list[Rounds]]:
    """Group the pairs by conditions that last through the loop; yield the groups with most scaler calls: AMP is on."""
    groups: dict[tuple[tuple[str, bool], ...], list[Rounds]] = {}
    for pair in pairs:
        groups.setdefault(tuple(sorted(_lasting(pair[1].values, changing).items())), []).append(pair)
    used = {
        key: frozenset(call.node for pair in group for path in pair for call in path.calls if call.scaler)
        for key, group in groups.items()
    }
    for key, group in groups.items():
        if used[key] and not any(used[key] < other for other in used.values()):
            yield group


def training_loops(facts: Facts) -> Iterator[TrainingLoop]:
    """Yield every function, and the module, with a scaler's backward pass and step, unless it hides some calls."""
    document = facts.document
    by_unit: dict[ast.AST, list[LoopCall]] = {}
    for node in document.calls:
        if (call := _call(facts, node)) is not None:
            by_unit.setdefault(document.unit(node), []).append(call)
    helpers = _helpers(document, by_unit)
    for unit, calls in by_unit.items():
        is_nested = isinstance(unit, FUNCTIONS) and any(unit in document.around(other) for other in by_unit)
        has_backward = any(call.kind == "backward" and call.scaler for call in calls)
        if is_nested or not has_backward or _touches_gradients(unit):
            continue
        lists, known = _lists(facts, calls), {call.node for call in calls}
        others = (node for node in document.calls if document.unit(node) is unit and node not in known)
        hidden = [LoopCall(node, None) for node in others if _hides(facts, node, helpers, lists, calls)]
        every = tuple(sorted([*calls, *hidden], key=lambda call: (call.node.end_lineno, call.node.end_col_offset)))
        yield TrainingLoop(facts, unit, _smallest(document, unit, calls), every)


def _helpers(document: Document, by_unit: Mapping[ast.AST, Sequence[LoopCall]]) -> set[str]:
    """Return the names of the file's functions that call a scaler or optimizer, write ``.grad``, or call one that
    does."""
    known = {unit for unit, calls in by_unit.items() if any(call.kind is not None or call.clears for call in calls)}
    found = {made.name for made in document.definitions if made in known or _WRITTEN.search(ast.unparse(made))}
    called = [(document.function(call), _name(call)) for call in document.calls]
    while more := {unit.name for unit, name in called if unit is not None and name in found} - found:
        found |= more
    return found


_WRITTEN = re.compile(r"\.grad(\.\w+)*(_\(| = )")


def _smallest(document: Document, unit: ast.AST, calls: Sequence[LoopCall]) -> ast.AST:
    """Return the innermost loop around every backward pass and step, else the unit."""
    held = [call.node for call in calls if call.kind in ("backward", *STEPS)]
    around = [[one for one in document.around(node) if isinstance(one, LOOPS)] for node in held]
    inside = [[one for one in loops if unit in document.around(one)] for loops in around]
    return next((one for one in inside[0] if all(one in loops for loops in inside)), unit)


def _touches_gradients(unit: ast.AST) -> bool:
    """True if code reads or writes ``.grad`` by hand, other than to clear it: it may unscale by hand.

    torch.autograd.grad is not the gradient of a parameter.
    """
    nodes = list(ast.walk(unit))
    clearing = (node for node in nodes if isinstance(node, ast.Assign) and is_none(node.value))
    cleared = {target for node in clearing for target in node.targets}
    named = (node for node in nodes if isinstance(node, ast.Attribute) and node.attr in ("grad", "grads"))
    return any(node not in cleared and not ast.unparse(node).endswith("autograd.grad") for node in named)


def _call(facts: Facts, node: ast.Call) -> LoopCall | None:
    """Return the meaning of a call in the call order; None for any other call."""
    match node.func:
        case ast.Attribute(value=scaler, attr=name) if facts.is_scaler(scaler):
            return _scalers(node, name, ast.unparse(scaler))
        case ast.Attribute(value=loss, attr="backward"):
            by = facts.scaler_of(loss)
            is_known = by is not None or not node.args
            return LoopCall(node, "backward" if is_known else None, scaler=ast.unparse(by) if by else "")
        case ast.Attribute(value=owner, attr="step") if facts.is_optimizer(owner) and not given(node):
            return LoopCall(node, "bare step", (ast.unparse(owner),))
        case ast.Attribute(value=owner, attr="zero_grad"):
            return LoopCall(node, None, (ast.unparse(owner),) * facts.is_optimizer(owner), clears=True)
    return LoopCall(node, "clip") if facts.is_clip(node) else None


def _scalers(node: ast.Call, name: str, scaler: str) -> LoopCall | None:
    optimizers = tuple(map(ast.unparse, node.args[:1])) * (name in ("unscale_", "step"))
    if name == "update" and (node.args or argument(node, "new_scale")):
        return LoopCall(node, None)
    return LoopCall(node, KINDS[name], optimizers, scaler) if name in KINDS else None


def _lists(facts: Facts, calls: Sequence[LoopCall]) -> set[ast.AST]:
    """Return the nodes that list the clipped parameters, directly or by a name: ``amp.master_params(optimizer)``."""
    clipped = [argument(call.node, "parameters", 0) for call in calls if call.kind == "clip"]
    made = [value for one in clipped for value in (facts.document.values(one) if isinstance(one, ast.Name) else [one])]
    return {node for value in made if value is not None for node in ast.walk(value)}


def _hides(facts: Facts, node: ast.Call, helpers: set[str], lists: set[ast.AST], calls: Sequence[LoopCall]) -> bool:
    """True if a call may change the scaler, an optimizer or gradients in code that is not visible.

    A call that lists parameters does not change their gradients, unless it takes the scaler too. A call that the file
    does not define may: a method of an optimizer, of its holder if the result is dropped, or with "grad" in its name.
    """
    name = _name(node)
    if name in helpers or any("zero_grad" in (keyword.arg or "") for keyword in node.keywords):
        return True
    if facts.document.call_origin(node).startswith(("torch.", "print")) or name in _HARMLESS:
        return False
    names = [one for one in given(node) if isinstance(one, (ast.Name, ast.Attribute))]
    if any(map(facts.is_scaler, names)) or (node not in lists and any(map(facts.is_optimizer, names))):
        return True
    if node in lists or any(name == made.name for made in facts.document.definitions):
        return False
    held = {text for call in calls for text in call.optimizers}
    is_discarded = isinstance(facts.document.parents[node], ast.Expr)  # called for its effect
    holders = {text.rpartition(".")[0] for text in held if is_discarded and "." in text}
    return "grad" in name or ast.unparse(node.func).rpartition(".")[0] in held | holders


def _name(node: ast.Call) -> str:
    return ast.unparse(node.func).rpartition(".")[2]


_HARMLESS = frozenset(
    "print isinstance len id get_lr state_dict load_state_dict adjust_learning_rate set_lr requires_grad_ log".split()
)


# The conditions on a path

_SAME_EACH_ROUND = frozenset("is_enabled isinstance hasattr len getattr get_rank is_main_process is_available".split())


def _lasting(values: Values, changing: frozenset[str]) -> dict[str, bool]:
    """Return the values of the conditions that another round of a loop cannot change."""
    return {text: value for text, value in values.items() if _is_lasting(text, changing)}


def _is_lasting(condition: str, changing: frozenset[str]) -> bool:
    """True if a condition reads nothing that a loop assigns, and calls only functions with a constant result."""
    nodes = list(ast.walk(ast.parse(condition, mode="eval")))
    named = {ast.unparse(node) for node in nodes if isinstance(node, (ast.Name, ast.Attribute))}
    called = {ast.unparse(node.func).rpartition(".")[2] for node in nodes if isinstance(node, ast.Call)}
    return named.isdisjoint(changing) and called <= _SAME_EACH_ROUND


def _changed_names(loop: ast.AST) -> frozenset[str]:
    """Return the names and attributes that a loop assigns."""
    return frozenset(
        ast.unparse(node)
        for node in ast.walk(loop)
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store)
    )


def _outcomes(test: ast.expr, values: Values) -> Iterator[tuple[bool, Values]]:
    """Yield each value that a condition can have, and the values of conditions that it implies."""
    match test:
        case ast.Constant(value=value):
            yield bool(value), values
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            yield from ((not is_true, known) for is_true, known in _outcomes(inner, values))
        case ast.BoolOp(op=op, values=[first, *rest]):
            ends_with = isinstance(op, ast.Or)
            for is_true, known in _outcomes(first, values):
                if is_true is ends_with or not rest:
                    yield is_true, known
                else:
                    yield from _outcomes(ast.BoolOp(op, rest), known)
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
