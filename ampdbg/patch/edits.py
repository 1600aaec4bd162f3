"""Edits of a user's source that run pinned code in FP32, written as a person would write them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import libcst as cst
from libcst import matchers as m

from ampdbg.patch.statements import (
    NOT_TRACED,
    PLAIN,
    SUSPENDED,
    Casts,
    Piece,
    PinnedLine,
    TensorNames,
    bound_inside,
    casts_of,
    is_product,
    names_on,
    pieces_of_line,
    root_name,
    value_of,
    with_replaced,
    writes_in_place,
)
from ampdbg.probes.half_names import LineNames
from ampdbg.source.expressions import (
    Bindings,
    assigned_codes,
    canonical,
    code_of,
    find,
    spelled,
    targets,
    walk,
    with_imported,
)
from ampdbg.source.source_file import EditError, Located, SourceFile, read_source


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
        rewriter = _Rewriter(file, seen)
        rewriter.mark(pins)
        edited = file.module.visit(rewriter)
        after = file.with_module(with_imported(edited, "torch") if rewriter.needs_import else edited)
    except EditError as error:
        return Edited(source, (Refused(error.line, str(error)),))
    refused = (Refused(line, reason) for line, reason in sorted(rewriter.refused.items()))
    return Edited(after, tuple(refused), rewriter.blocks)


@dataclass
class _Rewriter(cst.CSTTransformer):
    """Rewrites the suites with pinned ``lines``, by node id.

    ``refused`` maps a line number, or 0 for the file, to the reason why it was not edited.
    """

    source: SourceFile
    seen: Mapping[int, LineNames]
    lines: dict[int, PinnedLine] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    blocks: dict[int, int] = field(default_factory=dict)
    needs_import: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def mark(self, pins: Sequence[LinePin]) -> None:
        """Find the pinned lines in the file. Refuse missing lines."""
        for pin in pins:
            for number in sorted(set(pin.lines)):
                try:
                    located = self.source.at(number)
                    _check_place(located, pin.function)
                except EditError as error:
                    self.refused[number] = str(error)
                    continue
                names = names_on(located.span, self.seen, located.bindings)
                pinned = self.lines.setdefault(id(located.line), PinnedLine(number, names))
                pinned.callees |= {canonical(pin.callee)} if pin.callee else set()
                pinned.operations |= not pin.callee
                pinned.casts_to_fp32 |= pin.casts_to_fp32

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:  # noqa: N802
        body = self._suite(original_node, None).rewritten(original_node.body, updated_node.body)
        return updated_node.with_changes(body=body)

    def leave_IndentedBlock(  # noqa: N802 - LibCST's name
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        body = self._suite(original_node, original_node.indent).rewritten(original_node.body, updated_node.body)
        return updated_node.with_changes(body=body)

    def _suite(self, node: cst.CSTNode, indent: str | None) -> _Suite:
        return _Suite(self, self.source.bindings(node), indent or self.source.module.default_indent)


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
class _Suite:
    """A suite of a ``file`` under rewriting. ``indent`` is the indentation of a new block."""

    file: _Rewriter
    bindings: Bindings
    indent: str

    def names_of(self, node: cst.CSTNode) -> TensorNames:
        return names_on(self.file.source.span(node), self.file.seen, self.bindings)

    def rewritten(
        self, before: Sequence[cst.CSTNode], after: Sequence[cst.BaseStatement]
    ) -> Sequence[cst.BaseStatement]:
        """Return the new statements: ``before`` are the file's own nodes, ``after`` the same with inner edits."""
        if not any(id(node) in self.file.lines for node in before):
            return after
        while True:
            refused = len(self.file.refused)
            pieces = [p for old, new in zip(before, after, strict=True) for p in self._pieces(old, new)]
            statements = list(self._gathered(pieces))
            # If a block is refused, keep its lines and build the remaining blocks again.
            if len(self.file.refused) == refused:
                return statements

    def _pieces(self, old: cst.CSTNode, new: cst.BaseStatement) -> Sequence[Piece]:
        pinned = self.file.lines.get(id(old))
        if pinned is not None and pinned.number not in self.file.refused and isinstance(old, cst.SimpleStatementLine):
            try:
                return pieces_of_line(old, pinned)
            except EditError as error:
                self.file.refused[pinned.number] = str(error)
        return [Piece(new, self.names_of(old))]

    def _gathered(self, pieces: Sequence[Piece]) -> Iterator[cst.BaseStatement]:
        made: set[str] = set()
        index = 0
        while index < len(pieces):
            end = _end_of_block(pieces, index)
            block = pieces[index:end] or pieces[index : index + 1]
            assigned = set().union(*(assigned_codes(piece.statement) for piece in block))
            if end == index:
                yield block[0].statement
                made -= assigned
            else:
                numbers = [piece.pinned.number for piece in block if piece.pinned is not None]
                self.file.blocks.update(dict.fromkeys(numbers, numbers[0]))
                try:
                    yield self._block(block, made)
                except EditError as error:
                    self.file.refused.update(dict.fromkeys(numbers, str(error)))
                made |= assigned
            index += len(block)

    def _block(self, pieces: Sequence[Piece], made: Collection[str]) -> cst.With:
        """Return ``with torch.autocast(device_type=…, enabled=False):`` around the pieces."""
        casts = casts_of(pieces, made)
        device_type = self._device_type(pieces, casts)
        autocast = _imported_as(AUTOCASTS, self.bindings)
        if not autocast:
            torch, needs_import = torch_in(self.bindings)
            autocast, self.file.needs_import = f"{torch}.autocast", self.file.needs_import or needs_import
        off = cst.parse_expression(f"{autocast}(device_type={device_type}, enabled=False)")
        first, *rest = (with_replaced(piece.line, casts.inline) for piece in pieces)
        body = [*casts.lines, first.with_changes(leading_lines=()), *rest]
        inside = cst.IndentedBlock([_indented(line, self.indent) for line in body], indent=self.indent)
        return cst.With([cst.WithItem(off)], inside, leading_lines=pieces[0].line.leading_lines)

    def _device_type(self, pieces: Sequence[Piece], casts: Casts) -> str:
        """Return ``x.device.type`` of a tensor that exists at the start of the block, a plain name if possible."""
        around = self.names_of(self.bindings.function or self.bindings.module)
        found: list[str] = []
        made: set[str] = set()
        for piece in pieces:
            known = (piece.names.half | piece.names.full) - made
            plain = (node for node in walk(value_of(piece.small) or piece.small) if isinstance(node, PLAIN))
            found += (spelled(node) for node in plain if code_of(node) in known and root_name(node) not in made)
            made |= assigned_codes(piece.small)
        # Otherwise use a parameter that holds a tensor elsewhere in the function.
        found += (name for name in self.bindings.parameters if name in around.half | around.full)
        never = bound_inside(pieces) | (self.bindings.maybe_plain_values & casts.unsure)
        found = [text for text in found if text.partition(".")[0].partition("[")[0] not in never]
        # Prefer names that the user wrote to new names and attributes.
        found.sort(key=lambda text: (text in casts.unsure, text not in self.bindings.local, not text.isidentifier()))
        if not found:
            is_traced = any(piece.names.half | piece.names.full for piece in pieces)
            raise EditError("it has no named tensor whose device could be used" if is_traced else NOT_TRACED)
        return f"{found[0]}.device.type"


def _indented(line: cst.BaseStatement, indent: str) -> cst.BaseStatement:
    """Indent a statement and its backslash continuations. LibCST re-indents only lines within parentheses."""

    def deeper(node: cst.CSTNode, _: object) -> cst.CSTNode:
        space = cst.ensure_type(node, cst.SimpleWhitespace)
        return space.with_changes(value=space.value.replace("\n", "\n" + indent))

    return cst.ensure_type(m.replace(line, m.SimpleWhitespace(), deeper), type(line))


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
    match piece.statement:
        case cst.SimpleStatementLine(body=[cst.Assign() as line]) if piece.pinned is None:
            # An attribute such as `self.last = h` may be read elsewhere, so it must keep its dtype.
            stores = any(isinstance(target, (cst.Attribute, cst.Subscript)) for target in targets(line))
            writes = stores or any(map(writes_in_place, find(line, cst.Call)))
            refused = (type(node) in SUSPENDED or is_product(node) or piece.names.is_users(node) for node in walk(line))
            return not (writes or any(refused))
    return False


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
