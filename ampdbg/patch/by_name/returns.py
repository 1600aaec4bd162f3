"""What a function returns, passed through the helper: all that may be a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import libcst as cst

from ampdbg.source.expressions import COMPREHENSIONS, SCOPES, find, walk
from ampdbg.source.imports import dotted
from ampdbg.source.source_file import EditError

MODEL = "model"
LONG = 72
"""An expression of more characters, or lines, is not put into a call as it stands."""

CONTAINERS = (cst.Tuple, cst.BaseList, cst.BaseSet, cst.BaseDict, *COMPREHENSIONS)
NO_MODEL = (*CONTAINERS, cst.BaseNumber, cst.BaseString, cst.Ellipsis, cst.Comparison, cst.Lambda)
"""Expressions that give something else than a module, whatever is in them."""

CONSTANTS = ("None", "True", "False", "NotImplemented")


def models_of(function: cst.FunctionDef) -> list[cst.BaseExpression]:
    """The expressions by which a function makes what it returns, in order, but for those that are plainly no module.

    Raises:
        EditError: it is a coroutine or a generator, or no expression is left.
    """
    name, inside = function.name.value, _own_nodes(function.body)
    if function.asynchronous is not None:
        raise EditError(f"{name} is a coroutine; call the helper where its model is awaited")
    if any(isinstance(node, cst.Yield) for node in inside):
        raise EditError(f"{name} is a generator; call the helper where its model is used")
    values = [node.value for node in inside if isinstance(node, cst.Return) and node.value is not None]
    models = [model for value in values for model in _models_in(value)]
    if not models and any(isinstance(value, CONTAINERS) for value in values):
        raise EditError(f"{name} returns more than the model; call the helper on the model in it")
    if not models:
        raise EditError(f"{name} returns no model")
    return models


def with_returns_kept(function: cst.FunctionDef, helper: str) -> cst.FunctionDef:
    """The function with all of :func:`models_of` passed through the helper; one that does so already is left alone."""
    if any(is_call(model, helper) for model in models_of(function)):
        return function
    edited = function.visit(_Returns(function, helper))
    assert isinstance(edited, cst.FunctionDef)
    return edited


def is_call(node: cst.CSTNode, function: str) -> bool:
    """Whether an expression calls a function of that name."""
    return isinstance(node, cst.Call) and dotted(node.func) == function


def returns_early(function: cst.FunctionDef) -> bool:
    """Whether a function has a ``return`` of its own."""
    return any(isinstance(node, cst.Return) for node in _own_nodes(function.body))


def _models_in(value: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """The expression, or its two branches (``a if small else b``)."""
    if isinstance(value, cst.IfExp):
        yield from (*_models_in(value.body), *_models_in(value.orelse))
    elif not isinstance(value, NO_MODEL) and dotted(value) not in CONSTANTS:
        yield value


def _own_nodes(node: cst.CSTNode) -> list[cst.CSTNode]:
    """Every node but those of nested functions and classes."""
    inner = {id(below) for item in walk(node) if isinstance(item, SCOPES) for below in walk(item)}
    return [item for item in walk(node) if id(item) not in inner]


@dataclass
class _Returns(cst.CSTTransformer):
    """Passes what a function returns through the helper; nested functions are left alone."""

    function: cst.FunctionDef
    helper: str

    def __post_init__(self) -> None:
        super().__init__()

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:  # noqa: N802 - LibCST's name
        return node is self.function

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:  # noqa: N802 - LibCST's name
        return False

    def leave_SimpleStatementLine(  # noqa: N802 - LibCST's name
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.SimpleStatementLine]:
        """A model whose making is long gets a name first."""
        before, after = original_node.body[0], updated_node.body[0]
        if before is after or not isinstance(before, cst.Return) or not isinstance(after, cst.Return):
            return updated_node
        if before.value is None or isinstance(before.value, cst.IfExp) or not self._is_long(before.value):
            return updated_node
        made = cst.Assign([cst.AssignTarget(cst.Name(MODEL))], before.value)
        kept = after.with_changes(value=cst.Call(cst.Name(self.helper), [cst.Arg(cst.Name(MODEL))]))
        return cst.FlattenSentinel([updated_node.with_changes(body=[made]), cst.SimpleStatementLine([kept])])

    def _is_long(self, value: cst.BaseExpression) -> bool:
        code = cst.Module([]).code_for_node(value)
        shared = {item.name.value for item in find(self.function, cst.NameItem)}  # of global and nonlocal
        return MODEL not in shared and ("\n" in code or len(code) > LONG)

    def leave_Return(self, original_node: cst.Return, updated_node: cst.Return) -> cst.Return:  # noqa: N802
        value = updated_node.value
        if value is None or not any(True for _ in _models_in(value)):
            return updated_node
        spaced = cst.SimpleWhitespace(" ")
        return updated_node.with_changes(value=self._kept(value), whitespace_after_return=spaced)

    def _kept(self, value: cst.BaseExpression) -> cst.BaseExpression:
        if isinstance(value, cst.IfExp):
            return value.with_changes(body=self._kept(value.body), orelse=self._kept(value.orelse))
        if not any(True for _ in _models_in(value)):
            return value
        return cst.Call(cst.Name(self.helper), [cst.Arg(_unwrapped(value))])


def _unwrapped(value: cst.BaseExpression) -> cst.BaseExpression:
    """Without its outermost parentheses, for which the call's own stand; comments keep them."""
    outer: Sequence[cst.LeftParen] = getattr(value, "lpar", ())
    closing: Sequence[cst.RightParen] = getattr(value, "rpar", ())
    spaces = [*(paren.whitespace_after for paren in outer[:1]), *(paren.whitespace_before for paren in closing[-1:])]
    if not outer or not all(isinstance(space, cst.SimpleWhitespace) for space in spaces):
        return value
    return value.with_changes(lpar=outer[1:], rpar=closing[:-1])
