"""What torch has in the place of apex's classes and functions, call by call."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence

from ampdbg.lint.document import Document
from ampdbg.lint.edits import replaced
from ampdbg.lint.expressions import argument, constant, takes_stars
from ampdbg.lint.rule import Edit

Rewrite = Callable[[Document, ast.expr], "list[Edit] | None"]


def _renamed(
    new: str, drop: Sequence[str] = (), add: Mapping[str, str] | None = None, most: int | None = None
) -> Rewrite:
    """A call by another name, without keywords that torch does not have, and with those whose default is another.

    Args:
        new: torch's name.
        drop: keywords that change nothing where they are left out.
        add: keywords to be given where the call does not.
        most: how many arguments mean the same by their place; None for all of them.
    """

    def rewrite(document: Document, node: ast.expr) -> list[Edit] | None:
        call = document.parents[node]
        if not isinstance(call, ast.Call) or call.func is not node:
            return [replaced(document, node, new)] if not add and most is None else None
        if takes_stars(call) or (most is not None and len(call.args) > most):
            return None
        kept = [word for word in call.keywords if word.arg not in drop]
        missing = {name: value for name, value in (add or {}).items() if argument(call, name) is None}
        if len(kept) == len(call.keywords) and not missing:
            return [replaced(document, node, new)]
        given = [*map(document.source, call.args), *(f"{word.arg}={document.source(word.value)}" for word in kept)]
        given += [f"{name}={value}" for name, value in missing.items()]
        return [replaced(document, call, f"{new}({', '.join(given)})")]

    return rewrite


OF_ADAM = frozenset("params lr betas eps weight_decay bias_correction adam_w_mode amsgrad set_grad_none".split())
"""FusedAdam's options that torch's optimizers have too, or that change nothing."""


def _adam(document: Document, node: ast.expr) -> list[Edit] | None:
    """FusedAdam is AdamW unless it is told otherwise, with a weight decay of 0."""
    call = document.parents[node]
    if not isinstance(call, ast.Call):
        return None
    is_plain = constant(argument(call, "bias_correction") or ast.Constant(True)) is True
    if not is_plain or {word.arg for word in call.keywords} - OF_ADAM:
        return None
    mode = constant(argument(call, "adam_w_mode") or ast.Constant(True))
    drop = ("bias_correction", "adam_w_mode", "set_grad_none")
    if mode in (True, 1):
        return _renamed("torch.optim.AdamW", drop, {"weight_decay": "0.0"}, 2)(document, node)
    return _renamed("torch.optim.Adam", drop, {}, 2)(document, node) if mode in (False, 0) else None


def _to_float(document: Document, node: ast.expr) -> list[Edit] | None:
    """``to_python_float(loss)`` is ``loss.item()``."""
    call = document.parents[node]
    if not isinstance(call, ast.Call) or call.func is not node or len(call.args) != 1 or call.keywords:
        return None
    given = call.args[0]
    if not isinstance(given, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)):
        return None
    return [replaced(document, call, f"{document.source(given)}.item()")]


_LAYER_NORM = _renamed("torch.nn.LayerNorm", ("memory_efficient",))
_DDP = _renamed("torch.nn.parallel.DistributedDataParallel", ("delay_allreduce", "message_size"), {}, 1)

REWRITES: Mapping[str, tuple[str, Rewrite]] = {
    "apex.optimizers.FusedAdam": ("torch.optim.AdamW, or Adam where adam_w_mode=False", _adam),
    "apex.optimizers.FusedSGD": (
        "torch.optim.SGD",
        _renamed("torch.optim.SGD", ("materialize_master_grads", "set_grad_none"), {}, 2),
    ),
    "apex.normalization.FusedLayerNorm": ("torch.nn.LayerNorm", _LAYER_NORM),
    "apex.normalization.MixedFusedLayerNorm": ("torch.nn.LayerNorm", _LAYER_NORM),
    "apex.normalization.FusedRMSNorm": (
        "torch.nn.RMSNorm",
        _renamed("torch.nn.RMSNorm", ("memory_efficient",), {"eps": "1e-5"}, 1),
    ),
    "apex.parallel.DistributedDataParallel": ("torch.nn.parallel.DistributedDataParallel", _DDP),
    "apex.parallel.SyncBatchNorm": ("torch.nn.SyncBatchNorm", _renamed("torch.nn.SyncBatchNorm")),
    "apex.parallel.convert_syncbn_model": (
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
        _renamed("torch.nn.SyncBatchNorm.convert_sync_batchnorm"),
    ),
    "apex.fp16_utils.to_python_float": ("loss.item()", _to_float),
}
"""By apex's name: what torch has, for a message, and how a use is rewritten."""

NO_COUNTERPART: Mapping[str, str] = {
    "apex.optimizers.FusedLAMB": "torch has no LAMB: keep apex for it alone, or use AdamW",
    "apex.optimizers.FusedNovoGrad": "torch has no NovoGrad: keep apex for it alone, or use AdamW",
    "apex.fp16_utils.FP16_Optimizer": "torch.autocast, torch.amp.GradScaler and a float32 model take its place",
    "apex.fp16_utils.network_to_half": "torch.autocast, torch.amp.GradScaler and a float32 model take its place",
}
"""What torch has no class for, and what to do."""

_MOVED = ".fused_layer_norm."


def public_name(origin: str) -> str:
    """The name in the tables above of what apex also has in a module of its own."""
    if origin.startswith("apex.normalization.fused_layer_norm."):
        return origin.replace(_MOVED, ".")
    return f"apex.optimizers.{origin.rpartition('.')[2]}" if origin.startswith("apex.optimizers.fused_") else origin
