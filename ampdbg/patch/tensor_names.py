"""Which expressions hold tensors, in half or not: as a trace saw it, and as the source tells where it saw nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import libcst as cst

from ampdbg.ops import MOVES, TENSOR_METHODS
from ampdbg.source.bindings import METADATA, Bindings
from ampdbg.source.expressions import canonical, code_of


@dataclass(frozen=True)
class NamesSeen:
    """What a trace of a file saw: names, attributes, elements (``batch["x"]``) and calls, as they stand in the source.

    ``half`` are those that held half tensors, by the first line of each statement, and ``full`` those that held other
    tensors there and no half ones. Without any of either, nothing is known, and every operand is cast.
    """

    half: Mapping[int, Collection[str]] = field(default_factory=dict)
    full: Mapping[int, Collection[str]] = field(default_factory=dict)

    def on(self, lines: range, bindings: Bindings) -> TensorNames:
        """What is known of the names on some lines; where the trace saw none of these, what it saw on others counts."""
        seen = self.half.keys() | self.full.keys()
        known = seen & set(lines) or seen
        half, full = (
            frozenset(canonical(code) for line in known for code in names.get(line, ()))
            for names in (self.half, self.full)
        )
        return TensorNames(half, full - half, bindings)


@dataclass(frozen=True)
class TensorNames:
    """``half`` and ``full`` are canonical texts of expressions that a trace saw hold half tensors, or none but others.

    With ``guesses`` a plain name of which nothing is known may be a tensor.
    """

    half: frozenset[str]
    full: frozenset[str]
    bindings: Bindings
    guesses: bool = True

    @property
    def is_traced(self) -> bool:
        """Whether a trace has seen these lines."""
        return bool(self.half or self.full)

    def with_new(self, name: str, *, is_full: bool) -> TensorNames:
        """The same with a new name, one of the edit itself."""
        return replace(self, full=self.full | {name}) if is_full else replace(self, half=self.half | {name})

    def is_half_element(self, node: cst.BaseExpression) -> bool:
        """Whether ``x[i]`` is an element of a half tensor."""
        is_half = code_of(node) in self.half
        return is_half or (isinstance(node, cst.Subscript) and self.is_half_element(node.value))

    def is_tensor(self, node: cst.BaseExpression) -> bool:
        """Whether arithmetic with it is arithmetic with tensors, as far as can be told."""
        if (code := code_of(node)) in self.half or code in self.full:
            return True
        match node:
            case cst.Name():
                return self._may_be_tensor(node.value)
            case cst.Attribute():
                return node.attr.value in MOVES and self.is_tensor(node.value)
            case cst.Call():
                return self._call_is_tensor(node)
            case cst.BinaryOperation(operator=cst.MatrixMultiply()):
                return True
            case cst.BinaryOperation(left=one, right=other) | cst.IfExp(body=one, orelse=other):
                return self.is_tensor(one) or self.is_tensor(other)
            case cst.Subscript(value=inner) | cst.UnaryOperation(expression=inner):
                return self.is_tensor(inner)
            case _:
                return False

    def _may_be_tensor(self, name: str) -> bool:
        return self.guesses and name not in {*self.bindings.numbers, *self.bindings.imports, "self", "cls", "super"}

    def _call_is_tensor(self, node: cst.Call) -> bool:
        function = node.func
        if origin := self.bindings.origin(function):
            return not self.bindings.is_plain_module(origin)
        if isinstance(function, cst.Attribute):
            return function.attr.value not in METADATA
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
        return not (isinstance(base, cst.Call) and code_of(base.func) == "super")
