"""Half tensors that a loop makes of wider ones of its own, beside what its models make, and what comes of them.

A replay in FP32 is to make them again from what they were made of: a value that is inf in half, such as a target or the
distance to a far end or the product of two masks, would be inf in any replay that is given a copy.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ampdbg.ops import MOVES
from ampdbg.probes.source_lines import innermost_line
from ampdbg.probes.tensors import HALVES, leaves_of, times_written
from ampdbg.replay.played_step import torch_name
from ampdbg.source.ownership import Line

NARROWS_OR_MOVES = MOVES | {"type", "tensor", "as_tensor", "__getitem__"}
"""torch's functions that give a tensor's own values, in its format or in another one, by their names."""


DRAWS = re.compile(r"rand|dropout|bernoulli|multinomial|poisson|rrelu|gumbel|fractional|^(log_)?normal_?$")
"""What draws random numbers, by the names of torch's functions: it would draw others when it is called again."""


@dataclass(frozen=True)
class Narrowing:
    """A call that gives a half tensor: a cast or an op that autocast lowers; or what comes of such a one."""

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
        also: functions by torch's names for them, whose calls are kept whatever the format of what they give.
    """

    def __init__(self, device: str, also: Collection[str] = ()) -> None:
        self._device = device
        self._also = also
        self._known: dict[int, tuple[Narrowing, int]] = {}

    def add(self, made: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """To be called behind a call: what gives a half tensor of wider ones, or anything of such a one, is kept."""
        if type(made) is not torch.Tensor or not made.is_floating_point():
            return
        if made.dtype not in HALVES and not self._known and not self._also:
            return
        given = [tensor for _, tensor in leaves_of((args, kwargs)) if tensor.is_floating_point()]
        if any(tensor is made for tensor in given) or not self._is_of_wider(made, function, given):
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

    def _is_of_wider(self, made: torch.Tensor, function: Callable[..., Any], given: Sequence[torch.Tensor]) -> bool:
        """Whether another format would give other values: all that is half comes of what was wider."""
        name = getattr(function, "__name__", "")
        known = [self.of(tensor) is not None for tensor in given]
        if not all(is_known for tensor, is_known in zip(given, known, strict=True) if tensor.dtype in HALVES):
            return False
        if name in NARROWS_OR_MOVES and made.dtype in HALVES:
            return True
        is_half = bool(given) and made.dtype in HALVES
        return (is_half or any(known) or self._is_one_of(function)) and not DRAWS.search(name)

    def _is_one_of(self, function: Callable[..., Any]) -> bool:
        return bool(self._also) and torch_name(function) in self._also

    def of(self, tensor: torch.Tensor) -> Narrowing | None:
        """The call that has made it; None where there is none, or something was written since."""
        known, times = self._known.get(id(tensor), (None, 0))
        is_it = known is not None and known.made() is tensor and times_written(tensor) == times
        return known if is_it and known is not None and known.is_as_it_was else None
