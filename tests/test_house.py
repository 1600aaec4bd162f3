"""The house as a whole: class names that are unique, short lists of parameters."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import ampdbg

PACKAGE = Path(ampdbg.__file__).parent
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}

MOST_PARAMETERS = 8


def test_no_two_public_classes_share_a_name() -> None:
    names = Counter(
        node.name
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert names, "the package was not found"
    assert [name for name, count in names.items() if count > 1] == []


def test_only_the_options_of_a_command_are_many_parameters() -> None:
    def count(node: ast.FunctionDef) -> int:
        return len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])

    long = {
        f"{file}:{node.name}"
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and count(node) > MOST_PARAMETERS
    }
    assert {name for name in long if not (name.startswith("commands/") and name.endswith(":command"))} == set()
