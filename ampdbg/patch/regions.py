"""Which expressions hold tensors, and which must run in FP32, which under autocast as before, which in either."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import libcst as cst

from ampdbg.ops import CREATES, MATRIX_PRODUCTS, MOVES, PRODUCTS, RANDOM, TENSOR_METHODS
from ampdbg.source.expressions import COMPREHENSIONS, METADATA, Bindings, bare, canonical, code_of, dotted, walk
from ampdbg.source.source_file import EditError


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
        return bool(self.half or self.full)

    def with_new(self, name: str, *, is_full: bool) -> TensorNames:
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


class Region(Enum):
    """Where a piece of code runs."""

    FP32 = "in the block, autocast off"
    AUTOCAST = "outside of it, as before"
    EITHER = "wherever its neighbours run"


class Action(Enum):
    """What an expression does by itself, its operands left out."""

    OPERATION = "computes with tensors"
    USERS_CALL = "runs code of the user's: a child module, a method, a function"
    NOTHING = "names, numbers, containers; moves, makes or casts a tensor"


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
        return _action_by_name(function.attr.value)
    return Action.USERS_CALL


def _action_of_import(origin: str, names: TensorNames) -> Action:
    module, _, name = origin.rpartition(".")
    if module in TORCH_FUNCTIONS and name[:1].islower():
        return _action_by_name(name)
    return Action.NOTHING if names.bindings.is_plain_module(origin) else Action.USERS_CALL


def _action_of_builtin(name: str, call: cst.Call, names: TensorNames) -> Action:
    if name in names.bindings.local:
        return Action.USERS_CALL
    if name in BUILTIN_OPERATIONS and any(names.is_tensor(arg.value) for arg in call.args):
        return Action.OPERATION
    return Action.NOTHING if name in PLAIN_BUILTINS | BUILTIN_OPERATIONS | {"super"} else Action.USERS_CALL


def _action_by_name(name: str) -> Action:
    return Action.NOTHING if name in METADATA | MOVES | CREATES else Action.OPERATION


def operands_of(node: cst.CSTNode, names: TensorNames) -> Sequence[cst.BaseExpression]:
    """What an operation computes with in any case: both sides of an operator, a function's first argument."""
    match node if action_of(node, names) is Action.OPERATION else None:
        case cst.BinaryOperation(left=left, right=right):
            return left, right
        case cst.Call(args=args) as call:
            given = [arg.value for arg in args if arg.keyword is None]
            return given if called_name(call) in MATRIX_PRODUCTS else given[:1]
        case _:
            return ()


@dataclass(frozen=True)
class PinnedLine:
    """A line of simple statements that is pinned, and where its expressions run.

    ``number`` is the first of its lines that a pin names. ``callees`` are the canonical texts of what is called in
    FP32. The line's own operations run in FP32 where ``operations`` says so.
    """

    number: int
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
        inside = (item for item in walk(node) if item is not node and not isinstance(item, CONDITIONAL))
        found = {self.of(item) for item in inside} - {Region.EITHER}
        words = _CONDITIONAL.get(type(node), "an expression")
        if len(found) == 2:
            raise EditError(f"{words} holds both what must run in FP32 and what must not; split it first")
        if Region.FP32 in found and isinstance(node, (cst.Lambda, cst.GeneratorExp)):
            raise EditError(f"{words} runs after the block has ended; make it a function or a list first")
        return found.pop() if found else Region.EITHER

    def has_fp32(self, node: cst.CSTNode) -> bool:
        """Whether any part of it must run in FP32."""
        return any(self.of(item) is Region.FP32 for item in walk(node) if isinstance(item, cst.BaseExpression))

    def has_effect(self, node: cst.CSTNode) -> bool:
        """Whether moving the node in front of something else could change a result."""
        if not isinstance(node, cst.Call):
            return False
        if action_of(node, self.names) is Action.USERS_CALL or calls_a_variable(node, self.names):
            return True
        return called_name(node) in RANDOM or writes_in_place(node)


def has_product(node: cst.CSTNode) -> bool:
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


def calls_a_variable(node: cst.CSTNode, names: TensorNames) -> bool:
    """Whether it calls what a variable stands for: ``conv(x)`` behind ``conv = F.conv2d``, one of several, maybe."""
    return isinstance(node, cst.Call) and isinstance(node.func, cst.Name) and node.func.value in names.bindings.local


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
