"""Kinds of op, in one table: by base names of ATen (``mm``), of torch's functions, and of tensors' methods in source.

Kinds overlap. What autocast does with an op is CUDA's to say: see :mod:`ampdbg.precision.autocast_policy`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping


@functools.lru_cache(maxsize=4096)
def base_name(op: str) -> str:
    """``mul`` of ``aten.mul_.Tensor``; of what is no such name, as a damaged record may have it, all of it."""
    return (op.split(".")[1:2] or [op])[0].rstrip("_")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MATRIX_PRODUCTS = _names("baddbmm bmm einsum matmul mm")
"""Products of two tensors that may both be activations: ``(q * s) @ k`` is ``(q @ k) * s``."""

PRODUCTS = MATRIX_PRODUCTS | _names(
    """mv dot vdot vecdot inner outer tensordot chain_matmul multi_dot linear bilinear addmm addmv addbmm addr
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d prelu
    scaled_dot_product_attention multi_head_attention_forward"""
)
"""What autocast runs in half: most of a model's time. Never moved to FP32 unless it is itself pinned."""

ATEN_PRODUCTS = PRODUCTS | _names(
    """convolution _convolution _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm gru
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"""
)
"""The same by ATen's names."""

SCALINGS = _names("mul multiply div divide true_divide")
"""Element by element: every value times or by another one."""

SUMS = _names("sum nansum mean cumsum prod var std linalg_vector_norm norm")
"""What gathers many values into one."""

LOGARITHMS = _names("log log2 log10")
"""Infinite at zero."""

DIVISIONS = _names("div divide true_divide reciprocal")
"""What divides by its last operand."""

ROOTS = _names("sqrt rsqrt")
"""Without a derivative at zero, and without a value below it."""

POLES_ELSEWHERE: Mapping[str, tuple[float, ...]] = {
    "log1p": (-1.0,),
    "atanh": (-1.0, 1.0),
    "erfinv": (-1.0, 1.0),
    "logit": (0.0, 1.0),
    "acos": (-1.0, 1.0),
    "asin": (-1.0, 1.0),
    "acosh": (1.0,),
}
"""They, or their derivatives, are infinite where the operand is one of these numbers."""

POLES = LOGARITHMS | DIVISIONS | _names("pow rsqrt") | POLES_ELSEWHERE.keys()
"""Infinite where the last operand is zero, or as ``POLES_ELSEWHERE`` says."""

ANGULAR = _names("sin cos")
"""What takes angles, in radians: rounded by a radian they lead anywhere."""

SOFTMAXES = _names("_softmax _log_softmax _safe_softmax softmax log_softmax")
"""NaN for a row of nothing but -inf, which masks what it is given."""

SATURATES = _names("exp exp2 sigmoid tanh erf relu")
"""What comes to the same of an infinity, where that is finite, as of any number beyond half, forward and backward."""

CASTS = _names("_to_copy copy")
"""ATen's casts."""

CAST_METHODS = _names("float double half bfloat16")
"""Casts by a tensor's own methods."""

ATEN_MOVES = CASTS | _names(
    """alias_copy cat clone expand_copy flip gather index index_select masked_select permute_copy repeat roll
    select_copy slice_copy stack t_copy take transpose_copy tril triu view_copy"""
)
"""What only moves, repeats, leaves out or casts values, or puts zeros among them; ATen's views are no op of a trace."""

SHARES_MEMORY = _names(
    """view view_as reshape reshape_as contiguous transpose permute movedim swapaxes swapdims flatten unflatten ravel
    squeeze unsqueeze expand expand_as broadcast_to chunk split tensor_split unbind narrow select unfold diagonal
    detach t T mT H mH data real to type float half"""
)
"""What may hand out the memory of the tensor that it is asked of, and no copy."""

MOVES = (
    SHARES_MEMORY
    | CAST_METHODS
    | _names(
        """adjoint repeat repeat_interleave tile index_select take_along_dim gather roll flip cat concat concatenate
        stack hstack vstack pad tril triu clone type_as cpu cuda long int bool"""
    )
)
"""What only moves, repeats or casts values: nothing overflows there, and FP32 gains nothing."""

FILLS = _names("fill index_fill masked_fill")
"""What writes the number that it is given."""

WRITTEN_OUT = _names("lift_fresh")
"""What hands over a tensor that the code wrote out, ``x[mask] = -1e9`` too: its numbers are rounded before that."""

EXCHANGES = _names("c10d _c10d_functional _c10d_functional_autograd c10d_functional _dtensor symm_mem")
"""Namespaces of what processes do together: all of them have to, and what it gives may be another's."""

ALLOCATES = _names("empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize_")
"""What returns memory as it was found."""

OVERWRITES = _names("copy_ fill_ zero_ uniform_ normal_ bernoulli_ random_ exponential_ log_normal_")
"""What writes into a tensor without reading it."""

CREATES = _names(
    """zeros ones empty full arange linspace logspace eye tensor as_tensor zeros_like ones_like empty_like full_like
    new_zeros new_ones new_empty new_full new_tensor one_hot finfo iinfo device Size"""
)
"""What makes a tensor, or what describes one, of no other tensor's values."""

KEEPS_THE_REST = _names("_ctc_loss")
"""What gives more than its result, one loss a sample: the rest is for its own backward pass."""

TENSOR_METHODS = PRODUCTS | _names(
    """sum nansum mean prod std var norm softmax log_softmax logsumexp exp exp2 expm1 log log2 log10 log1p sqrt rsqrt
    pow square abs add sub mul div true_divide addcmul addcdiv neg reciprocal sigmoid tanh relu gelu clamp clip
    clamp_min clamp_max minimum maximum min max amax amin cumsum cumprod sin cos tan erf masked_fill where lerp dist
    cross sign round floor ceil logit sort argsort topk argmax argmin any all eq ne lt gt le ge scatter scatter_add
    index_add masked_select nonzero median quantile"""
)
"""Methods by which a name of unknown kind is taken to be a tensor."""
