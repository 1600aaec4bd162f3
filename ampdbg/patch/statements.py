"""Rewrites of pinned statements for a block with autocast off: calls move before it, half names are cast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import libcst as cst

from ampdbg.ops import CAST_METHODS, CREATES, MATRIX_PRODUCTS, MOVES, PRODUCTS, TENSOR_METHODS
from ampdbg.probes.half_names import LineNames
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

# What names hold and what calls run


def names_on(lines: range, seen: Mapping[int, LineNames], bindings: Bindings) -> TensorNames:
    """Return the names that held tensors on these lines, or on all lines if the trace did not run these."""
    known = seen.keys() & set(lines) or seen.keys()
    half = frozenset(canonical(code) for line in known for code in seen[line].half)
    full = frozenset(canonical(code) for line in known for code in seen[line].full)
    return TensorNames(half, full - half, bindings)


TORCH_FUNCTIONS = ("torch", "torch.nn.functional", "torch.linalg", "torch.fft", "torch.special", "torch.Tensor")
"""The origins of functions that only compute with tensors. Other torch functions (checkpoint) may run modules."""

BUILTINS: Mapping[str, Literal["torch", "plain"]] = {
    **dict.fromkeys(
        """len int float bool str range zip enumerate isinstance issubclass hasattr getattr min max list tuple dict set
        frozenset sorted reversed any all type slice round divmod id repr print iter next super""".split(),
        "plain",
    ),
    **dict.fromkeys(["sum", "abs", "pow"], "torch"),
}
"""Python builtins. Those marked ``torch`` compute with torch operators when given tensors."""

CONSUMERS = frozenset("sum list tuple max min any all sorted set dict".split())
"""Builtins that exhaust a generator before they return."""

OPERATORS = (cst.Add, cst.Subtract, cst.Multiply, cst.Divide, cst.FloorDivide, cst.Modulo, cst.Power)
CONDITIONAL = (cst.IfExp, cst.BooleanOperation, cst.Lambda, *COMPREHENSIONS)
"""Expressions that may evaluate a part never or many times, so that no call may move out."""

PLAIN = (cst.Name, cst.Attribute, cst.Subscript)


@dataclass(frozen=True)
class TensorNames:
    """Canonical texts of expressions that held ``half`` tensors in a trace, or only other tensors (``full``)."""

    half: frozenset[str]
    full: frozenset[str]
    bindings: Bindings

    def is_tensor(self, node: cst.CSTNode) -> bool:
        """True if the expression is known or likely to be a tensor."""
        if isinstance(node, cst.BaseExpression) and code_of(node) in self.half | self.full:
            return True
        match node:
            case cst.Call():
                return called_name(node) not in METADATA and self.runs(node) != "plain"
            case cst.Attribute(attr=cst.Name(value=name)) if name not in MOVES:
                return False
        return any(map(self.is_tensor, node.children))

    def computes(self, node: cst.CSTNode) -> bool:
        """True if the node itself computes with tensors, rather than moving, creating or casting them."""
        match node:
            case cst.MatrixMultiply():
                return True
            case cst.Call():
                return self.runs(node) == "torch" and called_name(node) not in COMPUTES_NOTHING
            case cst.BinaryOperation(operator=operator) if isinstance(operator, OPERATORS):
                return self.is_tensor(node)
        return False

    def is_users(self, node: cst.CSTNode) -> bool:
        """True if the node calls user code: a child module, a method or a function."""
        return isinstance(node, cst.Call) and self.runs(node) == "users"

    def runs(self, call: cst.Call) -> Literal["users", "torch", "plain"]:
        """Return the kind of code that a call runs, judged by its text; ``plain`` is Python or a plain module."""
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
        match base:
            case cst.Attribute() if not self.is_tensor(base):
                return name in MOVES  # `self.decoder.norm(x)` calls a module, `self.weight.t()` a tensor's method
            case cst.Name(value=owner):
                is_other = owner in {"self", "cls", *self.bindings.imports}
                return not is_other and (name in TENSOR_METHODS | MOVES or name.endswith("_"))
            case cst.Call(func=cst.Name(value="super")):
                return False
        return True  # of the result of a call or an operator


VIEWS = frozenset({"items", "keys", "values"})
"""Methods of dicts that only return their contents."""

COMPUTES_NOTHING = METADATA | MOVES | CREATES | VIEWS


def called_name(call: cst.Call) -> str:
    """Return the last part of the callee's name: ``softmax`` for ``F.softmax(x)``; "" if it has no name."""
    match call.func:
        case cst.Name(value=name) | cst.Attribute(attr=cst.Name(value=name)):
            return name
    return ""


def writes_in_place(call: cst.Call) -> bool:
    """True if a call writes into its tensor or argument: ``add_``, ``out=``."""
    name = called_name(call)
    writes = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return writes or "out" in map(keyword_of, call.args)


def written_into(body: cst.CSTNode) -> Iterator[str]:
    """Yield the names of tensors that the code writes into."""
    for item in walk(body):
        match item:
            case cst.AugAssign(target=target) | cst.AssignTarget(target=cst.Subscript() as target):
                yield root_name(target)
            case cst.Call() if writes_in_place(item):
                yield from map(root_name, (item.func, *(arg.value for arg in item.args)))


def root_name(node: cst.CSTNode) -> str:
    """Return ``x`` for ``x[i].T`` and ``self`` for ``self.weight``."""
    match node:
        case cst.Name(value=name):
            return name
        case cst.Attribute(value=base) | cst.Subscript(value=base) | cst.Call(func=base):
            return root_name(base)
    return ""


# A pinned line: calls that move to their own lines, and the remaining statement


@dataclass
class PinnedLine:
    """A line of simple statements, and the parts of it that its pins run in FP32.

    ``number`` is the first of its lines that a pin names. ``callees`` are the canonical texts of the pinned callees.
    With ``operations``, the line's own operations run in FP32. If it ``casts_to_fp32``, it casts nothing to half.
    """

    number: int
    names: TensorNames
    callees: set[str] = field(default_factory=set)
    operations: bool = False
    casts_to_fp32: bool = False

    def is_pinned(self, node: cst.CSTNode) -> bool:
        return isinstance(node, cst.Call) and code_of(node.func) in self.callees


@dataclass(frozen=True)
class Piece:
    """One statement of the new suite, the tensors that its names hold, and the pinned line that it comes from.

    It runs in FP32 if ``is_fp32``.
    """

    statement: cst.BaseStatement
    names: TensorNames
    pinned: PinnedLine | None = None
    is_fp32: bool = False

    @property
    def line(self) -> cst.SimpleStatementLine:
        """The statement as a simple line, the only kind that a block takes."""
        return cst.ensure_type(self.statement, cst.SimpleStatementLine)

    @property
    def small(self) -> cst.BaseSmallStatement:
        return self.line.body[0]


def value_of(statement: cst.CSTNode) -> cst.BaseExpression | None:
    """Return the expression from which calls may be moved out of a statement."""
    if isinstance(statement, (cst.Assign, cst.AnnAssign, cst.AugAssign, cst.Expr, cst.Return)):
        return statement.value
    return statement.test if isinstance(statement, cst.Assert) else None


def pieces_of_line(line: cst.SimpleStatementLine, pinned: PinnedLine) -> Sequence[Piece]:
    """Split a pinned line into calls on their own lines and the remaining statement.

    Raises:
        EditError: the line has nothing to pin, or cannot be split without changing its behavior.
    """
    if len(line.body) > 1:
        raise EditError("the line holds several statements; put each on its own line first")
    small, names = line.body[0], pinned.names
    _refuse_suspended(small)
    lifted = cst.ensure_type(small.visit(_Lifting(names)), type(small)) if pinned.casts_to_fp32 else small
    if not lifted.deep_equals(small):  # LibCST copies every node that it visits
        casts = value_of(lifted)
        if casts is not None and not any(map(names.computes, _walk_outside_calls(casts, pinned))):
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
        name = _new_name(node, value, pinned, names.bindings.taken | names.half | names.full)
        made = _alone(with_replaced(node, new), names.bindings.module.default_indent)
        assignment = cst.Assign([cst.AssignTarget(cst.Name(name))], made)
        pieces.append(Piece(cst.SimpleStatementLine([assignment]), names, pinned, _is_fp32(node, pinned)))
        new[id(node)] = cst.Name(name)
        # The result of an op under autocast is in half.
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
    """Return the expressions to move to their own lines before the statement, in order of evaluation.

    These are the pinned calls and, to keep the order, all calls before them. If the line's operations are pinned, they
    are all its calls, and those arguments of the calls that compute.
    """
    calls = _calls(value, pinned)
    fp32 = [node for node in calls if _is_fp32(node, pinned)]
    if pinned.operations:
        if not (fp32 or any(map(pinned.names.computes, _walk_outside_calls(value, pinned)))):
            raise EditError(NOTHING_COMPUTED if pinned.names.half | pinned.names.full else NOT_TRACED)
        return calls
    if not fp32:
        raise EditError(f"{' and '.join(sorted(pinned.callees))} is not called here")
    return calls[: calls.index(fp32[-1]) + 1]


def _calls(node: cst.CSTNode, pinned: PinnedLine) -> list[cst.BaseExpression]:
    """Return the expressions that forward the result of a user's or pinned call, in order of evaluation.

    A call nested in another such call is omitted, unless either runs in FP32.
    """
    call = _called(node, pinned)
    if isinstance(node, CONDITIONAL) and any(_called(item, pinned) is not None for item in walk(node)):
        raise EditError("it calls on a condition or in a comprehension; make the call on its own line first")
    inner = [one for child in _parts_called_with(call or node) for one in _calls(child, pinned)]
    if call is None:
        return inner
    assert isinstance(node, cst.BaseExpression)
    given = [item for arg in call.args for item in _walk_outside_calls(arg.value, pinned)]
    if pinned.is_pinned(call):
        if any(map(is_product, given)):
            raise EditError("the same expression computes a product; put that on its own line first")
    elif pinned.operations:
        inner += (
            arg.value for arg in call.args if any(map(pinned.names.computes, _walk_outside_calls(arg.value, pinned)))
        )
    return [*inner, node] if any(_is_fp32(one, pinned) for one in (*inner, node)) else [node]


def _parts_called_with(node: cst.CSTNode) -> Sequence[cst.CSTNode]:
    """Return the children of a node; for a method call, the owner and the arguments."""
    match node:
        case cst.Call(func=cst.Attribute(value=owner), args=args):
            return (owner, *args)
    return node.children


def _walk_outside_calls(node: cst.CSTNode, pinned: PinnedLine) -> Iterator[cst.CSTNode]:
    """Yield the node and its descendants, without user or pinned calls and their arguments."""
    if _called(node, pinned) is None:
        yield node
        for child in _parts_called_with(node):
            yield from _walk_outside_calls(child, pinned)


def _called(node: cst.CSTNode, pinned: PinnedLine) -> cst.Call | None:
    """Return the call that produces an expression: ``self.key(x)`` in ``self.key(x)[0].view(1, -1).T``."""
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
    """True if autocast runs the node in half, so that an edit must not move it into FP32 by accident."""
    return isinstance(node, cst.MatrixMultiply) or (isinstance(node, cst.Call) and called_name(node) in PRODUCTS)


def _alone(node: cst.BaseExpression, indent: str) -> cst.BaseExpression:
    """Return the expression without parentheses, unless its line breaks need them."""
    value = bare(node)
    try:
        syntax_tree(cst.Module([]).code_for_node(value), mode="eval")
    except SyntaxError:
        opened = cst.ParenthesizedWhitespace(indent=True, last_line=cst.SimpleWhitespace(indent))
        closed = cst.ParenthesizedWhitespace(indent=True)
        return value.with_changes(lpar=[cst.LeftParen(opened)], rpar=[cst.RightParen(closed)])
    return value


def _new_name(node: cst.BaseExpression, value: cst.BaseExpression, pinned: PinnedLine, taken: Collection[str]) -> str:
    """Return a readable new name for the result of a call, or for the argument of one."""
    call, end = _called(node, pinned), ""
    if call is None:
        calls = (call for call in find(value, cst.Call) if any(arg.value is node for arg in call.args))
        call, end = next(calls), "_input"
    name = called_name(call).strip("_").lower()
    name = "result" if name in ("", "forward") else name + end
    candidates = (name, f"{name}_out", *(f"{name}_{number}" for number in range(2, len(taken) + 3)))
    return next(candidate for candidate in candidates if candidate.isidentifier() and candidate not in taken)


def with_replaced(node: _Node, new: Mapping[int, cst.BaseExpression]) -> _Node:
    """Return the node with some descendants replaced, by their ids."""
    return cst.ensure_type(node.visit(_Replaced(new)), type(node))


class _Replaced(cst.CSTTransformer):
    def __init__(self, new: Mapping[int, cst.BaseExpression]) -> None:
        super().__init__()
        self._new = new

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:  # type: ignore[override]
        return self._new.get(id(original_node), updated_node)


@dataclass
class _Lifting(cst.CSTTransformer):
    """Replaces casts to half (``x.half()``, ``x.to(y.dtype)``) by ``x.float()``, and a half ``dtype=`` by float32."""

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

# Statements that are refused or rewritten


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
    """Refuse writes into a half tensor, which round any result to half."""
    if any(map(writes_in_place, find(statement, cst.Call))):
        raise EditError("it writes into an existing tensor, which stays in half; assign the result instead")
    for target in targets(statement):
        if isinstance(target, cst.Subscript) and _half_tensor(target, names, ()):
            raise EditError("it writes into part of a half tensor; create that tensor in FP32")


def _without_augmented(statement: cst.BaseSmallStatement, names: TensorNames) -> cst.BaseSmallStatement:
    """Return ``x += y`` as ``x = x + y`` if x is in half. An in-place sum would stay in half."""
    if not isinstance(statement, cst.AugAssign) or code_of(statement.target) in names.full:
        return statement
    target = statement.target
    if next(find(target, cst.Call), None) is not None:
        raise EditError("a call computes what it assigns to; write it as an assignment first")
    # LibCST's `AddAssign` is the in-place form of `Add`.
    operator = getattr(cst, type(statement.operator).__name__.removesuffix("Assign"))()
    plain = cst.BinaryOperation(target, operator, statement.value)
    apart = plain.with_changes(right=statement.value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()]))
    is_same = not isinstance(statement.value, cst.Tuple) and code_of(plain) == code_of(apart)
    return cst.Assign([cst.AssignTarget(target)], plain if is_same else apart)


# The casts of a block


METADATA_BUILTINS = frozenset("len isinstance hasattr type id repr print".split())
"""Builtins that do not read the values of a tensor argument."""

METADATA_ATTRIBUTES = METADATA - {"dtype"} | CAST_METHODS
"""Attributes and methods that read no value of a tensor, or already cast it."""


def _reads(
    node: cst.CSTNode, names: TensorNames, made: Collection[str]
) -> Iterator[tuple[str, cst.BaseExpression | None]]:
    """Yield the half tensors that a statement reads, as text and node, in order.

    Tensors ``made`` in the block are in FP32. The node is None if only the dtype is read, which needs no cast.
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
    """Return the parts of a node that are read by value."""
    match node:
        case cst.Attribute(value=cst.Name() | cst.Attribute() | cst.Subscript(), attr=cst.Name(value=name)) if (
            name in METADATA_ATTRIBUTES
        ):
            return ()
        case cst.Attribute(value=base):
            return (base,)
        case cst.Call(func=function, args=args):
            return () if dotted(function) in METADATA_BUILTINS else (function, *(arg.value for arg in args))
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
    """Yield operands that cannot be None, each with True if it cannot be a number either."""
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
    """Return the text of the half tensor that an expression reads from, or ""."""
    match node:
        case cst.Subscript(value=base) if of := _half_tensor(base, names, made):
            return of
        case cst.Attribute(value=base, attr=name) if name.value in TRANSPOSED and _half_tensor(base, names, made):
            return ""  # `x.float().T` is the usual order
    code = code_of(node)
    is_half = code in names.half and {code, root_name(node)}.isdisjoint(made)
    return code if is_half else ""


@dataclass(frozen=True)
class Casts:
    """The casts of a block.

    Casts in ``lines`` come first. ``inline`` casts are keyed by node id. ``unsure`` names may hold None or a number.
    """

    lines: Sequence[cst.BaseStatement]
    inline: Mapping[int, cst.BaseExpression]
    unsure: frozenset[str]


def _cast_lines(names: Collection[str], optional: Collection[str]) -> list[cst.BaseStatement]:
    """Return ``q, k = q.float(), k.float()``, and a conditional cast for each ``optional`` name, which may be None."""
    always = [name for name in names if name not in optional]
    casts = ", ".join(f"{name}.float()" for name in always)
    lines = [f"{', '.join(always)} = {casts}"] if always else []
    lines += [f"if {name} is not None:\n    {name} = {name}.float()" for name in names if name in optional]
    return [cst.parse_statement(line) for line in lines]


def casts_of(pieces: Sequence[Piece], made: Collection[str]) -> Casts:
    """Cast the half names that the pieces read: in a line at the start of the block, or inline if each is read once.

    Expressions ``made`` are in FP32 when the block starts.

    Raises:
        EditError: a tensor to cast may be None.
    """
    reads: list[tuple[str, cst.BaseExpression | None]] = []
    known = set(made)
    for piece in pieces:
        reads += _reads(piece.small, piece.names, known)
        known |= assigned_codes(piece.small)
    bindings = pieces[0].names.bindings
    numbers = bindings.maybe_plain_values
    used = {id(node): is_asked for piece in pieces for node, is_asked in _surely_used(piece.small)}
    # A possible number needs no cast, since an FP32 tensor promotes it. A read of its attribute rules out a number.
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
    return Casts(_cast_lines(rebound, optional), inline, (numbers | bindings.maybe_none) - sure)


def bound_inside(pieces: Sequence[Piece]) -> set[str]:
    """Return the names that the pieces bind in comprehensions, in lambdas and with ``:=``."""
    kinds = (cst.CompFor, cst.Param, cst.NamedExpr)
    binding = (item for piece in pieces for item in walk(piece.small) if isinstance(item, kinds))
    return {name for item in binding for name in names_assigned(item)}
