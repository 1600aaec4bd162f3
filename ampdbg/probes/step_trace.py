"""A trace of a step while it trains: producers, each with what its op gives alone in FP32, on the same inputs.

Nothing is run again but single ops, and nothing of the step is changed: it is for loops whose step cannot be replayed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree

from ampdbg.probes.module_calls import ModulePaths
from ampdbg.probes.op_trace import OpSeen, OpTraits
from ampdbg.probes.producer_trace import ProducerTrace
from ampdbg.probes.tensors import HALVES, NOTHING, Magnitude, magnitude_of, together

MOST_OPS = 300_000
"""A step of more ops is traced no further: whatever runs there, such as an evaluation, is not one step."""


class StepTrace(ProducerTrace):
    """Notes every op while the model is in training mode; ``alone`` has the magnitude that a producer's op has in FP32.

    An op that writes into its inputs cannot be run again, and is not in ``alone``.
    """

    def __init__(self, model: torch.nn.Module, paths: ModulePaths) -> None:
        super().__init__(model, paths)
        self.alone: dict[int, Magnitude] = {}
        self._roots = tuple(model.children()) or (model,)
        self._call: tuple[Any, Any, Any] | None = None

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the op; looks at it where it belongs to training."""
        if len(self.ops) >= MOST_OPS or not any(root.training for root in self._roots):
            return op(*args, **(kwargs or {}))
        return super().__torch_dispatch__(op, types, args, kwargs)

    def run(self, op: Any, args: Any, kwargs: Any, written: Sequence[torch.Tensor]) -> Any:
        """Runs the op and keeps what it was given until it has been looked at."""
        self._call = None if written else (op, args, kwargs)
        return super().run(op, args, kwargs, written)

    def after(self, traits: OpTraits, place: Any, parameter: str, before: Any, made: Sequence[torch.Tensor]) -> None:
        """Notes the op, and lets go of what it was given."""
        super().after(traits, place, parameter, before, made)
        self._call = None

    def noted(self, seen: OpSeen, made: Sequence[torch.Tensor]) -> None:
        """Runs a producer's op once more, in FP32."""
        super().noted(seen, made)
        if seen.produces and self._call is not None:
            op, args, kwargs = _pytree.tree_map(_wide, self._call)
            with contextlib.suppress(Exception):  # an op without a kernel for FP32, or of the user's own
                made_alone = _pytree.tree_leaves(op(*args, **kwargs))
                tensors = [leaf for leaf in made_alone if isinstance(leaf, torch.Tensor)]
                self.alone[len(self.ops) - 1] = together(map(magnitude_of, tensors)) if tensors else NOTHING


def _wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in HALVES else value
    return torch.float32 if isinstance(value, torch.dtype) and value in HALVES else value
