"""The cost of each module's own lines in a step: shares of the step's FLOPs and half activations."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ampdbg.costs.step import FlopCount
from ampdbg.errors import AmpdbgError
from ampdbg.probes.module_calls import ModulePaths, module_paths, run_eagerly
from ampdbg.probes.op_trace import PlacedOps, RunningOp, placed
from ampdbg.probes.tensors import HALVES, nbytes
from ampdbg.record.pins import OWN, PinCost
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import FailingStep, Snapshot, rewound


@dataclass(frozen=True)
class StepCosts:
    """The FLOPs and the bytes of half activations of each module's own lines in the forward pass."""

    flops: Mapping[str, int]
    activation_bytes: Mapping[str, int]

    def of(self, atoms: Iterable[str]) -> PinCost:
        """Return the share of these atoms: leaf modules, and other modules' own lines (``NAME:own``)."""
        chosen = {atom.removesuffix(OWN) for atom in atoms}
        size = sum(self.activation_bytes.get(name, 0) for name in chosen)
        flops = sum(self.flops.get(name, 0) for name in chosen)
        all_flops, all_bytes = sum(self.flops.values()), sum(self.activation_bytes.values())
        return PinCost(_share(flops, all_flops), _share(size, all_bytes), size)


def step_costs(run: Run, failing: FailingStep) -> StepCosts:
    """Run the step's forward pass twice more, to measure half outputs and to count FLOPs."""
    model, snapshot = run.workload.model, failing.snapshot
    with rewound(model, snapshot), placed(model, _HalfOutputs) as outputs, contextlib.suppress(AmpdbgError):
        _run_forward(run, snapshot)
    return StepCosts(_own_flops(run, snapshot), outputs.sizes)


class _HalfOutputs(PlacedOps):
    """Sums the bytes of half outputs of each module's ops."""

    def __init__(self, model: torch.nn.Module, paths: ModulePaths) -> None:
        super().__init__(model, paths)
        self.sizes: Counter[str] = Counter()

    def after(self, op: RunningOp) -> None:
        self.sizes[op.place.module] += sum(nbytes(one) for one in op.results if one.dtype in HALVES)


def _own_flops(run: Run, snapshot: Snapshot) -> dict[str, int]:
    """Return FLOPs by the module whose own lines run, whichever module calls it; empty if an error is raised."""
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
