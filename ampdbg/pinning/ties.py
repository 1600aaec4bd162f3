"""Modules that share a parameter: they are pinned together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ampdbg.record.pins import OWN
from ampdbg.search import AtomTree


def tied_modules(model: torch.nn.Module, tree: AtomTree) -> tuple[frozenset[str], ...]:
    """Groups of atoms whose modules hold the same parameter, such as an embedding and the head tied to it."""
    holders: dict[int, set[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None and name in tree:
                holders.setdefault(id(parameter), set()).add(tree.own(name))
    return tuple({frozenset(atoms): None for atoms in holders.values() if len(atoms) > 1})


def tied_together(names: Sequence[str], model: torch.nn.Module) -> tuple[tuple[str, ...], ...]:
    """The pins in parts: those that hold the same parameter are one part, every other is a part of its own."""
    holder: dict[int, str] = {}
    part = {name: [name] for name in names}
    for name in names:
        for parameter in _parameters(name, model):
            mine, other = part[name], part[holder.setdefault(id(parameter), name)]
            if mine is not other:
                other += mine
                part.update(dict.fromkeys(mine, other))
    return tuple(dict.fromkeys(tuple(names) for names in part.values()))


def _parameters(pin: str, model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The parameters of a module, or of its own lines."""
    module = model.get_submodule(pin.removesuffix(OWN))
    yield from module.parameters(recurse=not pin.endswith(OWN))
