"""Pinned statements in blocks with autocast off, as few and as small as can be, and what is cast to FP32 in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import libcst as cst
from libcst import matchers as m

from ampdbg.ops import CAST_METHODS, JOINS, SUMS
from ampdbg.patch.pieces import Piece, may_run_in_either, pieces_of_line, value_of
from ampdbg.patch.regions import (
    CONDITIONAL,
    PLAIN_BUILTINS,
    PinnedLine,
    Region,
    TensorNames,
    called_name,
    operands_of,
    viewed,
)
from ampdbg.source.expressions import (
    METADATA,
    TRANSPOSED,
    Bindings,
    assigned_codes,
    code_of,
    find,
    names_bound_inside,
    spelled,
    walk,
)
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


AUTOCASTS = ("torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast")
"""The class that takes ``device_type``, by all its names; the one of ``torch.cuda.amp`` does not."""

BETWEEN = 2
"""At most so many unpinned lines in a row are taken into a block, so that there is one block and not two."""


@dataclass
class Suite:
    """A suite being rewritten.

    ``pinned`` holds its lines that are by the ``id`` of their nodes, ``names_of`` tells what is known of the names in
    another statement, ``indent`` by how much a block is indented.
    What had to be left alone is in ``refused``: the line's number and the reason.
    """

    bindings: Bindings
    pinned: Mapping[int, PinnedLine]
    names_of: Callable[[cst.CSTNode], TensorNames]
    indent: str
    refused: dict[int, str] = field(default_factory=dict)
    needs_import: bool = False

    def rewritten(self, before: Sequence[cst.CSTNode], after: Sequence[cst.BaseStatement]) -> list[cst.BaseStatement]:
        """The statements of the new suite; ``before`` are the file's own nodes, ``after`` those with edits inside."""
        while True:
            refused = len(self.refused)
            pieces = [p for old, new in zip(before, after, strict=True) for p in self._pieces(old, new)]
            statements = list(self._gathered(pieces))
            # A block that cannot be made leaves its lines as they were, and the others are gathered again.
            if len(self.refused) == refused:
                return statements

    def _pieces(self, old: cst.CSTNode, new: cst.BaseStatement) -> Sequence[Piece]:
        pinned = self.pinned.get(id(old))
        if pinned is not None and pinned.number not in self.refused:
            try:
                if isinstance(old, cst.SimpleStatementLine):
                    return list(pieces_of_line(old, pinned))
            except EditError as error:
                self.refused[pinned.number] = str(error)
        # Whether it may stand in a block depends on what the block has made by then.
        return [Piece(Region.EITHER, new, self.names_of(old))]

    def _gathered(self, pieces: Sequence[Piece]) -> Iterator[cst.BaseStatement]:
        made: frozenset[str] = frozenset()
        index = 0
        while index < len(pieces):
            end = _end_of_block(pieces, index, made)
            if end == index:
                yield pieces[index].statement
                made -= assigned_codes(pieces[index].statement)
                index += 1
                continue
            block = pieces[index:end]
            try:
                yield self._block(block, made)
            except EditError as error:
                self.refused.update({piece.pinned.number: str(error) for piece in block if piece.pinned is not None})
            made = made.union(*(assigned_codes(piece.statement) for piece in block))
            index = end

    def _block(self, pieces: Sequence[Piece], made: frozenset[str]) -> cst.With:
        lines, cast = with_casts(pieces, made)
        above = lines[0].leading_lines
        lines[0] = lines[0].with_changes(leading_lines=())
        device_type = _device_type_of(pieces, cast, self.names_of(self.bindings.function or self.bindings.module))
        return self.with_off(device_type, lines).with_changes(leading_lines=above)

    def with_off(self, device_type: str, body: Sequence[cst.BaseStatement]) -> cst.With:
        """``with torch.autocast(device_type=…, enabled=False):`` around statements, spelled as the file spells it.

        Raises:
            EditError: the function has a variable of its own named torch.
        """
        autocast, needs_import = _autocast_in(self.bindings)
        self.needs_import |= needs_import
        off = cst.parse_expression(f"{autocast}(device_type={device_type}, enabled=False)")
        inside = cst.IndentedBlock([_indented(line, self.indent) for line in body], indent=self.indent)
        return cst.With([cst.WithItem(off)], inside)


def _indented(line: cst.BaseStatement, indent: str) -> cst.BaseStatement:
    """Lines behind a backslash are indented with the statement; LibCST does it within parentheses only."""

    def deeper(node: cst.CSTNode, _: object) -> cst.CSTNode:
        assert isinstance(node, cst.SimpleWhitespace)
        return node.with_changes(value=node.value.replace("\n", "\n" + indent))

    moved = m.replace(line, m.SimpleWhitespace(), deeper)
    assert isinstance(moved, cst.BaseStatement)
    return moved


def _end_of_block(pieces: Sequence[Piece], start: int, made: frozenset[str]) -> int:
    """Behind the last piece of the block that begins at ``start``; ``start`` itself where none does."""
    end = start
    for index in range(start, len(pieces)):
        piece = pieces[index]
        if piece.mode is Region.FP32:
            end = index + 1
        elif (
            index == start
            or index - end >= BETWEEN
            or piece.mode is Region.AUTOCAST
            or not may_run_in_either(piece.statement, piece.names, made)
        ):
            break
        made |= assigned_codes(piece.statement)
    return end


def _device_type_of(pieces: Sequence[Piece], cast: Sequence[str], around: TensorNames) -> str:
    """``x.device.type`` of a tensor that is there when the block is entered, a plain name where there is one.

    Args:
        pieces: what stands in the block.
        cast: the expressions that are cast in it; they are tensors.
        around: what is known of the names in the whole function.

    Raises:
        EditError: no such tensor has a name.
    """
    inner = {name for piece in pieces for name in names_bound_inside(piece.small)}
    bindings = pieces[0].names.bindings
    asked, local = _asked(pieces), bindings.local
    uncertain = (bindings.maybe_numbers - asked) | (bindings.maybe_none - asked - _computed_with(pieces))
    # A name that the reader knows, rather than one that the edit has just introduced or an attribute.
    read = sorted(_tensors_read(pieces, cast), key=lambda text: (text not in local, not text.isidentifier()))
    named = (text for text in read if "(" not in text)
    candidates = (text for text in (*named, *_others(pieces, around)) if _root(text) not in inner | uncertain)
    found = next(candidates, "")
    if not found and not any(piece.names.is_traced for piece in pieces):
        raise EditError(
            "no replay runs this line itself, so it is not known which of its names hold tensors; put it under "
            "torch.autocast(enabled=False) yourself, with .float() on what it computes with"
        )
    if not found:
        raise EditError("no named tensor is there to take the device from")
    return f"{found}.device.type"


def _asked(pieces: Sequence[Piece]) -> set[str]:
    """The names that are asked for a method or an attribute: tensors, whatever else they may be elsewhere."""
    parts = (part for piece in pieces for part in _unconditional(piece.small))
    return {part.value.value for part in parts if isinstance(part, cst.Attribute) and isinstance(part.value, cst.Name)}


def _computed_with(pieces: Sequence[Piece]) -> set[str]:
    """The names that are computed with: None is nothing to compute with."""
    operands = (
        node for piece in pieces for part in _unconditional(piece.small) for node in operands_of(part, piece.names)
    )
    return {node.value for node in operands if isinstance(node, cst.Name)}


def _unconditional(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The parts that are evaluated whenever the node is."""
    yield node
    for child in node.children:
        if not isinstance(child, CONDITIONAL):
            yield from _unconditional(child)


def _root(text: str) -> str:
    text = text.removeprefix("next(iter(")
    return text.partition(".")[0].partition("[")[0].strip()


def _tensors_read(pieces: Sequence[Piece], cast: Sequence[str]) -> list[str]:
    """Tensors that the statements read before they assign to them, as the source spells them, in its order."""
    found: list[str] = []
    made: set[str] = set()
    for piece in pieces:
        known = piece.names.half | piece.names.full | set(cast)
        value = value_of(piece.small)
        for node in walk(value) if value is not None else ():
            if isinstance(node, (cst.Name, cst.Attribute, cst.Subscript)) and (code := code_of(node)) not in made:
                found += [spelled(node)] if code in known else []
        made |= assigned_codes(piece.small)
    return found


def _others(pieces: Sequence[Piece], around: TensorNames) -> Iterator[str]:
    """What a pinned call is given, the first element that a comprehension takes, a parameter that held a tensor."""
    bindings = pieces[0].names.bindings
    yield from (name for piece in pieces for name in _given(piece))
    made: set[str] = set()
    for piece in pieces:
        for loop in find(piece.small, cst.CompFor):
            iterated = loop.iter.args[0].value if isinstance(loop.iter, cst.Call) and loop.iter.args else loop.iter
            if isinstance(iterated, cst.Name) and iterated.value not in made:
                yield f"{iterated.value}[0]"
            elif (held := viewed(iterated)) in bindings.local - made:
                yield f"next(iter({held}.values()))"
        made |= assigned_codes(piece.small)
    # Nothing that the block reads: a parameter that holds a tensor elsewhere in the function.
    yield from (name for name in bindings.parameters if name in around.half | around.full)


def _given(piece: Piece) -> Iterator[str]:
    """The plain names among the arguments of the pinned calls: tensors, as far as can be told."""
    callees = piece.pinned.callees if piece.pinned is not None else frozenset()
    for call in find(piece.small, cst.Call):
        if code_of(call.func) in callees:
            yield from (
                arg.value.value
                for arg in call.args
                if isinstance(arg.value, cst.Name) and piece.names.is_tensor(arg.value)
            )


def _autocast_in(bindings: Bindings) -> tuple[str, bool]:
    """What autocast is called in a function, and whether the file must import torch for it."""
    if known := _imported_as(AUTOCASTS, bindings):
        return known, False
    torch, needs_import = torch_in(bindings)
    return f"{torch}.autocast", needs_import


def torch_in(bindings: Bindings) -> tuple[str, bool]:
    """The name that torch has in a function, and whether the file must import it for that.

    Raises:
        EditError: the name stands for something else there.
    """
    if known := _imported_as(("torch",), bindings):
        return known, False
    if "torch" in bindings.taken:
        raise EditError("the name torch stands for something else here; import torch under its own name first")
    return "torch", True


def _imported_as(origins: Sequence[str], bindings: Bindings) -> str:
    """The name of one of these that no variable of the function hides; "" where there is none."""
    hidden = bindings.local if bindings.function is not None else frozenset()
    return next((name for name, origin in bindings.imports.items() if origin in origins and name not in hidden), "")
