"""Pins of modules by name as plain code: a helper in the user's own factory or class, or a file of its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import libcst as cst

from ampdbg.patch.by_name.factories import definition, models_made, takes_arguments, top_level, with_model_kept
from ampdbg.patch.by_name.helper_text import Pinned, Spelling, helper_functions
from ampdbg.patch.by_name.name_sets import name_set
from ampdbg.patch.by_name.written_helpers import pins_kept, spelling_in, with_functions
from ampdbg.patch.edits import Edited
from ampdbg.patch.source_pins import Refused
from ampdbg.record.pins import OWN
from ampdbg.source.imports import with_imported
from ampdbg.source.source_file import EditError, read_source

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


def module_text(names: Sequence[str], all_names: Collection[str] = (), *, one_tensor: Collection[str] = ()) -> str:
    """A file of its own with ``pin_fp32(model)``, for code that cannot be edited.

    The user saves it as ``ampdbg_pins.py`` and calls ``from ampdbg_pins import pin_fp32; pin_fp32(model)``.

    Args:
        names: pins, as the config takes them: qualified names, with ``:own`` behind where only own lines are meant.
        all_names: the qualified names of all modules, so that a pattern is found where there is one.
        one_tensor: those of ``names`` that are layers with a ``weight`` and called with one floating-point tensor.
    """
    functions = helper_functions(_pinned(names, all_names, one_tensor), Spelling(function="pin_fp32"))
    return MODULE.format(name=MODULE_NAME, functions="\n\n\n".join(functions.values()))


def edit_factory(
    source: bytes,
    name: str,
    pins: Sequence[str],
    all_names: Collection[str] = (),
    *,
    one_tensor: Collection[str] = (),
) -> Edited:
    """Adds a helper that pins modules to the user's file, and one call of it where the model is made.

    Where a function returns one model here and another there, the helper passes over names that a model lacks.

    Args:
        source: the file's bytes.
        name: what makes the model there: a function, an ``nn.Module`` class, or a variable that holds the model.
            It may be dotted (``Build.model``).
        pins: as the ``names`` of :func:`module_text`, which explains ``all_names`` and ``one_tensor`` too. Names that
            a helper of an earlier run lists stay pinned.
        all_names: as there.
        one_tensor: as there.
    """
    try:
        text = read_source(source)
        module = _with_helper(text.module, name, pins, all_names, one_tensor)
        edited = with_model_kept(module, name, Spelling().function)
        after = text.with_module(edited)
    except EditError as error:
        return Edited(source, (Refused(error.line, str(error)),), changed=False)
    return Edited(after, (), after != source)


def applies_to(source: bytes, name: str) -> str:
    """What else than the config's model the helper's call runs for, for who reads the patch; "" where it is nothing.

    Args:
        source: the file's bytes.
        name: what makes the model there, as for :func:`edit_factory`.
    """
    try:
        return _sharing(read_source(source).module, name)
    except EditError:
        return ""


def _sharing(module: cst.Module, name: str) -> str:
    count, maker = models_made(module, name), definition(module, name)
    if count > 1:
        return f"applies to what {name} returns in {count} places; names that a model lacks are passed over"
    if not isinstance(maker, (cst.FunctionDef, cst.ClassDef)) or not takes_arguments(maker):
        return ""
    what = f"all that {name} returns" if isinstance(maker, cst.FunctionDef) else f"every {name}"
    return f"applies to {what}, whatever the arguments; a model without these names raises AttributeError"


def _with_helper(
    module: cst.Module, name: str, pins: Sequence[str], all_names: Collection[str], one_tensor: Collection[str]
) -> cst.Module:
    place, is_one_of_several = top_level(module, name), models_made(module, name) > 1
    spelling = spelling_in(module)
    kept = pins_kept(module, spelling, all_names)
    if set(pins) <= set(kept):
        return module
    # What the modules of an earlier run take is not known here.
    simple = one_tensor if not kept else ()
    pinned = replace(_pinned((*kept, *pins), all_names, simple), may_lack_some=is_one_of_several)
    functions = helper_functions(pinned, spelling)
    module = with_functions(module, functions, place, is_extended=bool(kept))
    used = (spelling.torch, spelling.partial.partition(".")[0])
    for root in used:
        module = with_imported(module, root) if root in ("torch", "functools") else module
    return module


def _pinned(names: Sequence[str], all_names: Collection[str], one_tensor: Collection[str]) -> Pinned:
    whole = [name for name in names if not name.endswith(OWN)]
    own = [name.removesuffix(OWN) for name in names if name.endswith(OWN)]
    return Pinned(name_set(whole, all_names), name_set(own, all_names), set(whole) <= set(one_tensor))
