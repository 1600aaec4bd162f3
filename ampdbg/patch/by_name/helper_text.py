"""The text of the functions that keep modules in FP32 by name, for code that has nothing but torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence

from ampdbg.record.pins import OWN

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

PIN = ("module.forward = functools.partial(_forward_in_fp32, module)",)
PIN_OWN = ("module.forward = functools.partial(_own_lines_in_fp32, module)", "_autocast_inner_modules(module, None)")


def helper_functions(function: str, pins: Sequence[str], one_tensor: Collection[str] = ()) -> dict[str, str]:
    """The text of each function by its name, the one to call with a model last; no blank lines around them.

    Args:
        function: the name of the one to call.
        pins: qualified names of modules, with ``:own`` behind where only own lines are meant.
        one_tensor: those of ``pins`` that are layers with a ``weight`` and called with one floating-point tensor:
            where all are, a quarter of the code does.
    """
    whole = [name for name in dict.fromkeys(pins) if not name.endswith(OWN)]
    own = [name.removesuffix(OWN) for name in dict.fromkeys(pins) if name.endswith(OWN)]
    is_short = set(whole) <= set(one_tensor)
    parts = [CASTS] * bool(own or not is_short)
    parts += [FORWARD_OF_ONE_TENSOR if is_short else FORWARD] * bool(whole)
    parts += [OWN_LINES] * bool(own)
    texts = [text for part in parts for text in part.strip().split("\n\n\n")]
    functions = {text.partition("(")[0].removeprefix("def "): text for text in texts}
    # A module wraps those that it calls, whatever their forward is by then: the inner ones come first.
    own.sort(key=lambda name: name.count("."), reverse=True)
    lines = [
        f"def {function}(model):",
        f'{INDENT}"""Keeps modules that overflow in FP16 in FP32 under autocast; returns the model."""',
        *(INDENT + line for line in (*_loop(whole, PIN), *_loop(own, PIN_OWN))),
        f"{INDENT}return model",
    ]
    return {**functions, function: "\n".join(lines)}


def _loop(names: Sequence[str], body: Sequence[str]) -> Iterator[str]:
    """The lines that pin each of the modules by ``body``."""
    # As JSON: the keys of an nn.ModuleDict may hold anything but dots.
    quoted = [json.dumps(name, ensure_ascii=False) for name in names]
    if len(quoted) == 1:
        yield f"module = model.get_submodule({quoted[0]})"
        yield from body
    elif quoted:
        line = f"for name in [{', '.join(quoted)}]:"
        is_short = len(INDENT + line) <= LINE_LENGTH
        yield from [line] if is_short else ["for name in [", *(f"{INDENT}{name}," for name in quoted), "]:"]
        yield from (INDENT + line for line in ("module = model.get_submodule(name)", *body))
