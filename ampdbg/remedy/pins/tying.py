"""Modules that share a parameter: they are pinned together."""

from __future__ import annotations

import torch

from ampdbg.search import AtomTree


def tied_modules(model: torch.nn.Module, tree: AtomTree) -> tuple[frozenset[str], ...]:
    """Groups of atoms whose modules hold the same parameter, such as an embedding and the head tied to it."""
    holders: dict[int, set[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None and name in tree:
                holders.setdefault(id(parameter), set()).add(tree.own(name))
    return tuple({frozenset(atoms): None for atoms in holders.values() if len(atoms) > 1})
