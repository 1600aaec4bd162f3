"""Reads a loss's autograd graph: the scaler that scaled the loss, its 16-bit dtypes, and factors of the script's own.

Only graph nodes are inspected, and no tensor is kept. Reading a scalar factor syncs on a GPU.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.amp.grad_scaler import GradScaler
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import _disable_current_modes

from ampdbg.probes.tensors import HALVES, Scalar, scalar_of, tensors_in

NEAREST = 4
"""Search this many nodes for a product of the loss with a constant tensor."""

NEAR = 16
"""Search this many nodes for the scaler: a loop may divide or add up scaled losses before ``backward``."""

FAR = 4000
"""Search this many nodes for the dtypes of the forward pass."""

SCALED_BY_HAND = 8.0
"""A factor of at least this is a loss scale of the loop's own."""

MOVES = re.compile(
    "(ToCopy|T|Transpose|Permute|View|UnsafeView|Expand|Unsqueeze|Squeeze|Slice|Select|Split|Clone|Alias)Backward"
)
"""Matches the names of the nodes of casts and views."""

_SCALED = "ampdbg.scaled"

_have_scaled: set[int] = set()
"""The ``id`` of each scaler that has scaled a loss; while this is empty, no graph is searched for a scaler."""


class Scaled(NamedTuple):
    """A scaler and the loss before it was scaled: a scalar, on the loss's device."""

    by: Any
    loss: Scalar


def mark_scaled(losses: Any, scaled: Any, scaler: Any) -> None:
    """Mark the results of ``scaler.scale`` in the metadata of their graph nodes. The mark lives as long as the graph,
    and every watch can read it."""
    _have_scaled.add(id(scaler))
    for loss, leaf in zip(tensors_in(losses), tensors_in(scaled), strict=False):  # a user's scaler may sum losses
        node = _node_of(leaf)
        if node is not None:
            node.metadata[_SCALED] = Scaled(scaler, scalar_of(loss))


def scaler_marks(roots: Sequence[Any]) -> list[Scaled]:
    """Return the marks of one scaler in the graphs of these losses; an empty list if no scaler has scaled them."""
    if not _have_scaled:
        return []
    for nodes in (filter(None, map(_node_of, roots)), islice(_nodes(roots), NEAR)):  # few loops alter a scaled loss
        marks = [mark for node in nodes if (mark := node.metadata.get(_SCALED)) is not None]
        if marks:
            return [mark for mark in marks if mark.by is marks[0].by]
    return []


def scaler_of(roots: Sequence[Any]) -> Any:
    """Return the scaler that scaled these losses, or None."""
    return next((mark.by for mark in scaler_marks(roots)), None)


def forward_dtypes(roots: Sequence[Any]) -> tuple[tuple[str, ...], dict[int, torch.dtype]]:
    """Return the 16-bit dtypes of these losses' forward pass, and the dtype that each parameter is computed with.

    The storage dtypes of parameters do not count. ``compiled`` means a compiled function, which hides its dtypes in one
    node. The second result maps the ``id`` of a parameter to the output dtype of the first op on it.
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
    """Return the output dtype of the first op on a parameter, past casts and views; None if unknown."""
    node = takers.get(leaf)
    while node is not None and MOVES.match(node.name()):
        node = takers.get(node)
    entries = [] if node is None or node.name().startswith("CompiledFunction") else node._input_metadata
    return next((entry.dtype for entry in entries if entry is not None), None)


def is_scaled_by_hand(roots: Sequence[Any]) -> bool:
    """True if the script multiplied the losses by a large constant before ``backward``. Syncs on a GPU."""
    return any(_factor(node) >= SCALED_BY_HAND for node in islice(_nodes(roots), 3))


def is_loss_scale(factor: float) -> bool:
    """True for a large power of two: such a factor is not a weight of a loss."""
    return factor >= SCALED_BY_HAND and math.frexp(factor)[0] == 0.5


def is_lowered(before: float, after: float) -> bool:
    """True if a loop lowered its loss scale between two passes: by a power of two, unlike two weights of losses."""
    fell = before / after
    mantissa = math.frexp(fell)[0]
    return fell > 1.5 and min(mantissa - 0.5, 1.0 - mantissa) < 1e-6


def last_factor(roots: Sequence[Any]) -> float:
    """Return the factor of the script's last product before ``backward``; 1 without a product, or for several losses.
    Syncs on a GPU if the factor is a tensor there."""
    factors = [_factor(node) for node in map(_node_of, roots) if node is not None]
    return (factors[0] or 1.0) if len(factors) == 1 else 1.0


def is_plain(roots: Sequence[Any], starts: Sequence[torch.Tensor | None]) -> bool:
    """True if nothing in the losses' graph can have scaled them; ``starts`` are the pass's initial gradients.

    A product with a constant tensor can: the tensor may be a gradient of a scaled loss.
    """
    if not all(map(is_one, starts)) or is_scaled_by_hand(roots):
        return False
    nodes = list(islice(_nodes(roots), FAR))
    is_known = all(_SCALED not in node.metadata and _is_torchs(node) for node in nodes)
    return is_known and not any(map(_has_constant_factor, nodes[:NEAREST]))


def leaves_of_small_graph(tensor: torch.Tensor) -> set[int] | None:
    """Return the ``id`` of each leaf in a tensor's graph. None if the graph has more than ``NEAR`` nodes, a half dtype,
    or a function that is not torch's."""
    nodes = list(islice(_nodes([tensor]), NEAR + 1))
    dtypes = {getattr(entry, "dtype", None) for node in nodes for entry in node._input_metadata}
    if len(nodes) > NEAR or not dtypes.isdisjoint(HALVES) or not all(map(_is_torchs, nodes)):
        return None
    return {id(node.variable) for node in nodes if node.name().endswith("AccumulateGrad")}


def leaves_beside(results: Iterable[torch.Tensor], given: Iterable[tuple[str, torch.Tensor]]) -> set[int]:
    """Return the ``id`` of each leaf in the graphs of the results that no ``given`` tensor is, or leads to."""
    taken = [tensor for _, tensor in given]
    nodes = islice(_nodes(results, {tensor.grad_fn for tensor in taken}), FAR)
    return {id(node.variable) for node in nodes if node.name().endswith("AccumulateGrad")} - set(map(id, taken))


def is_one(gradient: torch.Tensor | None) -> bool:
    """True if the initial gradient of a pass is one, which is also torch's default for None."""
    return gradient is None or (gradient.numel() == 1 and float(gradient) == 1.0)


def is_scaling(scaler: GradScaler) -> bool:
    """True if the scaler's scale is at least ``SCALED_BY_HAND``. Syncs on a GPU."""
    scale = getattr(scaler, "_scale", None)
    return isinstance(scale, torch.Tensor) and float(scale) >= SCALED_BY_HAND


def _is_torchs(node: Any) -> bool:
    """True for a node of torch's own; a compiled or user-defined function may scale."""
    if isinstance(node, BackwardCFunction):
        return str(getattr(type(node), "_forward_cls", node).__module__).startswith("torch.")
    return not node.name().startswith("CompiledFunction")


def _has_constant_factor(node: Any) -> bool:
    """True for an elementwise or dot product with a constant of several elements, or if its saved tensors are freed."""
    if not node.name().startswith(("MulBackward", "DotBackward")):
        return False
    saved = _saved(node)
    return saved is None or any(value.numel() > 1 and not value.requires_grad for value in saved)


def _saved(node: Any) -> list[torch.Tensor] | None:
    """Return the tensors that a node has saved; None if an earlier backward pass has freed them."""
    try:
        kept = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    except RuntimeError:
        return None
    return [value for value in kept if isinstance(value, torch.Tensor)]


def _factor(node: Any) -> float:
    """Return the largest scalar factor of a product node, constant or not; 0 for other nodes."""
    if not node.name().startswith("MulBackward"):
        return 0.0
    scalars = [value for value in _saved(node) or () if value.numel() == 1]
    # A user's dispatch mode would get the constant of a product as a number, without tensor methods.
    with _disable_current_modes():
        return max((abs(float(value.detach())) for value in scalars), default=0.0)


def _nodes(roots: Iterable[Any], but: Collection[Any] = ()) -> Iterator[Any]:
    """Yield the graph's nodes, those nearest to the roots first, without the nodes ``but`` and what only they reach."""
    waiting = deque(node for node in map(_node_of, roots) if node is not None and node not in but)
    seen = {*waiting, *but}
    while waiting:
        node = waiting.popleft()
        yield node
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                waiting.append(other)


def _node_of(root: Any) -> Any:
    return root.grad_fn if isinstance(root, torch.Tensor) else getattr(root, "node", None)
