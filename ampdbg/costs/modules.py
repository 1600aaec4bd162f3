"""What each module's own lines cost in a step: the share of its FLOPs and of its half activations."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ampdbg.costs.step import FlopCount
from ampdbg.errors import AmpdbgError
from ampdbg.probes.module_calls import ModulePaths, module_paths, run_eagerly
from ampdbg.probes.op_trace import OpPlace, OpTraits, PlacedOps, placed
from ampdbg.probes.tensors import HALVES, nbytes
from ampdbg.record.pins import OWN, PinCost
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import FailingStep, Snapshot, rewound


@dataclass(frozen=True)
class StepCosts:
    """What each module's own lines cost in the forward pass: FLOPs, and bytes of half activations."""

    flops: Mapping[str, int]
    activation_bytes: Mapping[str, int]

    def of(self, atoms: Iterable[str]) -> PinCost:
        """The share that these have: leaf modules, and other modules' own lines (``NAME:own``)."""
        chosen = {atom.removesuffix(OWN) for atom in atoms}
        size = sum(self.activation_bytes.get(name, 0) for name in chosen)
        flops = sum(self.flops.get(name, 0) for name in chosen)
        all_flops, all_bytes = sum(self.flops.values()), sum(self.activation_bytes.values())
        return PinCost(_share(flops, all_flops), _share(size, all_bytes), size)


def step_costs(run: Run, failing: FailingStep) -> StepCosts:
    """Runs the forward pass of the step twice more: with FLOPs counted, and with a look at what is half."""
    model, snapshot = run.workload.model, failing.snapshot
    with rewound(model, snapshot), placed(model, _HalfOutputs) as outputs, contextlib.suppress(AmpdbgError):
        _run_forward(run, snapshot)
    return StepCosts(_own_flops(run, snapshot), outputs.sizes)


class _HalfOutputs(PlacedOps):
    """Adds up the bytes that the ops of each module give in half."""

    def __init__(self, model: torch.nn.Module, paths: ModulePaths) -> None:
        super().__init__(model, paths)
        self.sizes: Counter[str] = Counter()

    def after(
        self, traits: OpTraits, place: OpPlace, parameter: str, before: Any, made: Sequence[torch.Tensor]
    ) -> None:
        half = [one for one in (made[:1] if traits.keeps_the_rest else made) if one.dtype in HALVES]
        self.sizes[place.module] += sum(map(nbytes, half))


def _own_flops(run: Run, snapshot: Snapshot) -> dict[str, int]:
    """FLOPs by the module whose own lines run, which may be called by another than its parent; none where it raises."""
    model = run.workload.model
    try:
        with (
            rewound(model, snapshot),
            run_eagerly(),
            module_paths(model) as paths,
            FlopCount(lambda operand: paths.current[0]) as counter,
        ):
            _run_forward(run, snapshot)
    except (AmpdbgError, AssertionError, RuntimeError):
        return {}
    return dict(counter.flops)


def _run_forward(run: Run, snapshot: Snapshot) -> None:
    for batch in snapshot.batches:
        with run.mode.forward():
            run.workload.losses(batch)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
