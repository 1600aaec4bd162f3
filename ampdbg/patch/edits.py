"""Edits a user's source so that pinned code runs in FP32, as a person would have written it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import libcst as cst

from ampdbg.patch.statements import (
    NamesSeen,
    PinnedLine,
    Suite,
    TensorNames,
    cast_lines,
    written_into,
)
from ampdbg.source.expressions import (
    Bindings,
    block_of,
    canonical,
    disables_autocast,
    dotted,
    find,
    walk,
    with_imported,
)
from ampdbg.source.source_file import EditError, Located, SourceFile, parts_of, read_source


@dataclass(frozen=True)
class LinePin:
    """Lines of one function whose operations must run in FP32; with a ``callee``, its calls there and nothing else.

    Attributes:
        function: its ``co_name``, or its whole qualified name (``Block.forward``), by which it is that one alone; ""
            for whatever stands on the lines, ``<module>`` for the module's own code.
        lines: counted from 1.
        callee: what is called, as it stands in the source: ``self.attn``, ``self.blocks[0]``, ``block`` in a loop.
    """

    function: str
    lines: tuple[int, ...]
    callee: str = ""


@dataclass(frozen=True)
class FunctionPin:
    """A function, by its qualified name (``Block.forward``), that must run in FP32 as a whole."""

    function: str


SourcePin = LinePin | FunctionPin


@dataclass(frozen=True)
class Refused:
    """A pin, or a line of one, that was left alone; ``line`` is 0 where it is the whole file, ``file`` where known."""

    line: int
    reason: str
    file: str = ""


@dataclass(frozen=True)
class Edited:
    """The new file, and what was left alone and why. Where nothing is ``changed`` it is the old one, byte for byte."""

    source: bytes
    refused: tuple[Refused, ...]
    changed: bool


NOTHING_SEEN = NamesSeen()


def edit_source(source: bytes, pins: Sequence[SourcePin], names: NamesSeen = NOTHING_SEEN) -> Edited:
    """Puts pinned statements, calls and functions of one file under autocast's ``enabled=False``, inputs cast up.

    Each pin is edited or refused for itself. The result needs torch alone, runs on any device, and keeps the file's
    formatting, comments, line endings and encoding. What is in FP32 already stays as it is.

    Args:
        source: the file's bytes.
        pins: what to pin in it.
        names: what a trace saw in it.
    """
    try:
        file = read_source(source)
        rewriter = _Rewriter(file, names)
        rewriter.mark(pins)
        edited = file.module.visit(rewriter)
        after = file.with_module(with_imported(edited, "torch") if rewriter.needs_import else edited)
    except EditError as error:
        return Edited(source, (Refused(error.line, str(error)),), changed=False)
    return Edited(after, tuple(sorted(rewriter.refused, key=lambda item: item.line)), after != source)


@dataclass
class _Rewriter(cst.CSTTransformer):
    """Rewrites the suites that hold pinned ``lines``, and the functions that are pinned whole, by the nodes' ids."""

    source: SourceFile
    names: NamesSeen
    lines: dict[int, PinnedLine] = field(default_factory=dict)
    wholes: dict[int, cst.FunctionDef] = field(default_factory=dict)
    refused: list[Refused] = field(default_factory=list)
    needs_import: bool = False
    _functions: list[cst.FunctionDef | None] = field(default_factory=lambda: [None])

    def __post_init__(self) -> None:
        super().__init__()

    def mark(self, pins: Sequence[SourcePin]) -> None:
        """Finds what the pins name; what is not there is refused, and lines in a whole function need no more."""
        for whole in (pin for pin in pins if isinstance(pin, FunctionPin)):
            try:
                function = _function_of(self.source, whole)
                self.wholes[id(function)] = function
            except EditError as error:
                self.refused.append(Refused(0, str(error)))
        for pin in pins:
            if isinstance(pin, LinePin):
                for number in sorted(set(pin.lines)):
                    self._mark_line(pin, number)

    def _mark_line(self, pin: LinePin, number: int) -> None:
        try:
            located = _located(pin, number, self.source)
        except EditError as error:
            self.refused.append(Refused(number, str(error)))
            return
        if any(id(function) in self.wholes for function in located.functions):
            return
        key, callees = id(located.line), frozenset({canonical(pin.callee)} if pin.callee else ())
        if (old := self.lines.get(key)) is not None:
            operations = old.operations or not pin.callee
            self.lines[key] = replace(old, callees=old.callees | callees, operations=operations)
        else:
            names = self.names.on(located.span, Bindings(self.source.module, located.function))
            self.lines[key] = PinnedLine(number, names, callees, operations=not pin.callee)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:  # noqa: N802 - LibCST's name
        self._functions.append(node)

    def leave_FunctionDef(  # noqa: N802 - LibCST's name
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        if id(original_node) in self.wholes:
            suite = self._suite(getattr(original_node.body, "indent", None))
            try:
                updated_node = _with_body_in_fp32(original_node, updated_node, suite)
            except EditError as error:
                self.refused.append(Refused(self.source.span(original_node)[0], str(error)))
            self.needs_import |= suite.needs_import
        self._functions.pop()
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
        if not any(id(node) in self.lines for node in before):
            return after
        suite = self._suite(indent)
        body = suite.rewritten(before, after)
        self.needs_import |= suite.needs_import
        self.refused += [Refused(line, reason) for line, reason in suite.refused.items()]
        return body

    def _suite(self, indent: str | None) -> Suite:
        bindings = Bindings(self.source.module, self._functions[-1])

        def names_of(node: cst.CSTNode) -> TensorNames:
            return self.names.on(self.source.span(node), bindings)

        return Suite(bindings, self.lines, names_of, indent or self.source.module.default_indent)


def _located(pin: LinePin, number: int, source: SourceFile) -> Located:
    located = source.at(number)
    if not located.is_in(pin.function):
        where = ".".join(located.qualname) or "no function"
        raise EditError(f"the file has changed since the run: the line is in {where}, not in {pin.function}")
    if located.is_off:
        raise EditError("autocast is off there already; cast its half inputs with .float()")
    function = located.function
    if function is not None and any("jit.script" in dotted(each.decorator) for each in function.decorators):
        raise EditError(f"{function.name.value} is scripted, and TorchScript does not support such a block")
    return located


def _function_of(source: SourceFile, pin: FunctionPin) -> cst.FunctionDef:
    every = find(source.module, cst.FunctionDef)
    found = [node for node in every if (*source.qualname(node), node.name.value) == parts_of(pin.function)]
    if len(found) != 1:
        count = "no function" if not found else f"{len(found)} functions"
        raise EditError(f"the file has {count} named {pin.function}")
    return found[0]


def _with_body_in_fp32(function: cst.FunctionDef, updated: cst.FunctionDef, suite: Suite) -> cst.FunctionDef:
    """The function with its body in a block with autocast off, the parameters cast first that held half tensors.

    Raises:
        EditError: it is a coroutine or a generator, no argument of it is a tensor, or it writes into one.
    """
    _refuse_suspended(function)
    body, bindings, seen = block_of(updated.body), suite.bindings, suite.names_of(function)
    first = 1 if function.get_docstring() is not None else 0
    statements = list(body.body[first:])
    if len(statements) == 1 and disables_autocast(statements[0], bindings.imports):
        return updated
    stars = (function.params.star_arg, function.params.star_kwarg)
    if unknown := [star.name.value for star in stars if isinstance(star, cst.Param) and star.name.value in seen.half]:
        raise EditError(f"{', '.join(unknown)} is no named parameter, so the function cannot cast it")
    half = [name for name in bindings.parameters if name in seen.half]
    tensors = [*half, *(name for name in bindings.parameters if name in seen.full)]
    if not tensors:
        raise EditError("none of its arguments held a tensor")
    _refuse_writes(function, half, bindings)
    casts = cast_lines(half, [name for name in half if bindings.parameters[name].default is not None], bindings)
    block = suite.with_off(f"{tensors[0]}.device.type", [*casts, *statements])
    # Comments at the end of the function stay in the block that they were written in.
    block = block.with_changes(body=block.body.with_changes(footer=body.footer))
    return updated.with_changes(body=body.with_changes(body=[*body.body[:first], block], footer=()))


def _refuse_writes(function: cst.FunctionDef, names: Sequence[str], bindings: Bindings) -> None:
    """What is written into an argument reaches the caller; written into its cast, it would not."""
    written = set(written_into(function.body))
    for name in names:
        if not written.isdisjoint({name, *bindings.aliases(name)}):
            raise EditError(f"it writes into its argument {name} in place; assign the result to a new name first")


def _refuse_suspended(function: cst.FunctionDef) -> None:
    if function.asynchronous is not None:
        raise EditError("it is a coroutine, and other code would run with autocast off")
    if any(isinstance(node, cst.Yield) for node in walk(function.body)):
        raise EditError("it is a generator, and the caller's code would run with autocast off")
