"""Edits a user's source so that pinned code runs in FP32, as a person would have written it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import libcst as cst

from ampdbg.patch.blocks import Suite
from ampdbg.patch.marks import Marks, marks_of
from ampdbg.patch.pieces import LineMark
from ampdbg.patch.regions import TensorNames
from ampdbg.patch.source_pins import CallPin, FunctionPin, Refused, SourcePin, StatementPin
from ampdbg.patch.whole_functions import function_of, with_body_in_fp32
from ampdbg.source.bindings import Bindings
from ampdbg.source.imports import with_imported
from ampdbg.source.source_file import EditError, SourceFile, read_source

__all__ = ["CallPin", "Edited", "FunctionPin", "Refused", "SourcePin", "StatementPin", "edit_source"]


@dataclass(frozen=True)
class Edited:
    """The new file, and what was left alone and why. Where nothing is ``changed`` it is the old one, byte for byte."""

    source: bytes
    refused: tuple[Refused, ...]
    changed: bool


def edit_source(source: bytes, pins: Sequence[SourcePin]) -> Edited:
    """Puts pinned statements, calls and functions of one file under autocast's ``enabled=False``, inputs cast up.

    Each pin is edited or refused for itself. The result needs torch alone, runs on any device, and keeps the file's
    formatting, comments, line endings and encoding. What is in FP32 already stays as it is.

    Args:
        source: the file's bytes.
        pins: what to pin in it.
    """
    try:
        file = read_source(source)
        module, refused = _edited_module(file, pins)
        after = file.with_module(module)
    except EditError as error:
        return Edited(source, (Refused(error.line, str(error)),), changed=False)
    return Edited(after, tuple(sorted(refused, key=lambda item: item.line)), after != source)


def _edited_module(source: SourceFile, pins: Sequence[SourcePin]) -> tuple[cst.Module, list[Refused]]:
    refused: list[Refused] = []
    wholes: dict[int, tuple[cst.FunctionDef, FunctionPin]] = {}
    for pin in pins:
        if isinstance(pin, FunctionPin):
            try:
                function = function_of(source.module, pin)
                wholes[id(function)] = function, pin
            except EditError as error:
                refused.append(Refused(0, str(error)))
    line_pins = [pin for pin in pins if not isinstance(pin, FunctionPin)]
    marks = marks_of(line_pins, source, [function for function, _ in wholes.values()])
    rewriter = _Rewriter(source, marks, {key: pin for key, (_, pin) in wholes.items()})
    edited = source.module.visit(rewriter)
    if rewriter.needs_import:
        edited = with_imported(edited, "torch")
    return edited, [*refused, *marks.refused, *rewriter.refused]


@dataclass
class _Rewriter(cst.CSTTransformer):
    """Rewrites the suites that hold marked lines, and the functions that are pinned whole."""

    source: SourceFile
    marks: Marks
    wholes: Mapping[int, FunctionPin]
    refused: list[Refused] = field(default_factory=list)
    needs_import: bool = False
    _functions: list[cst.FunctionDef | None] = field(default_factory=lambda: [None])

    def __post_init__(self) -> None:
        super().__init__()

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:  # noqa: N802 - LibCST's name
        self._functions.append(node)

    def leave_FunctionDef(  # noqa: N802 - LibCST's name
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        self._functions.pop()
        pin = self.wholes.get(id(original_node))
        if pin is None:
            return updated_node
        bindings = Bindings(self.source.module, original_node)
        try:
            updated_node, needs_import = with_body_in_fp32(original_node, updated_node, pin, bindings)
        except EditError as error:
            self.refused.append(Refused(self.source.span(original_node)[0], str(error)))
        else:
            self.needs_import |= needs_import
        return updated_node

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:  # noqa: N802
        return updated_node.with_changes(body=self._rewritten(original_node.body, updated_node.body, None))

    def leave_IndentedBlock(  # noqa: N802 - LibCST's name
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        body = self._rewritten(original_node.body, updated_node.body, original_node.indent)
        return updated_node.with_changes(body=body)

    def _rewritten(
        self, before: Sequence[cst.CSTNode], after: Sequence[cst.BaseStatement], indent: str | None
    ) -> Sequence[cst.BaseStatement]:
        if not any(id(node) in self.marks.lines for node in before):
            return after
        suite = self._suite(self.marks.lines, indent)
        body = suite.rewritten(before, after)
        self._note(suite)
        return body

    def _suite(self, marks: Mapping[int, LineMark], indent: str | None) -> Suite:
        bindings = Bindings(self.source.module, self._functions[-1])

        def names_of(node: cst.CSTNode) -> TensorNames:
            return self.marks.names_on(self.source.span(node), bindings)

        return Suite(bindings, marks, names_of, indent or self.source.module.default_indent)

    def _note(self, suite: Suite) -> None:
        self.needs_import |= suite.needs_import
        self.refused += [Refused(line, reason) for line, reason in suite.refused.items()]
