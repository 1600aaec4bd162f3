"""Edits of a user's source that run pinned code in FP32, written as a person would write them."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ampdbg.patch.statements import (
    NOT_TRACED,
    PLAIN,
    SUSPENDED,
    Casts,
    Piece,
    PinnedLine,
    TensorNames,
    bound_inside,
    canonical,
    casts_of,
    is_product,
    names_on,
    pieces_of_line,
    rewritten,
    root_name,
    writes_in_place,
)
from ampdbg.probes.half_names import LineNames
from ampdbg.source.document import Document
from ampdbg.source.edits import Edit, Fix, applied, edited, line_starts
from ampdbg.source.names import Bindings, places_assigned
from ampdbg.source.source_file import EditError, Located, SourceFile, read_source, span


@dataclass(frozen=True)
class LinePin:
    """Lines of one function whose operations must run in FP32. With a ``callee``, only its calls on these lines do.

    Attributes:
        function: its ``co_name``, or its qualified name (``Block.forward``) to match that function alone; "" for any
            code on the lines, ``<module>`` for code at module level.
        lines: counted from 1.
        callee: the called expression as the source spells it: ``self.attn``, ``self.blocks[0]``, ``block`` in a loop.
        casts_to_fp32: the lines' own casts to half become casts to FP32.
    """

    function: str
    lines: tuple[int, ...]
    callee: str = ""
    casts_to_fp32: bool = False


@dataclass(frozen=True)
class Refused:
    """A pin, or one line of it, that was not edited. ``line`` is 0 for the whole file; ``file`` may be unknown."""

    line: int
    reason: str
    file: str = ""


@dataclass(frozen=True)
class Edited:
    """The new file, or the old one byte for byte if no edit was made, and the refusals.

    ``blocks`` maps each pinned line to the first pinned line in the same block.
    """

    source: bytes
    refused: tuple[Refused, ...]
    blocks: Mapping[int, int] = field(default_factory=dict)


def edit_source(source: bytes, pins: Sequence[LinePin], seen: Mapping[int, LineNames]) -> Edited:
    """Put pinned statements and calls of one file under ``autocast(enabled=False)``, and cast their inputs to FP32.

    Each pin is edited or refused independently. The result needs only torch and runs on any device. It keeps the file's
    formatting, comments, line endings and encoding. Code already in FP32 is left alone.

    ``seen`` has the names that held tensors in a trace of the file, by the first line of each statement.
    """
    try:
        file = read_source(source)
    except EditError as error:
        return Edited(source, (Refused(error.line, str(error)),))
    refused: dict[int, str] = {}
    lines = _pinned_lines(file, pins, seen, refused)
    while True:
        known = len(refused)
        blocks = _Blocks(file, seen, refused, [line for line in lines if line.number not in refused])
        after = blocks.edited()
        if len(refused) == known:  # otherwise the lines that are refused now must stay as they are
            break
    reasons = tuple(Refused(line, reason) for line, reason in sorted(refused.items()))
    return Edited(after.encode(file.encoding), reasons, blocks.firsts)


def _pinned_lines(
    file: SourceFile, pins: Sequence[LinePin], seen: Mapping[int, LineNames], refused: dict[int, str]
) -> list[PinnedLine]:
    """Find the pinned lines in the file. Refuse missing lines."""
    found: dict[ast.stmt, PinnedLine] = {}
    for pin in pins:
        for number in sorted(set(pin.lines)):
            try:
                located = file.at(number)
                _check_place(located, pin.function)
            except EditError as error:
                refused[number] = str(error)
                continue
            names = names_on(located.span, seen, located.bindings)
            pinned = found.setdefault(located.statement, PinnedLine(number, located.statement, names))
            pinned.callees |= {canonical(pin.callee)} if pin.callee else set()
            pinned.operations |= not pin.callee
            pinned.casts_to_fp32 |= pin.casts_to_fp32
    return list(found.values())


def _check_place(located: Located, function: str) -> None:
    if not located.is_in(function):
        where = ".".join(located.qualname) or "no function"
        raise EditError(f"the file has changed since the run: the line is in {where}, not in {function}")
    if located.is_off:
        raise EditError("autocast is already off there; cast its half inputs with .float()")


# Blocks


AUTOCASTS = ("torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast")
"""All names of the autocast class with a ``device_type``. The class in ``torch.cuda.amp`` takes none."""

BETWEEN = 2
"""Up to this many consecutive unpinned lines are moved into a block, which avoids a second block."""


@dataclass
class _Blocks:
    """The blocks of a ``file`` for its pinned ``lines``. Lines that cannot be edited are added to ``refused``.

    ``firsts`` maps each pinned line to the first pinned line in its block. ``inserted`` has new lines by the offset of
    the line that follows them.
    """

    file: SourceFile
    seen: Mapping[int, LineNames]
    refused: dict[int, str]
    lines: Sequence[PinnedLine]
    firsts: dict[int, int] = field(default_factory=dict)
    inserted: dict[int, str] = field(default_factory=dict)
    edits: list[Edit] = field(default_factory=list)
    needs_import: bool = False

    def edited(self) -> str:
        """Return the file with the blocks."""
        self._rewrite()
        blocks = {id(block): block for block in map(self.document.block, self.pinned)}
        for block in blocks.values():
            self._gather([piece for statement in block for piece in self._pieces(statement)])
        new = [Edit(at, at, text) for at, text in self.inserted.items()]
        return applied(self.document, [Fix((*new, *self.edits), ("torch",) * self.needs_import)])

    def _rewrite(self) -> None:
        """Rewrite the pinned statements themselves. Their lines may move, so each is mapped to the file's own."""
        edits: list[Edit] = []
        lines: dict[ast.stmt, PinnedLine] = {}
        for line in self.lines:
            try:
                own, is_enough = rewritten(self.file.document, line)
            except EditError as error:
                self.refused[line.number] = str(error)
                continue
            edits += own
            if not is_enough:
                lines[line.statement] = line
        self.document = Document(edited(self.file.document.text, edits))
        before, after = map(_statements, (self.file.document, self.document))
        self.origins = dict(zip(after, before, strict=True))
        of_file = ((new, lines[old]) for new, old in self.origins.items() if old in lines)
        self.pinned = {new: replace(line, statement=new) for new, line in of_file}

    def _pieces(self, statement: ast.stmt) -> Sequence[Piece]:
        pinned = self.pinned.get(statement)
        if pinned is not None:
            try:
                return pieces_of_line(pinned)
            except EditError as error:
                self.refused[pinned.number] = str(error)
        return [Piece(statement, self._names_of(self.origins[statement]))]

    def _names_of(self, statement: ast.stmt) -> TensorNames:
        return names_on(span(statement), self.seen, self.file.bindings(statement))

    def _gather(self, pieces: Sequence[Piece]) -> None:
        """Put the pieces of a suite that run in FP32 into blocks."""
        made: set[str] = set()
        index = 0
        while index < len(pieces):
            end = _end_of_block(pieces, index)
            block = pieces[index:end] or pieces[index : index + 1]
            assigned = set().union(*(piece.assigned for piece in block))
            if end == index:
                self._place(block[0], {})
                made -= assigned
            else:
                numbers = [piece.pinned.number for piece in block if piece.pinned is not None]
                self.firsts.update(dict.fromkeys(numbers, numbers[0]))
                try:
                    self._block(block, made)
                except EditError as error:
                    self.refused.update(dict.fromkeys(numbers, str(error)))
                made |= assigned
            index += len(block)

    def _block(self, pieces: Sequence[Piece], made: Collection[str]) -> None:
        """Put ``with torch.autocast(device_type=…, enabled=False):`` around the pieces."""
        document, first = self.document, pieces[0].statement
        indent = document.indent_unit(first)
        casts = casts_of(document, pieces, made, indent)
        device_type = self._device_type(pieces, casts)
        bindings = pieces[0].names.bindings
        autocast = _imported_as(AUTOCASTS, bindings)
        if not autocast:
            torch, needs_import = torch_in(bindings)
            autocast, self.needs_import = f"{torch}.autocast", self.needs_import or needs_import
        self._insert(first, f"with {autocast}(device_type={device_type}, enabled=False):")
        for line in casts.lines:
            self._insert(first, indent + line)
        start = document.lines(first).start
        for piece in pieces:
            self._place(piece, casts.inline, indent)
            lines = document.lines(piece.statement)
            end = lines.start if piece.moved else lines.end
            self.edits += (Edit(at, at, indent) for at in line_starts(document, start, end))
            start = max(start, end)

    def _place(self, piece: Piece, casts: Mapping[ast.AST, str], indent: str = "") -> None:
        """Insert a moved expression before its statement, or edit the statement in its place."""
        if piece.moved:
            self._insert(piece.statement, indent + piece.text(self.document, casts, indent))
        else:
            self.edits += piece.edits(self.document, casts)

    def _insert(self, statement: ast.stmt, line: str) -> None:
        at, document = self.document.lines(statement).start, self.document
        self.inserted[at] = f"{self.inserted.get(at, '')}{document.indent(statement)}{line}{document.newline}"

    def _device_type(self, pieces: Sequence[Piece], casts: Casts) -> str:
        """Return ``x.device.type`` of a tensor that exists at the start of the block, a plain name if possible."""
        bindings = pieces[0].names.bindings
        around = self._names_of(bindings.function) if bindings.function else names_on(range(0), self.seen, bindings)
        found: list[str] = []
        made: set[str] = set()
        for piece in pieces:
            known = (piece.names.half | piece.names.full) - made
            for node in piece.visible():
                code = piece.new.get(node) or (ast.unparse(node) if isinstance(node, PLAIN) else "")
                if code in known and root_name(node) not in made:
                    found.append(code if node in piece.new else self.document.spelled(node))
            made |= piece.assigned
        # Otherwise use a parameter that holds a tensor elsewhere in the function.
        found += (name for name in bindings.parameters if name in around.half | around.full)
        never = bound_inside(pieces) | (bindings.maybe_plain_values & casts.unsure)
        found = [text for text in found if text.partition(".")[0].partition("[")[0] not in never]
        # Prefer names that the user wrote to new names and attributes.
        found.sort(key=lambda text: (text in casts.unsure, text not in bindings.local, not text.isidentifier()))
        if not found:
            is_traced = any(piece.names.half | piece.names.full for piece in pieces)
            raise EditError("it has no named tensor whose device could be used" if is_traced else NOT_TRACED)
        return f"{found[0]}.device.type"


def _statements(document: Document) -> list[ast.stmt]:
    return [node for node in ast.walk(document.tree) if isinstance(node, ast.stmt)]


def _end_of_block(pieces: Sequence[Piece], start: int) -> int:
    """Return the index after the last piece of the block at ``start``, or ``start`` if no block begins there."""
    end = start
    for index in range(start, len(pieces)):
        if pieces[index].is_fp32:
            end = index + 1
        elif index == start or index - end >= BETWEEN or not _may_stand_between(pieces[index]):
            break
    return end


def _may_stand_between(piece: Piece) -> bool:
    """True if an unpinned line may be in a block with autocast off: it assigns to names and calls no user code. It also
    writes into no tensor and computes no product, which autocast would run in half."""
    statement = piece.statement
    # An attribute such as `self.last = h` may be read elsewhere, so it must keep its dtype.
    if piece.pinned is not None or not isinstance(statement, ast.Assign) or places_assigned(statement):
        return False
    return not any(
        type(node) in SUSPENDED or writes_in_place(node) or is_product(node) or piece.names.is_users(node)
        for node in ast.walk(statement)
    )


def torch_in(bindings: Bindings) -> tuple[str, bool]:
    """Return the name of torch in a function, and True if the file must import it first.

    Raises:
        EditError: the name torch means something else there.
    """
    if known := _imported_as(("torch",), bindings):
        return known, False
    if "torch" in bindings.taken:
        raise EditError("the name torch means something else here; import torch under its own name first")
    return "torch", True


def _imported_as(origins: Sequence[str], bindings: Bindings) -> str:
    """Return the name of an import from ``origins`` that the function does not shadow, or ""."""
    hidden = bindings.local if bindings.function is not None else frozenset()
    return next((name for name, origin in bindings.imports.items() if origin in origins and name not in hidden), "")
