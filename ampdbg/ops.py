"""Kinds of op, by base names: of ATen ops (``mm``), of torch functions, and of tensor methods in source code.

The kinds overlap. :mod:`ampdbg.precision.autocast_policy` has CUDA's rules for what autocast does with an op.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping


@functools.lru_cache(maxsize=4096)
def base_name(op: str) -> str:
    """Return ``mul`` for ``aten.mul_.Tensor``; the whole text if it is not such a name, as in a damaged record."""
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
"""Ops that autocast runs in half and that take most of a model's time. They move to FP32 only if pinned themselves."""

ATEN_PRODUCTS = PRODUCTS | _names(
    """convolution _convolution _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm gru
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"""
)
"""``PRODUCTS``, with ATen's names for them."""

SCALINGS = _names("mul multiply div divide true_divide")
"""Elementwise products and quotients."""

SUMS = _names("sum nansum mean cumsum prod var std linalg_vector_norm norm")
"""Ops that combine many values into one."""

LOGARITHMS = _names("log log2 log10")
"""Logarithms, which are infinite at zero."""

DIVISIONS = _names("div divide true_divide reciprocal")
"""Ops that divide by their last operand."""

ROOTS = _names("sqrt rsqrt")
"""Roots, which have no derivative at zero and no value below it."""

POLES_ELSEWHERE: Mapping[str, tuple[float, ...]] = {
    "log1p": (-1.0,),
    "atanh": (-1.0, 1.0),
    "erfinv": (-1.0, 1.0),
    "logit": (0.0, 1.0),
    "acos": (-1.0, 1.0),
    "asin": (-1.0, 1.0),
    "acosh": (1.0,),
}
"""The operands at which these ops, or their derivatives, are infinite."""

POLES = LOGARITHMS | DIVISIONS | _names("pow rsqrt") | POLES_ELSEWHERE.keys()
"""Ops that are infinite if the last operand is zero, or at the operands of ``POLES_ELSEWHERE``."""

ANGULAR = _names("sin cos")
"""Functions of an angle in radians. If rounding moves the angle by a radian, the result is arbitrary."""

SOFTMAXES = _names("_softmax _log_softmax _safe_softmax softmax log_softmax")
"""Softmaxes, which make NaN of a row of only -inf. Such a row is meant as a mask."""

SATURATES = _names("exp exp2 sigmoid tanh erf relu")
"""Ops whose result for an infinity, if finite, equals that for any number beyond half, forward and backward."""

CASTS = _names("_to_copy copy")
"""ATen ops that cast."""

CAST_METHODS = _names("float double half bfloat16")
"""Tensor methods that cast."""

ATEN_MOVES = CASTS | _names(
    """alias_copy cat clone expand_copy flip gather index index_select masked_select permute_copy repeat roll
    select_copy slice_copy stack t_copy take transpose_copy tril triu view_copy"""
)
"""ATen ops that only move, repeat, drop or cast values, or insert zeros. A trace does not record ATen's views."""

SHARES_MEMORY = _names(
    """view view_as reshape reshape_as contiguous transpose permute movedim swapaxes swapdims flatten unflatten ravel
    squeeze unsqueeze expand expand_as broadcast_to chunk split tensor_split unbind narrow select unfold diagonal
    detach t T mT H mH data real to type float half"""
)
"""Methods that may return the memory of their tensor instead of a copy."""

MOVES = (
    SHARES_MEMORY
    | CAST_METHODS
    | _names(
        """adjoint repeat repeat_interleave tile index_select take_along_dim gather roll flip cat concat concatenate
        stack hstack vstack pad tril triu clone type_as cpu cuda long int bool"""
    )
)
"""Ops that only move, repeat or cast values. They do not overflow, and FP32 gains nothing."""

FILLS = _names("fill index_fill masked_fill")
"""Ops that write a number from their arguments."""

CODE_CONSTANTS = _names("lift_fresh")
"""Ops that return a constant written in the code, in ``x[mask] = -1e9`` too. It is rounded before the op."""

COLLECTIVES = _names("c10d _c10d_functional _c10d_functional_autograd c10d_functional _dtensor symm_mem")
"""Namespaces of ops between processes: all processes must run them, and the result may come from another process."""

ALLOCATES = _names("empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize_")
"""Ops that return uninitialized memory."""

OVERWRITES = _names("copy_ fill_ zero_ uniform_ normal_ bernoulli_ random_ exponential_ log_normal_")
"""Ops that write into a tensor without reading it."""

CREATES = _names(
    """zeros ones empty full arange linspace logspace eye tensor as_tensor zeros_like ones_like empty_like full_like
    new_zeros new_ones new_empty new_full new_tensor one_hot finfo iinfo device Size"""
)
"""Functions that make a tensor, or a description of one, without the values of another tensor."""

RETURNS_SAVED_VALUES = _names("_ctc_loss")
"""Ops with one loss a sample as their first output. Their other outputs are for their own backward pass."""

TENSOR_METHODS = PRODUCTS | _names(
    """sum nansum mean prod std var norm softmax log_softmax logsumexp exp exp2 expm1 log log2 log10 log1p sqrt rsqrt
    pow square abs add sub mul div true_divide addcmul addcdiv neg reciprocal sigmoid tanh relu gelu clamp clip
    clamp_min clamp_max minimum maximum min max amax amin cumsum cumprod sin cos tan erf masked_fill where lerp dist
    cross sign round floor ceil logit sort argsort topk argmax argmin any all eq ne lt gt le ge scatter scatter_add
    index_add masked_select nonzero median quantile"""
)
"""Methods that show that an object of unknown type is a tensor."""
