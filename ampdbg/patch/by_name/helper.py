"""Pins of modules by name as plain code: a helper in the user's own factory or class, or a file of its own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import libcst as cst
import torch
from torch import nn

from ampdbg.patch.by_name.factory import with_model_kept
from ampdbg.patch.by_name.helper_text import INDENT, helper_functions
from ampdbg.patch.edits import Edited, Refused
from ampdbg.source.expressions import names_assigned
from ampdbg.source.imports import imports_of, with_imported
from ampdbg.source.source_file import EditError, read_source

FUNCTION = "_keep_in_fp32"
MODULE_NAME = "ampdbg_pins"
"""What a file of :func:`module_text` is called; with ``.py`` behind it."""

MODULE = '''"""Keeps modules in FP32 under autocast. Found by `ampdbg suggest-fp32`; needs torch alone.

    from {name} import pin_fp32

    pin_fp32(model)  # once, after the model is built and before it is compiled or wrapped
"""

import functools

import torch


{functions}
'''

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED_LINEAR = "transformers.pytorch_utils.Conv1D"
"""GPT-2's Linear, by its name: transformers is not to be imported."""

_BLANK = cst.EmptyLine(indent=False)


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


def module_text(names: Sequence[str], *, one_tensor: Collection[str] = ()) -> str:
    """A file of its own with ``pin_fp32(model)``, for code that cannot be edited.

    The user saves it as ``ampdbg_pins.py`` and calls ``from ampdbg_pins import pin_fp32; pin_fp32(model)``.

    Args:
        names: pins, as the config takes them: qualified names, with ``:own`` behind where only own lines are meant.
        one_tensor: those of ``names`` that are layers with a ``weight`` and called with one floating-point tensor.
    """
    functions = helper_functions("pin_fp32", names, one_tensor)
    return MODULE.format(name=MODULE_NAME, functions="\n\n\n".join(functions.values()))


def edit_factory(source: bytes, name: str, pins: Sequence[str], *, one_tensor: Collection[str] = ()) -> Edited:
    """Adds a helper that pins modules to the user's file, and one call of it where the model is made.

    Args:
        source: the file's bytes.
        name: what makes the model there: a function, an ``nn.Module`` class, or a variable that holds the model.
        pins: as the ``names`` of :func:`module_text`, which explains ``one_tensor`` too.
    """
    try:
        text = read_source(source)
        _check_names(text.module)
        functions = helper_functions(FUNCTION, pins, one_tensor)
        place, module = with_model_kept(text.module, name, FUNCTION)
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
    added = [_apart(_parsed(text, module.default_indent)) for text in functions.values()]
    body = module.body
    # What the helper stands in front of keeps its own comment lines.
    return module.with_changes(body=[*body[:place], *added, _apart(body[place]), *body[place + 1 :]])


def _parsed(text: str, indent: str) -> cst.SimpleStatementLine | cst.BaseCompoundStatement:
    """A function, indented as the file is."""
    leading = re.compile(rf"^(?:{INDENT})+", re.MULTILINE)
    indented = leading.sub(lambda start: indent * (len(start[0]) // len(INDENT)), text)
    (node,) = cst.parse_module(indented + "\n").body
    return node


def _apart(
    node: cst.SimpleStatementLine | cst.BaseCompoundStatement,
) -> cst.SimpleStatementLine | cst.BaseCompoundStatement:
    """With the two blank lines that stand around a function; it may have more."""
    lines = node.leading_lines
    blank = next((index for index, line in enumerate(lines) if line.comment is not None), len(lines))
    return node.with_changes(leading_lines=[*[_BLANK] * (2 - min(blank, 2)), *lines])
