"""One call of a module in the forward pass under way, as it is noted: by reference, and not holding what it gave, but
the gradients that came to that."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ampdbg.replay.copies import Copying, duplicate
from ampdbg.replay.played_step import Made, Own
from ampdbg.replay.random_state import RandomState
from ampdbg.source.ownership import Line

MOST_HELD = 2**24
"""Bytes of the gradients that are held of what one call gave: memory that the loop could use."""


@dataclass(eq=False)
class NotedCall:
    """One call: ``given`` has ``Made`` in the place of what earlier calls made, ``reads`` their numbers.

    ``lowers`` has the dtype that autocast lowers to, by kind of device where it is on. ``is_whole`` says that all that
    it is given is known, ``inputs`` has the other tensors with how often each had been written. ``backward`` is how
    many passes had gone backward by then.
    """

    module: torch.nn.Module
    line: Line | None
    lowers: Mapping[str, torch.dtype]
    random_state: RandomState
    backward: int = 0
    given: tuple[Any, Any] = ((), {})
    takes: set[Made] = field(default_factory=set)
    reads: set[int] = field(default_factory=set)
    inputs: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    is_whole: bool = True
    gives: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    has_returned: bool = False
    scalars: int = 0
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    """Those that have come to what it gave, by path; None for one too large to be held."""

    @property
    def is_of_frozen(self) -> bool:
        """Whether no gradient comes by it: weights that are all frozen compute with data."""
        return not self.reads and not any(weight.requires_grad for weight in self.module.parameters())

    @property
    def is_held(self) -> bool:
        """Whether somebody has something that it gave."""
        return any(result() is not None for result in self.gives)

    def hold_gradient(self, path: str, gradient: torch.Tensor | None) -> None:
        """Holds what has come to something that it gave, by reference."""
        if gradient is not None:
            held = sum(one.nbytes for one in self.gradients.values() if one is not None)
            is_plain = gradient.layout is torch.strided and not gradient.is_nested
            self.gradients[path] = gradient.detach() if is_plain and held + gradient.nbytes <= MOST_HELD else None

    def given_again(self, own: set[int]) -> tuple[Any, Any] | None:
        """A copy of what it was given, with what is of ``own`` as it is; None where a graph of before leads into it."""
        taking = _Taking(own)
        given: tuple[Any, Any] = taking.copying.of(self.given)
        return given if taking.is_whole else None


class _Taking:
    """Takes what one call was given into a pass that is to be run again."""

    def __init__(self, own: set[int]) -> None:
        self.is_whole = True
        self.copying = Copying(self._taken)
        self._own = own

    def _taken(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in self._own:
            return Own(value)
        self.is_whole &= value.is_leaf or not value.requires_grad
        return duplicate(value.detach()).requires_grad_(value.requires_grad)
