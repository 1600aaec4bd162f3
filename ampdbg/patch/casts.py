"""The casts of statements that run in FP32: ``.float()`` on what holds half tensors, at each use or once in front."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import libcst as cst

from ampdbg.ops import CAST_METHODS, JOINS, SUMS
from ampdbg.patch.pieces import Piece
from ampdbg.patch.regions import PLAIN_BUILTINS, called_name, operands_of
from ampdbg.patch.tensor_names import TensorNames
from ampdbg.source.bindings import METADATA, TRANSPOSED
from ampdbg.source.expressions import assigned_codes, code_of, find, walk
from ampdbg.source.source_file import EditError


def cast(node: cst.BaseExpression) -> cst.Call:
    """``node.float()``."""
    if isinstance(node, cst.IfExp) and not node.lpar:
        node = node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return cst.Call(cst.Attribute(node, cst.Name("float")))


class HalfCasts(cst.CSTTransformer):
    """Casts the half expressions of one statement and lists them, in their order."""

    def __init__(self, names: TensorNames, made: frozenset[str]) -> None:
        super().__init__()
        self.cast: list[str] = []
        self._names, self._made = names, made
        self._around: list[cst.CSTNode] = []
        self._left: set[int] = set()
        self._cast_already: set[int] = set()
        self._operands: set[int] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        goes_in = self._goes_in(node)
        self._around.append(node)
        return goes_in

    def _goes_in(self, node: cst.CSTNode) -> bool:
        if id(node) in self._left or isinstance(node, (cst.AssignTarget, cst.Annotation)):
            return False
        if isinstance(node, cst.Attribute) and node.attr.value in CAST_METHODS:
            self._cast_already.add(id(node.value))
        self._operands.update(map(id, operands_of(node, self._names)))
        for part in (*not_read(node), *self._promoted(node)):
            self._left.add(id(part))
        return not self._is_half(node)

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:  # type: ignore[override]
        self._around.pop()
        if isinstance(updated_node, cst.BinaryOperation):
            return _spaced(updated_node)
        if isinstance(original_node, cst.Call) and isinstance(updated_node, cst.Call):
            updated_node = self._summed_in_fp32(original_node, updated_node)
        if isinstance(updated_node, cst.Call) and (lowered := self._lowered_operand(original_node)) is not None:
            self.cast.append(code_of(lowered))
            return cast(lowered)
        if id(original_node) in self._left or not self._is_half(original_node):
            return updated_node
        if not isinstance(original_node, cst.BaseExpression) or not isinstance(updated_node, cst.BaseExpression):
            return updated_node
        code = self._tensor_of(original_node)
        parent = self._around[-1] if self._around else None
        # What is asked for a method or an attribute is a tensor there, and neither a number nor None.
        if code in self._names.bindings.maybe_numbers and not isinstance(parent, cst.Attribute):
            raise EditError(f"{code} may be a number there, and numbers have no .float()")
        self.cast.append(code)
        is_there = code not in self._names.bindings.maybe_none or id(original_node) in self._operands
        if not is_there and isinstance(parent, cst.Arg):
            return cst.IfExp(cst.parse_expression(f"{code} is None"), cst.Name("None"), cast(updated_node))
        return cast(updated_node)

    def _summed_in_fp32(self, node: cst.Call, updated: cst.Call) -> cst.Call:
        """``sum()`` for ``sum(dtype=x.dtype)``, where ``x`` is half still: it would add up in half all the same."""
        args = [arg for arg in updated.args if not self._is_half_dtype(arg)]
        if called_name(node) not in SUMS or len(args) == len(updated.args):
            return updated
        args[-1:] = [arg.with_changes(comma=cst.MaybeSentinel.DEFAULT) for arg in args[-1:]]
        return updated.with_changes(args=args)

    def _is_half_dtype(self, arg: cst.Arg) -> bool:
        """Whether it is ``dtype=x.dtype`` of a half ``x``."""
        match arg:
            case cst.Arg(value=cst.Attribute(value=like, attr=cst.Name("dtype")), keyword=cst.Name("dtype")):
                return self._is_half(like)
        return False

    def _lowered_operand(self, node: cst.CSTNode) -> cst.BaseExpression | None:
        """``y`` of ``y.to(x.dtype)``, where ``x`` is half still: beside operands in FP32 it would overflow as before.

        What is no operand may be handed on in that dtype on purpose.
        """
        match node:
            case cst.Call(
                func=cst.Attribute(value=tensor, attr=cst.Name("to")),
                args=[cst.Arg(value=cst.Attribute(value=like, attr=cst.Name("dtype")), keyword=None)],
            ) if self._around and isinstance(self._around[-1], cst.BinaryOperation) and self._is_half(like):
                return tensor
        return None

    def _promoted(self, node: cst.CSTNode) -> Iterator[cst.BaseExpression]:
        """The side of an operator that may hold a number: beside an FP32 tensor it is promoted without a cast."""
        if not isinstance(node, cst.BinaryOperation) or isinstance(node.operator, cst.MatrixMultiply):
            return
        for side, other in ((node.left, node.right), (node.right, node.left)):
            if isinstance(side, cst.Name) and side.value in self._names.bindings.maybe_numbers and self._is_fp32(other):
                yield side

    def _is_fp32(self, node: cst.BaseExpression) -> bool:
        """Whether a tensor in it holds FP32 when the statement has its casts."""
        uncertain = self._names.bindings.maybe_numbers
        asked = {id(part.value) for part in find(node, cst.Attribute)}
        for part in walk(node):
            if isinstance(part, (cst.Name, cst.Attribute, cst.Subscript, cst.Call)):
                code = code_of(part)
                is_tensor = code not in uncertain or id(part) in asked
                if is_tensor and (self._is_half(part) or code in self._made or code in self._names.full):
                    return True
        return False

    def _tensor_of(self, node: cst.BaseExpression) -> str:
        """What is cast, as a text: of an element, the tensor that it is taken from."""
        code = code_of(node)
        is_element = isinstance(node, cst.Subscript) and code not in self._names.half
        return self._tensor_of(node.value) if is_element and isinstance(node, cst.Subscript) else code

    def _is_half(self, node: cst.CSTNode) -> bool:
        """A half tensor, or an element of one: ``x``, ``x[:, 0]``."""
        if not isinstance(node, (cst.Name, cst.Attribute, cst.Subscript, cst.Call)):
            return False
        if isinstance(node, cst.Attribute) and node.attr.value in TRANSPOSED and self._is_half(node.value):
            return False  # `x.float().T`, as a person writes it
        code = code_of(node)
        if code in self._made or root_name(node) in self._made:
            return False
        if code in self._names.half or self._joins_unknown(node):
            return code not in self._names.full
        return isinstance(node, cst.Subscript) and self._is_half(node.value)

    def _joins_unknown(self, node: cst.CSTNode) -> bool:
        """``torch.stack(rows)``: a trace tells of tensors, and not what lists hold."""
        if not isinstance(node, cst.Call) or called_name(node) not in JOINS or not node.args:
            return False
        if id(node) in self._cast_already:
            return False
        joined = node.args[0].value
        return isinstance(joined, cst.Name) and joined.value not in self._made | self._names.half | self._names.full


def _spaced(node: cst.BinaryOperation) -> cst.BinaryOperation:
    """``x**2`` becomes ``x.float() ** 2``: formatters set spaces where an operand is a call."""
    is_tight = isinstance(node.operator, cst.Power) and node.operator.whitespace_before.empty
    if not is_tight or not any(isinstance(side, cst.Call) for side in (node.left, node.right)):
        return node
    return node.with_changes(operator=cst.Power())


_LOOKED_AT = PLAIN_BUILTINS - {"list", "tuple", "zip", "enumerate", "reversed", "min", "max", "iter", "next"}
"""Builtins that read no values of a tensor that they are given."""


def not_read(node: cst.CSTNode) -> list[cst.CSTNode]:
    """The parts of a node whose values are not computed with, or that are cast already."""
    match node:
        case cst.Attribute(value=base, attr=cst.Name(value=name) as attribute):
            is_asked = name in METADATA | CAST_METHODS and (_is_plain(base) or isinstance(base, cst.IfExp))
            return [base, attribute] if is_asked else [attribute]
        case cst.Arg(keyword=cst.Name() as keyword):
            return [keyword]
        case cst.Call():
            return _not_read_by_call(node)
        case cst.Comparison(comparisons=[cst.ComparisonTarget(operator=cst.Is() | cst.IsNot())]):
            return [node.left]
        case cst.AugAssign(target=target) | cst.AnnAssign(target=target):
            return [target]
        case cst.CompFor(target=target) | cst.NamedExpr(target=target) | cst.Param(name=target):
            return [target]
        case _:
            return []


def _not_read_by_call(call: cst.Call) -> list[cst.CSTNode]:
    match call.func:
        case cst.Attribute(value=base, attr=cst.Name(value="to")) if _is_plain(base) and _to_float32(call):
            return [base]
        case cst.Name(value=name):
            return [call.func, *(call.args if name in _LOOKED_AT else ())]
        case _:
            return []


def _is_plain(node: cst.BaseExpression) -> bool:
    return isinstance(node, (cst.Name, cst.Attribute, cst.Subscript))


def root_name(node: cst.CSTNode) -> str:
    """``x`` of ``x[i].T``, ``self`` of ``self.weight``."""
    match node:
        case cst.Name(value=name):
            return name
        case cst.Attribute(value=base) | cst.Subscript(value=base) | cst.Call(func=base):
            return root_name(base)
        case _:
            return ""


def _to_float32(node: cst.CSTNode) -> bool:
    return any(name.value == "float32" for name in find(node, cst.Name))


_TO_A_DTYPE = frozenset({"to", "type", "type_as", "half", "bfloat16"})


def with_casts(
    pieces: Sequence[Piece], made: frozenset[str] = frozenset()
) -> tuple[list[cst.SimpleStatementLine], list[str]]:
    """Casts the half names of consecutive lines, those left out that the lines made before (in FP32).

    Args:
        pieces: what stands in the block.
        made: what already holds FP32 when the block is entered.

    Returns:
        The lines with their casts, and the expressions that were cast, in order.

    Raises:
        EditError: a name that would be cast may hold a number.
    """
    lines, cast, known = [], [], set(made)
    for piece in pieces:
        casts = HalfCasts(piece.names, frozenset(known))
        statement = piece.small.visit(casts)
        assert isinstance(statement, cst.BaseSmallStatement)
        lines.append(piece.line.with_changes(body=[statement]))
        cast += casts.cast
        assigned = assigned_codes(piece.small)
        known = known - assigned if _asks_for_a_dtype(piece.small) else known | assigned
    return lines, cast


def _asks_for_a_dtype(statement: cst.CSTNode) -> bool:
    """Whether what it assigns may be in half for all that its operands are not: ``.to(q.dtype)``, ``dtype=``."""
    calls = list(find(statement, cst.Call))
    keywords = {arg.keyword.value for call in calls for arg in call.args if arg.keyword is not None}
    return "dtype" in keywords or not _TO_A_DTYPE.isdisjoint(called_name(call) for call in calls)
