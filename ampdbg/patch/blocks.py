"""Pinned statements of a suite gathered in blocks with autocast off, as few and as small as can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import libcst as cst
from libcst import matchers as m

from ampdbg.patch.casts import with_casts
from ampdbg.patch.pieces import Piece, may_run_in_either, pieces_of_line, value_of
from ampdbg.patch.regions import CONDITIONAL, PinnedLine, Region, operands_of, viewed
from ampdbg.patch.tensor_names import TensorNames
from ampdbg.source.bindings import Bindings
from ampdbg.source.expressions import assigned_codes, code_of, find, names_bound_inside, spelled, walk
from ampdbg.source.source_file import EditError

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
