"""Tensors that hold NaN or inf in the variables of the user's code that runs, or has raised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any

import torch

from ampdbg.probes.tensors import bad_data, leaves_of, may_be_bad
from ampdbg.record.run import TensorCounts
from ampdbg.source.ownership import is_users_file

MOST = 100
"""A container of more items is not looked into."""


def bad_data_held(frames: Iterable[FrameType]) -> TensorCounts | None:
    """The first tensor in the variables of the user's frames that holds NaN or inf and may be data of the step.

    That is one of several values that leads to no gradients: a loss, and what else a model computes, leads to some.
    """
    for frame in frames:
        for name, value in _variables(frame):
            found = ((name + path, tensor) for path, tensor in leaves_of(value))
            bad = bad_data(pair for pair in found if _may_be_data(pair[1]) and may_be_bad(pair[1]))
            if bad:
                return bad[0]
    return None


def stacked(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that have led to it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def raised_in(trace: TracebackType | None) -> list[FrameType]:
    """The frames that an error went through, the innermost first."""
    frames: list[FrameType] = []
    while trace is not None:
        frames.insert(0, trace.tb_frame)
        trace = trace.tb_next
    return frames


def _variables(frame: FrameType) -> Iterator[tuple[str, Any]]:
    if not is_users_file(frame.f_code.co_filename):
        return
    for name, value in [*frame.f_locals.items()]:
        is_container = type(value) in (dict, list, tuple) and len(value) <= MOST
        if is_container or isinstance(value, torch.Tensor):
            yield name, value


def _may_be_data(tensor: torch.Tensor) -> bool:
    return not tensor.requires_grad and tensor.numel() > 1
