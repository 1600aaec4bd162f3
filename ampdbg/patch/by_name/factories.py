"""Where a file makes the model, a function, a class or a variable, and the call that is put there."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from ampdbg.patch.by_name.returns import is_call, models_of, returns_early, with_returns_kept
from ampdbg.source.expressions import find, plain_parameters
from ampdbg.source.imports import dotted
from ampdbg.source.source_file import EditError

Statements = Sequence[cst.BaseStatement]

BLANK = cst.EmptyLine(indent=False)


def with_model_kept(module: cst.Module, name: str, helper: str) -> cst.Module:
    """The module with every model that ``name`` makes passed through the function ``helper``.

    A function's returned models are, a class calls it at the end of ``__init__``, a variable's model behind its
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


def models_made(module: cst.Module, name: str) -> int:
    """In how many places ``name`` makes a model: more than one for a function that returns one here and one there.

    Raises:
        EditError: there is no ``name``, or it returns no model.
    """
    maker = definition(module, name)
    return len(models_of(maker)) if isinstance(maker, cst.FunctionDef) else 1


def definition(module: cst.Module, name: str) -> cst.CSTNode:
    """The statement that defines ``name``, which may be dotted; an alias is followed.

    Raises:
        EditError: there is none.
    """
    body: Statements = module.body
    *outer, last = name.split(".")
    for part in outer:
        holder = body[_index(body, part)]
        if not isinstance(holder, cst.ClassDef):
            raise EditError(f"{name} is neither a function nor a class in this file")
        body = _block(holder.body).body
    node = body[_index(body, last)]
    value = _value(node, last)
    return definition(module, value.value) if isinstance(value, cst.Name) and not outer else node


def takes_arguments(maker: cst.FunctionDef | cst.ClassDef) -> bool:
    """Whether what is made may depend on arguments; those of an inherited ``__init__`` are not known."""
    if isinstance(maker, cst.FunctionDef):
        return _has_parameters(maker.params, 0)
    methods = [item for item in _block(maker.body).body if isinstance(item, cst.FunctionDef)]
    own = next((method for method in methods if method.name.value == "__init__"), None)
    return own is None or _has_parameters(own.params, 1)


def _has_parameters(params: cst.Parameters, bound: int) -> bool:
    """Whether there are more parameters than those that are ``bound``, as ``self`` is."""
    takes_any = isinstance(params.star_arg, cst.Param) or params.star_kwarg is not None
    return takes_any or len(plain_parameters(params)) > bound


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
        return [*before, with_returns_kept(node, helper), *after]
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
    if returns_early(method):
        raise EditError("its __init__ returns early; call the helper where the model is made")
    block = _block(method.body)
    if any(is_call(node, helper) for node in find(block, cst.Call)):
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
        is_call(call, helper) and dotted(call.args[0].value) == name for call in find(node, cst.Call) if call.args
    )


def _call_line(helper: str, argument: str) -> cst.SimpleStatementLine:
    return cst.SimpleStatementLine([cst.Expr(cst.Call(cst.Name(helper), [cst.Arg(cst.Name(argument))]))])
