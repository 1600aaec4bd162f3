"""Half tensors that a loop makes of wider ones of its own, beside what its models make.

A replay in FP32 is to make them again from what they were made of: a value that is inf in half, such as a target or the
distance to a far end, would be inf in any replay that is given a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ampdbg.ops import MOVES
from ampdbg.probes.source_lines import innermost_line
from ampdbg.probes.tensors import HALVES, leaves_of, times_written
from ampdbg.source.ownership import Line

NARROWS_OR_MOVES = MOVES | {"type", "tensor", "as_tensor", "__getitem__"}
"""torch's functions that give a tensor's own values, in its format or in another one, by their names."""


@dataclass(frozen=True)
class Narrowing:
    """A call that gives a half tensor: a cast, or a move of what a cast has given."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    line: Line | None
    lowers: bool
    has_gradients: bool
    made: weakref.ref[torch.Tensor]
    written: Sequence[tuple[torch.Tensor, int]]
    """What it was given, each with how often that had been written."""

    @property
    def is_as_it_was(self) -> bool:
        """Whether nothing has written into what it was given since."""
        return all(times_written(tensor) == times for tensor, times in self.written)


class Narrowings:
    """Those of one loop, as long as what they have made is alive.

    Args:
        device: the kind of device whose autocast counts.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._known: dict[int, tuple[Narrowing, int]] = {}

    def add(self, made: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """To be called behind a call: one that gives a half tensor of a wider one, or of such a one, is kept."""
        if type(made) is not torch.Tensor or made.dtype not in HALVES:
            return
        given = [tensor for _, tensor in leaves_of((args, kwargs))]
        of_half = [tensor for tensor in given if tensor.dtype in HALVES]
        if any(tensor is made for tensor in given) or (of_half and not any(map(self.of, of_half))):
            return
        number = id(made)
        narrowing = Narrowing(
            function,
            args,
            kwargs,
            innermost_line(),
            torch.is_autocast_enabled(self._device),
            torch.is_grad_enabled(),
            weakref.ref(made, lambda _: self._known.pop(number, None)),
            [(tensor, times_written(tensor)) for tensor in given],
        )
        self._known[number] = narrowing, times_written(made)

    def of(self, tensor: torch.Tensor) -> Narrowing | None:
        """The call that has made it; None where there is none, or something was written since."""
        known, times = self._known.get(id(tensor), (None, 0))
        is_it = known is not None and known.made() is tensor and times_written(tensor) == times
        return known if is_it and known is not None and known.is_as_it_was else None
