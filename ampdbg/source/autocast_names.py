"""How a file spells ``torch.autocast``, and the import of torch where it has none."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import libcst as cst
from libcst.helpers import get_full_name_for_node

from ampdbg.source.bindings import Bindings, imports_of
from ampdbg.source.source_text import EditError

AUTOCASTS = ("torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast")
"""The class that takes ``device_type``, by all its names; the one of ``torch.cuda.amp`` does not."""

_OFF = ("False", "0")


def autocast_in(bindings: Bindings) -> tuple[cst.BaseExpression, bool]:
    """The expression for autocast in a function, and whether the file must import torch for it.

    Raises:
        EditError: the function has a variable of its own named torch.
    """
    usable = {name: origin for name, origin in bindings.imports.items() if _means_itself(name, bindings)}
    for name, origin in usable.items():
        if origin in AUTOCASTS:
            return cst.Name(name), False
    for name, origin in usable.items():
        if origin == "torch":
            return cst.Attribute(cst.Name(name), cst.Name("autocast")), False
    if "torch" in bindings.taken:
        raise EditError("the name torch stands for something else here; import torch under its own name first")
    return cst.parse_expression("torch.autocast"), True


def _means_itself(name: str, bindings: Bindings) -> bool:
    """Whether no variable of the function hides the import."""
    if bindings.function is None:
        return True
    imported_here = imports_of(bindings.function.body.body)
    return name in imported_here or name not in bindings.local


def disables_autocast(item: cst.BaseExpression, imports: Mapping[str, str]) -> bool:
    """Whether this is ``autocast(…, enabled=False)``, by whatever name, torch.cuda.amp's too."""
    return _is_autocast(item, imports) and _is_off(item)


def enables_autocast(item: cst.BaseExpression, imports: Mapping[str, str]) -> bool:
    """Whether this is ``autocast(…)`` that is not off: within a region that is, it is on again."""
    return _is_autocast(item, imports) and not _is_off(item)


def _is_autocast(item: cst.BaseExpression, imports: Mapping[str, str]) -> bool:
    name = get_full_name_for_node(item.func) or "" if isinstance(item, cst.Call) else ""
    first, dot, rest = name.partition(".")
    origin = imports.get(first, first) + dot + rest
    return origin.startswith("torch.") and origin.endswith("autocast")


def _is_off(item: cst.BaseExpression) -> bool:
    return isinstance(item, cst.Call) and any(
        arg.keyword is not None and arg.keyword.value == "enabled" and get_full_name_for_node(arg.value) in _OFF
        for arg in item.args
    )


def with_torch_imported(module: cst.Module) -> cst.Module:
    """The module with ``import torch``, where it lacks it."""
    return with_imported(module, "torch")


def with_imported(module: cst.Module, name: str) -> cst.Module:
    """The module with ``import NAME`` where a person would put it: beside its other imports, else in order.

    ``name`` is a top-level package. A module that has that line already stays as it is.
    """
    if imports_of(module.body).get(name) == name:
        return module
    line = cst.SimpleStatementLine([cst.Import([cst.ImportAlias(cst.Name(name))])])
    block = _import_block(module.body)
    if not block:
        return _below_docstring(module, line)
    place = next((i for i in block if _root_of(module.body[i]) == name), None)
    if place is not None:
        return _inserted(module, place, line)
    section = _section_of(name)
    same = [i for i in block if _section(module.body[i]) == section]
    if same:
        later = (i for i in same if _is_from(module.body[i]) or _root_of(module.body[i]) > name)
        place = next(later, None)
        return _inserted(module, place, line) if place is not None else _after(module, same[-1], line)
    earlier = [i for i in block if _section(module.body[i]) < section]
    spaced = line.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
    if earlier:
        return _separated(_after(module, earlier[-1], spaced), earlier[-1] + 2)
    return _separated(_inserted(module, block[0], line), block[0] + 1)


Body = Sequence[cst.SimpleStatementLine | cst.BaseCompoundStatement]


def _import_block(body: Body) -> list[int]:
    """The indices of the imports at the top, ``from __future__`` among them, up to the first other statement."""
    found: list[int] = []
    for index, line in enumerate(body):
        if _root_of(line):
            found.append(index)
        elif not (index == 0 and _is_docstring(line)):
            break
    return found


def _is_docstring(line: cst.CSTNode) -> bool:
    return (
        isinstance(line, cst.SimpleStatementLine)
        and isinstance(line.body[0], cst.Expr)
        and isinstance(line.body[0].value, (cst.SimpleString, cst.ConcatenatedString))
    )


def _root_of(line: cst.CSTNode) -> str:
    """The package that a line imports from: "torch", "." for a relative import, "" where it is no import."""
    first = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
    if isinstance(first, cst.Import):
        return first.names[0].evaluated_name.partition(".")[0]
    if isinstance(first, cst.ImportFrom):
        return "." if first.relative else (get_full_name_for_node(first.module or "") or "").partition(".")[0]
    return ""


def _is_from(line: cst.CSTNode) -> bool:
    return isinstance(line, cst.SimpleStatementLine) and isinstance(line.body[0], cst.ImportFrom)


def _section(line: cst.CSTNode) -> int:
    """0 for ``__future__``, 1 for the standard library, 2 for installed packages, 3 for the package's own."""
    return _section_of(_root_of(line))


def _section_of(root: str) -> int:
    if root in ("__future__", "."):
        return 0 if root == "__future__" else 3
    return 1 if root in sys.stdlib_module_names else 2


def _inserted(module: cst.Module, index: int, line: cst.SimpleStatementLine) -> cst.Module:
    """Puts the line before another one and gives it the blank lines and comments that stood there."""
    there = module.body[index]
    taken = line.with_changes(leading_lines=there.leading_lines)
    bare = there.with_changes(leading_lines=())
    return module.with_changes(body=[*module.body[:index], taken, bare, *module.body[index + 1 :]])


def _after(module: cst.Module, index: int, line: cst.SimpleStatementLine) -> cst.Module:
    return module.with_changes(body=[*module.body[: index + 1], line, *module.body[index + 1 :]])


def _below_docstring(module: cst.Module, line: cst.SimpleStatementLine) -> cst.Module:
    blank = cst.EmptyLine(indent=False)
    if module.body and _is_docstring(module.body[0]):
        return _separated(_after(module, 0, line.with_changes(leading_lines=[blank])), 2)
    return _separated(module.with_changes(body=[line, *module.body]), 1)


def _separated(module: cst.Module, index: int) -> cst.Module:
    """With a blank line before a statement, unless it has one."""
    if index >= len(module.body) or any(line.comment is None for line in module.body[index].leading_lines[:1]):
        return module
    there = module.body[index]
    spaced = there.with_changes(leading_lines=[cst.EmptyLine(indent=False), *there.leading_lines])
    return module.with_changes(body=[*module.body[:index], spaced, *module.body[index + 1 :]])
