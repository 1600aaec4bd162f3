"""Which parts of an expression must run in FP32, which under autocast as before, and which may run in either."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import libcst as cst

from ampdbg.ops import CREATES, MOVES, PRODUCTS, RANDOM, TENSOR_METHODS
from ampdbg.source.bindings import METADATA, TRANSPOSED, Bindings
from ampdbg.source.expressions import COMPREHENSIONS, bare, code_of, walk
from ampdbg.source.imports import dotted
from ampdbg.source.source_file import EditError

TORCH_FUNCTIONS = ("torch", "torch.nn.functional", "torch.linalg", "torch.fft", "torch.special", "torch.Tensor")
"""Where the functions of tensors live; a call of anything else in torch (checkpoint) may run modules."""

PLAIN_BUILTINS = frozenset(
    """len int float bool str range zip enumerate isinstance issubclass hasattr getattr min max list tuple dict set
    frozenset sorted reversed any all type slice round divmod id repr print iter next""".split()
)

VIEWS = frozenset({"items", "keys", "values"})
"""Methods of dicts that only hand out what they hold."""

BUILTIN_OPERATIONS = frozenset({"sum", "abs", "pow"})
"""Builtins that compute with tensors when they are given some."""

CONSUMERS = frozenset("sum list tuple max min any all sorted set dict".split())
"""Builtins that run a generator to its end before they return."""


@dataclass(frozen=True)
class TensorNames:
    """``half`` and ``full`` are canonical texts of expressions that a trace saw hold half tensors, or other tensors.

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


class Region(Enum):
    """Where a piece of code runs."""

    FP32 = "in the block, autocast off"
    AUTOCAST = "outside of it, as before"
    EITHER = "wherever its neighbours run"


class Action(Enum):
    """What an expression does by itself, its operands left out."""

    OPERATION = "computes with tensors"
    MOVE = "moves, makes or casts a tensor"
    USERS_CALL = "runs code of the user's: a child module, a method, a function"
    NOTHING = "names, numbers, containers"


_CONDITIONAL: dict[type[cst.CSTNode], str] = {
    cst.IfExp: "a conditional expression",
    cst.BooleanOperation: "an `and` or `or`",
    cst.Lambda: "a lambda",
    **dict.fromkeys(COMPREHENSIONS, "a comprehension"),
    cst.GeneratorExp: "a generator expression",
}
CONDITIONAL = tuple(_CONDITIONAL)
"""Expressions whose parts may run never or many times: nothing is taken out of them."""

_OPERATORS = (
    cst.Add,
    cst.Subtract,
    cst.Multiply,
    cst.Divide,
    cst.FloorDivide,
    cst.Modulo,
    cst.Power,
    cst.MatrixMultiply,
)


def action_of(node: cst.CSTNode, names: TensorNames) -> Action:
    """What the node does by itself."""
    if isinstance(node, cst.BinaryOperation):
        computes = isinstance(node.operator, _OPERATORS) and names.is_tensor(node)
        return Action.OPERATION if computes else Action.NOTHING
    if isinstance(node, cst.Attribute):
        return Action.MOVE if node.attr.value in TRANSPOSED else Action.NOTHING
    return _action_of_call(node, names) if isinstance(node, cst.Call) else Action.NOTHING


def _action_of_call(call: cst.Call, names: TensorNames) -> Action:
    function = call.func
    if origin := names.bindings.origin(function):
        return _action_of_import(origin, names)
    if isinstance(function, cst.Name):
        return _action_of_builtin(function.value, call, names)
    if viewed(call):
        return Action.NOTHING
    if isinstance(function, cst.Attribute) and names.is_tensor_method(function):
        return _kind_by_name(function.attr.value)
    return Action.USERS_CALL


def _action_of_import(origin: str, names: TensorNames) -> Action:
    module, _, name = origin.rpartition(".")
    if module in TORCH_FUNCTIONS and name[:1].islower():
        return _kind_by_name(name)
    return Action.NOTHING if names.bindings.is_plain_module(origin) else Action.USERS_CALL


def _action_of_builtin(name: str, call: cst.Call, names: TensorNames) -> Action:
    if name in names.bindings.local:
        return Action.USERS_CALL
    if name in BUILTIN_OPERATIONS and any(names.is_tensor(arg.value) for arg in call.args):
        return Action.OPERATION
    return Action.NOTHING if name in PLAIN_BUILTINS | BUILTIN_OPERATIONS | {"super"} else Action.USERS_CALL


def _kind_by_name(name: str) -> Action:
    if name in METADATA:
        return Action.NOTHING
    return Action.MOVE if name in MOVES or name in CREATES else Action.OPERATION


@dataclass(frozen=True)
class Regions:
    """The regions of the expressions in one statement.

    ``callees`` are the canonical texts of what is called in FP32. The statement's own operations run in FP32
    where ``operations`` says so.
    """

    names: TensorNames
    callees: frozenset[str] = frozenset()
    operations: bool = False

    def of(self, node: cst.CSTNode) -> Region:
        """The mode of an expression as a whole.

        What follows a call or an operation (``[0]``, ``.T``, ``.view(…)``) goes where that goes.

        Raises:
            EditError: a part that may not be taken out would have to run in FP32, and another one not.
        """
        if isinstance(node, cst.Call) and code_of(node.func) in self.callees:
            return Region.FP32
        if self.is_whole(node):
            return self._of_whole(node)
        action = action_of(node, self.names)
        if action is Action.USERS_CALL:
            return Region.AUTOCAST
        if action is Action.OPERATION:
            return Region.FP32 if self.operations else Region.AUTOCAST
        return Region.EITHER if (base := _followed(node)) is None else self.of(base)

    def is_whole(self, node: cst.CSTNode) -> bool:
        """Whether nothing may be taken out of the node, so that all of it runs in one mode."""
        return isinstance(node, CONDITIONAL) or _consumes_generator(node)

    def _of_whole(self, node: cst.CSTNode) -> Region:
        found = {self._own(item) for item in walk(node) if item is not node} - {Region.EITHER}
        words = _CONDITIONAL.get(type(node), "an expression")
        if len(found) == 2:
            raise EditError(f"{words} holds both what must run in FP32 and what must not; split it first")
        if Region.FP32 in found and isinstance(node, (cst.Lambda, cst.GeneratorExp)):
            raise EditError(f"{words} runs after the block has ended; make it a function or a list first")
        return found.pop() if found else Region.EITHER

    def _own(self, node: cst.CSTNode) -> Region:
        return Region.EITHER if isinstance(node, CONDITIONAL) else self.of(node)

    def has_fp32(self, node: cst.CSTNode) -> bool:
        """Whether any part of it must run in FP32."""
        return any(self.of(item) is Region.FP32 for item in walk(node) if isinstance(item, cst.BaseExpression))

    def has_effect(self, node: cst.CSTNode) -> bool:
        """Whether moving the node in front of something else could change a result."""
        if not isinstance(node, cst.Call):
            return False
        return action_of(node, self.names) is Action.USERS_CALL or called_name(node) in RANDOM or writes_in_place(node)

    def has_product(self, node: cst.CSTNode) -> bool:
        """Whether it holds what autocast runs in half: nothing to put into FP32 by the way."""
        return any(
            isinstance(item, cst.MatrixMultiply) or (isinstance(item, cst.Call) and called_name(item) in PRODUCTS)
            for item in walk(node)
        )


def called_name(call: cst.Call) -> str:
    """The last part of what is called: ``softmax`` of ``F.softmax(x)``; "" of anything without a name."""
    match call.func:
        case cst.Name(value=name) | cst.Attribute(attr=cst.Name(value=name)):
            return name
        case _:
            return ""


def writes_in_place(call: cst.Call) -> bool:
    """Whether this is a tensor's method or a function that writes into its argument: ``add_``, ``out=``."""
    name = called_name(call)
    writes = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return writes or any(arg.keyword is not None and arg.keyword.value == "out" for arg in call.args)


def viewed(node: cst.CSTNode) -> str:
    """``feats`` of ``feats.items()``, a dict with a name; "" of anything else."""
    match node:
        case cst.Call(func=cst.Attribute(value=base, attr=cst.Name(value=name)), args=[]) if name in VIEWS:
            return dotted(base)
        case _:
            return ""


def _followed(node: cst.CSTNode) -> cst.BaseExpression | None:
    match node:
        case cst.Attribute(value=base) | cst.Subscript(value=base) | cst.Call(func=cst.Attribute(value=base)):
            return bare(base)
        case cst.UnaryOperation(expression=inner):
            return bare(inner)
        case _:
            return None


def _consumes_generator(node: cst.CSTNode) -> bool:
    return (
        isinstance(node, cst.Call)
        and called_name(node) in CONSUMERS
        and any(isinstance(arg.value, cst.GeneratorExp) for arg in node.args)
    )
