"""Torch's error texts for misuse of mixed precision, and the finding code of each (torch 2.6 to 2.13)."""

from __future__ import annotations

import contextlib
import linecache
import re
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType

import torch
from torch.autograd.function import FunctionCtx
from torch.optim import Optimizer

from ampdbg.call_order import BARE_STEP, NO_UPDATE, UNSCALED_LOSS, Call, CallOrder, Hit
from ampdbg.errors import AmpdbgError, text_of
from ampdbg.precision.half_kernels import NO_SPARSE_KERNEL
from ampdbg.probes.source_lines import source_if_known
from ampdbg.record.run import AutocastError
from ampdbg.source.ownership import line_of_error


@dataclass(frozen=True)
class TorchError:
    """An error text of torch.

    Attributes:
        code: The finding for the error.
        decide: Returns the finding for a call that the scaler refuses, or "" if an earlier call already has one.
        by_autocast: True if FP32 would not have raised the error.
        in_loop: True if the text alone identifies the misuse, no matter where a loop raises it.
        applies: Checks where the error was raised.
    """

    text: str
    code: str = ""
    decide: Callable[[CallOrder, Call], str] | None = None
    by_autocast: bool = False
    in_loop: bool = False
    applies: Callable[[BaseException], bool] = lambda error: True

    def is_in(self, message: str) -> bool:
        return re.search(self.text, message) is not None


def _in_undecorated_function(error: BaseException) -> bool:
    """True if an ``autograd.Function`` without ``custom_fwd`` and ``custom_bwd`` raised the error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    contexts = [value for frame in frames for value in _first_argument(frame) if isinstance(value, FunctionCtx)]
    functions = [getattr(type(one), "_forward_cls", None) for one in contexts[-1:]]
    methods = [getattr(function, name, None) for function in functions for name in ("forward", "backward")]
    return not all(hasattr(method, "__wrapped__") for method in methods)  # custom_fwd and custom_bwd set it


def _first_argument(frame: FrameType) -> list[object]:
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return [frame.f_locals[name] for name in names[:1] if name in frame.f_locals]


def _writes_a_constant(error: BaseException) -> bool:
    """True if the code writes a number beyond half into a tensor. Torch raises the same error for ``alpha``, a factor
    of an operand such as the learning rate of an update; that number does not count."""
    frames = list(traceback.walk_tb(error.__traceback__))
    is_of_update = any(isinstance(one, Optimizer) for frame, _ in frames for one in _first_argument(frame))
    called = [linecache.getline(frame.f_code.co_filename, number) for frame, number in frames[-1:]]
    return not is_of_update and "alpha=" not in "".join(called)


DTYPES_DIFFER = (
    r"must have the same dtype|expected .*scalar type|expected .* to have the same dtype|same scalar type"
    r"|Input type .* should be the same|found (dtype )?(Half|BFloat16|c10::Half)|dtype of .* does not match"
)

DTYPES_MEET = (
    "under autocast some ops return half and others float32, and this op takes only one dtype: cast its inputs "
    "to one, as with x.float()"
)

MAKE_IT_WIDE = (
    "autocast lowers a product with a sparse matrix, and CUDA has no FP16 kernel for one in COO form: compute it in "
    'FP32, within torch.autocast("cuda", enabled=False) and with x.float(), or make the matrix CSR, as with '
    "matrix.to_sparse_csr()"
)

WEIGHTS_ARE_HALF = (
    "at this level the weights are half, and nothing casts what the code computes in float32 for them: cast it, as "
    "with x.to(self.weight.dtype), or train with autocast: --set precision.level=O1"
)

TORCH_ERRORS = (
    TorchError(
        r"cannot be converted to type (c10|at)::Half", "mask-constant", by_autocast=True, applies=_writes_a_constant
    ),
    TorchError(
        r"binary_cross_entropy and torch\.nn\.BCELoss are unsafe to autocast",
        "misuse-bce",
        by_autocast=True,
        in_loop=True,
    ),
    TorchError(DTYPES_DIFFER, "misuse-custom-function", in_loop=True, applies=_in_undecorated_function),
    TorchError(r"Attempting to unscale FP16 gradients", "misuse-half-parameters", by_autocast=True),
    TorchError(r"Attempted (step|unscale_) but _scale is None", UNSCALED_LOSS),
    TorchError(r"unscale_\(\) has already been called", decide=CallOrder.code_of_second_unscale),
    TorchError(r"unscale_\(\) is being called after step\(\)", decide=CallOrder.code_of_late_unscale),
    TorchError(r"step\(\) has already been called", NO_UPDATE),
    TorchError(r"No inf checks were recorded for this optimizer", "misuse-unused-optimizer"),
    TorchError(r"No inf checks were recorded prior to update", decide=CallOrder.code_of_empty_update),
)


def autocast_error(
    cause: BaseException | None, step: int, named_modules: Callable[[], Iterable[tuple[str, torch.nn.Module]]]
) -> AutocastError | None:
    """Return the finding for an exception of the user's code, or None if autocast did not cause it.

    Its module is the innermost of ``named_modules`` on the stack, or "" if that call fails in the user's class.
    """
    if cause is None:
        return None
    text = text_of(cause)
    known = next((one for one in TORCH_ERRORS if one.by_autocast and one.is_in(text) and one.applies(cause)), None)
    if known is None:
        return None
    line = line_of_error(cause)
    names: dict[torch.nn.Module, str] = {}
    with contextlib.suppress(Exception):
        names = {module: name for name, module in named_modules()}
    owners = [value for frame, _ in traceback.walk_tb(cause.__traceback__) for value in _first_argument(frame)]
    running = [names[value] for value in owners if isinstance(value, torch.nn.Module) and value in names]
    return AutocastError(known.code, step, text, source_if_known(line), running[-1] if running else "")


def explained(raised: AmpdbgError, *, has_half_weights: bool) -> bool:
    """Add advice to a user's error if two dtypes differ or CUDA has no half kernel; return True in these cases.

    The advice explains what precision has to do with the error, and what to do.
    """
    text = "" if raised.__cause__ is None else text_of(raised.__cause__)
    is_of_dtypes, is_of_kernel = re.search(DTYPES_DIFFER, text), NO_SPARSE_KERNEL in text
    if not is_of_dtypes and not is_of_kernel:
        return False
    advice = MAKE_IT_WIDE if is_of_kernel else WEIGHTS_ARE_HALF if has_half_weights else DTYPES_MEET
    raised.args = (f"{raised}\n{advice}",)
    return True


def misuse_of_error(error: BaseException) -> str:
    """Return the code of the misuse that an error of a loop identifies, else ""."""
    text = text_of(error)
    return next((one.code for one in TORCH_ERRORS if one.in_loop and one.is_in(text) and one.applies(error)), "")


def misuse_of_refusal(order: CallOrder, call: Call) -> tuple[Hit, ...]:
    """Return the misuse for a call that the scaler refused, from the message and the earlier calls."""
    known = next((one for one in TORCH_ERRORS if not one.in_loop and one.is_in(call.raised)), None)
    code = "" if known is None else known.decide(order, call) if known.decide else known.code
    bare = order.bare_instead(call) if code == BARE_STEP else None
    blamed = call if bare is None else bare._replace(raised=call.raised)
    return (Hit(code, blamed),) if code else ()
