"""Errors of a loop that say of themselves which misuse they are: BCE under autocast, mixed dtypes in a Function."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from types import FrameType

from torch.autograd.function import FunctionCtx

from .source_lines import Line, is_named

_MIXED_DTYPES = re.compile(
    r"must have the same dtype|expected .*scalar type|expected .* to have the same dtype|same scalar type"
    r"|Input type .* should be the same|found (dtype )?(Half|BFloat16|c10::Half)|dtype of .* does not match"
)
_BCE = re.compile(r"binary_cross_entropy and torch\.nn\.BCELoss are unsafe to autocast")


def refusal_of(error: BaseException) -> Iterator[tuple[str, Line | None]]:
    """The misuse code that an error is, with the innermost line of the user's or a library's code; at most one."""
    text = str(error)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for pattern, code, applies in _REFUSALS:
        if pattern.search(text) and applies(frames):
            yield code, _innermost(error)
            return


def _in_undecorated_function(frames: list[FrameType]) -> bool:
    """Whether the error came out of an ``autograd.Function`` without ``custom_fwd`` and ``custom_bwd``."""
    contexts = [value for frame in frames for value in _first_argument(frame) if isinstance(value, FunctionCtx)]
    return bool(contexts) and not _is_decorated(type(contexts[-1]))


def _first_argument(frame: FrameType) -> list[object]:
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return [frame.f_locals[name] for name in names[:1] if name in frame.f_locals]


def _is_decorated(context: type) -> bool:
    """torch.amp.custom_fwd and custom_bwd wrap a method and set ``__wrapped__``."""
    function = getattr(context, "_forward_cls", None)
    return all(hasattr(getattr(function, name, None), "__wrapped__") for name in ("forward", "backward"))


def _innermost(error: BaseException) -> Line | None:
    found = [
        (frame.f_code.co_filename, number, frame.f_code.co_name)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if is_named(frame.f_code)
    ]
    return found[-1] if found else None


_REFUSALS: tuple[tuple[re.Pattern[str], str, Callable[[list[FrameType]], bool]], ...] = (
    (_BCE, "misuse-bce", lambda frames: True),
    (_MIXED_DTYPES, "misuse-custom-function", _in_undecorated_function),
)
