"""FP16 kernels for a CPU that round where a tensor core rounds, at the speed of FP32.

A tensor core multiplies half operands, accumulates in FP32 and rounds the result once. A CPU without
FP16 instructions has no fast kernel for that (25 times slower than FP32, some ops missing). So each op
here widens its half operands, runs the CPU's FP32 kernel, and rounds the result.

The kernels stand on the dispatch key ``BackendSelect``, which lies below autograd and below
``TorchDispatchMode`` and above the CPU's kernels. Autograd therefore records the very graph that CUDA
has (``MmBackward0`` on half tensors), backward ops are served too, a trace shows ``aten.mm.default`` on
half tensors and nothing of the emulation, and the CPU's own kernels stay reachable by redispatch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey

from ampdbg.formats import FLOAT16

MATRIX_PRODUCTS = """
    mm addmm bmm baddbmm addmv mv dot vdot _addmm_activation
    mm.out addmm.out bmm.out baddbmm.out addmv.out mv.out dot.out
    addmm_ baddbmm_ addmv_
"""
"""Not ``addbmm`` and ``conv_tbc``: on every device these are loops of ``addmm_``, rounding after each round."""

CONVOLUTIONS = "convolution _convolution _convolution.deprecated convolution_backward"
FUSED_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward"
RECURRENT = "mkldnn_rnn_layer mkldnn_rnn_layer_backward"
WITHOUT_CPU_KERNEL = """
    avg_pool3d avg_pool3d_backward rrelu_with_noise rrelu_with_noise_ rrelu_with_noise_backward
    multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_forward
    multilabel_margin_loss_backward
    _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
    _upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward
"""
"""Ops that CUDA has in half and the CPU has not: without emulation they raise 'not implemented for Half'.

The antialiasing ones are rounded once here; ``cuda/UpSampleBilinear2d.cu`` rounds its weights and rows as well,
and adds gradients in half. Fourier transforms are in :mod:`ampdbg.precision.half_transforms`.
"""

CLAMPS = "clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ hardtanh hardtanh_"
"""CUDA compares with the limits in float32 (``opmath_t`` in ``cuda/TensorCompare.cu``); the CPU makes them half
first, and raises where they are beyond it. Only those are emulated."""

EMULATED = " ".join((MATRIX_PRODUCTS, CONVOLUTIONS, FUSED_ATTENTION, RECURRENT, WITHOUT_CPU_KERNEL, CLAMPS)).split()

KEPT_IN_FP32 = {"_scaled_dot_product_flash_attention_for_cpu": (1,)}
"""Positions of outputs that stay float32, by op: the log-sum-exp, as in CUDA's flash kernel."""

TAKES_FP32 = ("_scaled_dot_product_flash_attention_for_cpu_backward",)
"""Ops that take a float32 operand (that log-sum-exp) beside half ones."""

HALF = torch.float16
"""What is emulated; bfloat16 is left to the CPU's kernels, which round where CUDA's do and are fast enough."""

NO_SPARSE_KERNEL = "\"addmm_sparse_cuda\" not implemented for 'Half'"
"""What CUDA says to a product of a sparse COO matrix and a dense one (torch 2.11 on an H200): autocast lowers it and no
kernel takes it. For a CSR matrix there is one."""

ran: set[str] = set()
"""The names of the ops that were computed here since :func:`half_kernels` was entered."""

_BELOW = torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)


@contextlib.contextmanager
def half_kernels() -> Iterator[None]:
    """While this is entered, half matrix products, convolutions, fused attention and recurrent layers
    on CPU tensors are computed in FP32 and rounded. Float32 and other devices are left as they are."""
    library = torch.library.Library("aten", "IMPL")
    ran.clear()
    try:
        for name in EMULATED:
            overload = find_op(name)
            if overload is not None:
                library.impl(name, _rounding_kernel(overload, name), "BackendSelect", with_keyset=True)
        yield
    finally:
        library._destroy()


def find_op(name: str) -> torch._ops.OpOverload | None:
    """The ATen op of that name (``sum``, ``sum.dim_IntList``), or None when the installed torch has none."""
    packet_name, _, overload_name = name.partition(".")
    packet = getattr(torch.ops.aten, packet_name, None)
    return getattr(packet, overload_name or "default", None)


def _rounding_kernel(op: torch._ops.OpOverload, name: str) -> Callable[..., Any]:
    kept, mixed, clamps = KEPT_IN_FP32.get(name, ()), name in TAKES_FP32, name in CLAMPS.split()
    arguments, (output, *_) = op._schema.arguments, op._schema.returns
    writes = [(i, argument.name) for i, argument in enumerate(arguments) if _is_written(argument)]
    # addmm_(self!) returns what it wrote; rrelu_with_noise(self, noise!) writes its noise and returns something else.
    returned = next((i for i, _ in writes if _are_one(output, arguments[i])), None)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        below = keyset & _BELOW
        if clamps and not any(map(_is_beyond_half, args)):
            return op.redispatch(below, *args, **kwargs)
        if not _are_half((*args, *kwargs.values()) if writes else args, mixed):
            return op.redispatch(below, *args, **kwargs)
        if any(map(_is_coo, args)):
            raise NotImplementedError(NO_SPARSE_KERNEL)
        ran.add(name)
        wide_args = [_widened(value) for value in args]
        wide_kwargs = {key: _widened(value) for key, value in kwargs.items()}
        result = op.redispatch(below, *wide_args, **wide_kwargs)
        written = {}
        for i, key in writes:
            target, wide = (args[i], wide_args[i]) if i < len(args) else (kwargs[key], wide_kwargs[key])
            written[i] = round_into(target, wide)
        return _rounded(result, kept) if returned is None else written[returned]

    return kernel


def round_into(target: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """Rounds what an in-place or ``out=`` op made in a wider dtype into its target."""
    if target.shape != wide.shape:
        target.resize_(wide.shape)
    return target.copy_(wide)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _are_one(output: Any, argument: Any) -> bool:
    """Whether an op returns the very tensor that it was given: ``Tensor(a!)`` in both places of its schema."""
    return output.alias_info is not None and output.alias_info.before_set == argument.alias_info.before_set


def _is_beyond_half(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) > FLOAT16.largest


def _is_coo(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo


def _are_half(args: Any, mixed: bool) -> bool:
    """Whether the operands are half tensors of the CPU, and none of another float dtype unless it may be ``mixed``.

    Operands of several float dtypes are left to torch, whose error says what is wrong, as CUDA's does.
    """
    found = False
    for argument in args:
        for tensor in argument if isinstance(argument, (list, tuple)) else (argument,):
            if not isinstance(tensor, torch.Tensor) or not tensor.dtype.is_floating_point:
                continue
            if tensor.dtype is HALF and tensor.device.type == "cpu":
                found = True
            elif not mixed:
                return False
    return found


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype is HALF else value
    if isinstance(value, (list, tuple)):
        return [_widened(item) for item in value]
    return value


def _rounded(result: Any, kept: tuple[int, ...]) -> Any:
    if isinstance(result, torch.Tensor):
        return result.to(HALF)
    return tuple(
        item.to(HALF) if isinstance(item, torch.Tensor) and item.dtype is torch.float32 and i not in kept else item
        for i, item in enumerate(result)
    )
