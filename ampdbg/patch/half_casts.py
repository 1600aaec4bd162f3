"""One statement with ``.float()`` on exactly the expressions that hold half tensors in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from ampdbg.patch.modes import CONDITIONAL, called_name
from ampdbg.patch.operands import not_read, operands_of, root_name
from ampdbg.patch.tensor_names import TensorNames
from ampdbg.source.bindings import Bindings
from ampdbg.source.expressions import code_of, find, walk
from ampdbg.source.source_text import EditError
from ampdbg.source.vocabulary import CASTS, JOINS, TRANSPOSED


@dataclass(frozen=True)
class PinnedStatement:
    """A statement of a block, what is known of the names in it, and the callees that are themselves pinned."""

    statement: cst.BaseSmallStatement
    names: TensorNames
    callees: frozenset[str] = frozenset()


def cast(node: cst.BaseExpression) -> cst.Call:
    """``node.float()``."""
    if isinstance(node, cst.IfExp) and not node.lpar:
        node = node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return cst.Call(cst.Attribute(node, cst.Name("float")))


class HalfCasts(cst.CSTTransformer):
    """Casts the half expressions of one statement and lists them, in their order.

    ``sure`` are those that are computed whenever the statement runs.
    """

    def __init__(self, pinned: PinnedStatement, made: frozenset[str]) -> None:
        super().__init__()
        self.cast: list[str] = []
        self.sure: set[str] = set()
        self._names, self._callees, self._made = pinned.names, pinned.callees, made
        self._around: list[cst.CSTNode] = []
        self._operands: set[int] = set()
        self._left: set[int] = set()
        self._cast_already: set[int] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        goes_in = self._goes_in(node)
        self._around.append(node)
        return goes_in

    def _goes_in(self, node: cst.CSTNode) -> bool:
        if id(node) in self._left or isinstance(node, (cst.AssignTarget, cst.Annotation)):
            return False
        if isinstance(node, cst.Attribute) and node.attr.value in CASTS:
            self._cast_already.add(id(node.value))
        for part in (*not_read(node), *self._promoted(node)):
            self._left.add(id(part))
        if not self._names.is_traced:
            self._operands |= {id(part) for part in operands_of(node, self._names, self._callees)}
        return not self._is_half(node)

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:  # type: ignore[override]
        self._around.pop()
        if isinstance(updated_node, cst.BinaryOperation):
            return _spaced(updated_node)
        if id(original_node) in self._left or not self._is_half(original_node):
            return updated_node
        if not isinstance(original_node, cst.BaseExpression) or not isinstance(updated_node, cst.BaseExpression):
            return updated_node
        code = self._tensor_of(original_node)
        parent = self._around[-1] if self._around else None
        # What is asked for a method or an attribute is a tensor there, and neither a number nor None.
        if code in self._names.bindings.maybe_numbers and not isinstance(parent, cst.Attribute):
            raise EditError(f"{code} may be a number there, which has no .float()")
        self.cast.append(code)
        if not any(isinstance(node, CONDITIONAL) for node in self._around):
            self.sure.add(code)
        if code in self._names.bindings.maybe_none and isinstance(parent, cst.Arg):
            return cst.IfExp(cst.parse_expression(f"{code} is None"), cst.Name("None"), cast(updated_node))
        return cast(updated_node)

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
        is_element = isinstance(node, cst.Subscript) and code not in self._names.half and id(node) not in self._operands
        return self._tensor_of(node.value) if is_element and isinstance(node, cst.Subscript) else code

    def _is_half(self, node: cst.CSTNode) -> bool:
        """A half tensor, or an element of one: ``x``, ``x[:, 0]``."""
        if isinstance(node, cst.IfExp):
            return self._chooses_unknown(node)
        if not isinstance(node, (cst.Name, cst.Attribute, cst.Subscript, cst.Call)):
            return False
        if isinstance(node, cst.Attribute) and node.attr.value in TRANSPOSED and self._is_half(node.value):
            return False  # `x.float().T`, as a person writes it
        code = code_of(node)
        if code in self._made or root_name(node) in self._made:
            return False
        if code in self._names.half or id(node) in self._operands or self._joins_unknown(node):
            return code not in self._names.full
        return isinstance(node, cst.Subscript) and self._is_half(node.value)

    def _chooses_unknown(self, node: cst.IfExp) -> bool:
        """``x if y is None else y``: the trace saw one of the two, and the other may be in half as well."""
        sides = (node.body, node.orelse)
        if not all(isinstance(side, (cst.Name, cst.Attribute, cst.Subscript)) for side in sides):
            return False
        known = self._names.half | self._names.full | self._made
        unknown = [side for side in sides if code_of(side) not in known]
        return (
            len(unknown) == 1 and any(map(self._is_half, sides)) and _is_there(unknown[0], node, self._names.bindings)
        )

    def _joins_unknown(self, node: cst.CSTNode) -> bool:
        """``torch.stack(rows)``: a trace tells of tensors, and not what lists hold."""
        if not isinstance(node, cst.Call) or called_name(node) not in JOINS or not node.args:
            return False
        if id(node) in self._cast_already:
            return False
        joined = node.args[0].value
        return isinstance(joined, cst.Name) and joined.value not in self._made | self._names.half | self._names.full


def _is_there(side: cst.BaseExpression, choice: cst.IfExp, bindings: Bindings) -> bool:
    """Whether that side of a choice holds a tensor where it is chosen, as far as the source tells."""
    code = code_of(side)
    asks = code_of(choice.test)
    if asks in (f"{code} is None", f"{code} is not None"):
        return (side is choice.orelse) == asks.endswith("is None")
    return code not in bindings.maybe_none | bindings.maybe_numbers | bindings.numbers | {"None", "True", "False"}


def _spaced(node: cst.BinaryOperation) -> cst.BinaryOperation:
    """``x**2`` becomes ``x.float() ** 2``: formatters set spaces where an operand is a call."""
    is_tight = isinstance(node.operator, cst.Power) and node.operator.whitespace_before.empty
    if not is_tight or not any(isinstance(side, cst.Call) for side in (node.left, node.right)):
        return node
    return node.with_changes(operator=cst.Power())
