"""Pinned statements whole in a block with autocast off: calls before it, half names cast, the rest as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import libcst as cst

from ampdbg.ops import CAST_METHODS, CREATES, MATRIX_PRODUCTS, MOVES, PRODUCTS, TENSOR_METHODS
from ampdbg.source.expressions import (
    COMPREHENSIONS,
    METADATA,
    PLAIN_MODULES,
    TRANSPOSED,
    Bindings,
    assigned_codes,
    bare,
    canonical,
    code_of,
    dotted,
    find,
    keyword_of,
    names_assigned,
    targets,
    walk,
)
from ampdbg.source.source_file import EditError
from ampdbg.syntax_tree import syntax_tree

_Node = TypeVar("_Node", bound=cst.CSTNode)

# What a name holds, and what a call is


@dataclass(frozen=True)
class NamesSeen:
    """What a trace of a file saw: names, attributes and elements (``batch["x"]``), as the source spells them.

    ``half`` are those that held half tensors, by the first line of each statement, and ``full`` those that held other
    tensors there and no half ones.
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


TORCH_FUNCTIONS = ("torch", "torch.nn.functional", "torch.linalg", "torch.fft", "torch.special", "torch.Tensor")
"""Where the functions of tensors live; a call of anything else in torch (checkpoint) may run modules."""

BUILTINS: Mapping[str, Literal["torch", "plain"]] = {
    **dict.fromkeys(
        """len int float bool str range zip enumerate isinstance issubclass hasattr getattr min max list tuple dict set
        frozenset sorted reversed any all type slice round divmod id repr print iter next super""".split(),
        "plain",
    ),
    **dict.fromkeys(["sum", "abs", "pow"], "torch"),
}
"""Python's own functions: those that compute do so with torch's operators."""

CONSUMERS = frozenset("sum list tuple max min any all sorted set dict".split())
"""Builtins that run a generator to its end before they return."""

OPERATORS = (cst.Add, cst.Subtract, cst.Multiply, cst.Divide, cst.FloorDivide, cst.Modulo, cst.Power)
CONDITIONAL = (cst.IfExp, cst.BooleanOperation, cst.Lambda, *COMPREHENSIONS)
"""Expressions whose parts may run never or many times: no call is taken out of them."""

PLAIN = (cst.Name, cst.Attribute, cst.Subscript)


@dataclass(frozen=True)
class TensorNames:
    """Canonical texts of expressions that a trace saw hold ``half`` tensors, or none but others: ``full``."""

    half: frozenset[str]
    full: frozenset[str]
    bindings: Bindings

    def is_tensor(self, node: cst.CSTNode) -> bool:
        """Arithmetic with it is arithmetic with tensors, as far as is known."""
        if isinstance(node, cst.BaseExpression) and code_of(node) in self.half | self.full:
            return True
        if isinstance(node, cst.Call):
            return called_name(node) not in METADATA and self.runs(node) != "plain"
        is_asked = isinstance(node, cst.Attribute) and node.attr.value not in MOVES
        return not is_asked and any(map(self.is_tensor, node.children))

    def computes(self, node: cst.CSTNode) -> bool:
        """The node itself computes with tensors, and neither moves, makes nor casts them."""
        if isinstance(node, cst.Call):
            return self.runs(node) == "torch" and called_name(node) not in COMPUTES_NOTHING
        is_arithmetic = isinstance(node, cst.BinaryOperation) and isinstance(node.operator, OPERATORS)
        return isinstance(node, cst.MatrixMultiply) or (is_arithmetic and self.is_tensor(node))

    def is_users(self, node: cst.CSTNode) -> bool:
        """The node calls code of the user's: a child module, a method, a function."""
        return isinstance(node, cst.Call) and self.runs(node) == "users"

    def runs(self, call: cst.Call) -> Literal["users", "torch", "plain"]:
        """Whose code a call runs, as far as its text says: ``plain`` is Python's own, or that of a plain module."""
        if origin := self.bindings.origin(call.func):
            module, _, name = origin.rpartition(".")
            is_torchs = module in TORCH_FUNCTIONS and name[:1].islower()
            return "torch" if is_torchs else "plain" if origin.partition(".")[0] in PLAIN_MODULES else "users"
        match call.func:
            case cst.Name(value=name) if name not in self.bindings.local:
                return BUILTINS.get(name, "users")
            case cst.Attribute(value=base, attr=cst.Name(value=name)) if self._is_method_of_tensor(base, name):
                return "torch"
        return "users"

    def _is_method_of_tensor(self, base: cst.BaseExpression, name: str) -> bool:
        if name in METADATA | VIEWS or code_of(base) in self.half | self.full:
            return True
        if isinstance(base, cst.Attribute) and not self.is_tensor(base):
            return name in MOVES  # `self.decoder.norm(x)` is a module's; `self.weight.t()` a tensor's
        if isinstance(base, cst.Name):
            is_other = base.value in ("self", "cls") or base.value in self.bindings.imports
            return not is_other and (name in TENSOR_METHODS | MOVES or name.endswith("_"))
        # A method of a call's or an operator's result.
        return not (isinstance(base, cst.Call) and code_of(base.func) == "super")


VIEWS = frozenset({"items", "keys", "values"})
"""Methods of dicts that only hand out what they hold."""

COMPUTES_NOTHING = METADATA | MOVES | CREATES | VIEWS


def called_name(call: cst.Call) -> str:
    """The last part of what is called: ``softmax`` of ``F.softmax(x)``; "" of anything without a name."""
    match call.func:
        case cst.Name(value=name) | cst.Attribute(attr=cst.Name(value=name)):
            return name
    return ""


def writes_in_place(call: cst.Call) -> bool:
    """This is a tensor's method or a function that writes into its argument: ``add_``, ``out=``."""
    name = called_name(call)
    writes = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return writes or "out" in map(keyword_of, call.args)


def written_into(body: cst.CSTNode) -> Iterator[str]:
    """The names whose memory the code writes into."""
    for item in walk(body):
        match item:
            case cst.AugAssign(target=target) | cst.AssignTarget(target=cst.Subscript() as target):
                yield root_name(target)
            case cst.Call() if writes_in_place(item):
                yield from map(root_name, (item.func, *(arg.value for arg in item.args)))


def root_name(node: cst.CSTNode) -> str:
    """``x`` of ``x[i].T``, ``self`` of ``self.weight``."""
    match node:
        case cst.Name(value=name):
            return name
        case cst.Attribute(value=base) | cst.Subscript(value=base) | cst.Call(func=base):
            return root_name(base)
    return ""


# A pinned line: the calls in it that are put on lines of their own, and what is left of it


@dataclass(frozen=True)
class PinnedLine:
    """A line of simple statements that is pinned, and what of it runs in FP32.

    ``number`` is the first of its lines that a pin names. ``callees`` are the canonical texts of what is called in
    FP32. The line's own operations run in FP32 where ``operations`` says so, and where it ``is_lifted`` it casts
    nothing to half.
    """

    number: int
    names: TensorNames
    callees: frozenset[str] = frozenset()
    operations: bool = False
    is_lifted: bool = False

    def is_pinned(self, node: cst.CSTNode) -> bool:
        return isinstance(node, cst.Call) and code_of(node.func) in self.callees


@dataclass(frozen=True)
class Piece:
    """One statement of the new suite, what is known of its names, and the pinned line that it comes from.

    It runs in FP32 where ``is_fp32`` says so.
    """

    statement: cst.BaseStatement
    names: TensorNames
    pinned: PinnedLine | None = None
    is_fp32: bool = False

    @property
    def line(self) -> cst.SimpleStatementLine:
        """The statement, where it is one that may stand in a block."""
        return cst.ensure_type(self.statement, cst.SimpleStatementLine)

    @property
    def small(self) -> cst.BaseSmallStatement:
        """The only statement of that line."""
        return self.line.body[0]


def value_of(statement: cst.CSTNode) -> cst.BaseExpression | None:
    """The expression of a statement that calls are taken out of."""
    match statement:
        case cst.Assign(value=value) | cst.AnnAssign(value=value) | cst.AugAssign(value=value):
            return value
        case cst.Expr(value=value) | cst.Return(value=value) | cst.Assert(test=value):
            return value
    return None


def pieces_of_line(line: cst.SimpleStatementLine, pinned: PinnedLine) -> Sequence[Piece]:
    """What a pinned line has to compute before its statement, each on a line of its own, and what is left of it.

    Raises:
        EditError: there is nothing to pin in it, or it cannot be written so without a change of what it does.
    """
    if len(line.body) > 1:
        raise EditError("the line holds several statements; put each on its own line first")
    small, names = line.body[0], pinned.names
    _refuse_suspended(small)
    lifted = cst.ensure_type(small.visit(_Lifting(names)), type(small)) if pinned.is_lifted else small
    if not lifted.deep_equals(small):  # LibCST copies all that it visits
        casts = value_of(lifted)
        if casts is not None and not any(map(names.computes, _apart(casts, pinned))):
            return [Piece(line.with_changes(body=[lifted]), names, pinned)]
        small = lifted
    if pinned.operations:
        _refuse_writes(small, names)
        small = _without_augmented(small, names)
    value = value_of(small)
    if value is None:
        raise EditError(NOTHING_COMPUTED)
    pieces, new = list[Piece](), dict[int, cst.BaseExpression]()
    for node in _hoisted(value, pinned):
        if node is value:
            break
        name = unused(_name_for(node, value, pinned), names.bindings.taken | names.half | names.full)
        made = _alone(with_replaced(node, new), names.bindings.module.default_indent)
        assignment = cst.Assign([cst.AssignTarget(cst.Name(name))], made)
        pieces.append(Piece(cst.SimpleStatementLine([assignment]), names, pinned, _is_fp32(node, pinned)))
        new[id(node)] = cst.Name(name)
        # What autocast computed is in half.
        kind = "full" if pieces[-1].is_fp32 else "half"
        names = replace(names, **{kind: getattr(names, kind) | {name}})
    rest = line.with_changes(body=[with_replaced(small, new)], leading_lines=())
    pieces.append(Piece(rest, names, pinned, _is_fp32(value, pinned)))
    first = pieces[0].statement.with_changes(leading_lines=line.leading_lines)
    return [replace(pieces[0], statement=first), *pieces[1:]]


NOT_TRACED = (
    "no replay runs this line itself, so ampdbg does not know which of its names hold tensors; put it under "
    "torch.autocast(enabled=False) yourself, and cast its inputs with .float()"
)
NOTHING_COMPUTED = "it only calls modules or functions; pin what it calls"


def _hoisted(value: cst.BaseExpression, pinned: PinnedLine) -> list[cst.BaseExpression]:
    """What gets lines of its own before the statement, in the order that it is computed.

    That is every pinned call and, so that none overtakes another, what is called before it; where the operations of
    the line are pinned, all that it calls, and what such a call is given that computes.

    Raises:
        EditError: one of them is made on a condition.
    """
    calls = _calls(value, pinned)
    fp32 = [node for node in calls if _is_fp32(node, pinned)]
    if not fp32 and not (pinned.operations and any(map(pinned.names.computes, _apart(value, pinned)))):
        is_traced = bool(pinned.names.half | pinned.names.full)
        nothing = NOTHING_COMPUTED if is_traced else NOT_TRACED
        raise EditError(nothing if pinned.operations else f"{' and '.join(sorted(pinned.callees))} is not called here")
    return calls if pinned.operations else calls[: calls.index(fp32[-1]) + 1]


def _calls(node: cst.CSTNode, pinned: PinnedLine) -> list[cst.BaseExpression]:
    """What hands on the result of a call of the user's, or of a pinned one, in the order of the calls. What stands
    inside another such call stays there, unless some of it is FP32.

    Raises:
        EditError: such a call is made on a condition, or after the statement.
    """
    call = _called(node, pinned)
    if isinstance(node, CONDITIONAL):
        if any(_called(item, pinned) is not None for item in walk(node)):
            raise EditError("it calls on a condition or in a comprehension; make the call on its own line first")
        return []
    inner = [one for child in _parts_called_with(call or node) for one in _calls(child, pinned)]
    if call is None:
        return inner
    assert isinstance(node, cst.BaseExpression)
    given = [item for arg in call.args for item in _apart(arg.value, pinned)]
    if pinned.is_pinned(call):
        if any(map(is_product, given)):
            raise EditError("the same expression computes a product; put that on its own line first")
    elif pinned.operations:
        inner += (arg.value for arg in call.args if any(map(pinned.names.computes, _apart(arg.value, pinned))))
    return [*inner, node] if any(_is_fp32(one, pinned) for one in (*inner, node)) else [node]


def _parts_called_with(node: cst.CSTNode) -> Sequence[cst.CSTNode]:
    """The children of a node, and of a method what it is asked of."""
    match node:
        case cst.Call(func=cst.Attribute(value=owner), args=args):
            return (owner, *args)
    return node.children


def _apart(node: cst.CSTNode, pinned: PinnedLine) -> Iterator[cst.CSTNode]:
    """The node and all below it, but for what is called there and what that is given."""
    if _called(node, pinned) is None:
        yield node
        for child in _parts_called_with(node):
            yield from _apart(child, pinned)


def _called(node: cst.CSTNode, pinned: PinnedLine) -> cst.Call | None:
    """The call whose result an expression hands on: ``self.key(x)`` of ``self.key(x)[0].view(1, -1).T``."""
    match node:
        case cst.Call() if pinned.is_pinned(node) or pinned.names.is_users(node):
            return node
        case cst.Call(func=cst.Attribute(value=inner, attr=cst.Name(value=name))) if name in MOVES:
            return _called(inner, pinned)
        case cst.Subscript(value=inner) | cst.Attribute(value=inner):
            return _called(inner, pinned)
    return None


def _is_fp32(node: cst.BaseExpression, pinned: PinnedLine) -> bool:
    call = _called(node, pinned)
    return pinned.operations if call is None else pinned.is_pinned(call)


def is_product(node: cst.CSTNode) -> bool:
    """Autocast runs this in half, so it is not to move into FP32 by accident."""
    return isinstance(node, cst.MatrixMultiply) or (isinstance(node, cst.Call) and called_name(node) in PRODUCTS)


def _alone(node: cst.BaseExpression, indent: str) -> cst.BaseExpression:
    """The expression with parentheses only where it goes over several lines that would fall apart."""
    value = bare(node)
    try:
        syntax_tree(cst.Module([]).code_for_node(value), mode="eval")
    except SyntaxError:
        opened = cst.ParenthesizedWhitespace(indent=True, last_line=cst.SimpleWhitespace(indent))
        closed = cst.ParenthesizedWhitespace(indent=True)
        return value.with_changes(lpar=[cst.LeftParen(opened)], rpar=[cst.RightParen(closed)])
    return value


def _name_for(node: cst.BaseExpression, value: cst.BaseExpression, pinned: PinnedLine) -> str:
    """What a person would call the result of a call, or what another call is given."""
    call, end = _called(node, pinned), ""
    if call is None:
        calls = (call for call in find(value, cst.Call) if any(arg.value is node for arg in call.args))
        call, end = next(calls), "_input"
    name = called_name(call).strip("_").lower()
    return "result" if name in ("", "forward") else name + end


def unused(name: str, taken: Collection[str]) -> str:
    """``name``, or with something behind it where it is taken."""
    candidates = (name, f"{name}_out", *(f"{name}_{number}" for number in range(2, len(taken) + 3)))
    return next(candidate for candidate in candidates if candidate.isidentifier() and candidate not in taken)


def with_replaced(node: _Node, new: Mapping[int, cst.BaseExpression]) -> _Node:
    """The node with others in the places of those below it that have these ids."""
    return cst.ensure_type(node.visit(_Replaced(new)), type(node))


class _Replaced(cst.CSTTransformer):
    def __init__(self, new: Mapping[int, cst.BaseExpression]) -> None:
        super().__init__()
        self._new = new

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:  # type: ignore[override]
        return self._new.get(id(original_node), updated_node)


@dataclass
class _Lifting(cst.CSTTransformer):
    """Writes ``x.float()`` for each cast to half: ``x.half()``, ``x.to(torch.float16)``, ``x.to(y.dtype)``; and of a
    ``dtype=`` that may be half ``dtype=torch.float32``."""

    names: TensorNames

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: N802 - LibCST's name
        name, args = called_name(updated_node), updated_node.args
        is_cast = name in ("half", "bfloat16") and not args
        is_cast |= name in ("to", "type") and len(args) == 1 and self._is_half(args[0].value)
        if not is_cast or not isinstance(updated_node.func, cst.Attribute):
            return updated_node
        return updated_node.with_changes(func=updated_node.func.with_changes(attr=cst.Name("float")), args=())

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:  # noqa: N802 - LibCST's name
        value, imports = updated_node.value, self.names.bindings.imports
        if keyword_of(updated_node) == "dtype" and (isinstance(value, cst.Name) or self._is_half(value)):
            torch = next((cst.Name(name) for name, origin in imports.items() if origin == "torch"), None)
            value = value if torch is None else cst.Attribute(torch, cst.Name("float32"))
        return updated_node.with_changes(value=value)

    def _is_half(self, dtype: cst.BaseExpression) -> bool:
        match dtype:
            case cst.Attribute(value=of, attr=cst.Name("dtype")):
                return code_of(of) in self.names.half
        return self.names.bindings.origin(dtype) in HALF_DTYPES


HALF_DTYPES = ("torch.float16", "torch.half", "torch.bfloat16")

# What is refused, and what is written otherwise


SUSPENDED: dict[type[cst.CSTNode], str] = {
    cst.Await: "it awaits, and other code would run with autocast off",
    cst.Yield: "it yields, and the caller's code would run with autocast off",
    cst.NamedExpr: "it binds a name with := in the expression",
    cst.Lambda: "a lambda runs after the block has ended; make it a function first",
    cst.GeneratorExp: "a generator expression runs after the block has ended; make it a list first",
}


def _refuse_suspended(code: cst.CSTNode) -> None:
    calls = (call for call in find(code, cst.Call) if called_name(call) in CONSUMERS)
    consumed = {id(arg.value) for call in calls for arg in call.args if isinstance(arg.value, cst.GeneratorExp)}
    for node in walk(code):
        if type(node) in SUSPENDED and id(node) not in consumed:
            raise EditError(SUSPENDED[type(node)])


def _refuse_writes(statement: cst.BaseSmallStatement, names: TensorNames) -> None:
    """What is written into a half tensor is in half, whatever it was computed in."""
    if any(map(writes_in_place, find(statement, cst.Call))):
        raise EditError("it writes into an existing tensor, which stays in half; assign the result instead")
    for target in targets(statement):
        if isinstance(target, cst.Subscript) and _half_tensor(target, names, ()):
            raise EditError("it writes into part of a half tensor; create that tensor in FP32")


def _without_augmented(statement: cst.BaseSmallStatement, names: TensorNames) -> cst.BaseSmallStatement:
    """``x += y`` as ``x = x + y`` where x is in half: written in place, the sum would be in half too."""
    if not isinstance(statement, cst.AugAssign) or code_of(statement.target) in names.full:
        return statement
    target = statement.target
    if next(find(target, cst.Call), None) is not None:
        raise EditError("a call computes what it assigns to; write it as an assignment first")
    # `AddAssign` is `Add` in place.
    operator = getattr(cst, type(statement.operator).__name__.removesuffix("Assign"))()
    plain = cst.BinaryOperation(target, operator, statement.value)
    apart = plain.with_changes(right=statement.value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()]))
    is_same = not isinstance(statement.value, cst.Tuple) and code_of(plain) == code_of(apart)
    return cst.Assign([cst.AssignTarget(target)], plain if is_same else apart)


# The casts of a block


LOOKED_AT = frozenset("len isinstance hasattr type id repr print".split())
"""Builtins that read no values of a tensor that they are given."""

NOT_READ = METADATA - {"dtype"} | CAST_METHODS
"""What asks a tensor for no value, or casts it already."""


def _reads(
    node: cst.CSTNode, names: TensorNames, made: Collection[str]
) -> Iterator[tuple[str, cst.BaseExpression | None]]:
    """The half tensors that a statement reads, by their texts, in its order; those ``made`` in the block are not half.

    Each is cast where it stands; where only its dtype is asked for, it is not.
    """
    match node:
        case cst.Name() | cst.Attribute() | cst.Subscript() if code := _half_tensor(node, names, made):
            yield code, node
        case cst.Attribute(value=of, attr=cst.Name(value="dtype")) if code := _half_tensor(of, names, made):
            yield code, None
        case _:
            for part in _parts_read(node):
                yield from _reads(part, names, made)


def _parts_read(node: cst.CSTNode) -> Sequence[cst.CSTNode]:
    """The parts of a node whose values are read."""
    match node:
        case cst.Attribute(value=cst.Name() | cst.Attribute() | cst.Subscript(), attr=cst.Name(value=name)) if (
            name in NOT_READ
        ):
            return ()
        case cst.Attribute(value=base):
            return (base,)
        case cst.Call(func=function, args=args):
            return () if dotted(function) in LOOKED_AT else (function, *(arg.value for arg in args))
        case cst.AssignTarget(target=target) | cst.AugAssign(target=target) | cst.CompFor(target=target):
            return [part for part in node.children if part is not target]
        case (
            cst.Annotation()
            | cst.Param()
            | cst.Comparison(comparisons=[cst.ComparisonTarget(operator=cst.Is() | cst.IsNot())])
        ):
            return ()
    return node.children


def _surely_used(node: cst.CSTNode) -> Iterator[tuple[cst.BaseExpression, bool]]:
    """What a statement computes with in any case, as no None is; and whether it asks that for an attribute, as no
    number is asked."""
    if isinstance(node, CONDITIONAL):
        return
    match node:
        case cst.Attribute(value=base):
            yield base, True
        case cst.BinaryOperation(left=left, right=right):
            yield from ((left, False), (right, False))
        case cst.Call(args=args) if called_name(node) in MATRIX_PRODUCTS:
            yield from ((arg.value, False) for arg in args)
    for child in node.children:
        yield from _surely_used(child)


def _half_tensor(node: cst.BaseExpression, names: TensorNames, made: Collection[str]) -> str:
    """The text of the half tensor that a name, an attribute or an element holds, or is an element of; "" for none."""
    match node:
        case cst.Subscript(value=base) if of := _half_tensor(base, names, made):
            return of
        case cst.Attribute(value=base, attr=name) if name.value in TRANSPOSED and _half_tensor(base, names, made):
            return ""  # `x.float().T`, as a person writes it
    code = code_of(node)
    is_half = code in names.half - names.full and code not in made and root_name(node) not in made
    return code if is_half else ""


@dataclass(frozen=True)
class Casts:
    """What of a block is cast, and how: names in front by ``lines``, others ``inline`` where they are read, by the
    nodes' ids. ``unsure`` may be None or a number there."""

    lines: Sequence[cst.BaseStatement]
    inline: Mapping[int, cst.BaseExpression]
    unsure: frozenset[str]


def cast_lines(names: Collection[str], optional: Collection[str]) -> list[cst.BaseStatement]:
    """``q, k = q.float(), k.float()``, and for what is ``optional``, and may be None, a condition of its own."""
    always = [name for name in names if name not in optional]
    lines = [_rebinding(always)] if always else []
    for name in (name for name in names if name in optional):
        test = cst.parse_expression(f"{name} is not None")
        lines.append(cst.If(test, cst.IndentedBlock([_rebinding([name])])))
    return lines


def _rebinding(names: Sequence[str]) -> cst.BaseStatement:
    casts = ", ".join(f"{name}.float()" for name in names)
    return cst.parse_statement(f"{', '.join(names)} = {casts}")


def casts_of(pieces: Sequence[Piece], made: Collection[str]) -> Casts:
    """A line that casts the names which the pieces read in half; where each is read but once, it is cast there.

    Args:
        pieces: what stands in the block.
        made: what holds FP32 when the block is entered.

    Raises:
        EditError: what would be cast may be None there.
    """
    reads: list[tuple[str, cst.BaseExpression | None]] = []
    known = set(made)
    for piece in pieces:
        reads += _reads(piece.small, piece.names, known)
        known |= assigned_codes(piece.small)
    bindings = pieces[0].names.bindings
    numbers = bindings.maybe_numbers
    used = {id(node): is_asked for piece in pieces for node, is_asked in _surely_used(piece.small)}
    # What may be a number is promoted beside an FP32 tensor without a cast; what is asked for a method is none there.
    reads = [(code, node) for code, node in reads if code not in numbers or used.get(id(node))]
    cast = dict.fromkeys(code for code, node in reads if node is not None)
    sure = {code for code, node in reads if id(node) in used}
    optional = bindings.maybe_none & cast.keys() - sure
    fixed = numbers | bound_inside(pieces) | set(written_into(bindings.scope))
    # In the order of the parameters, as in `q, k, v = q.float(), k.float(), v.float()`.
    order = dict.fromkeys(name for name in (*bindings.parameters, *cast) if name in cast)
    own = [code for code in order if code.isidentifier() and code not in fixed and bindings.may_assign(code)]
    if stuck := sorted(optional - set(own)):
        raise EditError(f"{stuck[0]} may be None there, and None has no .float()")
    count = Counter(code for code, _ in reads)
    rebound = own if optional or any(count[code] > 1 for code in own) else []
    inline = {
        id(node): cst.Call(cst.Attribute(node, cst.Name("float")))
        for code, node in reads
        if node is not None and code not in rebound
    }
    lines = cast_lines(rebound, optional)
    return Casts(lines, inline, (numbers | bindings.maybe_none) - sure)


def bound_inside(pieces: Sequence[Piece]) -> set[str]:
    """Names that the expressions of the pieces bind: in comprehensions, lambdas, and by ``:=``."""
    kinds = (cst.CompFor, cst.Param, cst.NamedExpr)
    binding = (item for piece in pieces for item in walk(piece.small) if isinstance(item, kinds))
    return {name for item in binding for name in names_assigned(item)}
