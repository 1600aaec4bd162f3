"""Which objects of a script the names of pins begin with, where it has several models."""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import nn

from ampdbg.probes.makings import Makings
from ampdbg.probes.models import Together, is_global_of_script
from ampdbg.record.pins import RootModel, root_of

TAKEN = ("module", "name", "functools")
"""What a file of pins means something else by."""


def roots_of(model: nn.Module, pins: Iterable[str], makings: Makings | None) -> tuple[RootModel, ...]:
    """The models that the pins are of, in the order of the pins; none where there is but one model."""
    if not isinstance(model, Together):
        return ()
    names = dict.fromkeys(map(root_of, pins))
    arguments = _arguments(names)
    return tuple(
        RootModel(name, argument, _what(name, model, makings), is_global_of_script(name, model.get_submodule(name)))
        for name, argument in zip(names, arguments, strict=True)
    )


def _arguments(names: Iterable[str]) -> Iterator[str]:
    """A name of its own for the argument of each; what begins with an underscore is a function of the file."""
    taken = set(TAKEN)
    for name in names:
        argument = name.lstrip("_")
        argument = argument if argument.isidentifier() and not keyword.iskeyword(argument) else "model"
        while argument in taken:
            argument += "_"
        taken.add(argument)
        yield argument


def _what(name: str, model: Together, makings: Makings | None) -> str:
    root = model.get_submodule(name)
    if is_global_of_script(name, root):
        return f"the model that the script calls {name}"
    kind = type(root).__name__
    same = [one for one in model.children() if type(one).__name__ == kind]
    if len(same) == 1:
        return f"the model of class {kind} that the script makes"
    lines = makings.lines_apart(same) if makings is not None else ()
    if not lines:
        return f"one of the {len(same)} models of class {kind} that the script makes; which of them is not known"
    file, line = next(place for place, one in zip(lines, same, strict=True) if one is root)
    return f"the model of class {kind} that line {line} of {Path(file).name} makes"
