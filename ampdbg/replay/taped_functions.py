"""Which of the functions that torch shows a mode are calls of a step."""

from __future__ import annotations

import itertools
import sys
from traceback import walk_stack
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._ops import OpOverload

VIEWS = frozenset({"T", "H", "mT", "mH", "real", "imag", "data"})
"""The attributes of a tensor that are views of it. To ask for another, such as ``grad``, computes nothing: a loop asks
each of its parameters for it several times a step."""

NO_PART = (torch.Tensor.backward, torch.Tensor.__deepcopy__)
"""Of no step: what goes backward is noted apart, and a copy of a model is given all that was copied so far."""


def is_transformed() -> bool:
    """Whether ``torch.func`` transforms what runs: what goes backward comes from no single call in there."""
    return peek_interpreter_stack() is not None


def is_no_part(function: Any) -> bool:
    """Whether it is to be run, and not noted."""
    return function in NO_PART or _only_asks(function) or _is_dispatched(function)


def _only_asks(function: Any) -> bool:
    """Whether it gets an attribute that is no view."""
    if getattr(function, "__name__", "") != "__get__":
        return False
    return getattr(getattr(function, "__self__", None), "__name__", "") not in VIEWS


def _is_dispatched(function: Any) -> bool:
    """Whether it is an op that a dispatch mode runs, such as a trace, for what the script has called without it being
    seen here: `torch.autograd.Variable` is one. The script that is started again has no such mode."""
    if not isinstance(function, OpOverload):
        return False
    frames = itertools.islice(walk_stack(sys._getframe(1)), _MOST_FRAMES)
    return any(frame.f_code.co_name == "__torch_dispatch__" for frame, _ in frames)


_MOST_FRAMES = 6
"""Between a mode and the op that it runs there are fewer."""
