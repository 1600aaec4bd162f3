"""CUDA's autocast policy for CPU tensors: register CUDA's op lists on the dispatch key ``AutocastCPU``.

Every op in CUDA's lists gets an autocast kernel here. Ops that only the CPU's autocast casts fall through.
Each kernel casts its inputs and calls the op again with the autocast key excluded, like ``WrapFunction_`` in
PyTorch's ``autocast_mode.h``. Ops inside a composite op (``bmm`` and ``sum`` in an einsum) thus run in half
without further casts. As on CUDA, all weight casts share one cache. Therefore even ``linear`` is replaced:
the CPU's own kernel casts it identically, but into a C++ cache that Python cannot reach.

The op lists are read from ``autocast_mode.h`` of the installed torch. If torch ships without that header, the tables
below are used instead: they copy torch 2.13.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.utils import _pytree

from ampdbg.precision.half_kernels import find_op

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
"""Maps each op without a dtype argument to the overload with one that autocast calls for a float32 result."""

BANNED: Mapping[str, str] = {
    "binary_cross_entropy": (
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
        "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
        "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
        "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
        "safe to autocast."
    ),
}
"""Ops that raise under CUDA's autocast, with their messages (from PyTorch's ``autocast_mode.cpp``)."""

RECURRENT_LAYERS = "lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data"
"""Whole recurrent layers. On CUDA they run as ``_cudnn_rnn``, which ``autocast/RNN.cpp`` casts to half."""

OpLists = Mapping[str, frozenset[str]]
"""Op names by macro name: ATen ops without the namespace, with the overload name unless it is the default."""

BUILT_IN: OpLists = {
    "LOWER_PRECISION_FP": frozenset(LOWER_PRECISION.split()),
    "FP32": frozenset(FP32.split()),
    "FP32_SET_OPT_DTYPE": frozenset(FP32_SET_OPT_DTYPE.split()),
    "PROMOTE": frozenset(PROMOTE.split()),
}


def lists_of_header(text: str) -> OpLists | None:
    """Return the op lists that the macros in ``autocast_mode.h`` define, or None if the format is unknown."""
    found = {name: _entries_of_macro(text, f"AT_FORALL_{name}") for name in BUILT_IN}
    return found if all(found.values()) else None


def installed_lists(torch_folder: Path) -> OpLists:
    """Return the op lists of the torch in ``torch_folder``, or the built-in lists if it ships no header."""
    try:
        text = (torch_folder / "include" / "ATen" / "autocast_mode.h").read_text(encoding="utf-8")
    except OSError:
        return BUILT_IN
    return lists_of_header(text) or BUILT_IN


def lists_by_origin(torch_folder: Path) -> dict[str, dict[str, list[str]]]:
    """Return every op list of the emulation by origin: ``header`` (torch's own) or ``table`` (this module)."""
    lists = installed_lists(torch_folder)
    by_hand = {"FP32_APPEND_DTYPE": FP32_APPEND_DTYPE, "BANNED": BANNED, "RECURRENT_LAYERS": RECURRENT_LAYERS.split()}
    tables = {name: sorted(ops) for name, ops in by_hand.items()}
    read = {name: sorted(ops) for name, ops in lists.items()}
    return {"header": {}, "table": read | tables} if lists is BUILT_IN else {"header": read, "table": tables}


def _entries_of_macro(text: str, macro: str) -> frozenset[str]:
    # Every line of the macro but the last ends in a backslash; an entry is _(op) or _(op, overload).
    body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*)", text)
    if body is None:
        return frozenset()
    entries = re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body.group(1))
    return frozenset(f"{op}.{overload}" if overload else op for op, overload in entries)


_AUTOCAST_CPU = DispatchKeySet(DispatchKey.AutocastCPU)
_AUTOCAST_KEY = "AutocastCPU"

weight_casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
"""Maps a weight's ``id`` to the weight and its half copy. Cleared when the outermost region exits."""


@contextlib.contextmanager
def cuda_autocast_policy() -> Iterator[None]:
    """Make ``torch.autocast("cpu")`` cast by CUDA's op lists inside this context."""
    casts_keep_gradients()
    library = torch.library.Library("aten", "IMPL")
    native = set(torch._C._dispatch_get_registrations_for_dispatch_key(_AUTOCAST_KEY))
    try:
        with warnings.catch_warnings():
            # torch warns once that a C++ kernel is overridden, which is intended here.
            warnings.simplefilter("ignore")
            for name, kernel in _kernels(installed_lists(Path(torch.__file__).parent), native):
                library.impl(name, kernel, "AutocastCPU", **_ALLOW_OVERRIDE)
        yield
    finally:
        library._destroy()
        weight_casts.clear()


_ALLOW_OVERRIDE = (
    {"allow_override": True} if "allow_override" in inspect.signature(torch.library.Library.impl).parameters else {}
)


def _kernels(lists: OpLists, native: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield each op's name with its autocast kernel."""
    lowered = lists["LOWER_PRECISION_FP"].union(RECURRENT_LAYERS.split())
    policies: list[tuple[frozenset[str], Callable[[torch._ops.OpOverload], Any]]] = [
        (lowered, partial(_cast_to, lambda op, given: torch.get_autocast_dtype("cpu"))),
        (lists["FP32"], partial(_cast_to, lambda op, given: torch.float32)),
        (lists["FP32_SET_OPT_DTYPE"], _fp32_set_opt_dtype),
        (lists["PROMOTE"], partial(_cast_to, _widest)),
        (frozenset(FP32_APPEND_DTYPE), _fp32_append_dtype),
        (frozenset(BANNED), _banned),
    ]
    handled = set()
    for names, policy in policies:
        for name in sorted(names):
            op = find_op(name)
            if op is not None:
                handled.add(name)
                yield name, policy(op)
    for qualified in sorted(native):
        namespace, _, name = qualified.partition("::")
        if namespace == "aten" and name not in handled:
            yield name, torch.library.fallthrough_kernel


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU)


def _cast_to(choose: Callable[[torch._ops.OpOverload, Any], torch.dtype], op: torch._ops.OpOverload) -> Any:
    """Return a kernel that casts the op's inputs to the dtype that ``choose(op, arguments)`` returns."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = choose(op, (args, tuple(kwargs.values())))
        with _without_autocast():
            return op(*_cast(args, dtype), **_cast(kwargs, dtype))

    return kernel


def _widest(op: torch._ops.OpOverload, given: Any) -> torch.dtype:
    """Return the widest dtype of the operands.

    Follows ``prioritize`` in PyTorch's ``autocast_mode.h``, which reduces the operands in order. After a float32
    operand it accepts any dtype; before that, only the autocast dtype.
    """
    widest = torch.get_autocast_dtype("cpu")
    for operand in filter(_is_eligible, _pytree.tree_leaves(given)):
        if torch.float32 in (widest, operand.dtype):
            widest = torch.float32
        elif operand.dtype is not widest:
            raise RuntimeError(
                f"Unexpected floating ScalarType in at::autocast::prioritize: {op} promotes {widest} and float32, "
                f"and was given {operand.dtype} before any float32"
            )
    return widest


def _fp32_set_opt_dtype(op: torch._ops.OpOverload) -> Callable[..., Any]:
    position = next(i for i, argument in enumerate(op._schema.arguments) if argument.name == "dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # The dispatcher omits arguments that have their default value.
        if position >= len(args) and "dtype" not in kwargs and _is_eligible(args[0]):
            kwargs = {**kwargs, "dtype": torch.float32}
        with _without_autocast():
            return op(*args, **kwargs)

    return kernel


def _fp32_append_dtype(op: torch._ops.OpOverload) -> Callable[..., Any]:
    with_dtype = find_op(FP32_APPEND_DTYPE[f"{op._schema.name.split('::')[1]}.{op._schema.overload_name}"])
    assert with_dtype is not None
    # The dispatcher omits arguments that have their default value, and the other overload has no defaults.
    defaults = [argument.default_value for argument in op._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.float32 if _is_eligible(args[0]) else args[0].dtype
        with _without_autocast():
            return with_dtype(*args, *defaults[len(args) :], dtype=dtype)

    return kernel


def _banned(op: torch._ops.OpOverload) -> Callable[..., Any]:
    message = BANNED[op._schema.name.split("::")[1]]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(message)

    return kernel


def _is_eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return the arguments with every eligible tensor cast to ``dtype``."""
    if isinstance(value, torch.Tensor):
        return _cached_cast(value, dtype) if value.dtype is not dtype and _is_eligible(value) else value
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value


def _cached_cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a tensor. A weight's half copy is reused, so the gradients of its uses add up in half, as on CUDA.

    The conditions match ``cached_cast`` in PyTorch's ``autocast_mode.cpp``. As on CUDA, a nested region of another
    dtype receives the outer region's copies, and the op raises.
    """
    is_weight = tensor.dtype is torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
    cacheable = torch.is_autocast_cache_enabled() and not torch.is_inference_mode_enabled()
    if not (is_weight and dtype is not torch.float32 and cacheable):
        return _to(tensor, dtype)
    # Keeping the tensor alive prevents another tensor from reusing its id.
    _, cast = weight_casts.get(id(tensor), (None, None))
    if cast is None:
        with torch.set_grad_enabled(torch.is_grad_enabled() or casts_keep_gradients()):
            cast = _to(tensor, dtype)
        weight_casts[id(tensor)] = (tensor, cast)
    return cast


def _to(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast the tensor. Bypass a tensor subclass's own ``to``, because torch casts in C++ and never calls it."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.to(tensor, dtype)


@cache
def casts_keep_gradients() -> bool:
    """True if torch's weight cache creates its copies with gradients even under ``no_grad``.

    Older versions do not (PyTorch issue 112583, pull request 165068). There, a first use under ``no_grad`` cuts
    off the gradients of later uses, on CUDA too. The first call must happen before torch's kernels are replaced.
    """
    with torch.inference_mode(False):
        weight = torch.ones(1, 1, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                torch.mm(weight, weight)
            with torch.enable_grad():
                return torch.mm(weight, weight).requires_grad
