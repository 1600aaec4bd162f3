"""Pinned statements of a suite gathered in blocks with autocast off, as few and as small as can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import libcst as cst

from ampdbg.patch.casting import cast_statements
from ampdbg.patch.devices import device_type_of
from ampdbg.patch.half_casts import PinnedStatement, cast
from ampdbg.patch.later_reads import is_read_later
from ampdbg.patch.modes import Mode
from ampdbg.patch.pieces import Mark, Piece, may_run_in_either, pieces_of_head, pieces_of_line
from ampdbg.patch.tensor_names import TensorNames
from ampdbg.source.autocast_names import autocast_in
from ampdbg.source.bindings import Bindings
from ampdbg.source.expressions import assigned_codes
from ampdbg.source.source_text import EditError

BETWEEN = 2
"""At most so many unpinned lines in a row are taken into a block, so that there is one block and not two."""


@dataclass
class Suite:
    """A suite being rewritten.

    ``marks`` holds the pinned lines by the ``id`` of their nodes, ``names_of`` tells what is known of the names in
    another statement, ``indent`` by how much a block is indented.
    What had to be left alone is in ``refused``: the mark's line and the reason.
    """

    bindings: Bindings
    marks: Mapping[int, Mark]
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
        mark = self.marks.get(id(old))
        if mark is not None and mark.number not in self.refused:
            try:
                if isinstance(old, (cst.If, cst.For)) and isinstance(new, cst.BaseCompoundStatement):
                    return pieces_of_head(old, new, mark)
                if isinstance(old, cst.SimpleStatementLine):
                    return list(pieces_of_line(old, mark))
            except EditError as error:
                self.refused[mark.number] = str(error)
        # Whether it may stand in a block depends on what the block has made by then.
        return [Piece(Mode.EITHER, new, self.names_of(old), origin=old)]

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
                self.refused.update({piece.mark.number: str(error) for piece in block if piece.mark is not None})
            made = made.union(*(assigned_codes(piece.statement) for piece in block))
            index = end

    def _block(self, pieces: Sequence[Piece], made: frozenset[str]) -> cst.With:
        pinned = [_pinned(piece) for piece in pieces]
        casts = cast_statements(pinned, made, lambda name: not self._is_read_later(name, pieces))
        lines = [p.line.with_changes(body=[s]) for p, s in zip(pieces, casts.statements, strict=True)]
        above = lines[0].leading_lines
        lines[0] = lines[0].with_changes(leading_lines=())
        marks = [piece.mark for piece in pieces if piece.mark is not None]
        device = next((mark.device_type for mark in marks if mark.device_type), "")
        device = device or device_type_of(pinned, casts.cast)
        start = [rebinding(casts.rebound)] if casts.rebound else []
        return self.with_off(device, [*start, *lines]).with_changes(leading_lines=above)

    def _is_read_later(self, name: str, block: Sequence[Piece]) -> bool:
        origins = [piece.origin for piece in block if piece.origin is not None]
        scope = self.bindings.function.body if self.bindings.function is not None else self.bindings.module
        return len(origins) < len(block) or is_read_later(name, origins, scope)

    def with_off(self, device_type: str, body: Sequence[cst.BaseStatement]) -> cst.With:
        """``with torch.autocast(device_type=…, enabled=False):`` around statements."""
        autocast, needs_import = autocast_in(self.bindings)
        self.needs_import |= needs_import
        continued = _Continued(self.indent)
        return with_autocast_off(autocast, device_type, [_deeper(line, continued) for line in body], self.indent)


def _deeper(line: cst.BaseStatement, continued: _Continued) -> cst.BaseStatement:
    deeper = line.visit(continued)
    return deeper if isinstance(deeper, cst.BaseStatement) else line


class _Continued(cst.CSTTransformer):
    """Lines behind a backslash are indented with the statement; LibCST does it within parentheses only."""

    def __init__(self, indent: str) -> None:
        super().__init__()
        self._indent = indent

    def leave_SimpleWhitespace(  # noqa: N802 - LibCST's name
        self, original_node: cst.SimpleWhitespace, updated_node: cst.SimpleWhitespace
    ) -> cst.SimpleWhitespace:
        return updated_node.with_changes(value=updated_node.value.replace("\n", "\n" + self._indent))


def with_autocast_off(
    autocast: cst.BaseExpression, device_type: str, body: Sequence[cst.BaseStatement], indent: str
) -> cst.With:
    """The block, with autocast spelled as the file spells it."""
    tight = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    arguments = [
        cst.Arg(cst.parse_expression(device_type), cst.Name("device_type"), equal=tight),
        cst.Arg(cst.Name("False"), cst.Name("enabled"), equal=tight),
    ]
    return cst.With([cst.WithItem(cst.Call(autocast, arguments))], cst.IndentedBlock(body, indent=indent))


def rebinding(names: Sequence[str]) -> cst.SimpleStatementLine:
    """``q, k = q.float(), k.float()``."""
    targets, values = [cst.Name(name) for name in names], [cast(cst.Name(name)) for name in names]
    if len(names) == 1:
        return cst.SimpleStatementLine([cst.Assign([cst.AssignTarget(targets[0])], values[0])])
    target, value = (cst.Tuple([cst.Element(item) for item in items], lpar=(), rpar=()) for items in (targets, values))
    return cst.SimpleStatementLine([cst.Assign([cst.AssignTarget(target)], value)])


def _pinned(piece: Piece) -> PinnedStatement:
    callees = piece.mark.callees if piece.mark is not None else frozenset()
    return PinnedStatement(piece.line.body[0], piece.names, callees)


def _end_of_block(pieces: Sequence[Piece], start: int, made: frozenset[str]) -> int:
    """Behind the last piece of the block that begins at ``start``; ``start`` itself where none does."""
    end = start
    for index in range(start, len(pieces)):
        piece = pieces[index]
        if piece.mode is Mode.FP32:
            end = index + 1
        elif (
            index == start
            or index - end >= BETWEEN
            or piece.mode is Mode.AUTOCAST
            or not may_run_in_either(piece.statement, piece.names, made)
        ):
            break
        made |= assigned_codes(piece.statement)
    return end
