"""Small questions about LibCST expressions: their canonical text, their names, what they assign."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from typing import TypeVar

import libcst as cst

from ampdbg.syntax_tree import syntax_tree

_EMPTY = cst.Module([])
_Node = TypeVar("_Node", bound=cst.CSTNode)

SCOPES = (cst.FunctionDef, cst.ClassDef, cst.Lambda)
COMPREHENSIONS = (cst.ListComp, cst.SetComp, cst.DictComp, cst.GeneratorExp)


@functools.lru_cache(maxsize=4096)
def canonical(code: str) -> str:
    """An expression without what does not matter: spaces, outer parentheses, the kind of quotes."""
    try:
        # In parentheses, as it may go over several lines.
        return ast.unparse(syntax_tree(f"({code.strip()}\n)", mode="eval"))
    except SyntaxError:
        return code


def code_of(node: cst.BaseExpression) -> str:
    """The canonical text of an expression."""
    return node.value if isinstance(node, cst.Name) else canonical(_EMPTY.code_for_node(node))


def spelled(node: cst.BaseExpression) -> str:
    """An expression as the source has it, on one line and without outer parentheses."""
    text = _EMPTY.code_for_node(bare(node))
    return code_of(node) if "\n" in text else text


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The node and all below it, parents first, in the order of the text."""
    yield node
    for child in node.children:
        yield from walk(child)


def find(node: cst.CSTNode, kind: type[_Node]) -> Iterator[_Node]:
    """All of one kind, the node itself included."""
    return (item for item in walk(node) if isinstance(item, kind))


def names_read(node: cst.CSTNode) -> set[str]:
    """Every name in an expression or statement, those of attributes and keywords left out."""
    hidden = {id(item.attr) for item in find(node, cst.Attribute)}
    hidden |= {id(item.keyword) for item in find(node, cst.Arg) if item.keyword is not None}
    return {name.value for name in find(node, cst.Name) if id(name) not in hidden}


def names_assigned(node: cst.CSTNode) -> set[str]:
    """Every plain name that a statement binds, those in nested functions too."""
    return {name for item in walk(node) for target in _targets(item) for name in _target_names(target)}


def assigned_codes(statement: cst.CSTNode) -> set[str]:
    """What a statement assigns to: names, and the canonical text of attributes and subscripts."""
    parts = (target for target in targets(statement) if isinstance(target, (cst.Attribute, cst.Subscript)))
    return names_assigned(statement) | set(map(code_of, parts))


def targets(statement: cst.CSTNode) -> Iterator[cst.BaseExpression]:
    """What stands in front of each ``=``, or of ``+=`` and its like."""
    kinds = (cst.AssignTarget, cst.AnnAssign, cst.AugAssign)
    return (item.target for item in walk(statement) if isinstance(item, kinds))


def names_bound_inside(statement: cst.CSTNode) -> set[str]:
    """Names that the expressions of a statement bind: in comprehensions, lambdas, and by ``:=``."""
    kinds = (cst.CompFor, cst.Param, cst.NamedExpr)
    return {name for item in walk(statement) if isinstance(item, kinds) for name in names_assigned(item)}


def _targets(node: cst.CSTNode) -> Iterator[cst.BaseExpression]:
    if isinstance(node, (cst.AssignTarget, cst.AnnAssign, cst.AugAssign, cst.NamedExpr, cst.For, cst.CompFor)):
        yield node.target
    elif isinstance(node, (cst.WithItem, cst.ExceptHandler)):
        name = node.asname if isinstance(node, cst.WithItem) else node.name
        if isinstance(name, cst.AsName):
            yield name.name
    elif isinstance(node, cst.Del):
        yield node.target
    elif isinstance(node, (cst.FunctionDef, cst.ClassDef, cst.Param)):
        yield node.name


def _target_names(target: cst.BaseExpression) -> Iterator[str]:
    """The plain names that an assignment to ``target`` binds."""
    if isinstance(target, cst.Name):
        yield target.value
    elif isinstance(target, (cst.Tuple, cst.List)):
        for element in target.elements:
            yield from _target_names(element.value)


def bare(node: cst.BaseExpression) -> cst.BaseExpression:
    """The expression without its parentheses."""
    return node.with_changes(lpar=(), rpar=()) if getattr(node, "lpar", ()) else node


def block_of(body: cst.BaseSuite) -> cst.IndentedBlock:
    """A suite as a block of lines; ``class Net(Base): pass`` becomes one."""
    if isinstance(body, cst.IndentedBlock):
        return body
    assert isinstance(body, cst.SimpleStatementSuite)
    line = cst.SimpleStatementLine(body.body, trailing_whitespace=body.trailing_whitespace)
    return cst.IndentedBlock([line])
