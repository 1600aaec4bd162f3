"""Code that pins modules by name: a helper in the user's factory or class, or a separate file."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from ampdbg.patch.edits import Edited, Refused
from ampdbg.probes.makings import Construction
from ampdbg.record.pins import OWN, RootModel, call_of_pins, root_of, within
from ampdbg.source.document import Document
from ampdbg.source.edits import Edit, Fix, applied, below
from ampdbg.source.names import COMPREHENSIONS, imports_of, names_assigned
from ampdbg.source.source_file import EditError, SourceFile, read_source

MODULE_NAME = "ampdbg_pins"
"""The name for the module that :func:`module_text` returns."""

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
SEVERAL = "\nThe script has several models. Call it with these, wrapped in DataParallel or not:\n\n{}\n"


def module_text(names: Sequence[str], roots: Sequence[RootModel] = ()) -> str:
    """Return the source of a module that defines ``pin_fp32(model)``, for code that cannot be edited.

    The user saves it as ``ampdbg_pins.py`` and calls ``from ampdbg_pins import pin_fp32; pin_fp32(model)``. If the
    script has several models, ``pin_fp32`` takes each of the ``roots``, to which the ``names`` of pins belong.
    """
    models = "\n".join(f"    {root.argument}: {root.what}" for root in roots)
    return MODULE.format(
        name=MODULE_NAME,
        call=call_of_pins(roots),
        when=AFTER_SEVERAL if roots else AFTER_ONE,
        about=SEVERAL.format(models) if roots else "",
        functions="\n\n\n".join(helper_functions("pin_fp32", names, roots).values()),
    )


FUNCTION = "_keep_in_fp32"
"""The name of the helper in the user's file."""


def edit_maker(source: bytes, making: Construction, pins: Sequence[str]) -> Edited:
    """Add a helper for the pins to the user's file, and one call at the line that creates the model."""
    try:
        file = read_source(source)
        document, functions = file.document, helper_functions(FUNCTION, pins)
        _check_names(document.tree, functions)
        statement = file.at(making.line).statement
        if making.is_wrapped:
            reason = "the line creates the model and wraps it; create the model on its own line first"
            raise EditError(reason, making.line)
        call = _call_of_helper(file, statement, making)
    except EditError as error:
        return Edited(source, (Refused(error.line, str(error)),))
    after = applied(document, [Fix((_helper_above(document, statement, functions), call), ("functools", "torch"))])
    return Edited(after.encode(file.encoding), ())


def _check_names(module: ast.Module, functions: Collection[str]) -> None:
    """Raise EditError unless the file leaves torch, functools and the helper's names their meaning."""
    there = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
    if FUNCTION in there:
        raise EditError(f"it already has a function {FUNCTION}; add the modules to it by hand, or rename it")
    imports = imports_of(module.body)
    assigned = names_assigned(module) - imports.keys()
    meant = {"torch": "torch", "functools": "functools"}
    for name in (*meant, *functions):
        if name in assigned or imports.get(name, name) != meant.get(name, name):
            raise EditError(f"the name {name} means something else in this file; rename that first")


def _helper_above(document: Document, statement: ast.stmt, functions: Mapping[str, str]) -> Edit:
    """Insert the functions, two blank lines apart, above the comments of the top-level statement around a line."""
    start = document.span(statement).start
    before = [one for one in document.tree.body if document.span(one).end < start]
    at = document.lines(before[-1]).end if before else document.lines(document.tree.body[0]).start
    after = document.text[at:]
    blank_lines = after[: len(after) - len(after.lstrip())].count("\n")
    text = "\n\n\n".join(functions.values())
    text = re.sub(rf"(?m)^({INDENT})+", lambda found: document.default_indent * (len(found[0]) // len(INDENT)), text)
    text = "\n\n" * bool(before) + f"{text}\n" + "\n" * max(0, 2 - blank_lines)
    return Edit(at, at, text.replace("\n", document.newline))


# The call of the helper: in the factory or class that creates the model, or after the line that creates it


NOT_ONE = (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.IfExp, ast.Lambda, *COMPREHENSIONS)
"""Expressions that do not yield exactly one model."""


def _call_of_helper(file: SourceFile, statement: ast.stmt, making: Construction) -> Edit:
    """Edit ``return Net()`` to ``return _keep_in_fp32(Net())``; after other lines, add a call with the model's name.

    If the line adds a part to a named model, the call is for that model, after the enclosing loop.
    """
    document, known = file.document, making.known
    names = _names_given(statement, making.path)
    if isinstance(statement, ast.Return) and statement.value and not isinstance(statement.value, NOT_ONE):
        start = document.span(statement).start + len("return")
        value = document.text[start : document.span(statement).end].strip()
        return Edit(start, document.span(statement).end, f" {FUNCTION}({value})")
    made = statement
    if known and not {*names} & {*known}:
        made = file.loop_around(statement)
        read = {ast.unparse(one) for one in ast.walk(statement) if isinstance(one, (ast.Name, ast.Attribute))}
        names = [name for name in known if name in read] or list(known)
    elif not names:
        reason = "no single call there creates the model and names it; write one, such as model = Net()"
        raise EditError(reason, statement.lineno)
    return below(document, made, f"{FUNCTION}({names[0]})")


def _names_given(statement: ast.stmt, path: str) -> list[str]:
    """Return the names of the model in a statement: all targets of ``a = b = Net()``. In ``a, n = Net(), 2``, it is the
    only target of a call, or the target with the path."""
    match statement:
        case ast.Assign(targets=whole, value=ast.Tuple(elts=made)):
            several = [target.elts for target in whole if isinstance(target, ast.Tuple)]
            pairs = [pair for targets in several for pair in zip(targets, made, strict=False)]
            called = [to for to, value in pairs if isinstance(value, ast.Call)]
            whole = called if len(called) == 1 else [to for to in called if ast.unparse(to) == path]
        case ast.Assign(targets=whole, value=value) if not isinstance(value, NOT_ONE):
            pass
        case ast.AnnAssign(target=target, value=ast.expr() as value) if not isinstance(value, NOT_ONE):
            whole = [target]
        case _:
            return []
    plain = [target for target in whole if not isinstance(target, NOT_ONE)]
    return [ast.unparse(target) for target in plain if not any(isinstance(one, ast.Call) for one in ast.walk(target))]


# The text of the helper, which needs torch alone

LINE_LENGTH = 88
INDENT = "    "

CASTS = '''
def _cast_up(value):
    """A half tensor in FP32; anything else as it is."""
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value


def _autocast_of(module, *inputs):
    """The device type whose autocast a module runs under, as its tensors say, or None."""
    for one in (*torch.utils._pytree.tree_leaves(inputs), *module.parameters(), *module.buffers()):
        if isinstance(one, torch.Tensor) and not one.is_meta:
            return one.device.type if torch.is_autocast_enabled(one.device.type) else None
    return None
'''

FORWARD = '''
def _forward_in_fp32(module, *args, **kwargs):
    """Runs a module in FP32 where it would run under autocast."""
    if (device_type := _autocast_of(module, args, kwargs)) is None:
        return type(module).forward(module, *args, **kwargs)
    args, kwargs = torch.utils._pytree.tree_map(_cast_up, (args, kwargs))
    with torch.autocast(device_type=device_type, enabled=False):
        return type(module).forward(module, *args, **kwargs)
'''

OWN_LINES = '''
def _own_lines_in_fp32(module, *args, **kwargs):
    """Runs a module's own lines in FP32 where they would run under autocast."""
    if (device_type := _autocast_of(module, args, kwargs)) is None:
        return type(module).forward(module, *args, **kwargs)
    dtype = torch.get_autocast_dtype(device_type)
    autocast = device_type, dtype, True, torch.is_autocast_cache_enabled()
    _autocast_inner_modules(module, autocast)
    args, kwargs = torch.utils._pytree.tree_map(_cast_up, (args, kwargs))
    # This dtype without a cache shows the inner modules that autocast was left here.
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
        return torch.utils._pytree.tree_map(_cast_up, forward(*args, **kwargs))
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


def helper_functions(function: str, pins: Sequence[str], roots: Sequence[RootModel] = ()) -> dict[str, str]:
    """Return the source of each function by name, without blank lines around it, with ``function`` to call last."""
    pins = tuple(dict.fromkeys(pins))
    has_own = {name.endswith(OWN) for name in pins}
    parts = [CASTS, FORWARD * (False in has_own), OWN_LINES * (True in has_own), UNWRAPPED * bool(roots)]
    texts = [text for part in filter(None, parts) for text in part.strip().split("\n\n\n")]
    functions = {text.partition("(")[0].removeprefix("def "): text for text in texts}
    given = ", ".join(root.argument for root in roots) or "model"
    returned = "models" if len(roots) > 1 else "model"
    of_models: dict[str, Sequence[str]] = {} if roots else {"model": pins}
    for root in roots:
        own = [within(root.name, pin) for pin in pins if root_of(pin) == root.name]
        of_models[f"_unwrapped({root.argument})"] = own
    lines = [
        f"def {function}({given}):",
        f'{INDENT}"""Keeps modules that overflow in FP16 in FP32 under autocast; returns the {returned}."""',
        *(INDENT + line for model, names in of_models.items() for line in _pinning(names, model)),
        f"{INDENT}return {given}",
    ]
    return {**functions, function: "\n".join(lines)}


def _pinning(pins: Sequence[str], model: str) -> Iterator[str]:
    own = [pin.removesuffix(OWN) for pin in pins if pin.endswith(OWN)]
    # Pinning wraps the current forward of each inner module, so inner modules are pinned first.
    own.sort(key=lambda name: name.count("."), reverse=True)
    yield from _loop([pin for pin in pins if not pin.endswith(OWN)], PIN, model)
    yield from _loop(own, PIN_OWN, model)


def _loop(names: Sequence[str], body: Sequence[str], model: str) -> Iterator[str]:
    """Yield the lines that apply ``body`` to each module; ``model`` is the expression of the model."""
    # Quoted as JSON, because the keys of an nn.ModuleDict may hold anything but dots.
    quoted = [json.dumps(name, ensure_ascii=False) for name in names]
    if len(quoted) == 1:
        yield f"module = {model}.get_submodule({quoted[0]})"
        yield from body
    elif quoted:
        line = f"for name in [{', '.join(quoted)}]:"
        is_short = len(INDENT + line) <= LINE_LENGTH
        yield from [line] if is_short else ["for name in [", *(f"{INDENT}{name}," for name in quoted), "]:"]
        yield from (INDENT + line for line in (f"module = {model}.get_submodule(name)", *body))
