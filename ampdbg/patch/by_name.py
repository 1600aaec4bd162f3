"""Pins of modules by name as plain code: a helper in the user's own factory or class, or a file of its own."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import libcst as cst
import torch
from torch import nn

from ampdbg.config.schema import THE_SCRIPT
from ampdbg.patch.edits import Edited, Refused
from ampdbg.probes.makings import Making
from ampdbg.record.pins import OWN, RootModel, call_of_pins, root_of, within
from ampdbg.source.expressions import (
    COMPREHENSIONS,
    SCOPES,
    Statement,
    apart,
    assigned_codes,
    block_of,
    code_of,
    dotted,
    find,
    imports_of,
    names_assigned,
    origin_of,
    targets,
    walk,
    with_imported,
)
from ampdbg.source.source_file import EditError, Located, SourceFile, read_source

MODULE_NAME = "ampdbg_pins"
"""What a file of :func:`module_text` is called; with ``.py`` behind it."""

MODULE = '''"""Keeps modules in FP32 under autocast. Found by `ampdbg suggest-fp32`; needs torch alone.

    from {name} import pin_fp32

    {call}  # once, {when}
{about}"""

import functools

import torch


{functions}
'''

AFTER_ONE = "after the model is built and before it is compiled or wrapped"
AFTER_SEVERAL = "when all of its modules are made, and before it is compiled"
SEVERAL = """
The script has several models. It takes, also where DataParallel or its like wraps it:

{}
"""

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED_LINEAR = "transformers.pytorch_utils.Conv1D"
"""GPT-2's Linear, by its name: transformers is not to be imported."""


def takes_one_tensor(module: nn.Module) -> bool:
    """Whether the module is a layer of products with a ``weight``, whose ``forward`` takes one tensor alone.

    A pin of such a layer takes little code.
    """
    kind = type(module)
    is_layer = isinstance(module, LAYERS) or f"{kind.__module__}.{kind.__qualname__}" == TRANSPOSED_LINEAR
    if not is_layer or not isinstance(getattr(module, "weight", None), torch.Tensor):
        return False
    parameters = list(inspect.signature(kind.forward).parameters.values())
    return [item.kind for item in parameters[1:]] == [inspect.Parameter.POSITIONAL_OR_KEYWORD]


def layers_of_one_tensor(names: Iterable[str], model: nn.Module) -> tuple[str, ...]:
    """Those of the pins that are plain layers, called with one tensor."""
    modules = dict(model.named_modules())
    return tuple(name for name in names if name in modules and takes_one_tensor(modules[name]))


def module_text(names: Sequence[str], *, one_tensor: Collection[str] = (), roots: Sequence[RootModel] = ()) -> str:
    """A file of its own with ``pin_fp32(model)``, for code that cannot be edited.

    The user saves it as ``ampdbg_pins.py`` and calls ``from ampdbg_pins import pin_fp32; pin_fp32(model)``.

    Args:
        names: pins, as the config takes them: qualified names, with ``:own`` behind where only own lines are meant.
        one_tensor: those of ``names`` that are layers with a ``weight`` and called with one floating-point tensor.
        roots: the models that the names are of, where the script has several: ``pin_fp32`` takes each of them.
    """
    told = "\n".join(f"    {root.argument}: {root.what}" for root in roots)
    return MODULE.format(
        name=MODULE_NAME,
        call=call_of_pins(roots),
        when=AFTER_SEVERAL if roots else AFTER_ONE,
        about=SEVERAL.format(told) if roots else "",
        functions="\n\n\n".join(helper_functions("pin_fp32", names, one_tensor, roots).values()),
    )


def edit_factory(
    source: bytes, maker: str | Making, pins: Sequence[str], *, one_tensor: Collection[str] = ()
) -> Edited:
    """Adds a helper that pins modules to the user's file, and one call of it where the model is made.

    Args:
        source: the file's bytes.
        maker: what makes the model there: the name of a function, of an ``nn.Module`` class, or of a variable that
            holds the model; or the line, counted in ``source``.
        pins: as the ``names`` of :func:`module_text`, which explains ``one_tensor`` too.
    """
    try:
        text = read_source(source)
        _check_names(text.module)
        functions = helper_functions(FUNCTION, pins, one_tensor)
        if isinstance(maker, Making):
            place, module = with_made_kept(text, maker)
        else:
            place, module = with_model_kept(text.module, maker)
        module = _with_functions(module, functions, place)
        for package in ("torch", "functools"):
            module = with_imported(module, package)
        after = text.with_module(module)
    except EditError as error:
        return Edited(source, (Refused(error.line, str(error)),), changed=False)
    return Edited(after, (), changed=True)


def _check_names(module: cst.Module) -> None:
    """The helper calls torch and functools by these names.

    Raises:
        EditError: one of them stands for something else in the file.
    """
    imports = imports_of(module.body)
    for name in ("torch", "functools"):
        is_assigned = name not in imports and any(name in names_assigned(node) for node in module.body)
        if imports.get(name, name) != name or is_assigned:
            raise EditError(f"the name {name} stands for something else in this file")


def _with_functions(module: cst.Module, functions: Mapping[str, str], place: int) -> cst.Module:
    """The module with the functions, their text by name, in front of the statement ``place``.

    Raises:
        EditError: the file has a function of one of these names.
    """
    there = {node.name.value for node in module.body if isinstance(node, cst.FunctionDef)}
    if FUNCTION in there:
        raise EditError(f"it has a function {FUNCTION} already; add the modules to it by hand, or rename it")
    if taken := [name for name in functions if name in there]:
        raise EditError(f"it has a function {taken[0]} of its own; rename that first")
    added = [apart(_parsed(text, module.default_indent), 2) for text in functions.values()]
    body = module.body
    # What the helper stands in front of keeps its own comment lines.
    return module.with_changes(body=[*body[:place], *added, apart(body[place], 2), *body[place + 1 :]])


def _parsed(text: str, indent: str) -> Statement:
    leading = re.compile(rf"^(?:{INDENT})+", re.MULTILINE)
    indented = leading.sub(lambda start: indent * (len(start[0]) // len(INDENT)), text)
    (node,) = cst.parse_module(indented + "\n").body
    return node


# The call of the helper where the file makes the model: in its factory or class, or behind the line that makes it


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


# The text of the helper, for code that has nothing but torch

LINE_LENGTH = 88
INDENT = "    "

FORWARD_OF_ONE_TENSOR = '''
def _forward_in_fp32(module, input):
    """Runs a layer outside autocast, its input cast up to the weights' dtype."""
    device_type = "cpu" if input.is_meta else input.device.type
    with torch.autocast(device_type=device_type, enabled=False):
        return type(module).forward(module, input.to(module.weight.dtype))
'''

FORWARD = '''
def _forward_in_fp32(module, *args, **kwargs):
    """Runs a module in FP32 where it would run under autocast."""
    device_type = _device_type(args, kwargs, module.parameters(), module.buffers())
    if device_type is None or not torch.is_autocast_enabled(device_type):
        return type(module).forward(module, *args, **kwargs)
    args, kwargs = _cast_up(args), _cast_up(kwargs)
    with torch.autocast(device_type=device_type, enabled=False):
        return type(module).forward(module, *args, **kwargs)
'''

OWN_LINES = '''
def _own_lines_in_fp32(module, *args, **kwargs):
    """Runs a module's own lines in FP32 where they would run under autocast."""
    device_type = _device_type(args, kwargs, module.parameters(), module.buffers())
    if device_type is None or not torch.is_autocast_enabled(device_type):
        return type(module).forward(module, *args, **kwargs)
    dtype = torch.get_autocast_dtype(device_type)
    autocast = device_type, dtype, True, torch.is_autocast_cache_enabled()
    _autocast_inner_modules(module, autocast)
    args, kwargs = _cast_up(args), _cast_up(kwargs)
    # This dtype without a cache tells the inner modules that autocast was left here.
    with torch.autocast(device_type, torch.float32, enabled=False, cache_enabled=False):
        return type(module).forward(module, *args, **kwargs)


def _autocast_inner_modules(module, autocast):
    """Has what a module calls, also what came later, run under autocast where its lines left it."""
    for inner in list(module.modules())[1:]:
        known = getattr(inner, "_autocast_before", ())
        if known != autocast:
            inner._autocast_before = autocast
        if known == () or autocast is None:
            forward = functools.partial(type(inner).forward, inner)
            forward = inner.__dict__.get("forward", forward)
            inner.forward = functools.partial(_forward_as_before, inner, forward)


def _forward_as_before(module, forward, *args, **kwargs):
    """Runs a module under autocast again where the lines that call it left it."""
    autocast = module._autocast_before
    if (
        autocast is None
        or torch.get_autocast_dtype(autocast[0]) is not torch.float32
        or torch.is_autocast_cache_enabled()
    ):
        return forward(*args, **kwargs)
    with torch.autocast(*autocast):
        return _cast_up(forward(*args, **kwargs))
'''

CASTS = '''
def _cast_up(value):
    """Casts half tensors to FP32, also those in tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, (tuple, list)):
        items = [_cast_up(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is dict:
        return {key: _cast_up(item) for key, item in value.items()}
    return value


def _device_type(*groups):
    """The device type of the first tensor in tuples, lists and dicts, or None."""
    for group in groups:
        for value in group.values() if isinstance(group, dict) else group:
            if isinstance(value, torch.Tensor) and not value.is_meta:
                return value.device.type
            found = _device_type(value) if isinstance(value, (tuple, list, dict)) else None
            if found is not None:
                return found
    return None
'''

UNWRAPPED = '''
def _unwrapped(model):
    """The model inside of DataParallel, DistributedDataParallel, torch.compile and their like."""
    parts = model._modules
    name = next(iter(parts), "")
    is_wrapper = name in ("module", "_orig_mod", "_forward_module") and parts[name] is not None
    if is_wrapper and all(part is parts[name] for part in parts.values()):
        return _unwrapped(parts[name])
    return model
'''

PIN = ("module.forward = functools.partial(_forward_in_fp32, module)",)
PIN_OWN = ("module.forward = functools.partial(_own_lines_in_fp32, module)", "_autocast_inner_modules(module, None)")


def helper_functions(
    function: str, pins: Sequence[str], one_tensor: Collection[str] = (), roots: Sequence[RootModel] = ()
) -> dict[str, str]:
    """The text of each function by its name, the one to call with a model last; no blank lines around them.

    Args:
        function: the name of the one to call.
        pins: qualified names of modules, with ``:own`` behind where only own lines are meant.
        one_tensor: those of ``pins`` that are layers with a ``weight`` and called with one floating-point tensor:
            where all are, a quarter of the code does.
        roots: the models that it takes, where the pins are of several.
    """
    pins = tuple(dict.fromkeys(pins))
    whole, has_own = [name for name in pins if not name.endswith(OWN)], any(name.endswith(OWN) for name in pins)
    is_short = set(whole) <= set(one_tensor)
    parts = [CASTS] * (has_own or not is_short)
    parts += [FORWARD_OF_ONE_TENSOR if is_short else FORWARD] * bool(whole)
    parts += [OWN_LINES] * has_own + [UNWRAPPED] * bool(roots)
    texts = [text for part in parts for text in part.strip().split("\n\n\n")]
    functions = {text.partition("(")[0].removeprefix("def "): text for text in texts}
    given = ", ".join(root.argument for root in roots) or "model"
    returned = "models" if len(roots) > 1 else "model"
    lines = [
        f"def {function}({given}):",
        f'{INDENT}"""Keeps modules that overflow in FP16 in FP32 under autocast; returns the {returned}."""',
        *(INDENT + line for line in _pinning(pins, roots)),
        f"{INDENT}return {given}",
    ]
    return {**functions, function: "\n".join(lines)}


def _pinning(pins: Sequence[str], roots: Sequence[RootModel]) -> Iterator[str]:
    if not roots:
        yield from _pinning_of_one(pins, "model")
    for root in roots:
        own = [within(root.name, pin) for pin in pins if root_of(pin) == root.name]
        yield from _pinning_of_one(own, f"_unwrapped({root.argument})")


def _pinning_of_one(pins: Sequence[str], model: str) -> Iterator[str]:
    own = [pin.removesuffix(OWN) for pin in pins if pin.endswith(OWN)]
    # A module wraps those that it calls, whatever their forward is by then: the inner ones come first.
    own.sort(key=lambda name: name.count("."), reverse=True)
    yield from _loop([pin for pin in pins if not pin.endswith(OWN)], PIN, model)
    yield from _loop(own, PIN_OWN, model)


def _loop(names: Sequence[str], body: Sequence[str], model: str) -> Iterator[str]:
    """The lines that pin each of the modules by ``body``; ``model`` is the expression that has them."""
    # As JSON: the keys of an nn.ModuleDict may hold anything but dots.
    quoted = [json.dumps(name, ensure_ascii=False) for name in names]
    if len(quoted) == 1:
        yield f"module = {model}.get_submodule({quoted[0]})"
        yield from body
    elif quoted:
        line = f"for name in [{', '.join(quoted)}]:"
        is_short = len(INDENT + line) <= LINE_LENGTH
        yield from [line] if is_short else ["for name in [", *(f"{INDENT}{name}," for name in quoted), "]:"]
        yield from (INDENT + line for line in (f"module = {model}.get_submodule(name)", *body))
