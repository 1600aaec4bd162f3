"""What pins cost: the share of a step's FLOPs and of its half activations that leave FP16, and its time."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch.utils.flop_counter import FlopCounterMode

from ampdbg.errors import AmpdbgError
from ampdbg.precision.pins import pin_fp32
from ampdbg.probes.op_trace import OpTrace
from ampdbg.record.pins import OWN, PinCost
from ampdbg.replay.replay import Manner, replay_step
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import FailingStep, Snapshot, rewound

TIMED_STEPS = 3
"""The median of so many steps is the time of one; an untimed one goes before them."""

HALF_BYTES = 2


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
        all_flops, all_bytes = self._totals
        return PinCost(_share(flops, all_flops), _share(size, all_bytes), size)

    @cached_property
    def _totals(self) -> tuple[int, int]:
        return sum(self.flops.values()), sum(self.activation_bytes.values())


def step_costs(run: Run, failing: FailingStep) -> StepCosts:
    """Runs the step twice more: with torch's own FLOP counter, and with a trace of what is half."""
    manner = as_it_was(run, failing)
    trace = replay_step(run, failing.snapshot, manner, traced=OpTrace).trace
    sizes: Counter[str] = Counter()
    for seen in trace.ops if trace else ():
        if seen.place.phase == "forward" and seen.output.dtype == manner.dtype:
            sizes[seen.place.module] += seen.output.size * HALF_BYTES
    return StepCosts(_own_flops(run, failing.snapshot), sizes)


def step_seconds(run: Run, failing: FailingStep, pins: Sequence[str]) -> dict[str, float]:
    """The median time of one forward and backward pass on this machine, in seconds: without pins, with, in FP32."""
    low = as_it_was(run, failing)
    ways = {"float16": ((), low), "pinned": (pins, low), "float32": ((), replace(low, dtype="float32"))}
    return {name: seconds_of(run, failing, given, manner) for name, (given, manner) in ways.items()}


def as_it_was(run: Run, failing: FailingStep) -> Manner:
    """The dtype and the loss scale that the step had in the run."""
    return Manner(run.mode.format.name, failing.scale, is_lifted=False)


def seconds_of(run: Run, failing: FailingStep, pins: Sequence[str], manner: Manner) -> float:
    """The median time of one forward and backward pass, in seconds."""
    with pin_fp32(run.workload.model, pins):
        seconds = [replay_step(run, failing.snapshot, manner).seconds for _ in range(1 + TIMED_STEPS)]
    return round(statistics.median(seconds[1:]), 4)


def _own_flops(run: Run, snapshot: Snapshot) -> dict[str, int]:
    """FLOPs by module without those of its children; none where torch's counter cannot run the model."""
    model = run.workload.model
    counter = FlopCounterMode(display=False)
    try:
        # With gradients: without, the counter's hooks fail on a view of a parameter that goes into a module.
        with rewound(model, snapshot), counter:
            for batch in snapshot.batches:
                with run.mode.forward():
                    run.workload.losses(batch)
    except (AmpdbgError, AssertionError, RuntimeError):
        return {}
    root = type(model).__name__
    every = {
        "" if name == root else name.removeprefix(f"{root}."): sum(by_op.values())
        for name, by_op in counter.get_flop_counts().items()
        if name == root or name.startswith(f"{root}.")
    }
    own = dict(every)
    for name, count in every.items():
        parent = _nearest(name, every)
        if parent is not None:
            own[parent] -= count
    return own


def _nearest(name: str, names: Mapping[str, int]) -> str | None:
    while name:
        name = name.rpartition(".")[0]
        if name in names:
            return name
    return None


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
