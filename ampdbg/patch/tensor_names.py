"""What is known of the expressions in pinned statements: which hold half tensors, which other ones, which none."""

from __future__ import annotations

from dataclasses import dataclass, replace

import libcst as cst

from ampdbg.source.bindings import Bindings
from ampdbg.source.expressions import code_of
from ampdbg.source.vocabulary import METADATA, MOVES, TENSOR_METHODS


@dataclass(frozen=True)
class TensorNames:
    """``half`` and ``full`` are canonical texts of expressions that a trace saw hold half tensors, or other tensors.

    ``is_traced`` is False where no trace has seen these lines: then any operand may be in half. With ``guesses`` a
    plain name of which nothing is known may be a tensor.
    """

    half: frozenset[str]
    full: frozenset[str]
    is_traced: bool
    bindings: Bindings
    guesses: bool = True

    def with_new(self, half: frozenset[str], full: frozenset[str]) -> TensorNames:
        """The same with further names, new ones of the edit itself."""
        return replace(self, half=(self.half | half) - full, full=(self.full | full) - half)

    def is_half_element(self, node: cst.BaseExpression) -> bool:
        """Whether ``x[i]`` is an element of a half tensor."""
        is_half = code_of(node) in self.half
        return is_half or (isinstance(node, cst.Subscript) and self.is_half_element(node.value))

    def is_known_full(self, node: cst.BaseExpression) -> bool:
        """Whether a trace saw other than half tensors there."""
        code = code_of(node)
        return code in self.full and code not in self.half

    def is_tensor(self, node: cst.BaseExpression) -> bool:
        """Whether arithmetic with it is arithmetic with tensors, as far as can be told."""
        if (code := code_of(node)) in self.half or code in self.full:
            return True
        match node:
            case cst.Name():
                return self._may_be_tensor(node.value)
            case cst.Attribute():
                return node.attr.value in MOVES and self.is_tensor(node.value)
            case cst.Subscript():
                return not _is_metadata(node.value) and self.is_tensor(node.value)
            case cst.Call():
                return self._call_is_tensor(node)
            case cst.BinaryOperation(operator=cst.MatrixMultiply()):
                return True
            case _:
                return any(self.is_tensor(operand) for operand in _operands(node))

    def _may_be_tensor(self, name: str) -> bool:
        known = self.bindings
        return (
            self.guesses
            and name not in known.numbers
            and name not in known.imports
            and name not in ("self", "cls", "super")
        )

    def _call_is_tensor(self, node: cst.Call) -> bool:
        function = node.func
        if origin := self.bindings.origin(function):
            return not self.bindings.is_plain_module(origin)
        if isinstance(function, cst.Attribute):
            return not _is_metadata(function)
        return isinstance(function, cst.Name) and function.value in self.bindings.local

    def is_tensor_method(self, method: cst.Attribute) -> bool:
        """Whether ``x.name`` in ``x.name(...)`` is a tensor's method, not that of a module or of the user's class."""
        base, name = method.value, method.attr.value
        if code_of(base) in self.half | self.full or name in METADATA:
            return True
        if isinstance(base, cst.Name):
            return self._may_be_tensor(base.value) and (name in TENSOR_METHODS or name in MOVES or name.endswith("_"))
        if isinstance(base, cst.Attribute) and not self.is_tensor(base):
            # `self.decoder.norm(x)` is a module; `self.weight.t()` a tensor.
            return name in MOVES
        # A method of a call's or an operator's result.
        return not _is_super(base)


def _operands(node: cst.BaseExpression) -> list[cst.BaseExpression]:
    match node:
        case cst.BinaryOperation():
            return [node.left, node.right]
        case cst.UnaryOperation():
            return [node.expression]
        case cst.IfExp():
            return [node.body, node.orelse]
        case _:
            return []


def _is_metadata(node: cst.BaseExpression) -> bool:
    if isinstance(node, cst.Call):
        node = node.func
    return isinstance(node, cst.Attribute) and node.attr.value in METADATA


def _is_super(node: cst.BaseExpression) -> bool:
    return isinstance(node, cst.Call) and isinstance(node.func, cst.Name) and node.func.value == "super"
