"""The dtype contract of a loop: in which dtypes its parameters are stored, have their gradients, and are stepped.

Looked at once for each optimizer, right behind its first step: nothing is read from a device, and nothing held.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ampdbg.probes.models import Models
from ampdbg.record.run import KindDtypes

OTHERS = "other weights"
KINDS = (
    ("norm", "norms"),
    ("embed", "embeddings"),
    ("bias", "biases"),
    ("conv", "convolutions"),
    ("linear", "linears"),
)
"""The kinds of parameter, by a part of the module's class or of the parameter's name; the first that fits."""


def kind_of(module: str, name: str) -> str:
    """The kind of a parameter as people read them, by its name and the class of its module."""
    found = f"{module} {'.'.join(name.split('.')[-2:])}".lower()
    return next((kind for part, kind in KINDS if part in found), OTHERS)


def names_and_kinds(models: Models) -> dict[int, tuple[str, str]]:
    """The name and the kind of each parameter of the models, by ``id``."""
    return {
        id(parameter): (f"{path}.{name}".lstrip("."), kind_of(type(module).__name__, f"{path}.{name}"))
        for path, module in models.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
    }


class DtypeContract:
    """What the optimizers of a loop hold in which dtypes, since each has stepped.

    Args:
        models: name the parameters.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._of: dict[int, tuple[weakref.ref[Optimizer], tuple[KindDtypes, ...]]] = {}

    def after(self, optimizer: Optimizer) -> None:
        """To be called right behind a step of the optimizer, while the gradients are still there."""
        known = self._of.get(id(optimizer))
        if known is None or known[0]() is not optimizer:
            self._of[id(optimizer)] = weakref.ref(optimizer), _dtypes(optimizer, names_and_kinds(self._models))

    @property
    def dtypes(self) -> tuple[KindDtypes, ...]:
        """What is stored in which dtype, by kind of parameter, for each optimizer."""
        return tuple(of_kind for _, of_it in self._of.values() for of_kind in of_it)


def _dtypes(optimizer: Optimizer, names: Mapping[int, tuple[str, str]]) -> tuple[KindDtypes, ...]:
    """What an optimizer that has stepped holds, by kind of parameter."""
    by_kind: dict[str, list[Any]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            by_kind.setdefault(names.get(id(parameter), ("", OTHERS))[1], []).append(parameter)
    return tuple(
        KindDtypes(
            kind=kind,
            parameters=len(of_it),
            stored=_names_of_dtypes(of_it),
            gradients=_names_of_dtypes(one.grad for one in of_it),
            states=_names_of_dtypes(
                value
                for one in of_it
                for value in optimizer.state.get(one, {}).values()
                if isinstance(value, torch.Tensor) and value.ndim
            ),
        )
        for kind, of_it in by_kind.items()
    )


def _names_of_dtypes(tensors: Iterable[torch.Tensor | None]) -> tuple[str, ...]:
    return tuple(sorted({str(one.dtype).removeprefix("torch.") for one in tensors if one is not None}))
