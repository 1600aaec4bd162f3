"""What the levels of precision cost, side by side, as the record keeps it (no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ampdbg.record.findings import Count, Finding


@dataclass(frozen=True)
class StepMemory:
    """The bytes that one step holds, each piece of memory counted once.

    ``parameters`` has buffers too, ``masters`` are FP32 copies of half weights, ``gradients`` are as the backward pass
    leaves them, ``optimizer`` is its state. Between forward and backward autograd keeps, of one micro-batch, ``casts``,
    which are copies of weights in another dtype, and ``activations``, which is all else.
    """

    parameters: Count
    masters: Count
    gradients: Count
    optimizer: Count
    casts: Count
    activations: Count

    @property
    def total(self) -> int:
        """All of it at once, which a step comes near to at the end of its forward pass."""
        return self.parameters + self.masters + self.gradients + self.optimizer + self.kept

    @property
    def kept(self) -> int:
        """What autograd keeps for the backward pass."""
        return self.casts + self.activations


@dataclass(frozen=True)
class BatchFit:
    """How many ``times`` the config's batch fits into the budget: a power of two, 0 where it does not fit at all.

    ``measured`` are the bytes of activations at 1, 2, 4 … times; ``is_reckoned`` says that what lies beyond was
    reckoned from their growth. ``why`` is what kept the batch from being any larger but the budget.
    """

    times: Count
    measured: tuple[Count, ...] = ()
    is_reckoned: bool = False
    why: str = ""


@dataclass(frozen=True)
class LevelCost:
    """What one level does and takes.

    ``verdict`` and its root ``finding`` are what ``ampdbg scan`` comes to over the ``steps`` that ran, of
    which ``skipped`` were; ``error`` is what stopped it. ``loss`` is the last step's. Where it trains, ``apart`` is how
    far its losses are from FP32's, the median relative difference over the last quarter of the steps, and ``noise`` how
    far FP32 is from itself when it begins with weights rounded to the dtype. ``flops`` are of one micro-batch, forward
    and backward, by dtype. ``seconds`` of a step and its ``peak`` are measured on a GPU alone.
    """

    name: str
    level: str
    dtype: str
    pins: tuple[str, ...] = ()
    verdict: Literal["healthy", "precision", "other", "inconclusive"] = "inconclusive"
    finding: Finding | None = None
    error: str = ""
    steps: Count = 0
    skipped: Count = 0
    loss: float | None = None
    apart: float | None = None
    noise: float | None = None
    memory: StepMemory | None = None
    flops: Mapping[str, Count] = field(default_factory=dict)
    seconds: float | None = None
    peak: Count | None = None
    fit: BatchFit | None = None

    @property
    def trains(self) -> bool:
        """Whether every step came through and nothing was found."""
        return self.verdict == "healthy" and not self.error


@dataclass(frozen=True)
class Costs:
    """The levels, FP32 first. ``batch`` is the size of a micro-batch, ``budget`` what larger ones had to fit into."""

    levels: tuple[LevelCost, ...] = ()
    batch: Count | None = None
    budget: Count | None = None
    notes: tuple[str, ...] = ()
