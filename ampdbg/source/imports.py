"""What a file's imports bind, which expressions are ``torch.autocast``, and an import put where the file lacks it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import libcst as cst

Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement

# `from __future__`, the standard library, installed packages, the package's own.
_FUTURE, _STANDARD, _INSTALLED, _OWN = range(4)


def imports_of(body: Iterable[cst.CSTNode]) -> dict[str, str]:
    """What the import statements among ``body`` bind: local name to dotted name, ``F`` to torch.nn.functional.

    Those in an ``if`` or ``try`` count (``if is_torch_available():``), but for what is there for types alone.
    """
    bound: dict[str, str] = {}
    for line in body:
        for statement in line.body if isinstance(line, cst.SimpleStatementLine) else ():
            bound.update(_imported(statement))
        if isinstance(line, cst.Try) or (isinstance(line, cst.If) and not _is_for_types(line.test)):
            bound.update(imports_of(line.body.body))
    return bound


def _is_for_types(test: cst.BaseExpression) -> bool:
    return dotted(test).rpartition(".")[2] == "TYPE_CHECKING"


def _imported(statement: cst.BaseSmallStatement) -> Iterator[tuple[str, str]]:
    if isinstance(statement, cst.Import):
        for alias in statement.names:
            name = alias.evaluated_name
            # `import torch.nn` binds torch; `import torch.nn as nn` binds torch.nn.
            yield (alias.evaluated_alias, name) if alias.evaluated_alias else (name.partition(".")[0],) * 2
    elif isinstance(statement, cst.ImportFrom) and not isinstance(statement.names, cst.ImportStar):
        origin = "." * len(statement.relative) + (dotted(statement.module) if statement.module else "")
        for alias in statement.names:
            yield alias.evaluated_alias or alias.evaluated_name, f"{origin}.{alias.evaluated_name}"


def dotted(node: cst.BaseExpression) -> str:
    """``a.b.c`` as text; "" for anything that is not names and dots."""
    match node:
        case cst.Name(value=name):
            return name
        case cst.Attribute(value=base, attr=cst.Name(value=name)) if owner := dotted(base):
            return f"{owner}.{name}"
        case _:
            return ""


def origin_of(name: str, imports: Mapping[str, str]) -> str:
    """Where a dotted name comes from: ``torch.nn.functional.softmax`` of ``F.softmax``; "" where it is not imported."""
    first, dot, rest = name.partition(".")
    return f"{imports[first]}{dot}{rest}" if first in imports else ""


def disables_autocast(node: cst.CSTNode, imports: Mapping[str, str]) -> bool:
    """Whether this is ``autocast(…, enabled=False)``, by whatever name, torch.cuda.amp's too, or under it.

    Under it are the block of a ``with`` and a function with such a decorator.
    """
    match node:
        case cst.With(items=managers):
            return any(disables_autocast(manager.item, imports) for manager in managers)
        case cst.FunctionDef(decorators=decorators):
            return any(disables_autocast(each.decorator, imports) for each in decorators)
        case cst.Call(func=function, args=args):
            origin = origin_of(dotted(function), imports) or dotted(function)
            off = {arg.keyword.value for arg in args if arg.keyword is not None and dotted(arg.value) == "False"}
            return "enabled" in off and origin.startswith("torch.") and origin.endswith("autocast")
        case _:
            return False


def with_imported(module: cst.Module, name: str) -> cst.Module:
    """The module with ``import NAME`` where a person would put it; one that has it already stays as it is.

    LibCST's AddImportsVisitor puts a name behind all other imports, out of the order that linters ask for.

    Args:
        module: the file.
        name: a top-level package.
    """
    if imports_of(module.body).get(name) == name:
        return module
    line = cst.SimpleStatementLine([cst.Import([cst.ImportAlias(cst.Name(name))])])
    first = int(module.get_docstring() is not None)
    block = _import_block(module.body, first)
    rank = _rank(line)
    place = next((index for index in block if _rank(module.body[index]) >= rank), block[-1] + 1 if block else first)
    starts_section = not block or _rank(module.body[max(place - 1, block[0])])[0] != rank[0]
    body: list[Statement] = list(module.body)
    if place in block:  # the blank lines and comments that stood there stay above
        line = line.with_changes(leading_lines=body[place].leading_lines)
        body[place] = body[place].with_changes(leading_lines=())
        ends_section = _rank(body[place])[0] != rank[0]
    else:
        line = line.with_changes(leading_lines=[cst.EmptyLine(indent=False)] if starts_section and place else ())
        ends_section = starts_section
    body.insert(place, line)
    if ends_section and place + 1 < len(body):
        body[place + 1] = apart(body[place + 1], 1)
    return module.with_changes(body=body)


def _import_block(body: Sequence[cst.CSTNode], first: int) -> range:
    """The indices of the imports at the top, from the ``first`` statement behind a docstring on."""
    end = next((index for index, line in enumerate(body) if index >= first and not _root_of(line)), len(body))
    return range(first, end)


def _root_of(line: cst.CSTNode) -> str:
    """The package that a line imports from: "torch", "." for a relative import, "" where it is no import."""
    first = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
    if isinstance(first, cst.Import):
        return first.names[0].evaluated_name.partition(".")[0]
    if isinstance(first, cst.ImportFrom):
        return "." if first.relative else dotted(first.module or cst.Name("")).partition(".")[0]
    return ""


def _rank(line: cst.CSTNode) -> tuple[int, bool, str]:
    """The order of imports: by section, ``import`` before ``from``, by name."""
    root = _root_of(line)
    standard = _STANDARD if root in sys.stdlib_module_names else _INSTALLED
    section = {"__future__": _FUTURE, ".": _OWN}.get(root, standard)
    is_from = isinstance(line, cst.SimpleStatementLine) and isinstance(line.body[0], cst.ImportFrom)
    return section, is_from, root


def apart(statement: Statement, count: int) -> Statement:
    """With so many blank lines above it and its comments; it may have more."""
    lines = statement.leading_lines
    blank = next((index for index, line in enumerate(lines) if line.comment is not None), len(lines))
    missing = [cst.EmptyLine(indent=False)] * (count - min(blank, count))
    return statement.with_changes(leading_lines=[*missing, *lines])
