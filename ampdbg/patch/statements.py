"""Rewrites of pinned statements for a block with autocast off: calls move before it, half names are cast."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ampdbg.ops import CAST_METHODS, CREATES, MATRIX_PRODUCTS, MOVES, PRODUCTS, TENSOR_METHODS
from ampdbg.probes.half_names import LineNames
from ampdbg.source.document import Document
from ampdbg.source.edits import Edit, edited, line_starts, replaced
from ampdbg.source.expressions import given, walk
from ampdbg.source.names import COMPREHENSIONS, METADATA, Bindings, dotted, names_assigned, places_assigned
from ampdbg.source.source_file import EditError
from ampdbg.syntax_tree import syntax_tree

# What names hold and what calls run


FILLED = frozenset({"zeros", "ones", "full", "empty"})
"""Torch functions that make a tensor, also as ``new_zeros`` and ``zeros_like``."""


def names_on(lines: range, seen: Mapping[int, LineNames], bindings: Bindings) -> TensorNames:
    """Return the names that held tensors on these lines, or on all lines if the trace did not run these."""
    known = seen.keys() & set(lines) or seen.keys()
    half = frozenset(canonical(code) for line in known for code in seen[line].half)
    full = frozenset(canonical(code) for line in known for code in seen[line].full)
    return TensorNames(half, full - half, bindings)


def canonical(code: str) -> str:
    """Normalize the spacing, outer parentheses and quotes of an expression."""
    try:
        # In parentheses, because the expression may span several lines.
        return ast.unparse(syntax_tree(f"({code.strip()}\n)", mode="eval"))
    except SyntaxError:
        return code


TORCH_FUNCTIONS = ("torch", "torch.nn.functional", "torch.linalg", "torch.fft", "torch.special", "torch.Tensor")
"""The origins of functions that only compute with tensors. Other torch functions (checkpoint) may run modules."""

PLAIN_MODULES = frozenset("math operator itertools functools typing warnings collections einops cmath numbers".split())
"""Modules with functions that never run user code."""

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

OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
CONDITIONAL = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.JoinedStr, *COMPREHENSIONS)
"""Expressions that may evaluate a part never or many times, or as text, so that no call may move out."""

PLAIN = (ast.Name, ast.Attribute, ast.Subscript)
TRANSPOSED = frozenset({"T", "mT", "H", "mH"})
"""Tensor attributes that return a transposed view."""


@dataclass(frozen=True)
class TensorNames:
    """Canonical texts of expressions that held ``half`` tensors in a trace, or only other tensors (``full``)."""

    half: frozenset[str]
    full: frozenset[str]
    bindings: Bindings

    def is_tensor(self, node: ast.AST) -> bool:
        """True if the expression is known or likely to be a tensor."""
        if isinstance(node, ast.expr) and ast.unparse(node) in self.half | self.full:
            return True
        match node:
            case ast.Call():
                return called_name(node) not in METADATA and self.runs(node) != "plain"
            case ast.Attribute(attr=name) if name not in MOVES:
                return False
        return any(map(self.is_tensor, ast.iter_child_nodes(node)))

    def computes(self, node: ast.AST) -> bool:
        """True if the node itself computes with tensors, rather than moving, creating or casting them."""
        match node:
            case ast.BinOp(op=ast.MatMult()):
                return True
            case ast.Call():
                return self.runs(node) == "torch" and called_name(node) not in COMPUTES_NOTHING
            case ast.BinOp(op=operator) if isinstance(operator, OPERATORS):
                return self.is_tensor(node)
        return False

    def is_users(self, node: ast.AST) -> bool:
        """True if the node calls user code: a child module, a method or a function."""
        return isinstance(node, ast.Call) and self.runs(node) == "users"

    def runs(self, call: ast.Call) -> Literal["users", "torch", "plain"]:
        """Return the kind of code that a call runs, judged by its text; ``plain`` is Python or a plain module."""
        if origin := self.bindings.origin(call.func):
            module, _, name = origin.rpartition(".")
            is_torchs = module in TORCH_FUNCTIONS and name[:1].islower()
            return "torch" if is_torchs else "plain" if origin.partition(".")[0] in PLAIN_MODULES else "users"
        match call.func:
            case ast.Name(id=name) if name not in self.bindings.local:
                return BUILTINS.get(name, "users")
            case ast.Attribute(value=base, attr=name) if self._is_method_of_tensor(base, name):
                return "torch"
        return "users"

    def _is_method_of_tensor(self, base: ast.expr, name: str) -> bool:
        if name in METADATA | VIEWS or ast.unparse(base) in self.half | self.full:
            return True
        match base:
            case ast.Attribute() if not self.is_tensor(base):
                return name in MOVES  # `self.decoder.norm(x)` calls a module, `self.weight.t()` a tensor's method
            case ast.Name(id=owner):
                is_other = owner in {"self", "cls", *self.bindings.imports}
                return not is_other and (name in TENSOR_METHODS | MOVES or name.endswith("_"))
            case ast.Call(func=ast.Name(id="super")):
                return False
        return True  # of the result of a call or an operator


VIEWS = frozenset({"items", "keys", "values"})
"""Methods of dicts that only return their contents."""

COMPUTES_NOTHING = METADATA | MOVES | CREATES | VIEWS


def called_name(call: ast.Call) -> str:
    """Return the last part of the callee's name: ``softmax`` for ``F.softmax(x)``; "" if it has no name."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def writes_in_place(node: ast.AST) -> bool:
    """True for a call that writes into its tensor or argument: ``add_``, ``out=``."""
    if not isinstance(node, ast.Call):
        return False
    name = called_name(node)
    writes = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return writes or any(keyword.arg == "out" for keyword in node.keywords)


def written_into(body: ast.AST) -> Iterator[str]:
    """Yield the names of tensors that the code writes into."""
    for node in ast.walk(body):
        match node:
            case ast.AugAssign(target=target):
                yield root_name(target)
            case ast.Subscript(ctx=ast.Store()):
                yield root_name(node)
            case ast.Call() if writes_in_place(node):
                yield from map(root_name, (node.func, *given(node)))


def root_name(node: ast.AST) -> str:
    """Return ``x`` for ``x[i].T`` and ``self`` for ``self.weight``."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=base) | ast.Subscript(value=base) | ast.Call(func=base):
            return root_name(base)
    return ""


# A pinned line: calls that move to their own lines, and the remaining statement


@dataclass
class PinnedLine:
    """A simple statement, and the parts of it that its pins run in FP32.

    ``number`` is the first of its lines that a pin names. ``callees`` are the canonical texts of the pinned callees.
    With ``operations``, the line's own operations run in FP32. If it ``casts_to_fp32``, it casts nothing to half.
    """

    number: int
    statement: ast.stmt
    names: TensorNames
    callees: set[str] = field(default_factory=set)
    operations: bool = False
    casts_to_fp32: bool = False

    def is_pinned(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and ast.unparse(node.func) in self.callees

    def computes(self, code: ast.AST) -> bool:
        """True if code of this line computes something outside of the calls of the user's or pinned code."""
        return any(map(self.names.computes, _walk_outside_calls(code, self)))


@dataclass(frozen=True)
class Piece:
    """A statement of the new suite: one of the file, or ``name = …`` of an expression that is ``moved`` out of it.

    ``new`` has the names of the expressions that moved out of the piece itself. ``names`` are those that hold tensors.
    It comes from a ``pinned`` line, or from none, and runs in FP32 if ``is_fp32``.
    """

    statement: ast.stmt
    names: TensorNames
    pinned: PinnedLine | None = None
    is_fp32: bool = False
    moved: ast.expr | None = None
    name: str = ""
    new: Mapping[ast.AST, str] = field(default_factory=dict)

    @property
    def value(self) -> ast.AST:
        """The code that computes something: without the target of an assignment."""
        return self.moved or value_of(self.statement) or self.statement

    @property
    def assigned(self) -> set[str]:
        return {self.name} if self.moved else names_assigned(self.statement) | places_assigned(self.statement)

    def text(self, document: Document, casts: Mapping[ast.AST, str], by: str) -> str:
        """Return ``name = …`` for the moved expression, with its further lines indented ``by`` more."""
        assert self.moved is not None
        span = document.span(self.moved)
        edits = [Edit(at, at, by) for at in line_starts(document, span.start, span.end)]
        edits += self.edits(document, casts)
        moved = [Edit(edit.start - span.start, edit.end - span.start, edit.new) for edit in edits]
        text = edited(document.source(self.moved), moved)
        if _parses(text):
            return f"{self.name} = {text}"
        indent, newline = document.indent(self.statement) + by, document.newline
        return f"{self.name} = ({newline}{indent}{document.default_indent}{text}{newline}{indent})"

    def edits(self, document: Document, casts: Mapping[ast.AST, str]) -> list[Edit]:
        """Return the edits of the piece's code: the names of what has moved, and the casts."""
        texts = {**self.new, **casts}
        return [replaced(document, node, texts[node]) for node in self.visible() if node in texts]

    def visible(self) -> Iterator[ast.AST]:
        """Yield the nodes of its value, without what is in the expressions that moved out of it."""
        return walk(self.value, self.new)


def _parses(text: str) -> bool:
    try:
        syntax_tree(text, mode="eval")
    except SyntaxError:
        return False
    return True


def value_of(statement: ast.stmt) -> ast.expr | None:
    """Return the expression from which calls may be moved out of a statement."""
    return statement.test if isinstance(statement, ast.Assert) else getattr(statement, "value", None)


def pieces_of_line(pinned: PinnedLine) -> Sequence[Piece]:
    """Split a pinned line into calls on their own lines and the remaining statement.

    Raises:
        EditError: the line has nothing to pin, or cannot be split without changing its behavior.
    """
    statement, names = pinned.statement, pinned.names
    value = value_of(statement)
    if value is None:
        raise EditError(NOTHING_COMPUTED)
    pieces, new = list[Piece](), dict[ast.AST, str]()
    for node in _hoisted(value, pinned):
        if node is value:
            break
        name = _new_name(node, value, pinned, names.bindings.taken | names.half | names.full)
        pieces.append(Piece(statement, names, pinned, _is_fp32(node, pinned), node, name, dict(new)))
        new[node] = name
        # The result of an op under autocast is in half.
        kind = "full" if pieces[-1].is_fp32 else "half"
        names = replace(names, **{kind: getattr(names, kind) | {name}})
    return [*pieces, Piece(statement, names, pinned, _is_fp32(value, pinned), new=new)]


NOT_TRACED = (
    "no replay runs this line itself, so ampdbg does not know which of its names hold tensors; put it under "
    "torch.autocast(enabled=False) yourself, and cast its inputs with .float()"
)
NOTHING_COMPUTED = "it only calls modules or functions; pin what it calls"


def _hoisted(value: ast.expr, pinned: PinnedLine) -> list[ast.expr]:
    """Return the expressions to move to their own lines before the statement, in order of evaluation.

    These are the pinned calls and, to keep the order, all calls before them. If the line's operations are pinned, they
    are all its calls, and those arguments of the calls that compute.
    """
    calls = _calls(value, pinned)
    fp32 = [node for node in calls if _is_fp32(node, pinned)]
    if pinned.operations:
        if not (fp32 or pinned.computes(value)):
            raise EditError(NOTHING_COMPUTED if pinned.names.half | pinned.names.full else NOT_TRACED)
        return calls
    if not fp32:
        raise EditError(f"{' and '.join(sorted(pinned.callees))} is not called here")
    return calls[: calls.index(fp32[-1]) + 1]


def _calls(node: ast.AST, pinned: PinnedLine) -> list[ast.expr]:
    """Return the expressions that forward the result of a user's or pinned call, in order of evaluation.

    A call nested in another such call is omitted, unless either runs in FP32.
    """
    call = _called(node, pinned)
    if isinstance(node, CONDITIONAL) and any(_called(item, pinned) is not None for item in ast.walk(node)):
        raise EditError("it calls on a condition or in a comprehension; make the call on its own line first")
    inner = [one for child in _parts_called_with(call or node) for one in _calls(child, pinned)]
    if call is None:
        return inner
    assert isinstance(node, ast.expr)
    if pinned.is_pinned(call):
        if any(is_product(item) for one in arguments(call) for item in _walk_outside_calls(one, pinned)):
            raise EditError("the same expression computes a product; put that on its own line first")
    elif pinned.operations:
        inner += filter(pinned.computes, arguments(call))
    return [*inner, node] if any(_is_fp32(one, pinned) for one in (*inner, node)) else [node]


def arguments(call: ast.Call) -> list[ast.expr]:
    """Return the arguments of a call without their stars."""
    return [one.value if isinstance(one, ast.Starred) else one for one in given(call)]


def _parts_called_with(node: ast.AST) -> Sequence[ast.AST]:
    """Return the parts of a node; for a method call, the owner and the arguments."""
    match node:
        case ast.Call(func=ast.Attribute(value=owner)):
            return (owner, *given(node))
    return list(ast.iter_child_nodes(node))


def _walk_outside_calls(node: ast.AST, pinned: PinnedLine) -> Iterator[ast.AST]:
    """Yield the node and the nodes in it, without user or pinned calls and their arguments."""
    if _called(node, pinned) is None:
        yield node
        for child in _parts_called_with(node):
            yield from _walk_outside_calls(child, pinned)


def _called(node: ast.AST, pinned: PinnedLine) -> ast.Call | None:
    """Return the call that produces an expression: ``self.key(x)`` in ``self.key(x)[0].view(1, -1).T``."""
    match node:
        case ast.Call() if pinned.is_pinned(node) or pinned.names.is_users(node):
            return node
        case ast.Call(func=ast.Attribute(value=inner, attr=name)) if name in MOVES:
            return _called(inner, pinned)
        case ast.Subscript(value=inner) | ast.Attribute(value=inner):
            return _called(inner, pinned)
    return None


def _is_fp32(node: ast.expr, pinned: PinnedLine) -> bool:
    call = _called(node, pinned)
    return pinned.operations if call is None else pinned.is_pinned(call)


def is_product(node: ast.AST) -> bool:
    """True if autocast runs the node in half, so that an edit must not move it into FP32 by accident."""
    match node:
        case ast.BinOp(op=ast.MatMult()):
            return True
        case ast.Call():
            return called_name(node) in PRODUCTS
    return False


def _new_name(node: ast.expr, value: ast.expr, pinned: PinnedLine, taken: Collection[str]) -> str:
    """Return a readable new name for the result of a call, or for the argument of one."""
    call, end = _called(node, pinned), ""
    if call is None:
        call, end = next(one for one in walk(value) if isinstance(one, ast.Call) and node in arguments(one)), "_input"
    name = called_name(call).strip("_").lower()
    name = "result" if name in ("", "forward") else name + end
    candidates = (name, f"{name}_out", *(f"{name}_{number}" for number in range(2, len(taken) + 3)))
    return next(candidate for candidate in candidates if candidate.isidentifier() and candidate not in taken)


# Statements that are refused or rewritten


def rewritten(document: Document, pinned: PinnedLine) -> tuple[list[Edit], bool]:
    """Return the edits of a pinned statement itself, and True if it needs no block with them.

    Casts to half become casts to FP32; of a pinned call, those in its arguments do. ``x += y`` becomes ``x = x + y``.

    Raises:
        EditError: the statement cannot run in a block.
    """
    statement = pinned.statement
    _refuse_suspended(statement)
    is_cast = pinned.casts_to_fp32 or any(map(_is_made_here, ast.walk(statement)))
    calls = [one for one in ast.walk(statement) if isinstance(one, ast.Call) and pinned.is_pinned(one)]
    codes = [statement] if is_cast else [one for call in calls for one in given(call)]
    lifted = [*dict.fromkeys(edit for code in codes for edit in _lifted(document, pinned, code))]
    if is_cast and lifted and not pinned.computes(statement):
        return lifted, True
    if pinned.operations:
        _refuse_writes(statement, pinned.names)
        if isinstance(statement, ast.AugAssign) and ast.unparse(statement.target) not in pinned.names.full:
            lifted.append(_plain_assignment(document, statement))
    return lifted, False


HALF_DTYPES = ("torch.float16", "torch.half", "torch.bfloat16")


def _lifted(document: Document, pinned: PinnedLine, code: ast.AST) -> Iterator[Edit]:
    """Replace casts to half (``x.half()``, ``x.to(y.dtype)``) in code of a pinned line by ``x.float()``, and a half
    ``dtype=`` by float32. In a whole statement, any name for a dtype counts as half."""
    imports = pinned.names.bindings.imports
    torch = next((name for name, origin in imports.items() if origin == "torch"), "")

    def is_half(dtype: ast.expr) -> bool:
        match dtype:
            case ast.Attribute(value=of, attr="dtype"):
                return ast.unparse(of) in pinned.names.half
        return pinned.names.bindings.origin(dtype) in HALF_DTYPES

    named = ast.Name if code is pinned.statement else ()
    for node in walk(code):
        match node:
            case ast.Call(func=ast.Attribute(attr="half" | "bfloat16") as method, args=[], keywords=[]):
                yield _call_of_float(document, node, method)
            case ast.Call(func=ast.Attribute(attr="to" | "type") as method, args=[dtype], keywords=[]):
                if is_half(dtype):
                    yield _call_of_float(document, node, method)
            case ast.keyword(arg="dtype", value=value) if torch and (isinstance(value, named) or is_half(value)):
                yield replaced(document, value, f"{torch}.float32")


def _call_of_float(document: Document, call: ast.Call, method: ast.Attribute) -> Edit:
    start = document.span(method).end - len(method.attr)
    return Edit(start, document.span(call).end, "float()")


SUSPENDED: Mapping[type[ast.AST], str] = {
    ast.Await: "it awaits, and other code would run with autocast off",
    **dict.fromkeys((ast.Yield, ast.YieldFrom), "it yields, and the caller's code would run with autocast off"),
    ast.NamedExpr: "it binds a name with := in the expression",
    ast.Lambda: "a lambda runs after the block has ended; make it a function first",
    ast.GeneratorExp: "a generator expression runs after the block has ended; make it a list first",
}


def _refuse_suspended(code: ast.AST) -> None:
    calls = (one for one in ast.walk(code) if isinstance(one, ast.Call) and called_name(one) in CONSUMERS)
    consumed = {one for call in calls for one in given(call) if isinstance(one, ast.GeneratorExp)}
    for node in walk(code):
        if type(node) in SUSPENDED and node not in consumed:
            raise EditError(SUSPENDED[type(node)])


def _refuse_writes(statement: ast.stmt, names: TensorNames) -> None:
    """Refuse writes into a half tensor, which round any result to half."""
    if any(writes_in_place(one) and not _is_made_here(one) for one in ast.walk(statement)):
        raise EditError("it writes into an existing tensor, which stays in half; assign the result instead")
    for node in ast.walk(statement):
        match node:
            case ast.Subscript(ctx=ast.Store()) if _half_tensor(node, names, ()):
                raise EditError("it writes into part of a half tensor; create that tensor in FP32")


def _is_made_here(call: ast.AST) -> bool:
    """True for ``torch.zeros(n, dtype=x.dtype).index_add_(0, i, x)``: the written tensor gets the dtype of a cast x."""
    match call:
        case ast.Call(func=ast.Attribute(value=ast.Call() as maker)):
            dtypes = [one.value for one in maker.keywords if one.arg == "dtype"]
            follows = all(isinstance(one, ast.Attribute) and one.attr == "dtype" for one in dtypes)
            return follows and called_name(maker).removeprefix("new_").removesuffix("_like") in FILLED
    return False


def _plain_assignment(document: Document, statement: ast.AugAssign) -> Edit:
    """Return ``x = x + y`` for ``x += y``. An in-place sum would stay in half."""
    if any(isinstance(one, ast.Call) for one in ast.walk(statement.target)):
        raise EditError("a call computes what it assigns to; write it as an assignment first")
    target, end = document.source(statement.target), document.span(statement).end
    begin = document.span(statement.target).end
    operator, _, value = document.text[begin:end].partition("=")
    plain = f"{target} {operator.strip()} {value.strip()}"
    is_same = canonical(plain) == ast.unparse(ast.BinOp(statement.target, statement.op, statement.value))
    if isinstance(statement.value, ast.Tuple) or not is_same:
        plain = f"{target} {operator.strip()} ({value.strip()})"
    return Edit(begin, end, f" = {plain}")


# The casts of a block


METADATA_BUILTINS = frozenset("len isinstance hasattr type id repr print".split())
"""Builtins that do not read the values of a tensor argument."""

METADATA_ATTRIBUTES = METADATA - {"dtype"} | CAST_METHODS
"""Attributes and methods that read no value of a tensor, or already cast it."""

CASTS = CAST_METHODS | {"to", "type"}
"""Methods that may cast, to a dtype that the text does not show."""

Read = tuple[str, ast.AST, bool]
"""The text and the node of a half tensor that is read, and True unless only its dtype is read."""


def _reads(node: ast.AST, piece: Piece, made: Collection[str]) -> Iterator[Read]:
    """Yield the half tensors that a piece reads, in order. Tensors ``made`` in the block are in FP32."""
    if node in piece.new:
        if piece.new[node] in piece.names.half:
            yield piece.new[node], node, True
        return
    match node:
        case ast.Name() | ast.Attribute() | ast.Subscript() if code := _half_tensor(node, piece.names, made):
            yield code, node, True
        case ast.Attribute(value=of, attr="dtype") if code := _half_tensor(of, piece.names, made):
            yield code, node, False
        case _:
            is_pinned = piece.pinned is not None and piece.pinned.is_pinned(node)
            for part in _parts_read(node):
                inner = [*_reads(part, piece, made)]
                yield from _whole_argument(part, inner, piece, made) if is_pinned else inner


def _whole_argument(part: ast.AST, inner: Sequence[Read], piece: Piece, made: Collection[str]) -> Sequence[Read]:
    """Return the reads of a pinned call's argument: itself if casts of what it reads leave it in half."""
    is_cast = isinstance(part, ast.Call) and called_name(part) in CASTS
    stays = is_cast or not any(is_value for *_, is_value in inner)
    read = {one.id for one in ast.walk(part) if isinstance(one, ast.Name)}
    code, is_new = ast.unparse(part), part in piece.new or not read.isdisjoint(made)
    is_whole = stays and code in piece.names.half and not (is_new or isinstance(part, PLAIN))
    return [(code, part, True)] if is_whole else inner


def _parts_read(node: ast.AST) -> Sequence[ast.AST]:
    """Return the parts of a node that are read by value."""
    match node:
        case ast.Attribute(value=ast.Name() | ast.Attribute() | ast.Subscript(), attr=name) if (
            name in METADATA_ATTRIBUTES
        ):
            return ()
        case ast.Attribute(value=base):
            return (base,)
        case ast.Call(func=function):
            return () if dotted(function) in METADATA_BUILTINS else (function, *given(node))
        case ast.comprehension(iter=values, ifs=tests):
            return (values, *tests)
        case ast.arg() | ast.JoinedStr() | ast.Compare(ops=[ast.Is() | ast.IsNot()]):
            return ()
    return list(ast.iter_child_nodes(node))


def _surely_used(node: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """Yield operands that cannot be None, each with True if it cannot be a number either."""
    if isinstance(node, CONDITIONAL):
        return
    match node:
        case ast.Attribute(value=base):
            yield base, True
        case ast.BinOp(left=left, right=right):
            yield from ((left, False), (right, False))
        case ast.Call() if called_name(node) in MATRIX_PRODUCTS:
            yield from ((one, False) for one in given(node))
    for child in ast.iter_child_nodes(node):
        yield from _surely_used(child)


def _half_tensor(node: ast.AST, names: TensorNames, made: Collection[str]) -> str:
    """Return the text of the half tensor that an expression reads from, or ""."""
    match node:
        case ast.Subscript(value=base) if of := _half_tensor(base, names, made):
            return of
        case ast.Attribute(value=base, attr=name) if name in TRANSPOSED and _half_tensor(base, names, made):
            return ""  # `x.float().T` is the usual order
    code = ast.unparse(node)
    is_half = code in names.half and {code, root_name(node)}.isdisjoint(made)
    return code if is_half else ""


@dataclass(frozen=True)
class Casts:
    """The casts of a block.

    Casts in ``lines`` come first. ``inline`` casts are keyed by node. ``unsure`` names may hold None or a number.
    """

    lines: Sequence[str]
    inline: Mapping[ast.AST, str]
    unsure: frozenset[str]


def _cast_lines(names: Collection[str], optional: Collection[str], indent: str) -> list[str]:
    """Return ``q, k = q.float(), k.float()``, and a conditional cast for each ``optional`` name, which may be None."""
    always = [name for name in names if name not in optional]
    casts = ", ".join(f"{name}.float()" for name in always)
    lines = [f"{', '.join(always)} = {casts}"] if always else []
    for name in names:
        if name in optional:
            lines += [f"if {name} is not None:", f"{indent}{name} = {name}.float()"]
    return lines


def casts_of(document: Document, pieces: Sequence[Piece], made: Collection[str], indent: str) -> Casts:
    """Cast the half names that the pieces read: in a line at the start of the block, or inline if each is read once.

    Expressions ``made`` are in FP32 when the block starts.

    Raises:
        EditError: a tensor to cast may be None.
    """
    reads: list[Read] = []
    known = set(made)
    for piece in pieces:
        reads += _reads(piece.value, piece, known)
        known |= piece.assigned
    bindings = pieces[0].names.bindings
    numbers = bindings.maybe_plain_values
    used = {node: is_asked for piece in pieces for node, is_asked in _surely_used(piece.value)}
    # A possible number needs no cast, since an FP32 tensor promotes it. A read of its attribute rules out a number.
    reads = [read for read in reads if read[0] not in numbers or used.get(read[1])]
    cast = dict.fromkeys(code for code, _, is_value in reads if is_value)
    sure = {code for code, node, _ in reads if node in used}
    optional = bindings.maybe_none & cast.keys() - sure
    fixed = numbers | bound_inside(pieces) | set(written_into(bindings.scope))
    # In the order of the parameters, as in `q, k, v = q.float(), k.float(), v.float()`.
    order = dict.fromkeys(name for name in (*bindings.parameters, *cast) if name in cast)
    own = [code for code in order if code.isidentifier() and code not in fixed and bindings.may_assign(code)]
    if stuck := sorted(optional - set(own)):
        raise EditError(f"{stuck[0]} may be None there, and None has no .float()")
    count = Counter(code for code, *_ in reads)
    rebound = own if optional or any(count[code] > 1 for code in own) else []
    moved = {node: name for piece in pieces for node, name in piece.new.items()}
    inline = {
        node: f"{moved.get(node) or _operand(document, node)}.float()"
        for code, node, is_value in reads
        if is_value and code not in rebound
    }
    return Casts(_cast_lines(rebound, optional, indent), inline, (numbers | bindings.maybe_none) - sure)


def _operand(document: Document, node: ast.AST) -> str:
    return document.source(node) if isinstance(node, (*PLAIN, ast.Call)) else f"({document.source(node)})"


def bound_inside(pieces: Sequence[Piece]) -> set[str]:
    """Return the names that the pieces bind in comprehensions, in lambdas and with ``:=``."""
    kinds = (ast.comprehension, ast.arg, ast.NamedExpr)
    binding = (one for piece in pieces for one in ast.walk(piece.value) if isinstance(one, kinds))
    return {name for one in binding for name in names_assigned(one)}
