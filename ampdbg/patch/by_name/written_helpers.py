"""The functions of :mod:`helper_text` in a user's file: put there, found again, extended."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

import libcst as cst

from ampdbg.patch.by_name.helper_text import DOCSTRING, INDENT, OWN_LINES_FUNCTION, WHOLE_FUNCTION, Spelling
from ampdbg.record.pins import OWN
from ampdbg.source.expressions import code_of, find, names_assigned
from ampdbg.source.imports import dotted, imports_of
from ampdbg.source.source_file import EditError

BLANK = cst.EmptyLine(indent=False)


def spelling_in(module: cst.Module) -> Spelling:
    """How the file names torch and functools.partial, which may have to be imported yet.

    Raises:
        EditError: a name that the helper needs stands for something else.
    """
    imports = imports_of(module.body)
    names = {origin: name for name, origin in imports.items()}
    torch = names.get("torch", "torch")
    functools = names.get("functools", "functools")
    for name, origin in ((torch, "torch"), (functools, "functools")):
        is_other = imports.get(name, origin) != origin
        if is_other or (name not in imports and any(name in names_assigned(node) for node in module.body)):
            raise EditError(f"the name {name} stands for something else in this file")
    return Spelling(torch=torch, partial=names.get("functools.partial", f"{functools}.partial"))


def pins_kept(module: cst.Module, spelling: Spelling, all_names: Collection[str]) -> tuple[str, ...]:
    """The pins of the helper that an earlier run put there, as the config takes them; () without one.

    Raises:
        EditError: there is a function of that name, and it is none of ours, or was changed beyond reading.
    """
    helper = _functions(module).get(spelling.function)
    if helper is None:
        return ()
    if DOCSTRING not in module.code_for_node(helper):
        raise EditError(f"it has a function {spelling.function} of its own; rename that first")
    return tuple(_pins_in(helper.body.body, all_names))


def _pins_in(body: Sequence[cst.CSTNode], all_names: Collection[str]) -> Iterator[str]:
    """Loops over names, and single modules: a line that gets one, and behind it the line that pins it."""
    single = ""
    for node in body:
        if isinstance(node, cst.For) and code_of(node.target) in ("name", "(name, module)"):
            yield from (name + _suffix(node) for name in _names(node, all_names))
            continue
        used = {name.value for name in find(node, cst.Name)}
        if "get_submodule" in used:
            single = next(_text(call.args[0].value) for call in find(node, cst.Call))
        elif used & {WHOLE_FUNCTION, OWN_LINES_FUNCTION}:
            yield single + _suffix(node)


def _suffix(node: cst.CSTNode) -> str:
    return OWN if any(name.value == OWN_LINES_FUNCTION for name in find(node, cst.Name)) else ""


def _names(loop: cst.For, all_names: Collection[str]) -> Iterator[str]:
    if isinstance(loop.iter, (cst.List, cst.Tuple)):
        yield from (_text(element.value) for element in loop.iter.elements)
        return
    tests = {dotted(call.func): _text(call.args[0].value) for call in find(loop.body, cst.Call) if call.args}
    start, end = tests.get("name.startswith", ""), tests.get("name.endswith", "")
    if not end:
        raise EditError("its helper names its modules in a way of its own; add the new ones to it by hand")
    yield from (name for name in all_names if name.startswith(start) and name.endswith(end))


def _text(node: cst.BaseExpression) -> str:
    value = node.evaluated_value if isinstance(node, cst.SimpleString) else ""
    return value if isinstance(value, str) else ""


def with_functions(module: cst.Module, functions: Mapping[str, str], place: int, *, is_extended: bool) -> cst.Module:
    """The module with ``functions``, their text by name, in front of the statement ``place``.

    Where they extend an earlier helper, those that are there are replaced where they stand.

    Raises:
        EditError: the file has functions of these names that are none of ours.
    """
    there = _functions(module)
    if not is_extended and (taken := [name for name in functions if name in there]):
        raise EditError(f"it has a function {taken[0]} of its own; rename that first")
    nodes = {name: _parsed(text, module.default_indent) for name, text in functions.items()}
    first = next((i for i, node in enumerate(module.body) if _name(node) in nodes), place)
    body = [_replaced(node, nodes) for node in module.body]
    added = [_apart(node) for name, node in nodes.items() if name not in there]
    # What the helper stands in front of keeps its own comment lines.
    return module.with_changes(body=[*body[:first], *added, _apart(body[first]), *body[first + 1 :]])


def _functions(module: cst.Module) -> dict[str, cst.FunctionDef]:
    return {node.name.value: node for node in module.body if isinstance(node, cst.FunctionDef)}


def _name(node: cst.CSTNode) -> str:
    return node.name.value if isinstance(node, cst.FunctionDef) else ""


def _parsed(text: str, indent: str) -> cst.FunctionDef:
    """A function, indented as the file is."""
    leading = re.compile(rf"^(?:{INDENT})+", re.MULTILINE)
    indented = leading.sub(lambda start: indent * (len(start[0]) // len(INDENT)), text)
    (node,) = cst.parse_module(indented + "\n").body
    assert isinstance(node, cst.FunctionDef)
    return node


def _replaced(
    node: cst.SimpleStatementLine | cst.BaseCompoundStatement, nodes: Mapping[str, cst.FunctionDef]
) -> cst.SimpleStatementLine | cst.BaseCompoundStatement:
    new = nodes.get(_name(node))
    return node if new is None else new.with_changes(leading_lines=node.leading_lines)


def _apart(
    node: cst.SimpleStatementLine | cst.BaseCompoundStatement,
) -> cst.SimpleStatementLine | cst.BaseCompoundStatement:
    """With the two blank lines that stand around a function; it may have more."""
    blank = 0
    for line in node.leading_lines:
        if line.comment is not None:
            break
        blank += 1
    return node.with_changes(leading_lines=[*[BLANK] * (2 - min(blank, 2)), *node.leading_lines])
