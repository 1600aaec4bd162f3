"""What the graph of a loss tells: which scaler has scaled it, what it was lowered to, whether the code has scaled it.

Nodes are looked at, and no tensor is kept; where a scalar is read, a GPU syncs.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.amp.grad_scaler import GradScaler
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import _disable_current_modes

from ampdbg.probes.tensors import HALVES, Scalar, scalar_of, tensors_in

NEAREST = 4
"""So many nodes are looked at for what the code itself has made of the loss."""

NEAR = 16
"""A scaled loss may be divided or added up before ``backward``: so many nodes are looked at for the scaler."""

FAR = 4000
"""So many nodes are looked at for the dtypes of the forward pass."""

SCALED_BY_HAND = 8.0
"""A loss that is multiplied by at least this has a loss scale of the loop's own."""

MOVES = re.compile(
    "(ToCopy|T|Transpose|Permute|View|UnsafeView|Expand|Unsqueeze|Squeeze|Slice|Select|Split|Clone|Alias)Backward"
)
"""The nodes of casts and views."""

_SCALED = "ampdbg.scaled"

_have_scaled: set[int] = set()
"""The ``id`` of each scaler that has: where there is none, no graph is looked into for one."""


class Scaled(NamedTuple):
    """A loss as it was before a scaler scaled it: a scalar, on its device."""

    by: Any
    loss: Scalar


def mark_scaled(losses: Any, scaled: Any, scaler: Any) -> None:
    """Marks what ``scaler.scale`` made of losses, on its graph: the mark goes when the graph does, and any watch reads
    it."""
    _have_scaled.add(id(scaler))
    for loss, leaf in zip(tensors_in(losses), tensors_in(scaled), strict=False):  # a scaler of the user's may add up
        node = _node_of(leaf)
        if node is not None:
            node.metadata[_SCALED] = Scaled(scaler, scalar_of(loss))


def scaled_behind(roots: Sequence[Any]) -> list[Scaled]:
    """What one scaler has scaled of what goes backward from these; nothing where none has."""
    if not _have_scaled:
        return []
    for nodes in (filter(None, map(_node_of, roots)), islice(_nodes(roots), NEAR)):  # seldom is one altered since
        marks = [mark for node in nodes if (mark := node.metadata.get(_SCALED)) is not None]
        if marks:
            return [mark for mark in marks if mark.by is marks[0].by]
    return []


def scaler_of(roots: Sequence[Any]) -> Any:
    """The scaler that scaled these losses, or None."""
    return next((mark.by for mark in scaled_behind(roots)), None)


def forward_dtypes(roots: Sequence[Any]) -> tuple[tuple[str, ...], dict[int, torch.dtype]]:
    """The 16-bit dtypes of the forward pass behind these losses; what parameters are stored in does not count. And in
    which dtype each parameter, by ``id``, is computed with: that of what the first op makes of it.

    ``compiled`` stands for those inside a compiled function, which its one node does not show.
    """
    found: set[torch.dtype] = set()
    takers: dict[Any, Any] = {}
    leaves, is_compiled = [], False
    for node in islice(_nodes(roots), FAR):
        name = node.name()
        is_compiled |= name.startswith("CompiledFunction")
        if name.endswith("AccumulateGrad"):
            leaves.append(node)
        else:
            found.update(entry.dtype for entry in node._input_metadata if entry is not None)
            for other, _ in node.next_functions:
                takers.setdefault(other, node)
    names = tuple(str(dtype).rpartition(".")[2] for dtype in HALVES if dtype in found)
    computed = {id(leaf.variable): dtype for leaf in leaves if (dtype := _computed_with(leaf, takers)) is not None}
    return ((*names, "compiled") if is_compiled else names), computed


def _computed_with(leaf: Any, takers: Mapping[Any, Any]) -> torch.dtype | None:
    """The dtype of what the first op makes of a parameter that is no cast and no view of it."""
    node = takers.get(leaf)
    while node is not None and MOVES.match(node.name()):
        node = takers.get(node)
    entries = [] if node is None or node.name().startswith("CompiledFunction") else node._input_metadata
    return next((entry.dtype for entry in entries if entry is not None), None)


def is_scaled_by_hand(roots: Sequence[Any]) -> bool:
    """The losses were multiplied by a large constant on the way to ``backward``. Syncs on a GPU."""
    return any(_factor(node) >= SCALED_BY_HAND for node in islice(_nodes(roots), 3))


def is_loss_scale(factor: float) -> bool:
    """Nobody weighs losses by a large power of two."""
    return factor >= SCALED_BY_HAND and math.frexp(factor)[0] == 0.5


def last_factor(roots: Sequence[Any]) -> float:
    """What the script has multiplied its only loss by as the last before that goes backward; 1 where it has not. Syncs
    on a GPU where that is a tensor there."""
    factors = [_factor(node) for node in map(_node_of, roots) if node is not None]
    return (factors[0] or 1.0) if len(factors) == 1 else 1.0


def is_plain(roots: Sequence[Any], starts: Sequence[torch.Tensor | None]) -> bool:
    """Nothing in the graph of these losses may have scaled them; the backward pass ``starts`` with these.

    A product with a constant tensor may: that tensor may be a gradient of a scaled loss.
    """
    if not all(map(is_one, starts)) or is_scaled_by_hand(roots):
        return False
    nodes = list(islice(_nodes(roots), FAR))
    is_known = all(_SCALED not in node.metadata and _is_torchs(node) for node in nodes)
    return is_known and not any(map(_has_constant_factor, nodes[:NEAREST]))


def leaves_behind(tensor: torch.Tensor) -> set[int] | None:
    """The leaves that the graph of a tensor leads to, by ``id``, where that is a few ops of torch's, none in half; else
    None."""
    nodes = list(islice(_nodes([tensor]), NEAR + 1))
    dtypes = {getattr(entry, "dtype", None) for node in nodes for entry in node._input_metadata}
    if len(nodes) > NEAR or not dtypes.isdisjoint(HALVES) or not all(map(_is_torchs, nodes)):
        return None
    return {id(node.variable) for node in nodes if node.name().endswith("AccumulateGrad")}


def is_one(gradient: torch.Tensor | None) -> bool:
    """A backward pass starts from the loss as it is: torch fills in a one where nothing is given."""
    return gradient is None or (gradient.numel() == 1 and float(gradient) == 1.0)


def is_scaling(scaler: GradScaler) -> bool:
    """The scaler has a scale that makes a difference. Syncs on a GPU."""
    scale = getattr(scaler, "_scale", None)
    return isinstance(scale, torch.Tensor) and float(scale) >= SCALED_BY_HAND


def _is_torchs(node: Any) -> bool:
    """What the node does is known: a compiled or a user's own function may scale."""
    if isinstance(node, BackwardCFunction):
        return str(getattr(type(node), "_forward_cls", node).__module__).startswith("torch.")
    return not node.name().startswith("CompiledFunction")


def _has_constant_factor(node: Any) -> bool:
    """The node is of a product, number by number, with a tensor of several that needs no gradient."""
    if not node.name().startswith(("MulBackward", "DotBackward")):
        return False
    saved = _saved(node)
    return saved is None or any(value.numel() > 1 and not value.requires_grad for value in saved)


def _saved(node: Any) -> list[torch.Tensor] | None:
    """The tensors that a node has kept; None where an earlier backward pass has freed them."""
    try:
        kept = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    except RuntimeError:
        return None
    return [value for value in kept if isinstance(value, torch.Tensor)]


def _factor(node: Any) -> float:
    """The largest scalar that the node multiplies by; a tensor that is no constant of the loop counts as well."""
    if not node.name().startswith("MulBackward"):
        return 0.0
    scalars = [value for value in _saved(node) or () if value.numel() == 1]
    # To a dispatch mode of the user's torch hands the constant of a product as a number, which has no methods.
    with _disable_current_modes():
        return max((abs(float(value.detach())) for value in scalars), default=0.0)


def _nodes(roots: Iterable[Any]) -> Iterator[Any]:
    """The graph's nodes, the nearest to the roots first."""
    waiting = deque(node for node in map(_node_of, roots) if node is not None)
    seen = set(waiting)
    while waiting:
        node = waiting.popleft()
        yield node
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                waiting.append(other)


def _node_of(root: Any) -> Any:
    return root.grad_fn if isinstance(root, torch.Tensor) else getattr(root, "node", None)
