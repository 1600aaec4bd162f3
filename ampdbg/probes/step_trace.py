"""A trace of a step while it trains: producers, each with what its op gives alone in FP32, on the same inputs.

Nothing is run again but single ops, and nothing of the step is changed: it is for loops whose step cannot be replayed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree

from ampdbg.ops import EXCHANGES
from ampdbg.probes.guard import Guard
from ampdbg.probes.module_calls import ModulePaths
from ampdbg.probes.op_trace import OpPhase, OpPlace, OpSeen, OpTraits, storage_of, tensors_in
from ampdbg.probes.producer_trace import ProducerTrace
from ampdbg.probes.tensors import HALVES, NOTHING, Magnitude, magnitude_of, together

MOST_OPS = 300_000
"""A step of more ops is traced no further: whatever runs there, such as an evaluation, is not one step."""


class StepTrace(ProducerTrace):
    """Notes every op while the model is in training mode; ``alone`` has the magnitude that a producer's op has in FP32,
    and one's that makes NaN of the infinities of others.

    An op that writes into its inputs cannot be run again, and is not in ``alone``; nor is one that is not torch's own,
    which may wait for other processes. What processes exchange is no op of this one.
    """

    def __init__(self, model: torch.nn.Module, paths: ModulePaths) -> None:
        super().__init__(model, paths)
        self.alone: dict[int, Magnitude] = {}
        self._roots = tuple(model.children()) or (model,)
        self._call: tuple[Any, Any, Any] | None = None
        self._received: set[int] = set()
        self._is_of_others = False
        self._bad_phases: set[str] = set()
        self._spoilt: set[int] = set()
        self._reads_spoilt = False
        self._guard = Guard()

    @property
    def failure(self) -> str:
        """Why it has seen the step in part only, if it has: it failed itself, which is no concern of the script."""
        return self._guard.failure

    def is_bad_itself(self, phase: OpPhase) -> bool:
        """Whether an op of this process made inf or NaN in the phase, of what no other process has sent."""
        return phase in self._bad_phases

    def has_spoilt(self, tensor: torch.Tensor) -> bool:
        """Whether the inf or NaN that a tensor holds goes back to an op of the step that has made it of finite
        numbers; copies count."""
        return storage_of(tensor) in self._spoilt

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the op; looks at it where it belongs to training."""
        if self.failure or len(self.ops) >= MOST_OPS or not any(root.training for root in self._roots):
            return op(*args, **(kwargs or {}))
        if op.namespace in EXCHANGES:
            result = op(*args, **(kwargs or {}))
            self._received |= {*map(storage_of, tensors_in((args, result)))} - {0}
            return result
        return super().__torch_dispatch__(op, types, args, kwargs)

    def looked_before(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Looks at an op that is about to run."""
        looked: list[Any] = []
        self._guard.hooked(lambda: looked.append(ProducerTrace.looked_before(self, op, args, kwargs)))
        return looked[0] if looked else None

    def look_behind(self, looked: Any, output: Any) -> None:
        """Looks at what the op has made."""
        self._guard.hooked(super().look_behind, looked, output)

    def run(self, op: Any, args: Any, kwargs: Any, written: Sequence[torch.Tensor]) -> Any:
        """Runs the op and keeps what it was given until it has been looked at."""
        self._call = None if written or op.namespace != "aten" else (op, args, kwargs)
        return super().run(op, args, kwargs, written)

    def before(self, traits: OpTraits, given: Sequence[torch.Tensor], numbers: Sequence[float]) -> Magnitude:
        """The magnitude of all inputs; what an exchange writes into comes later than its op."""
        received = [tensor for tensor in given if storage_of(tensor) in self._received]
        for tensor in received:
            self.known.forget(tensor)
        self._is_of_others = not all(self.known.of(tensor).is_finite for tensor in received)
        self._reads_spoilt = bool(self._spoilt) and any(storage_of(tensor) in self._spoilt for tensor in given)
        return super().before(traits, given, numbers)

    def after(
        self, traits: OpTraits, place: OpPlace, parameter: str, before: Magnitude, made: Sequence[torch.Tensor]
    ) -> None:
        """Notes the op, and lets go of what it was given."""
        super().after(traits, place, parameter, before, made)
        is_bad, storages = not together(map(self.known.of, made)).is_finite, set(map(storage_of, made))
        if is_bad and self._is_of_others:
            self._received |= storages - {0}
        else:
            self._received -= storages
            self._bad_phases |= {place.phase} if is_bad else set()
        if is_bad and (before.is_finite or self._reads_spoilt):
            self._spoilt |= storages - {0}
        else:
            self._spoilt -= storages
        self._call = None

    def noted(self, seen: OpSeen, made: Sequence[torch.Tensor]) -> None:
        """Runs a producer's op once more, in FP32."""
        super().noted(seen, made)
        if (seen.produces or seen.makes_nan) and self._call is not None:
            op, args, kwargs = _pytree.tree_map(_wide, self._call)
            with contextlib.suppress(Exception):  # an op without a kernel for FP32, or of the user's own
                made_alone = _pytree.tree_leaves(op(*args, **kwargs))
                tensors = [leaf for leaf in made_alone if isinstance(leaf, torch.Tensor)]
                self.alone[len(self.ops) - 1] = together(map(magnitude_of, tensors)) if tensors else NOTHING


def _wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in HALVES else value
    return torch.float32 if isinstance(value, torch.dtype) and value in HALVES else value
