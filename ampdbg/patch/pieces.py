"""A pinned line as a row of pieces, each of which runs in FP32, under autocast, or in either, in the order it had."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import libcst as cst

from ampdbg.ops import MOVES, PRODUCTS, TENSOR_METHODS
from ampdbg.patch.regions import (
    Action,
    PinnedLine,
    Region,
    TensorNames,
    action_of,
    called_name,
    calls_a_variable,
    has_product,
    writes_in_place,
)
from ampdbg.source.expressions import (
    Bindings,
    bare,
    code_of,
    find,
    is_number,
    names_bound_inside,
    names_read,
    targets,
    walk,
)
from ampdbg.source.source_file import EditError
from ampdbg.syntax_tree import syntax_tree


@dataclass(frozen=True)
class Piece:
    """One statement of the new suite, what is known of its names, and the pinned line that it comes from."""

    mode: Region
    statement: cst.BaseStatement
    names: TensorNames
    pinned: PinnedLine | None = None

    @property
    def line(self) -> cst.SimpleStatementLine:
        """The statement, where it is one that may stand in a block."""
        assert isinstance(self.statement, cst.SimpleStatementLine)
        return self.statement

    @property
    def small(self) -> cst.BaseSmallStatement:
        """The only statement of that line."""
        return self.line.body[0]


def pieces_of_line(line: cst.SimpleStatementLine, pinned: PinnedLine) -> Iterator[Piece]:
    """The pieces of a pinned line: its small statements on lines of their own, taken apart.

    Raises:
        EditError: none of them can be pinned.
    """
    pieces: list[Piece] = []
    refused: list[EditError] = []
    for small in line.body:
        try:
            pieces += _pieces_of_small(small, pinned)
        except EditError as error:
            refused.append(error)
            pieces.append(Piece(Region.AUTOCAST, _line(small), pinned.names, pinned))
    if not any(piece.mode is Region.FP32 for piece in pieces):
        raise refused[0]
    return _with_margins(line, pieces)


def _pieces_of_small(small: cst.BaseSmallStatement, pinned: PinnedLine) -> list[Piece]:
    """The pieces of a statement: the steps before it, and what is left of it.

    Raises:
        EditError: there is nothing to pin in it, or it cannot be taken apart without a change of what it does.
    """
    _refuse_suspended(small)
    if pinned.operations:
        _refuse_writes(small, pinned.names)
    small = _without_augmented(small, pinned.names)
    value = value_of(small)
    inside = pinned if value is None else _certain(pinned, value)
    computes = pinned.operations and isinstance(small, cst.AugAssign)
    if value is None or not (computes or inside.has_fp32(value)):
        raise EditError(_nothing_to_pin(pinned))
    mode = _mode_of(small, value, inside)
    steps, placed = _taken_apart(value, mode, inside)
    if steps and next(find(small, cst.NamedExpr), None) is not None:
        raise EditError("it binds a name with := in an expression that has to be split")
    names, pieces = pinned.names, []
    for step in steps:
        assignment = cst.Assign([cst.AssignTarget(cst.Name(step.name))], step.value)
        pieces.append(Piece(step.mode, _line(assignment), names, pinned))
        # What autocast computed in a step is in half, unless the trace saw otherwise.
        is_full = step.mode is Region.FP32 or step.origin in pinned.names.full
        names = names.with_new(step.name, is_full=is_full)
    rest = small.with_changes(**{VALUE_FIELDS[type(small)]: placed})
    return [*pieces, Piece(mode, _line(rest), names, pinned)]


def _certain(pinned: PinnedLine, value: cst.BaseExpression) -> PinnedLine:
    """The line without guesses: a trace that names the tensors in FP32 too has named all but what is bound inside."""
    if not pinned.names.full:
        return pinned
    certain = replace(pinned, names=replace(pinned.names, guesses=False))
    return pinned if names_bound_inside(value) and not certain.has_fp32(value) else certain


def _nothing_to_pin(pinned: PinnedLine) -> str:
    if pinned.callees:
        return f"{' and '.join(sorted(pinned.callees))} is not called here"
    return "it only calls modules or functions; pin what it calls"


def _mode_of(statement: cst.BaseSmallStatement, value: cst.BaseExpression, pinned: PinnedLine) -> Region:
    if isinstance(statement, cst.AugAssign):
        return Region.FP32 if pinned.operations else Region.AUTOCAST
    mode = pinned.of(value)
    return Region.FP32 if mode is Region.EITHER else mode


def _line(small: cst.BaseSmallStatement) -> cst.SimpleStatementLine:
    return cst.SimpleStatementLine([small.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)])


def _with_margins(line: cst.SimpleStatementLine, pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The first piece gets the blank lines and comments above the line, the last one the comment behind it."""
    for index, piece in enumerate(pieces):
        statement = piece.statement
        if index == 0:
            statement = statement.with_changes(leading_lines=line.leading_lines)
        if index == len(pieces) - 1:
            statement = statement.with_changes(trailing_whitespace=line.trailing_whitespace)
        yield replace(piece, statement=statement)


# What is refused, and what is written otherwise


def _refuse_suspended(statement: cst.CSTNode) -> None:
    if next(find(statement, cst.Await), None) is not None:
        raise EditError("it awaits, and other code would run with autocast off")
    if next(find(statement, cst.Yield), None) is not None:
        raise EditError("it yields, and the caller's code would run with autocast off")


def _refuse_writes(statement: cst.BaseSmallStatement, names: TensorNames) -> None:
    """What is written into a half tensor is in half, whatever it was computed in."""
    for call in find(statement, cst.Call):
        if writes_in_place(call):
            raise EditError("it writes into an existing tensor, which stays in half; assign the result instead")
    for target in targets(statement):
        if isinstance(target, cst.Subscript) and (names.is_half_element(target) or not names.is_traced):
            raise EditError("it writes into part of a half tensor; create that tensor in FP32")


def _without_augmented(statement: cst.BaseSmallStatement, names: TensorNames) -> cst.BaseSmallStatement:
    """``x += y`` as ``x = x + y`` where x is in half: written in place, the sum would be in half too."""
    if not isinstance(statement, cst.AugAssign) or code_of(statement.target) in names.full:
        return statement
    target = statement.target
    if isinstance(target, cst.Name) and (others := names.bindings.aliases(target.value)):
        raise EditError(f"it also changes {' and '.join(sorted(others))} in place; write it as an assignment first")
    if next(find(target, cst.Call), None) is not None:
        raise EditError("a call computes what it assigns to; write it as an assignment first")
    # `AddAssign` is `Add` in place.
    operator = getattr(cst, type(statement.operator).__name__.removesuffix("Assign"))()
    plain = cst.BinaryOperation(target, operator, statement.value)
    apart = statement.value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    in_parentheses = plain.with_changes(right=apart)
    is_same = not isinstance(statement.value, cst.Tuple) and code_of(plain) == code_of(in_parentheses)
    return cst.Assign([cst.AssignTarget(target)], plain if is_same else in_parentheses)


def may_run_in_either(line: cst.BaseStatement, names: TensorNames, made: frozenset[str]) -> bool:
    """Whether an unpinned line between two pinned ones may stand in their block.

    It is an assignment that calls none of the user's code, holds no product that autocast would run in half, and
    computes only with what is known, so that nothing in half is left over from it.
    """
    if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
        return False
    statement = line.body[0]
    if not isinstance(statement, (cst.Assign, cst.AnnAssign)) or statement.value is None:
        return False
    # Who reads `self.last = h` elsewhere is to find what the code put there, and no cast.
    if any(isinstance(target, (cst.Attribute, cst.Subscript)) for target in targets(statement)):
        return False
    banned = (cst.Await, cst.Yield, cst.NamedExpr, cst.Lambda, cst.GeneratorExp)
    if any(isinstance(node, banned) or calls_a_variable(node, names) for node in walk(statement)):
        return False
    if any(action_of(node, names) is Action.USERS_CALL for node in walk(statement)):
        return False
    if has_product(statement) or any(writes_in_place(call) for call in find(statement, cst.Call)):
        return False
    return is_number(statement.value) or _reads_what_is_known(statement.value, names, made)


def _reads_what_is_known(value: cst.BaseExpression, names: TensorNames, made: frozenset[str]) -> bool:
    bindings: Bindings = names.bindings
    plain = made | bindings.numbers | set(bindings.imports) | {"self", "cls"}
    tensors = {code for code in names.half | names.full if code.isidentifier()}
    return all(name in plain or name in tensors or name not in bindings.local for name in names_read(value))


VALUE_FIELDS: dict[type[cst.CSTNode], str] = {
    cst.Assign: "value",
    cst.AnnAssign: "value",
    cst.AugAssign: "value",
    cst.Expr: "value",
    cst.Return: "value",
    cst.Assert: "test",
}
"""Statements, and their expression that can be taken apart."""


def value_of(statement: cst.CSTNode) -> cst.BaseExpression | None:
    """The expression of a statement that may be taken apart."""
    field = VALUE_FIELDS.get(type(statement))
    value = getattr(statement, field) if field else None
    return value if isinstance(value, cst.BaseExpression) else None


@dataclass(frozen=True)
class _Step:
    """A value that is computed before its statement: ``name = value``. ``origin`` is what it was in the source."""

    mode: Region
    name: str
    value: cst.BaseExpression
    origin: str


def _taken_apart(
    value: cst.BaseExpression, want: Region, pinned: PinnedLine
) -> tuple[Sequence[_Step], cst.BaseExpression]:
    """The steps that an expression needs, and what is left of it, which runs in the region ``want``."""
    placer = _Placer(pinned, want, frozenset())
    placed = value.visit(placer)
    if overtaken := _overtaken(placer.visited):
        placer = _Placer(pinned, want, overtaken)
        placed = value.visit(placer)
    assert isinstance(placed, cst.BaseExpression)
    return placer.steps, placed


@dataclass(frozen=True)
class _Visited:
    """A call with an effect, or what becomes a step; ``first`` is the first of those visited that stands inside it."""

    node: int
    first: int
    is_step: bool
    has_effect: bool


class _Placer(cst.CSTTransformer):
    """Replaces each part whose mode is not that of what surrounds it by a name, and keeps what the name stands for.

    So it does with the nodes of the ids ``forced``. ``visited`` are in the order of evaluation.
    """

    def __init__(self, pinned: PinnedLine, want: Region, forced: frozenset[int]) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self.visited: list[_Visited] = []
        self._pinned, self._forced = pinned, forced
        self._wants = [want]
        self._around: list[tuple[cst.CSTNode, int]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        parent = self._around[-1][0] if self._around else None
        # In `f(x).sum()` what may be taken out is `f(x)`, and not the method `f(x).sum`.
        is_method = isinstance(parent, cst.Call) and parent.func is node and isinstance(node, cst.Attribute)
        is_part = isinstance(node, cst.BaseExpression) and not is_method
        mode = self._pinned.of(node) if is_part else Region.EITHER
        self._wants.append(self._wants[-1] if mode is Region.EITHER else mode)
        self._around.append((node, len(self.visited)))
        return not self._pinned.is_whole(node)

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:  # type: ignore[override]
        _, first = self._around.pop()
        mode = self._wants.pop()
        is_step = mode is not self._wants[-1]
        self._note(original_node, first, is_step)
        if not is_step and id(original_node) not in self._forced:
            return updated_node
        if not isinstance(original_node, cst.BaseExpression) or not isinstance(updated_node, cst.BaseExpression):
            return updated_node
        bindings = self._pinned.names.bindings
        name = unused(name_for(original_node), bindings.taken | {step.name for step in self.steps})
        value = _standing_alone(updated_node, bindings.module.default_indent)
        self.steps.append(_Step(mode, name, value, code_of(original_node)))
        return cst.Name(name)

    def _note(self, node: cst.CSTNode, first: int, is_step: bool) -> None:
        inside = walk(node) if self._pinned.is_whole(node) else (node,)
        has_own = any(self._pinned.has_effect(item) for item in inside)
        if is_step or has_own:
            has_effect = has_own or any(item.has_effect for item in self.visited[first:])
            self.visited.append(_Visited(id(node), first, is_step, has_effect))


def _overtaken(visited: Sequence[_Visited]) -> frozenset[int]:
    """What must become a step too, because a step with an effect that comes later would overtake it."""
    steps = [(place, item) for place, item in enumerate(visited) if item.is_step]
    forced: set[int] = set()
    for place, item in enumerate(visited):
        carrier = next((end for end, step in steps if step.first <= place < end), len(visited))
        overtaking = (step for end, step in steps if step.has_effect and place < step.first and end < carrier)
        if not item.is_step and next(overtaking, None) is not None:
            forced.add(item.node)
    return frozenset(forced)


def _standing_alone(node: cst.BaseExpression, indent: str) -> cst.BaseExpression:
    """The expression with parentheses only where it goes over several lines that would fall apart."""
    value = bare(node)
    try:
        syntax_tree(cst.Module([]).code_for_node(value), mode="eval")
    except SyntaxError:
        opened = cst.ParenthesizedWhitespace(indent=True, last_line=cst.SimpleWhitespace(indent))
        closed = cst.ParenthesizedWhitespace(indent=True)
        return value.with_changes(lpar=[cst.LeftParen(opened)], rpar=[cst.RightParen(closed)])
    return value


OPERATOR_NAMES: dict[type[cst.BaseBinaryOp], str] = {
    cst.Add: "total",
    cst.Subtract: "difference",
    cst.Multiply: "product",
    cst.MatrixMultiply: "product",
    cst.Divide: "ratio",
}
"""What a new variable is called that holds the result of an operator."""

RESULT = "result"


def name_for(node: cst.BaseExpression) -> str:
    """What a person would call the value of an expression."""
    if isinstance(node, cst.BinaryOperation):
        return OPERATOR_NAMES.get(type(node.operator), RESULT)
    call = _call_in(node)
    if call is None:
        return RESULT
    name = called_name(call).strip("_")
    if name in PRODUCTS:
        return "product"
    return RESULT if not name or name == "forward" or name in TENSOR_METHODS | MOVES else name


def _call_in(node: cst.BaseExpression) -> cst.Call | None:
    """The call in ``f(x)``, ``f(x)[0]``, ``f(x).view(1).T``: the first one."""
    match node:
        case cst.Call(func=cst.Name(value="super")):
            return None
        case cst.Call(func=cst.Attribute(value=base)) if _call_in(base) is not None:
            return _call_in(base)
        case cst.Call():
            return node
        case cst.Attribute(value=base) | cst.Subscript(value=base):
            return _call_in(base)
        case _:
            return None


def unused(name: str, taken: frozenset[str]) -> str:
    """``name``, or with something behind it where it is taken."""
    candidates = (name, f"{name}_out", *(f"{name}_{number}" for number in range(2, len(taken) + 3)))
    return next(candidate for candidate in candidates if candidate.isidentifier() and candidate not in taken)
