"""FP16 kernels for a CPU that round where a tensor core rounds, at the speed of FP32.

A tensor core multiplies half operands, accumulates in FP32 and rounds the result once. A CPU without
FP16 instructions has no fast kernel for that (25 times slower than FP32, some ops missing). Each op here
therefore widens its half operands, runs the CPU's FP32 kernel and rounds the result.

The kernels are registered on the dispatch key ``BackendSelect``. It is below autograd and
``TorchDispatchMode``, and above the CPU's kernels. Autograd therefore records the same graph as on CUDA
(``MmBackward0`` on half tensors), and backward ops are covered too. A trace shows ``aten.mm.default`` on half
tensors and no trace of the emulation. A redispatch still reaches the CPU's own kernels.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._C import DispatchKey
from torch._refs.fft import _canonicalize_fft_shape_and_dim_args, _resize_fft_input

from ampdbg.formats import FLOAT16

MATRIX_PRODUCTS = """
    mm addmm bmm baddbmm addmv mv dot vdot _addmm_activation
    mm.out addmm.out bmm.out baddbmm.out addmv.out mv.out dot.out
    addmm_ baddbmm_ addmv_
"""
"""``addbmm`` and ``conv_tbc`` are absent: on every device they loop over ``addmm_`` and round after each pass."""

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
"""Ops with a half kernel on CUDA but not on the CPU, where they raise 'not implemented for Half'.

The antialiasing ops are rounded once here. ``cuda/UpSampleBilinear2d.cu`` also rounds their weights and rows, and
accumulates gradients in half. Fourier transforms are below.
"""

ROUNDED_ONCE = """
    _log_softmax glu_backward col2im avg_pool2d_backward max_pool2d_with_indices_backward
    upsample_linear1d upsample_bicubic2d upsample_trilinear3d
"""
"""Ops that CUDA computes in float32 and rounds once, while the CPU rounds to half in between.

``cross_entropy`` runs ``_log_softmax`` in half under autocast: it names the dtype, which autocast respects. These ops
are emulated in bfloat16 too. Composite losses are absent, such as ``kl_div``, ``cosine_similarity`` and
``binary_cross_entropy_with_logits``: CUDA rounds after each of their ops too. Gradients of interpolations and of
adaptive pooling add up in half on CUDA.
"""

ADDED_IN_HALF = "scatter_add scatter_add_ scatter_reduce.two scatter_reduce_.two index_add index_add_".split()
"""Ops that round each add on CUDA, where atomics add in the tensor's own dtype (``ScatterGatherKernel.cu``,
``Indexing.cu``). A float16 count of ones ends at 2048. The CPU adds most of them in float32, as CUDA's deterministic
algorithms do. ``gather`` and ``index_select`` have gradients of this kind."""

CLAMPS = "clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ hardtanh hardtanh_"
"""CUDA compares with the limits in float32 (``opmath_t`` in ``cuda/TensorCompare.cu``). The CPU casts the limits to
half first and raises if they exceed its range. Only such limits are emulated."""

EMULATED = " ".join(
    (MATRIX_PRODUCTS, CONVOLUTIONS, FUSED_ATTENTION, RECURRENT, WITHOUT_CPU_KERNEL, ROUNDED_ONCE, CLAMPS)
).split()

KEPT_IN_FP32 = {"_scaled_dot_product_flash_attention_for_cpu": (1,)}
"""Output positions that stay float32, by op: the log-sum-exp, as in CUDA's flash kernel."""

TAKES_FP32 = ("_scaled_dot_product_flash_attention_for_cpu_backward",)
"""Ops that take a float32 operand (the log-sum-exp) besides half operands."""

HALF = torch.float16
"""The dtype of the emulated kernels. Most are not emulated in bfloat16: the CPU's round where CUDA's do and are fast
enough."""

HALVES = (HALF, torch.bfloat16)

NO_SPARSE_KERNEL = "\"addmm_sparse_cuda\" not implemented for 'Half'"
"""CUDA's error for the product of a sparse COO matrix and a dense matrix (torch 2.11 on an H200). Autocast casts the
product to half, but only CSR matrices have a half kernel."""

ran: set[str] = set()
"""The names of the ops that ran in emulation since :func:`half_kernels` was last entered."""

_BELOW = torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)


@contextlib.contextmanager
def half_kernels() -> Iterator[None]:
    """Compute half matrix products, convolutions, fused attention and recurrent layers in FP32, and round them.

    The context affects half tensors on the CPU only."""
    library = torch.library.Library("aten", "IMPL")
    ran.clear()
    kernels = dict.fromkeys(EMULATED, _rounding_kernel) | dict.fromkeys(ADDED_IN_HALF, _adding_kernel)
    try:
        for name, make in kernels.items():
            overload = find_op(name)
            if overload is not None:
                library.impl(name, make(overload, name), "BackendSelect", with_keyset=True)
        yield
    finally:
        library._destroy()


def find_op(name: str) -> torch._ops.OpOverload | None:
    """Return the ATen op with this name (``sum``, ``sum.dim_IntList``), or None if the installed torch lacks it."""
    packet_name, _, overload_name = name.partition(".")
    packet = getattr(torch.ops.aten, packet_name, None)
    return getattr(packet, overload_name or "default", None)


def _rounding_kernel(op: torch._ops.OpOverload, name: str) -> Callable[..., Any]:
    kept, mixed, clamps = KEPT_IN_FP32.get(name, ()), name in TAKES_FP32, name in CLAMPS.split()
    emulated = HALVES if name in ROUNDED_ONCE.split() else (HALF,)
    arguments, (output, *_) = op._schema.arguments, op._schema.returns
    aliases = [(i, argument.name, argument.alias_info) for i, argument in enumerate(arguments)]
    writes = [(i, key, alias) for i, key, alias in aliases if alias is not None and alias.is_write]
    # addmm_(self!) returns the tensor it wrote; rrelu_with_noise(self, noise!) writes its noise and returns another.
    # Both are Tensor(a!) in the schema if they are one tensor.
    result_set = None if output.alias_info is None else output.alias_info.before_set
    returned = next((i for i, _, alias in writes if alias.before_set == result_set), None)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        below = keyset & _BELOW
        if clamps and not any(map(_is_beyond_half, args)):
            return op.redispatch(below, *args, **kwargs)
        dtype = _half_dtype((*args, *kwargs.values()) if writes else args, mixed)
        if dtype not in emulated:
            return op.redispatch(below, *args, **kwargs)
        if any(isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo for value in args):
            raise NotImplementedError(NO_SPARSE_KERNEL)
        ran.add(name)
        wide_args = [_widened(value) for value in args]
        wide_kwargs = {key: _widened(value) for key, value in kwargs.items()}
        result = op.redispatch(below, *wide_args, **wide_kwargs)
        written = {}
        for i, key, _ in writes:
            target, wide = (args[i], wide_args[i]) if i < len(args) else (kwargs[key], wide_kwargs[key])
            written[i] = round_into(target, wide)
        return _rounded(result, kept, dtype) if returned is None else written[returned]

    return kernel


def round_into(target: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """Round the wide result of an in-place or ``out=`` op into its half target."""
    if target.shape != wide.shape:
        target.resize_(wide.shape)
    return target.copy_(wide)


def _adding_kernel(op: torch._ops.OpOverload, name: str) -> Callable[..., Any]:
    checked = find_op(re.sub(r"_(?=$|\.)", "", name)) or op
    is_index_add = name.startswith("index_add")

    def kernel(
        keyset: Any,
        target: torch.Tensor,
        dim: int,
        index: torch.Tensor,
        source: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        below, reduce = keyset & _BELOW, args[0] if args else "sum"
        is_own = target.dtype not in HALVES or target.device.type != "cpu" or target.dim() == 0
        if is_own or reduce not in ("sum", "mean") or torch.are_deterministic_algorithms_enabled():
            return op.redispatch(below, target, dim, index, source, *args, **kwargs)
        checked.redispatch(below, target, dim, index, source, *args, **kwargs)  # raises torch's own errors
        ran.add(name)
        dim, shape = dim % target.dim(), index.shape
        if is_index_add:
            places, added = [*[None] * dim, index], source * kwargs.get("alpha", 1)
        else:
            grid = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
            places, added = [*grid[:dim], index, *grid[dim + 1 :]], source[tuple(map(slice, shape))]
        total = target if op._schema.is_mutable else target.clone()
        count, put = torch.ones_like(total), torch.ops.aten.index_put_
        if not kwargs.get("include_self", True):
            put(total, places, total.new_zeros(()))
            count.zero_()
        put(total, places, added, True)  # the CPU rounds each add of this op
        if reduce == "mean":
            put(count, places, torch.ones_like(added), True)
            total /= count.masked_fill_(count == 0, 1)
        return total

    return kernel


def _is_beyond_half(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) > FLOAT16.largest


def _half_dtype(args: Any, mixed: bool) -> torch.dtype | None:
    """The dtype that all float operands share, if they are on the CPU. With ``mixed``, some may be float32.

    Operands of several float dtypes are passed to torch unchanged: its error names the problem, as CUDA's does.
    """
    values = [value for item in args for value in (item if isinstance(item, (list, tuple)) else (item,))]
    floats = [value for value in values if isinstance(value, torch.Tensor) and value.dtype.is_floating_point]
    dtypes = {value.dtype if value.device.type == "cpu" else None for value in floats}
    dtypes -= {torch.float32} if mixed else set()
    return dtypes.pop() if len(dtypes) == 1 else None


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in HALVES else value
    if isinstance(value, (list, tuple)):
        return [_widened(item) for item in value]
    return torch.float32 if value in HALVES else value


def _rounded(result: Any, kept: tuple[int, ...], dtype: torch.dtype | None) -> Any:
    if isinstance(result, torch.Tensor):
        return result.to(dtype)
    return tuple(
        item.to(dtype) if isinstance(item, torch.Tensor) and item.dtype is torch.float32 and i not in kept else item
        for i, item in enumerate(result)
    )


# Fourier transforms of half tensors, as cuFFT computes them: half input, ``torch.complex32`` output.
#
# CUDA's autocast lists contain no transform. A half tensor that reaches ``torch.stft`` or ``torch.fft`` is therefore
# transformed in half, inside and outside of autocast. The CPU has no kernel for that. The functions of ``torch.fft``
# reject half CPU tensors before they dispatch (``promote_type_fft`` in ``SpectralOps.cpp``), so they are replaced too.
# cuFFT's half-precision intermediates are not reproduced: sums are float32 here. Ops that torch runs in half around
# the transform also run in half here, such as the scaling of an inverse transform after the rounding.

COMPLEX_HALF = torch.complex32

TRANSFORMS = "_fft_r2c _fft_c2r _fft_c2c".split()
"""All transforms and their gradients use these three ops, including ``torch.stft`` and ``torch.istft``."""

OF_REAL = "fft_fft fft_ifft fft_rfft fft_ihfft fft_rfft2 fft_rfftn fft_ihfft2 fft_ihfftn".split()
"""``torch.fft`` functions that transform a real tensor directly, with ``n`` and one dim or ``s`` and several."""

OF_COMPLEX = """
    fft_irfft fft_hfft fft_fft2 fft_ifft2 fft_irfft2 fft_hfft2 fft_fftn fft_ifftn fft_irfftn fft_hfftn
""".split()
"""``torch.fft`` functions that first convert a real tensor to complex."""

OF_SPECTRA = "log sqrt rsqrt sin cos tanh sigmoid pow.Tensor_Scalar sum sum.dim_IntList prod".split()
"""Ops on spectra and in their backward passes that have a complex32 kernel on CUDA but not on the CPU."""

OF_PHASES = "angle exp".split()
"""The same, for ops that build a spectrum from a phase before any transform, as in ``torch.exp(1j * phase)``."""

DIVISIONS = "div.Tensor div_.Tensor".split()
"""Separate from ``OF_SPECTRA``, because divisions also take plain numbers."""

COMPOSITE = ("AutogradCPU", "CPU", "FuncTorchBatched")
"""Dispatch keys for composite functions, which have no kernel below autograd. They run at the autograd key,
or at the CPU key in inference mode. Inside ``torch.vmap``, the batching key comes first."""

WIDER = {HALF: torch.float32, COMPLEX_HALF: torch.complex64}
NARROWER = {wide: narrow for narrow, wide in WIDER.items()}

NO_SUCH_SIZE = (
    "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision, "
    "but got a signal size of{}"
)
"""CUDA's error for a size that is not a power of two (``CuFFTPlanCache.h``)."""

_NONE, _BY_ROOT_N, _BY_N = range(3)
"""torch's ``fft_norm_mode``."""

_NORMS = {
    **dict.fromkeys((None, "backward"), (_BY_N, _NONE)),
    "forward": (_NONE, _BY_N),
    "ortho": (_BY_ROOT_N, _BY_ROOT_N),
}
"""Maps the user's ``norm`` argument to the modes of the inverse and of the forward transform."""

Kernel = Callable[..., Any]


@contextlib.contextmanager
def half_transforms() -> Iterator[None]:
    """Inside this context, half tensors on the CPU have the Fourier transforms that they have on CUDA."""
    library = torch.library.Library("aten", "IMPL")

    def register(names: Iterable[str], make: Callable[[torch._ops.OpOverload], Kernel], *keys: str) -> None:
        for name in names:
            op = find_op(name)
            if op is not None:
                for key in keys:
                    library.impl(name, make(op), key, with_keyset=key == "BackendSelect")

    @functools.cache
    def at_the_first() -> None:
        # Sums and divisions run in every step. Keep them out of Python until the first half transform.
        register(OF_SPECTRA, _of_complex_half, "BackendSelect")
        register(DIVISIONS, _division, "BackendSelect")

    try:
        transforms = [*TRANSFORMS, *(f"{name}.out" for name in TRANSFORMS)]
        register(transforms, functools.partial(_transform, at_the_first), "BackendSelect")
        register(OF_PHASES, _of_complex_half, "BackendSelect")
        register(OF_REAL, _of_real, *COMPOSITE)
        register(OF_COMPLEX, _of_complex, *COMPOSITE)
        yield
    finally:
        library._destroy()


def _is_narrow(tensor: torch.Tensor) -> bool:
    return tensor.dtype in WIDER and tensor.device.type == "cpu"


def _transform(at_the_first: Callable[[], None], op: torch._ops.OpOverload) -> Kernel:
    gives_signal = op._schema.name == "aten::_fft_c2r"
    gives = torch.float32 if gives_signal else torch.complex64

    def kernel(
        keyset: Any, x: torch.Tensor, dims: Sequence[int], norm: int, last: Any, out: torch.Tensor | None = None
    ) -> Any:
        below = keyset & _BELOW
        if not _is_narrow(x):
            return op.redispatch(below, x, dims, norm, last, **({} if out is None else {"out": out}))
        sizes = [x.shape[dim] for dim in dims]
        if gives_signal:
            sizes[-1] = last
        if any(size & (size - 1) for size in sizes):
            raise RuntimeError(NO_SUCH_SIZE.format(sizes))
        at_the_first()
        into = {} if out is None else {"out": torch.empty(0, dtype=gives)}
        wide = op.redispatch(below, x.to(WIDER[x.dtype]), dims, _NONE, last, **into)
        result = wide.to(NARROWER[gives])  # round before scaling: values beyond half's range become infinite
        if norm != _NONE:
            numel = math.prod(sizes)
            result.mul_(1.0 / (math.sqrt(numel) if norm == _BY_ROOT_N else numel))
        return result if out is None else round_into(out, result)

    return kernel


def _of_complex_half(op: torch._ops.OpOverload) -> Kernel:
    def kernel(keyset: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        below = keyset & _BELOW
        if x.dtype is not COMPLEX_HALF or x.device.type != "cpu" or kwargs.get("dtype") is not None:
            return op.redispatch(below, x, *args, **kwargs)
        result = op.redispatch(below, x.to(torch.complex64), *args, **kwargs)
        return result.to(NARROWER[result.dtype])

    return kernel


def _division(op: torch._ops.OpOverload) -> Kernel:
    in_place = op._schema.is_mutable
    # For ``x / 2`` a Python kernel receives the bare number. No lower kernel accepts it, but this overload does.
    divide = op.overloadpacket.Tensor_mode

    def kernel(keyset: Any, x: Any, other: Any) -> Any:
        operands = [value for value in (x, other) if isinstance(value, torch.Tensor)]
        if torch.result_type(x, other) is COMPLEX_HALF and operands[0].device.type == "cpu":
            quotient = torch.div(_widened_spectrum(x), _widened_spectrum(other), rounding_mode=None).to(COMPLEX_HALF)
            return x.copy_(quotient) if in_place else quotient
        if len(operands) == 2:
            return op.redispatch(keyset & _BELOW, x, other)
        return divide(x, other, rounding_mode=None)

    return kernel


def _widened_spectrum(value: Any) -> Any:
    return value.to(WIDER.get(value.dtype, value.dtype)) if isinstance(value, torch.Tensor) else value


def _of_complex(op: torch._ops.OpOverload) -> Kernel:
    def function(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Only half tensors are converted; complex tensors keep their dtype.
        complex_half = x.dtype is HALF and _is_narrow(x)
        return op.decompose(x.to(COMPLEX_HALF) if complex_half else x, *args, **kwargs)

    return function


def _of_real(op: torch._ops.OpOverload) -> Kernel:
    name = op._schema.name.removeprefix("aten::fft_")
    parameters = [argument.name for argument in op._schema.arguments[1:]]
    defaults = {argument.name: argument.default_value for argument in op._schema.arguments[1:]}
    is_forward = name in ("fft", "rfft", "rfft2", "rfftn")

    def function(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype is not HALF or not _is_narrow(x):
            return op.decompose(x, *args, **kwargs)
        given = {**defaults, **dict(zip(parameters, args, strict=False)), **kwargs}
        try:
            sizes, dims = _canonicalize_fft_shape_and_dim_args(x, given.get("s", given.get("n")), given["dim"])
            mode, (*others, last) = _NORMS[given["norm"]][is_forward], dims
        except (LookupError, RuntimeError, ValueError):
            return op.decompose(x.float(), *args, **kwargs)  # raises torch's own error
        resized, onesided = _resize_fft_input(x, dims, sizes), name not in ("fft", "ifft")
        if is_forward:
            return torch.ops.aten._fft_r2c(resized, dims, mode, onesided)
        spectrum = torch.ops.aten._fft_r2c(resized, [last], mode, onesided)
        # The inverse transform of a real signal is the conjugate of its forward transform.
        return torch.ops.aten._fft_c2c(spectrum.conj_physical(), others, mode, False) if others else spectrum.conj()

    return function
