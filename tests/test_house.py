"""Tests of the whole package: unique class names, short lists of parameters, few decisions for its code."""

import ast
import io
import re
import tokenize
from collections import Counter

from tests.package_source import PACKAGE, trees

TYPE_NAME = re.compile(r"(?:[A-Z][a-z]+)+")

MOST_PARAMETERS = 8
MOST_DECISIONS = 0.255
"""Decisions for each line of code. A new case raises the share; a row of a table or a mechanism does not."""


def public_names(tree: ast.Module) -> set[str]:
    """The public classes and type aliases that a module defines."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        found |= {one.id for one in targets if isinstance(one, ast.Name) and TYPE_NAME.fullmatch(one.id)}
    return {name for name in found if not name.startswith("_")}


def test_public_classes_and_types_have_unique_names_across_modules() -> None:
    names = Counter(name for tree in trees().values() for name in public_names(tree))
    assert names, "the package was not found"
    assert [name for name, count in names.items() if count > 1] == []


def test_only_functions_of_commands_have_more_than_eight_parameters() -> None:
    def count(node: ast.FunctionDef) -> int:
        return len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])

    long = {
        f"{file}:{node.name}"
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and count(node) > MOST_PARAMETERS
    }
    assert {name for name in long if not (name.startswith("commands/") and name.endswith(":command"))} == set()


def decisions(tree: ast.AST) -> int:
    """The number of branches in the code: conditions, operands of and/or, filters, cases and handlers."""
    nodes = list(ast.walk(tree))
    branches = (ast.If, ast.IfExp, ast.While, ast.ExceptHandler, ast.Assert, ast.match_case)
    operands = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    filters = sum(len(node.ifs) for node in nodes if isinstance(node, ast.comprehension))
    return sum(isinstance(node, branches) for node in nodes) + operands + filters


def code_lines(text: str, tree: ast.AST) -> int:
    """The number of lines of code, without docstrings, imports, comments and blank lines."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    aside: set[int] = set()
    for node in ast.walk(tree):
        part: ast.stmt | None = node if isinstance(node, (ast.Import, ast.ImportFrom)) else None
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            part = node.body[0]
        if part is not None:
            aside.update(range(part.lineno, (part.end_lineno or part.lineno) + 1))
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in layout]
    held = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(held - aside)


def test_code_lines_and_decisions_are_counted() -> None:
    text = '''"""A module."""
import os

def f(a):
    """Says
    so."""
    # a comment
    if a and os.sep or not a:
        return [b for b in a if b]
    return """two
lines"""
'''
    tree = ast.parse(text)
    assert (code_lines(text, tree), decisions(tree)) == (5, 4)


def test_the_share_of_decisions_in_the_package_has_not_grown() -> None:
    code = sum(code_lines((PACKAGE / file).read_text("utf-8"), tree) for file, tree in trees().items())
    made = sum(map(decisions, trees().values()))
    assert made / code <= MOST_DECISIONS
