"""The call of the helper where a file makes the model: in its factory or class, or behind the line that makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import libcst as cst

from ampdbg.config.schema import THE_SCRIPT
from ampdbg.probes.makings import Making
from ampdbg.source.expressions import (
    COMPREHENSIONS,
    SCOPES,
    assigned_codes,
    block_of,
    code_of,
    find,
    targets,
    walk,
)
from ampdbg.source.imports import Statement, dotted, imports_of, origin_of
from ampdbg.source.source_file import EditError, Located, SourceFile

FUNCTION = "_keep_in_fp32"
"""What the helper is called."""

MODEL = "model"
LONG = 72
"""An expression of more characters, or lines, is not put into a call as it stands."""

CONTAINERS = (cst.Tuple, cst.BaseList, cst.BaseSet, cst.BaseDict, *COMPREHENSIONS)

WRAPPING = frozenset({"compile", "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"})
"""What is given a model and returns another, which has it for a part: the helper takes the one that is given."""


def with_model_kept(module: cst.Module, name: str) -> tuple[int, cst.Module]:
    """The module with the model that ``name`` makes passed through the helper.

    A function's returned model is, a class calls it at the end of ``__init__``, a variable's model behind its
    assignment.

    Returns:
        The index of the statement that makes the model, and the module.

    Raises:
        EditError: there is no ``name``, or no plain place for the call.
    """
    found = [index for index, node in enumerate(module.body) if name in _bound(node)]
    if not found and name == THE_SCRIPT:
        raise EditError("no line of it is to blame alone, and no one place is known where the script makes its model")
    if not found:
        raise EditError(f"{name} is not defined at the top of this file; it may be imported, or made in a condition")
    index = found[-1]
    edited = _edited(module.body[index], name)
    return index, module.with_changes(body=[*module.body[:index], *edited, *module.body[index + 1 :]])


def _bound(node: Statement) -> set[str]:
    if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
        return {node.name.value}
    return assigned_codes(node) if isinstance(node, cst.SimpleStatementLine) else set()


def _edited(node: Statement, name: str) -> list[Statement]:
    """The statements in the place of the one that makes the model."""
    if isinstance(node, cst.FunctionDef):
        return [_function(node)]
    if isinstance(node, cst.ClassDef):
        return [_class(node)]
    if any(isinstance(item.value, cst.Lambda) for item in find(node, cst.Assign)):
        raise EditError(f"{name} is a lambda; write it as a function")
    return [node, _call_line(name)]


def _function(function: cst.FunctionDef) -> cst.FunctionDef:
    """The function with the one model that it returns passed through the helper."""
    name, inside = function.name.value, _own_nodes(function.body)
    if function.asynchronous is not None:
        raise EditError(f"{name} is a coroutine; call the helper where its model is awaited")
    if any(isinstance(node, cst.Yield) for node in inside):
        raise EditError(f"{name} is a generator; call the helper where its model is used")
    returns = {node.value: node for node in inside if isinstance(node, cst.Return) and node.value is not None}
    if not returns:
        raise EditError(f"{name} returns no model")
    value, node = next(iter(returns.items()))
    if len(returns) > 1 or isinstance(value, cst.IfExp):
        raise EditError(f"{name} returns one thing here and another there; make the model in a function of its own")
    if isinstance(value, CONTAINERS):
        raise EditError(f"{name} returns more than the model; call the helper on the model in it")
    edited = _with_return_kept(function, node, value)
    assert isinstance(edited, cst.FunctionDef)
    return edited


def _own_nodes(node: cst.CSTNode) -> list[cst.CSTNode]:
    """Every node but those of nested functions and classes."""
    inner = {id(below) for item in walk(node) if isinstance(item, SCOPES) for below in walk(item)}
    return [item for item in walk(node) if id(item) not in inner]


def _with_return_kept(function: cst.FunctionDef, node: cst.Return, value: cst.BaseExpression) -> cst.CSTNode:
    """Passes what one ``return`` gives through the helper; a model whose making is long gets a name first."""
    code = cst.Module([]).code_for_node(value)
    shared = {item.name.value for item in find(function, cst.NameItem)}  # of global and nonlocal
    line = next((line for line in find(function, cst.SimpleStatementLine) if line.body[0] is node), None)
    if line is None or MODEL in shared or not ("\n" in code or len(code) > LONG):
        return function.with_deep_changes(node, value=_kept(value), whitespace_after_return=cst.SimpleWhitespace(" "))
    made = line.with_changes(body=[cst.Assign([cst.AssignTarget(cst.Name(MODEL))], value)])
    returned = cst.SimpleStatementLine([cst.Return(_kept(cst.Name(MODEL)))])
    return function.deep_replace(line, cst.FlattenSentinel([made, returned]))  # type: ignore[arg-type]


def _kept(value: cst.BaseExpression) -> cst.Call:
    return cst.Call(cst.Name(FUNCTION), [cst.Arg(value)])


def _class(node: cst.ClassDef) -> cst.ClassDef:
    """The class with a call of the helper at the end of its ``__init__``."""
    methods = [item for item in block_of(node.body).body if isinstance(item, cst.FunctionDef)]
    method = next((method for method in methods if method.name.value == "__init__"), None)
    if method is None:
        raise EditError(f"{node.name.value} has no __init__ of its own; make the model in a function")
    first = [*method.params.posonly_params, *method.params.params][:1]
    if not first:
        raise EditError("its __init__ does not name self")
    if any(isinstance(item, cst.Return) for item in _own_nodes(method.body)):
        raise EditError("its __init__ returns early; call the helper where the model is made")
    block = block_of(method.body)
    longer = block.with_changes(body=[*block.body, _call_line(first[0].name.value)])
    edited = node.with_deep_changes(method, body=longer)
    assert isinstance(edited, cst.ClassDef)
    return edited


def _call_line(argument: str) -> cst.SimpleStatementLine:
    return cst.SimpleStatementLine([cst.Expr(_kept(cst.parse_expression(argument)))])


# Where it is not known by a name but by a line


def with_made_kept(text: SourceFile, making: Making) -> tuple[int, cst.Module]:
    """As :func:`with_model_kept`, for the model that a line makes: the call stands directly behind that.

    What a ``return`` gives, and what a wrapper is given, is passed through the helper.

    Raises:
        EditError: the line is no statement of its own, or gives the model no name.
    """
    number, located = making.line, text.at(making.line)
    line = located.line
    index = next(index for index, node in enumerate(text.module.body) if number in text.span(node))
    if len(line.body) > 1:
        raise EditError("several statements are on the line; put what makes the model on one of its own", number)
    names, value = _assigned(line.body[0])
    is_old = bool(making.known) and not isinstance(line.body[0], cst.Return) and not {*names} & {*making.known}
    if is_old:
        edited = _with_part_kept(text, line, making.known)
    elif value is None or not (names or isinstance(line.body[0], cst.Return)):
        raise EditError(
            "the model gets no name of its own there; give it one on a line of its own, as in model = Net()", number
        )
    elif not isinstance(value, cst.Call):
        raise EditError("it is not one call that makes the model there; write it as one, as in model = Net()", number)
    else:
        edited = _with_value_kept(text.module, located, value, names, making)
    assert isinstance(edited, cst.Module)
    return index, edited


def _assigned(small: cst.BaseSmallStatement) -> tuple[list[str], cst.BaseExpression | None]:
    """The names that stand for one value as a whole, and that value; also what is returned."""
    if not isinstance(small, (cst.Assign, cst.AnnAssign, cst.Return)):
        return [], None
    whole = (item for item in targets(small) if not isinstance(item, CONTAINERS) and not any(find(item, cst.Call)))
    return list(map(code_of, whole)), small.value


def _with_value_kept(
    module: cst.Module, located: Located, value: cst.Call, names: Sequence[str], making: Making
) -> cst.CSTNode:
    inner, small, function = _innermost(value, imports_of(module.body)), located.line.body[0], located.function
    if inner is not value:
        return module.deep_replace(inner, _kept(inner))
    if making.is_wrapped:
        raise EditError("the line wraps the model that it makes; make that on a line of its own first", making.line)
    if isinstance(small, cst.Return) and function is not None:
        return module.deep_replace(function, _with_return_kept(function, small, value))
    return _followed(module, located.line, names[0])


def _innermost(value: cst.Call, imports: Mapping[str, str]) -> cst.Call:
    """What the innermost wrapper is given: ``Net()`` of ``nn.DataParallel(Net()).cuda()``."""
    call = value
    while isinstance(call.func, cst.Attribute) and isinstance(call.func.value, cst.Call):
        call = call.func.value
    name, given = dotted(call.func), call.args[0].value if call.args else None
    wraps = (origin_of(name, imports) or name).rpartition(".")[2] in WRAPPING
    return _innermost(given, imports) if wraps and isinstance(given, cst.Call) else value


def _with_part_kept(text: SourceFile, line: cst.SimpleStatementLine, known: Sequence[str]) -> cst.CSTNode:
    """Where the line gives a part to a model that has these names before: behind all loops that do so."""
    read = {code_of(item) for item in walk(line) if isinstance(item, (cst.Name, cst.Attribute))}
    name = next((name for name in known if name in read), known[0])
    behind: Statement = line
    for loop in text.loops_around(line):
        if name in assigned_codes(loop):
            break
        behind = loop
    return _followed(text.module, behind, name)


def _followed(module: cst.Module, statement: Statement, name: str) -> cst.CSTNode:
    behind = cst.FlattenSentinel([statement, _call_line(name)])
    return module.deep_replace(statement, behind)  # type: ignore[arg-type]
