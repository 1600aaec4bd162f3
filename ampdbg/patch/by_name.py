"""Code that pins modules by name: a helper in the user's factory or class, or a separate file."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence

import libcst as cst

from ampdbg.patch.edits import Edited, Refused
from ampdbg.probes.makings import Construction
from ampdbg.record.pins import OWN, RootModel, call_of_pins, root_of, within
from ampdbg.source.expressions import (
    COMPREHENSIONS,
    Statement,
    apart,
    code_of,
    find,
    imports_of,
    names_assigned,
    targets,
    walk,
    with_imported,
)
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
        text = read_source(source)
        functions = helper_functions(FUNCTION, pins)
        _check_names(text.module, functions)
        line = text.at(making.line).line
        if making.is_wrapped:
            reason = "the line creates the model and wraps it; create the model on its own line first"
            raise EditError(reason, making.line)
        index = next(index for index, node in enumerate(text.module.body) if making.line in text.span(node))
        module = _with_line_kept(text, line, making)
        added = [apart(_parsed(body, module.default_indent), 2) for body in functions.values()]
        # The statement after the helper keeps its own leading comments.
        body = [*module.body[:index], *added, apart(module.body[index], 2), *module.body[index + 1 :]]
        for package in ("torch", "functools"):
            module = with_imported(module.with_changes(body=body), package)
            body = list(module.body)
        after = text.with_module(module)
    except EditError as error:
        return Edited(source, (Refused(error.line, str(error)),))
    return Edited(after, ())


def _check_names(module: cst.Module, functions: Collection[str]) -> None:
    """Raise EditError unless the file leaves torch, functools and the helper's names their meaning."""
    there = {node.name.value for node in module.body if isinstance(node, cst.FunctionDef)}
    if FUNCTION in there:
        raise EditError(f"it already has a function {FUNCTION}; add the modules to it by hand, or rename it")
    imports = imports_of(module.body)
    assigned = set().union(*map(names_assigned, module.body)) - imports.keys()
    meant = {"torch": "torch", "functools": "functools"}
    for name in (*meant, *functions):
        if name in assigned or imports.get(name, name) != meant.get(name, name):
            raise EditError(f"the name {name} means something else in this file; rename that first")


def _parsed(text: str, indent: str) -> Statement:
    leading = re.compile(rf"^(?:{INDENT})+", re.MULTILINE)
    indented = leading.sub(lambda start: indent * (len(start[0]) // len(INDENT)), text)
    (node,) = cst.parse_module(indented + "\n").body
    return node


# The call of the helper: in the factory or class that creates the model, or after the line that creates it


NOT_ONE = (type(None), cst.Tuple, cst.BaseList, cst.BaseSet, cst.BaseDict, cst.IfExp, cst.Lambda, *COMPREHENSIONS)
"""Expressions that do not yield exactly one model."""


def _with_line_kept(text: SourceFile, line: cst.SimpleStatementLine, making: Construction) -> cst.Module:
    """Edit ``return Net()`` to ``return _keep_in_fp32(Net())``; after other lines, add a call with the model's name.

    If the line adds a part to a named model, the call is for that model, after the enclosing loop.
    """
    number = text.span(line)[0]
    if len(line.body) > 1:
        raise EditError("the line holds several statements; create the model on its own line", number)
    small = line.body[0]
    value = small.value if isinstance(small, (cst.Assign, cst.AnnAssign, cst.Return)) else None
    names, known = _names_given(small, value, making.path), making.known
    read = {code_of(item) for item in walk(line) if isinstance(item, (cst.Name, cst.Attribute))}
    if isinstance(small, cst.Return) and not isinstance(value, NOT_ONE):
        kept = small.with_changes(value=_kept(value), whitespace_after_return=cst.SimpleWhitespace(" "))
        return cst.ensure_type(text.module.deep_replace(small, kept), cst.Module)
    made: cst.BaseStatement = line
    if known and not {*names} & {*known}:
        made = text.loop_around(line)
        names = [name for name in known if name in read] or list(known)
    elif not names:
        raise EditError("no single call there creates the model and names it; write one, such as model = Net()", number)
    call = cst.SimpleStatementLine([cst.Expr(_kept(cst.parse_expression(names[0])))])
    behind = cst.FlattenSentinel([made, call])
    return cst.ensure_type(text.module.deep_replace(made, behind), cst.Module)  # type: ignore[type-var]


def _names_given(small: cst.BaseSmallStatement, value: cst.BaseExpression | None, path: str) -> list[str]:
    """Return the names of the model in a statement: all targets of ``a = b = Net()``. In ``a, n = Net(), 2``, it is the
    only target of a call, or the target with the path."""
    whole = [*targets(small)]
    if isinstance(value, cst.Tuple):
        several = [target.elements for target in whole if isinstance(target, cst.Tuple)]
        pairs = (pair for elements in several for pair in zip(elements, value.elements, strict=False))
        called = [to.value for to, made in pairs if isinstance(made.value, cst.Call)]
        whole = called if len(called) == 1 else [to for to in called if code_of(to) == path]
    elif isinstance(value, NOT_ONE):
        whole = []
    return [code_of(target) for target in whole if not (isinstance(target, NOT_ONE) or any(find(target, cst.Call)))]


def _kept(value: cst.BaseExpression) -> cst.Call:
    return cst.Call(cst.Name(FUNCTION), [cst.Arg(value)])


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
