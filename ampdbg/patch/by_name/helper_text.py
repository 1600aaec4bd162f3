"""The text of the functions that keep modules in FP32 by name, for code that has nothing but torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ampdbg.patch.by_name.name_sets import NameSet

LINE_LENGTH = 88
INDENT = "    "

DOCSTRING = "Keeps modules that overflow in FP16 in FP32 under autocast; returns the model."
"""By which the function is known again."""

WHOLE_FUNCTION, OWN_LINES_FUNCTION = "_forward_in_fp32", "_own_lines_in_fp32"

FORWARD_OF_ONE_TENSOR = '''
def _forward_in_fp32(module, input):
    """Runs a layer outside autocast, its input cast up to the weights' dtype."""
    device_type = "cpu" if input.is_meta else input.device.type
    with {torch}.autocast(device_type=device_type, enabled=False):
        return type(module).forward(module, input.to(module.weight.dtype))
'''

FORWARD = '''
def _forward_in_fp32(module, *args, **kwargs):
    """Runs a module in FP32 where it would run under autocast."""
    device_type = _device_type(args, kwargs, module.parameters(), module.buffers())
    if device_type is None or not {torch}.is_autocast_enabled(device_type):
        return type(module).forward(module, *args, **kwargs)
    args, kwargs = _cast_up(args), _cast_up(kwargs)
    with {torch}.autocast(device_type=device_type, enabled=False):
        return type(module).forward(module, *args, **kwargs)
'''

OWN_LINES = '''
def _own_lines_in_fp32(module, *args, **kwargs):
    """Runs a module's own lines in FP32 where they would run under autocast."""
    device_type = _device_type(args, kwargs, module.parameters(), module.buffers())
    if device_type is None or not {torch}.is_autocast_enabled(device_type):
        return type(module).forward(module, *args, **kwargs)
    dtype = {torch}.get_autocast_dtype(device_type)
    autocast = device_type, dtype, True, {torch}.is_autocast_cache_enabled()
    _autocast_inner_modules(module, autocast)
    args, kwargs = _cast_up(args), _cast_up(kwargs)
    # This dtype without a cache tells the inner modules that autocast was left here.
    with {torch}.autocast(device_type, {torch}.float32, enabled=False, cache_enabled=False):
        return type(module).forward(module, *args, **kwargs)


def _autocast_inner_modules(module, autocast):
    """Has what a module calls, also what came later, run under autocast where its lines left it."""
    for inner in list(module.modules())[1:]:
        known = getattr(inner, "_autocast_before", ())
        if known != autocast:
            inner._autocast_before = autocast
        if known == () or autocast is None:
            forward = {partial}(type(inner).forward, inner)
            forward = inner.__dict__.get("forward", forward)
            inner.forward = {partial}(_forward_as_before, inner, forward)


def _forward_as_before(module, forward, *args, **kwargs):
    """Runs a module under autocast again where the lines that call it left it."""
    autocast = module._autocast_before
    if (
        autocast is None
        or {torch}.get_autocast_dtype(autocast[0]) is not {torch}.float32
        or {torch}.is_autocast_cache_enabled()
    ):
        return forward(*args, **kwargs)
    with {torch}.autocast(*autocast):
        return _cast_up(forward(*args, **kwargs))
'''

CASTS = '''
def _cast_up(value):
    """Casts half tensors to FP32, also those in tuples, lists and dicts."""
    if isinstance(value, {torch}.Tensor):
        return value.float() if value.dtype in ({torch}.float16, {torch}.bfloat16) else value
    if isinstance(value, (tuple, list)):
        items = [_cast_up(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is dict:
        return {{key: _cast_up(item) for key, item in value.items()}}
    return value


def _device_type(*groups):
    """The device type of the first tensor in tuples, lists and dicts, or None."""
    for group in groups:
        for value in group.values() if isinstance(group, dict) else group:
            if isinstance(value, {torch}.Tensor) and not value.is_meta:
                return value.device.type
            found = _device_type(value) if isinstance(value, (tuple, list, dict)) else None
            if found is not None:
                return found
    return None
'''

PIN = "module.forward = {partial}(_forward_in_fp32, module)"

PIN_OWN = """module.forward = {partial}(_own_lines_in_fp32, module)
_autocast_inner_modules(module, None)"""

NAMED = "for name, module in model.named_modules():"

ONE_OF_SEVERAL = """if not isinstance(model, {torch}.nn.Module):
    return model"""

MODULES = "modules = dict(model.named_modules())  # another return's model may lack some of these"


@dataclass(frozen=True)
class Pinned:
    """What a helper pins.

    ``whole`` are modules whose whole forward runs in FP32, ``own`` those of which only the own lines do.
    ``takes_one_tensor`` says that each of ``whole`` is a layer with a ``weight`` that is called with one tensor: that
    takes a quarter of the code. ``may_lack_some`` says that what is pinned may be another model, or none: names that
    it lacks are passed over.
    """

    whole: NameSet
    own: NameSet
    takes_one_tensor: bool = False
    may_lack_some: bool = False


@dataclass(frozen=True)
class Spelling:
    """How a file names the helper itself, torch and functools.partial."""

    function: str = "_keep_in_fp32"
    torch: str = "torch"
    partial: str = "functools.partial"


def helper_functions(pinned: Pinned, spelling: Spelling) -> dict[str, str]:
    """The text of each function by its name, the one to call with a model last; no blank lines around them."""
    parts = list(_runtime(pinned))
    texts = [text for part in parts for text in part.strip().split("\n\n\n")]
    filled = (text.format(torch=spelling.torch, partial=spelling.partial) for text in texts)
    functions = {text.partition("(")[0].removeprefix("def "): text for text in filled}
    return {**functions, spelling.function: _keep(pinned, spelling)}


def _runtime(pinned: Pinned) -> Iterator[str]:
    if pinned.own.names or not pinned.takes_one_tensor:
        yield CASTS
    if pinned.whole.names:
        yield FORWARD_OF_ONE_TENSOR if pinned.takes_one_tensor else FORWARD
    if pinned.own.names:
        yield OWN_LINES


def _keep(pinned: Pinned, spelling: Spelling) -> str:
    """The function that takes a model, pins its modules and returns it."""
    lines = [f"def {spelling.function}(model):", f'{INDENT}"""{DOCSTRING}"""']
    if pinned.may_lack_some:
        lines += [INDENT + line for line in ONE_OF_SEVERAL.format(torch=spelling.torch).splitlines()]
        are_listed = any(names.names and not names.is_pattern for names in (pinned.whole, pinned.own))
        lines += [INDENT + MODULES] if are_listed else []
    for names, pin in ((pinned.whole, PIN), (_inner_first(pinned.own), PIN_OWN)):
        if names.names:
            body = pin.format(partial=spelling.partial).splitlines()
            lines += [INDENT + line for line in _loop(names, body, may_lack_some=pinned.may_lack_some)]
    return "\n".join([*lines, f"{INDENT}return model"])


def _inner_first(names: NameSet) -> NameSet:
    """A module wraps those that it calls, whatever their forward is by then."""
    return replace(names, names=tuple(sorted(names.names, key=lambda name: name.count("."), reverse=True)))


def _loop(names: NameSet, body: Sequence[str], *, may_lack_some: bool) -> Iterator[str]:
    if names.is_pattern:
        starts = f"name.startswith({_quoted(names.start)}) and " if names.start else ""
        yield "for name, module in reversed(list(model.named_modules())):" if len(body) > 1 else NAMED
        yield f"{INDENT}if {starts}name.endswith({_quoted(names.end)}):"
        yield from (INDENT * 2 + line for line in body)
    elif may_lack_some:
        yield from _for_each(names)
        yield f"{INDENT}if name in modules:"
        yield from (INDENT * 2 + line for line in ("module = modules[name]", *body))
    elif len(names.names) == 1:
        yield f"module = model.get_submodule({_quoted(names.names[0])})"
        yield from body
    else:
        yield from _for_each(names)
        yield from (INDENT + line for line in ("module = model.get_submodule(name)", *body))


def _for_each(names: NameSet) -> list[str]:
    quoted = [_quoted(name) for name in names.names]
    line = f"for name in [{', '.join(quoted)}]:"
    if len(INDENT + line) <= LINE_LENGTH:
        return [line]
    return ["for name in [", *(f"{INDENT}{name}," for name in quoted), "]:"]


def _quoted(name: str) -> str:
    """As a Python string: the keys of an ``nn.ModuleDict`` may hold anything but dots."""
    return json.dumps(name, ensure_ascii=False)
