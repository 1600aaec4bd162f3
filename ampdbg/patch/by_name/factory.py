"""Where a file makes the model, a function, a class or a variable, and the call that is put there."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from ampdbg.source.expressions import COMPREHENSIONS, SCOPES, find, walk
from ampdbg.source.imports import dotted
from ampdbg.source.source_file import EditError

Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement

MODEL = "model"
LONG = 72
"""An expression of more characters, or lines, is not put into a call as it stands."""

CONTAINERS = (cst.Tuple, cst.BaseList, cst.BaseSet, cst.BaseDict, *COMPREHENSIONS)


def with_model_kept(module: cst.Module, name: str, helper: str) -> tuple[int, cst.Module]:
    """The module with the model that ``name`` makes passed through the function ``helper``.

    A function's returned model is, a class calls it at the end of ``__init__``, a variable's model behind its
    assignment.

    Returns:
        The index of the statement that makes the model, and the module.

    Raises:
        EditError: there is no ``name``, or no plain place for the call.
    """
    index = _index(module.body, name)
    edited = _edited(module.body[index], name, helper)
    return index, module.with_changes(body=[*module.body[:index], *edited, *module.body[index + 1 :]])


def _index(body: Sequence[cst.CSTNode], name: str) -> int:
    """Where a name is bound, the last time."""
    found = [index for index, node in enumerate(body) if name in _bound(node)]
    if not found:
        raise EditError(f"{name} is not defined at the top of this file; it may be imported, or made in a condition")
    return found[-1]


def _bound(node: cst.CSTNode) -> set[str]:
    if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
        return {node.name.value}
    lines = node.body if isinstance(node, cst.SimpleStatementLine) else ()
    return {name for small in lines for name in _targets(small)}


def _targets(small: cst.CSTNode) -> list[str]:
    if isinstance(small, cst.Assign):
        return [dotted(target.target) for target in small.targets]
    return [dotted(small.target)] if isinstance(small, cst.AnnAssign) and small.value is not None else []


def _value(node: cst.CSTNode, name: str) -> cst.BaseExpression | None:
    for small in node.body if isinstance(node, cst.SimpleStatementLine) else ():
        if isinstance(small, (cst.Assign, cst.AnnAssign)) and name in _targets(small):
            return small.value
    return None


def _edited(node: Statement, name: str, helper: str) -> list[Statement]:
    """The statements in the place of the one that makes the model."""
    if isinstance(node, cst.FunctionDef):
        return [_function(node, helper)]
    if isinstance(node, cst.ClassDef):
        return [_class(node, helper)]
    if isinstance(_value(node, name), cst.Lambda):
        raise EditError(f"{name} is a lambda; write it as a function")
    return [node, _call_line(helper, name)]


# A function


def _function(function: cst.FunctionDef, helper: str) -> cst.FunctionDef:
    """The function with the one model that it returns passed through the helper."""
    name, inside = function.name.value, _own_nodes(function.body)
    if function.asynchronous is not None:
        raise EditError(f"{name} is a coroutine; call the helper where its model is awaited")
    if any(isinstance(node, cst.Yield) for node in inside):
        raise EditError(f"{name} is a generator; call the helper where its model is used")
    returns = [node for node in inside if isinstance(node, cst.Return) and node.value is not None]
    if not returns:
        raise EditError(f"{name} returns no model")
    value = returns[0].value
    if len(returns) > 1 or isinstance(value, cst.IfExp):
        raise EditError(f"{name} returns one thing here and another there; make the model in a function of its own")
    if isinstance(value, CONTAINERS):
        raise EditError(f"{name} returns more than the model; call the helper on the model in it")
    edited = function.visit(_Return(function, returns[0], helper))
    assert isinstance(edited, cst.FunctionDef)
    return edited


def _own_nodes(node: cst.CSTNode) -> list[cst.CSTNode]:
    """Every node but those of nested functions and classes."""
    inner = {id(below) for item in walk(node) if isinstance(item, SCOPES) for below in walk(item)}
    return [item for item in walk(node) if id(item) not in inner]


class _Return(cst.CSTTransformer):
    """Passes what one ``return`` gives through the helper; a model whose making is long gets a name first."""

    def __init__(self, function: cst.FunctionDef, node: cst.Return, helper: str) -> None:
        super().__init__()
        self.node, self.helper = node, helper
        assert node.value is not None
        code = cst.Module([]).code_for_node(node.value)
        shared = {item.name.value for item in find(function, cst.NameItem)}  # of global and nonlocal
        self.is_named = MODEL not in shared and ("\n" in code or len(code) > LONG)

    def leave_SimpleStatementLine(  # noqa: N802 - LibCST's name
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.SimpleStatementLine]:
        if original_node.body[0] is not self.node or not self.is_named:
            return updated_node
        assert self.node.value is not None
        made = cst.Assign([cst.AssignTarget(cst.Name(MODEL))], self.node.value)
        return cst.FlattenSentinel(
            [updated_node.with_changes(body=[made]), cst.SimpleStatementLine([self._kept(cst.Name(MODEL))])]
        )

    def leave_Return(self, original_node: cst.Return, updated_node: cst.Return) -> cst.Return:  # noqa: N802
        if original_node is not self.node or updated_node.value is None:
            return updated_node
        return self._kept(updated_node.value).with_changes(semicolon=updated_node.semicolon)

    def _kept(self, value: cst.BaseExpression) -> cst.Return:
        call = cst.Call(cst.Name(self.helper), [cst.Arg(value)])
        return cst.Return(call, whitespace_after_return=cst.SimpleWhitespace(" "))


# A class


def _initialiser_of(node: cst.ClassDef) -> cst.FunctionDef | None:
    methods = [item for item in _block(node.body).body if isinstance(item, cst.FunctionDef)]
    return next((method for method in methods if method.name.value == "__init__"), None)


def _class(node: cst.ClassDef, helper: str) -> cst.ClassDef:
    """The class with a call of the helper at the end of its ``__init__``."""
    method = _initialiser_of(node)
    if method is None:
        raise EditError(f"{node.name.value} has no __init__ of its own; make the model in a function")
    first = [*method.params.posonly_params, *method.params.params][:1]
    if not first:
        raise EditError("its __init__ does not name self")
    if any(isinstance(item, cst.Return) for item in _own_nodes(method.body)):
        raise EditError("its __init__ returns early; call the helper where the model is made")
    block = _block(method.body)
    longer = block.with_changes(body=[*block.body, _call_line(helper, first[0].name.value)])
    edited = node.with_deep_changes(method, body=longer)
    assert isinstance(edited, cst.ClassDef)
    return edited


def _block(body: cst.BaseSuite) -> cst.IndentedBlock:
    """A suite as a block of lines; ``class Net(Base): pass`` becomes one."""
    if isinstance(body, cst.IndentedBlock):
        return body
    assert isinstance(body, cst.SimpleStatementSuite)
    line = cst.SimpleStatementLine(body.body, trailing_whitespace=body.trailing_whitespace)
    return cst.IndentedBlock([line])


def _call_line(helper: str, argument: str) -> cst.SimpleStatementLine:
    return cst.SimpleStatementLine([cst.Expr(cst.Call(cst.Name(helper), [cst.Arg(cst.Name(argument))]))])
