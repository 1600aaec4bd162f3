"""CUDA autocast's op lists: which ops run in half, which in FP32, which in the widest of their inputs.

The lists that count are those of the torch that is installed, read from its ``autocast_mode.h``. The
tables below are what torch 2.13 has there; they serve where the header was not shipped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

LOWER_PRECISION = """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv
    linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
    _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
"""

FP32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm
    frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa
"""

FP32_SET_OPT_DTYPE = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
"""

PROMOTE = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"

FP32_APPEND_DTYPE: Mapping[str, str] = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}
"""Ops without a dtype argument, and the overload with one that they are sent to (a float32 result)."""

BANNED: Mapping[str, str] = {
    "binary_cross_entropy": (
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
        "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
        "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
        "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
        "safe to autocast."
    ),
}
"""Ops that raise under CUDA's autocast, and the message (``autocast_mode.cpp`` of PyTorch)."""

RECURRENT_LAYERS = "lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data"
"""Whole recurrent layers. On CUDA they run as ``_cudnn_rnn``, which ``autocast/RNN.cpp`` casts to half."""


OpLists = Mapping[str, frozenset[str]]
"""By the names of the macros: ATen ops without the namespace, with the overload where it is not the default."""

BUILT_IN: OpLists = {
    "LOWER_PRECISION_FP": frozenset(LOWER_PRECISION.split()),
    "FP32": frozenset(FP32.split()),
    "FP32_SET_OPT_DTYPE": frozenset(FP32_SET_OPT_DTYPE.split()),
    "PROMOTE": frozenset(PROMOTE.split()),
}


def lists_of_header(text: str) -> OpLists | None:
    """The op lists that ``autocast_mode.h`` defines as macros, or None when its form is not the known one."""
    found = {name: _entries_of_macro(text, f"AT_FORALL_{name}") for name in BUILT_IN}
    return found if all(found.values()) else None


def installed_lists(torch_folder: Path) -> OpLists:
    """The op lists of the torch installed in ``torch_folder``; the built-in ones where it ships no header."""
    try:
        text = (torch_folder / "include" / "ATen" / "autocast_mode.h").read_text(encoding="utf-8")
    except OSError:
        return BUILT_IN
    return lists_of_header(text) or BUILT_IN


def _entries_of_macro(text: str, macro: str) -> frozenset[str]:
    # The macro runs over lines that end in a backslash; an entry is _(op) or _(op, overload).
    body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*)", text)
    if body is None:
        return frozenset()
    entries = re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body.group(1))
    return frozenset(f"{op}.{overload}" if overload else op for op, overload in entries)
