"""Where a file makes the model, a function, a class or a variable, and the call that is put there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from ampdbg.remedy.source.bindings import dotted
from ampdbg.remedy.source.expressions import SCOPES, find, walk
from ampdbg.remedy.source.source_text import EditError

Statements = Sequence[cst.BaseStatement]

BLANK = cst.EmptyLine(indent=False)

MODEL = "model"
LONG = 72
"""An expression of more characters, or lines, is not put into a call as it stands."""


def with_model_kept(module: cst.Module, name: str, helper: str) -> cst.Module:
    """The module with every model that ``name`` makes passed through the function ``helper``.

    A function's returned values are, a class calls it at the end of ``__init__``, a variable's model behind its
    assignment. A second run changes nothing.

    Raises:
        EditError: there is no ``name``, or no place for the call.
    """
    body = _in_body(module.body, name.split("."), helper, is_class=False)
    return module.with_changes(body=body)


def top_level(module: cst.Module, name: str) -> int:
    """The index of the statement that defines ``name`` or the class that holds it; an alias is followed.

    Raises:
        EditError: there is none.
    """
    first = name.partition(".")[0]
    index = _index(module.body, first)
    value = _value(module.body[index], first)
    return top_level(module, value.value) if isinstance(value, cst.Name) else index


def _in_body(body: Statements, path: Sequence[str], helper: str, *, is_class: bool) -> list[cst.BaseStatement]:
    index = _index(body, path[0])
    node = body[index]
    before, after = list(body[:index]), list(body[index + 1 :])
    if isinstance(node, cst.ClassDef) and len(path) > 1:
        inner = _in_body(_block(node.body).body, path[1:], helper, is_class=True)
        return [*before, node.with_changes(body=_block(node.body).with_changes(body=inner)), *after]
    if len(path) > 1 or (is_class and isinstance(node, cst.SimpleStatementLine)):
        raise EditError(f"{'.'.join(path)} is neither a function nor a class in this file")
    if isinstance(node, cst.FunctionDef):
        return [*before, _function(node, helper), *after]
    if isinstance(node, cst.ClassDef):
        return [*before, _class(node, helper), *after]
    return _variable([*before, node, *after], index, path[0], helper)


def _index(body: Sequence[cst.CSTNode], name: str) -> int:
    """Where a name is bound, the last time."""
    found = [i for i, node in enumerate(body) if name in _bound(node)]
    if not found:
        raise EditError(f"{name} is not defined at the top of this file; it may be imported, or made in a condition")
    return found[-1]


def _bound(node: cst.CSTNode) -> set[str]:
    if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
        return {node.name.value}
    names: set[str] = set()
    for small in node.body if isinstance(node, cst.SimpleStatementLine) else ():
        if isinstance(small, cst.Assign):
            names |= {dotted(target.target) for target in small.targets}
        elif isinstance(small, cst.AnnAssign) and small.value is not None:
            names.add(dotted(small.target))
    return names


# A function


def _function(function: cst.FunctionDef, helper: str) -> cst.FunctionDef:
    name = function.name.value
    inside = list(_own_nodes(function.body))
    if function.asynchronous is not None:
        raise EditError(f"{name} is a coroutine; call the helper where its model is awaited")
    if any(isinstance(node, cst.Yield) for node in inside):
        raise EditError(f"{name} is a generator; call the helper where its model is used")
    values = [node.value for node in inside if isinstance(node, cst.Return) and _is_model(node.value)]
    if not values:
        raise EditError(f"{name} returns no model")
    if any(isinstance(value, cst.Tuple) for value in values):
        raise EditError(f"{name} returns more than the model; call the helper on the model in it")
    edited = function.visit(_Returns(function, helper))
    assert isinstance(edited, cst.FunctionDef)
    return edited


def _own_nodes(node: cst.CSTNode) -> list[cst.CSTNode]:
    """Every node but those of nested functions and classes."""
    inner = {id(below) for item in walk(node) if isinstance(item, SCOPES) for below in walk(item)}
    return [item for item in walk(node) if id(item) not in inner]


def _is_model(value: cst.BaseExpression | None) -> bool:
    return value is not None and dotted(value) != "None"


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
        if before.value is None or not self._is_long(before.value):
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
        if value is None or not _is_model(value) or _is_call(value, self.helper):
            return updated_node
        kept = cst.Call(cst.Name(self.helper), [cst.Arg(_unwrapped(value))])
        return updated_node.with_changes(value=kept, whitespace_after_return=cst.SimpleWhitespace(" "))


def _is_call(node: cst.CSTNode, helper: str) -> bool:
    return isinstance(node, cst.Call) and dotted(node.func) == helper


def _unwrapped(value: cst.BaseExpression) -> cst.BaseExpression:
    """Without its outermost parentheses, for which the call's own stand; comments keep them."""
    outer: Sequence[cst.LeftParen] = getattr(value, "lpar", ())
    closing: Sequence[cst.RightParen] = getattr(value, "rpar", ())
    spaces = [*(paren.whitespace_after for paren in outer[:1]), *(paren.whitespace_before for paren in closing[-1:])]
    if not outer or not all(isinstance(space, cst.SimpleWhitespace) for space in spaces):
        return value
    return value.with_changes(lpar=outer[1:], rpar=closing[:-1])


# A class


def _class(node: cst.ClassDef, helper: str) -> cst.ClassDef:
    block = _block(node.body)
    methods = [i for i, item in enumerate(block.body) if isinstance(item, cst.FunctionDef)]
    for i in methods:
        method = block.body[i]
        if isinstance(method, cst.FunctionDef) and method.name.value == "__init__":
            body = [*block.body[:i], _initialiser(method, helper), *block.body[i + 1 :]]
            return node.with_changes(body=block.with_changes(body=body))
    if any("dataclass" in dotted(call) for item in node.decorators for call in [_decorator(item)]):
        raise EditError(f"{node.name.value} is a dataclass, whose __init__ is not written out")
    place = methods[0] if methods else len(block.body)
    before, after = list(block.body[:place]), list(block.body[place:])
    if not methods and all(_is_placeholder(item) for item in before):
        before = []
    spaced = [_spaced(item) if i == 0 else item for i, item in enumerate(after)]
    body = [*before, _new_initialiser(helper, is_first=not before), *spaced]
    return node.with_changes(body=block.with_changes(body=body))


def _decorator(node: cst.Decorator) -> cst.BaseExpression:
    return node.decorator.func if isinstance(node.decorator, cst.Call) else node.decorator


def _initialiser(method: cst.FunctionDef, helper: str) -> cst.FunctionDef:
    first = [*method.params.posonly_params, *method.params.params][:1]
    if not first:
        raise EditError("its __init__ does not name self")
    if any(isinstance(node, cst.Return) for node in _own_nodes(method.body)):
        raise EditError("its __init__ returns early; call the helper where the model is made")
    block = _block(method.body)
    if any(_is_call(node, helper) for node in find(block, cst.Call)):
        return method
    call = _call_line(helper, first[0].name.value)
    return method.with_changes(body=block.with_changes(body=[*block.body, call]))


def _new_initialiser(helper: str, *, is_first: bool) -> cst.FunctionDef:
    text = f"def __init__(self, *args, **kwargs):\n    super().__init__(*args, **kwargs)\n    {helper}(self)\n"
    method = cst.parse_module(text).body[0]
    assert isinstance(method, cst.FunctionDef)
    return method if is_first else method.with_changes(leading_lines=[BLANK])


def _is_placeholder(node: cst.CSTNode) -> bool:
    """``pass`` and ``...``."""
    small = node.body[0] if isinstance(node, cst.SimpleStatementLine) else None
    return isinstance(small, cst.Pass) or (isinstance(small, cst.Expr) and isinstance(small.value, cst.Ellipsis))


def _spaced(node: cst.BaseStatement) -> cst.BaseStatement:
    lines: Sequence[cst.EmptyLine] = getattr(node, "leading_lines", ())
    if any(line.comment is None for line in lines[:1]):
        return node
    return node.with_changes(leading_lines=[BLANK, *lines])


def _block(body: cst.BaseSuite) -> cst.IndentedBlock:
    """A suite as a block of lines; ``class Net(Base): pass`` becomes one."""
    if isinstance(body, cst.IndentedBlock):
        return body
    assert isinstance(body, cst.SimpleStatementSuite)
    line = cst.SimpleStatementLine(body.body, trailing_whitespace=body.trailing_whitespace)
    return cst.IndentedBlock([line])


# A variable


def _variable(body: list[cst.BaseStatement], index: int, name: str, helper: str) -> list[cst.BaseStatement]:
    value = _value(body[index], name)
    if isinstance(value, cst.Lambda):
        raise EditError(f"{name} is a lambda; write it as a function")
    if isinstance(value, cst.Name):
        return _in_body(body, [value.value], helper, is_class=False)  # an alias
    if any(_calls_on(node, name, helper) for node in body[index + 1 :]):
        return body
    return [*body[: index + 1], _call_line(helper, name), *body[index + 1 :]]


def _value(node: cst.CSTNode, name: str) -> cst.BaseExpression | None:
    for small in node.body if isinstance(node, cst.SimpleStatementLine) else ():
        if isinstance(small, (cst.Assign, cst.AnnAssign)) and name in _bound(cst.SimpleStatementLine([small])):
            return small.value
    return None


def _calls_on(node: cst.CSTNode, name: str, helper: str) -> bool:
    return any(
        _is_call(call, helper) and dotted(call.args[0].value) == name for call in find(node, cst.Call) if call.args
    )


def _call_line(helper: str, argument: str) -> cst.SimpleStatementLine:
    return cst.SimpleStatementLine([cst.Expr(cst.Call(cst.Name(helper), [cst.Arg(cst.Name(argument))]))])
