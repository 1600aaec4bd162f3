"""A suite as a row of pieces, each of which runs in FP32, under autocast, or in either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import libcst as cst

from ampdbg.patch.regions import Action, Region, Regions, TensorNames, action_of, writes_in_place
from ampdbg.patch.steps import Apart, Part, take_apart, value_of
from ampdbg.source.bindings import Bindings, is_number
from ampdbg.source.expressions import code_of, find, names_read, walk
from ampdbg.source.source_file import EditError


@dataclass(frozen=True)
class LineMark:
    """A line that is pinned: what is known of its names, the callees to pin, whether its own operations are.

    ``number`` is the first of its lines that a pin names.
    """

    number: int
    names: TensorNames
    callees: frozenset[str] = frozenset()
    operations: bool = False


@dataclass(frozen=True)
class Piece:
    """One statement of the new suite, what is known of its names, and the mark of the line that it comes from."""

    mode: Region
    statement: cst.BaseStatement
    names: TensorNames
    mark: LineMark | None = None

    @property
    def line(self) -> cst.SimpleStatementLine:
        """The statement, where it is one that may stand in a block."""
        if not isinstance(self.statement, cst.SimpleStatementLine):
            raise TypeError(f"{type(self.statement).__name__} is not a line")
        return self.statement


def pieces_of_line(line: cst.SimpleStatementLine, mark: LineMark) -> Iterator[Piece]:
    """The pieces of a pinned line: its small statements on lines of their own, taken apart.

    Raises:
        EditError: none of them can be pinned.
    """
    pieces: list[Piece] = []
    refused: list[EditError] = []
    for small in line.body:
        try:
            pieces += _pieces_of_small(small, mark)
        except EditError as error:
            refused.append(error)
            pieces.append(Piece(Region.AUTOCAST, _line(small), mark.names, mark))
    if not any(piece.mode is Region.FP32 for piece in pieces):
        raise refused[0]
    return _with_margins(line, pieces)


def _pieces_of_small(small: cst.BaseSmallStatement, mark: LineMark) -> list[Piece]:
    _refuse_suspended(small)
    if mark.operations:
        _refuse_writes(small, mark.names)
    small = _without_augmented(small, mark.names)
    apart = take_apart(small, _regions(mark, small))
    rest = Piece(apart.mode, _line(apart.rest), _names_after(apart.parts, mark), mark)
    return [*_pieces_of_parts(apart, mark), rest]


def _regions(mark: LineMark, statement: cst.BaseSmallStatement) -> Regions:
    regions = Regions(mark.names, mark.callees, mark.operations)
    value = value_of(statement)
    if value is None:
        return regions
    # A trace that names the tensors in FP32 too has named them all: arithmetic with other names is with numbers.
    certain = replace(regions, names=replace(mark.names, guesses=not mark.names.full))
    return certain if certain.has_fp32(value) else regions


def _pieces_of_parts(apart: Apart, mark: LineMark) -> Iterator[Piece]:
    for index, step in enumerate(apart.parts):
        assignment = cst.Assign([cst.AssignTarget(cst.Name(step.name))], step.value)
        yield Piece(step.mode, _line(assignment), _names_after(apart.parts[:index], mark), mark)


def _names_after(steps: Sequence[Part], mark: LineMark) -> TensorNames:
    """What autocast computed in a step is in half, unless the trace saw otherwise."""
    full = frozenset(step.name for step in steps if step.mode is Region.FP32 or step.origin in mark.names.full)
    return mark.names.with_new(frozenset(step.name for step in steps) - full, full)


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
    if isinstance(statement, (cst.Assign, cst.AugAssign)):
        targets = (
            [item.target for item in statement.targets] if isinstance(statement, cst.Assign) else [statement.target]
        )
        for target in targets:
            if isinstance(target, cst.Subscript) and (names.is_half_element(target) or not names.is_traced):
                raise EditError("it writes into part of a half tensor; create that tensor in FP32")


def _without_augmented(statement: cst.BaseSmallStatement, names: TensorNames) -> cst.BaseSmallStatement:
    """``x += y`` as ``x = x + y`` where x is in half: written in place, the sum would be in half too."""
    if not isinstance(statement, cst.AugAssign) or names.is_known_full(statement.target):
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
    if _keeps_a_tensor(statement):
        return False
    banned = (cst.Await, cst.Yield, cst.NamedExpr, cst.Lambda, cst.GeneratorExp)
    if any(isinstance(node, banned) or action_of(node, names) is Action.USERS_CALL for node in walk(statement)):
        return False
    if Regions(names).has_product(statement) or any(writes_in_place(call) for call in find(statement, cst.Call)):
        return False
    return is_number(statement.value) or _reads_what_is_known(statement.value, names, made)


def _keeps_a_tensor(statement: cst.Assign | cst.AnnAssign) -> bool:
    """``self.last = h``: who reads it elsewhere is to find what the code put there, and no cast."""
    targets = [item.target for item in statement.targets] if isinstance(statement, cst.Assign) else [statement.target]
    return any(isinstance(target, (cst.Attribute, cst.Subscript)) for target in targets)


def _reads_what_is_known(value: cst.BaseExpression, names: TensorNames, made: frozenset[str]) -> bool:
    bindings: Bindings = names.bindings
    plain = made | bindings.numbers | set(bindings.imports) | {"self", "cls"}
    tensors = {code for code in names.half | names.full if code.isidentifier()}
    return all(name in plain or name in tensors or name not in bindings.local for name in names_read(value))
