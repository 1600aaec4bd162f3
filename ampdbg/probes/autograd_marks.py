"""What autograd tells without a sync: which scaler scaled a loss, which dtypes it went through, who wrote gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils import _pytree

NEAR = 16
"""A scaled loss may be divided or added up before ``backward``: so many nodes are looked at for the scaler."""

FAR = 4000
"""So many nodes are looked at for the dtypes of the forward pass."""

SCALED_BY_HAND = 8.0
"""A loss that is multiplied by at least this has a loss scale of the loop's own."""

_SCALER = "ampdbg.scaler"
_HALVES = (torch.float16, torch.bfloat16)


def mark_scaled(outputs: Any, scaler: int) -> None:
    """Marks what ``scaler.scale`` returned, on its graph: the mark goes when the graph does."""
    for leaf in _pytree.tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            _metadata(leaf.grad_fn)[_SCALER] = scaler


def scaler_of(roots: Sequence[Any]) -> int:
    """The number of the scaler that scaled these losses, or 0."""
    marks = (_metadata(node).get(_SCALER, 0) for node in islice(_nodes(roots), NEAR))
    return next((int(mark) for mark in marks if mark), 0)


def lowered_to(roots: Sequence[Any]) -> tuple[str, ...]:
    """The 16-bit dtypes of the forward pass behind these losses; what parameters are stored in does not count.

    ``compiled`` stands for those inside a compiled function, which its one node does not show.
    """
    found: set[torch.dtype] = set()
    is_compiled = False
    for node in islice(_nodes(roots), FAR):
        is_compiled |= node.name().startswith("CompiledFunction")
        if not node.name().endswith("AccumulateGrad"):
            found.update(entry.dtype for entry in node._input_metadata if entry is not None)
    names = tuple(str(dtype).rpartition(".")[2] for dtype in _HALVES if dtype in found)
    return (*names, "compiled") if is_compiled else names


def is_scaled_by_hand(roots: Sequence[Any]) -> bool:
    """Whether the losses were multiplied by a large constant on the way to ``backward``. Syncs on a GPU."""
    return any(_factor(node) >= SCALED_BY_HAND for node in islice(_nodes(roots), 3))


def _metadata(node: Any) -> dict[Any, Any]:
    """A node's own place for notes; torch's annotation takes it for a method."""
    notes: dict[Any, Any] = node.metadata
    return notes


def _factor(node: Any) -> float:
    """The largest scalar that the node multiplies by; a tensor that is no constant of the loop counts as well."""
    if not node.name().startswith("MulBackward"):
        return 0.0
    try:
        saved = [getattr(node, name, None) for name in ("_saved_other", "_saved_self")]
    except RuntimeError:  # an earlier backward pass has freed them
        return 0.0
    scalars = [value for value in saved if isinstance(value, torch.Tensor) and value.numel() == 1]
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


SAMPLE = 8
"""So many parameters of each optimizer are looked at. What they do not show is not blamed."""

Marks = tuple[tuple[int, int] | None, ...]


class GradientMarks:
    """The state of a sample of one optimizer's gradients when it was last noted."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._parameters = _sample(optimizer)
        self._noted = self.now()

    def now(self) -> Marks:
        """The identity and version of each gradient of the sample; None where there is none."""
        gradients = (parameter.grad for parameter in self._parameters)
        return tuple(None if gradient is None else (id(gradient), gradient._version) for gradient in gradients)

    def note(self) -> None:
        """From here on the gradients are those of now."""
        self._noted = self.now()

    def are_rewritten(self) -> bool:
        """Whether the gradients were cleared, or written by someone, since they were noted."""
        now = self.now()
        return now != self._noted or not any(now)


def _sample(optimizer: torch.optim.Optimizer) -> tuple[torch.Tensor, ...]:
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return tuple(trained[:: max(1, -(-len(trained) // SAMPLE))])
