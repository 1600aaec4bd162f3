"""The Record of one run, and everything it holds: frozen data (no torch).

One run makes one record; every report is made from it alone.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval

from ampdbg.record.cost import Costs
from ampdbg.record.findings import Count, Exponent, Finding, Listing, Phase, Source
from ampdbg.record.pins import Handover, Pin, Proof, Search, Trial
from ampdbg.record.replays import Investigation, Replay

RECORD_FORMAT = "ampdbg.record"
RECORD_VERSION = 2
READABLE_VERSIONS = (1, 2)

EXITED = "the script ended with exit code"
"""How the ``error`` of a record begins where no error, but the script itself has ended the run within a step."""

NOT_CAPTURED = "was not captured"
"""What a note of a record says of a step that should have been captured."""

Verdict = Literal["healthy", "precision", "other", "inconclusive"]


@dataclass(frozen=True)
class ParameterCounts:
    """How many elements of one parameter's gradient are infinite and NaN; ``size`` is the element count.

    Where the loop has rewritten the gradient on a GPU before it was counted, there were at least so many.
    """

    name: str
    inf: Count
    nan: Count
    size: Count


@dataclass(frozen=True)
class GroupOverflow:
    """A parameter group with a non-finite gradient in one step; ``index`` counts over all optimizers."""

    index: Count
    name: str
    parameters: tuple[ParameterCounts, ...]


@dataclass(frozen=True)
class TensorCounts:
    """A batch leaf, parameter or buffer that holds non-finite values.

    ``name`` is a qualified name, or for a batch the path to the leaf (``[0]``, ``["input_ids"]``).
    ``first_index`` is the index of the first such element; for a batch leaf its first number is the sample.
    ``when`` says whether it was so before the step's forward pass, or seen only after the step. A ``frozen`` parameter
    needs no gradient.
    """

    kind: Literal["batch", "parameter", "buffer"]
    name: str
    inf: Count
    nan: Count
    size: Count
    first_index: tuple[Count, ...] = ()
    when: Literal["before", "after"] = "before"
    frozen: bool = False


@dataclass(frozen=True)
class Step:
    """What was seen in one optimizer step.

    ``loss`` is the mean over the accumulated micro-batches, before scaling; ``losses`` has each by name
    when the workload returns several. ``scale`` is the loss scale during the step (1 without a scaler),
    and ``scaler`` tells the loop's scalers apart: numbers from 1, and 0 where it has none. At the first step of one
    that has taken the place of another, for the same optimizer, ``succeeds`` is the number of that.
    ``grad_norm`` is the 2-norm of all gradients after unscaling and before clipping; inf or NaN when any of them is
    not finite, and None where it was not taken, as of most healthy steps of a long run. ``skipped`` says that an
    optimizer's step was withheld. ``groups_hit`` is how many groups had a non-finite gradient where ``groups`` does not
    list them: only a run's first unhealthy steps do.
    """

    step: Count
    loss: float
    scale: float
    found_inf: bool
    skipped: bool
    grad_norm: float | None = None
    groups: tuple[GroupOverflow, ...] = ()
    nonfinite: tuple[TensorCounts, ...] = ()
    losses: Mapping[str, float] = field(default_factory=dict)
    groups_hit: Count = 0
    scaler: Count = 0
    succeeds: Count = 0


@dataclass(frozen=True)
class Trend:
    """The largest magnitude of one thing at the steps that were sampled: ``values[i]`` at ``steps[i]``, all above 0.

    ``name`` is the module of an activation, which is its output in float16, or the parameter of a gradient, which is
    without the loss scale; "" for the loss scale itself.
    """

    kind: Literal["activation", "gradient", "scale"]
    name: str
    steps: tuple[Count, ...]
    values: tuple[Annotated[float, Interval(gt=0, lt=math.inf)], ...]


@dataclass(frozen=True)
class Environment:
    """What the run ran on. ``emulated`` says that CUDA's autocast was emulated on a CPU.

    ``policy`` says whose op lists autocast had: ``cuda`` or ``native``, and ``none`` where nothing that was looked at
    of a watched loop ran in half precision.
    """

    ampdbg: str
    python: str
    torch: str
    platform: str
    device: str
    device_name: str
    policy: str
    emulated: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FrozenParameter:
    """A bfloat16 parameter that the optimizer's updates hardly move: they are too small to change its rounded values.

    In ``still`` of the compared steps no entry changed; ``unmoved`` is the mean share of the entries that did not.
    """

    name: str
    still: Count
    unmoved: float


@dataclass(frozen=True)
class HalfUpdates:
    """The updates of half parameters, each held against the same optimizer step on float32 copies.

    ``steps`` is how many were. ``lost_energy`` is the share of the sum of squares of float32's updates that fell
    on weights which did not change at all; ``lost_gradient`` and ``lost_decay`` are its shares in what comes of the
    gradient and of a decoupled weight decay. ``lost`` names the float16 parameters that lost more than half of theirs.
    ``frozen`` are the bfloat16 parameters that did.
    ``spoilt`` names those that the update of ``spoilt_step`` made infinite or NaN although every gradient and
    float32's update are finite. ``vanishing_eps`` is the optimizer's eps, where it is 0 in float16.
    """

    steps: Count
    lost_energy: float | None = None
    lost_gradient: float | None = None
    lost_decay: float | None = None
    lost: tuple[str, ...] = ()
    frozen: tuple[FrozenParameter, ...] = ()
    vanishing_eps: float | None = None
    spoilt_step: Count | None = None
    spoilt: tuple[str, ...] = ()


@dataclass(frozen=True)
class Site:
    """One line's tensors of one op, over all its calls in one step: how near they come to what FP16 can hold.

    ``dtype`` is what the policy gives them. They were measured in a format of wider range, so that nothing
    is hidden behind an inf, and gradients at a loss scale of 1. ``order`` counts sites by their first
    execution; ``calls`` is how often the op ran, ``call`` the call of the module in which ``abs_max``, the
    largest finite magnitude, was met. ``inf`` and ``nan`` are elements out of ``size`` that no format holds.

    ``headroom_bits`` is negative where ``abs_max`` overflows; ``overflow`` then says whether it ``starts``
    here or was ``carried`` here by an input. ``exponents[i]`` is about how many values lie in
    [2**(lowest_exponent + i), 2**(lowest_exponent + i + 1)). For gradients, and for nothing else that the backward
    pass computes, ``scale_ceiling`` is the largest power of two as a loss scale that does not overflow,
    ``scale_floor`` the smallest that keeps 99 % of the sum of squares; ``is_noise`` marks a gradient that is nothing
    but rounding error.
    """

    phase: Phase
    module: str
    op: str
    source: Source | None
    dtype: str
    order: Count
    calls: Count
    call: Count
    size: Count
    inf: Count
    nan: Count
    abs_max: float
    headroom_bits: float
    overflow: Literal["", "starts", "carried"] = ""
    lowest_exponent: Exponent = 0
    exponents: tuple[Count, ...] = ()
    scale_ceiling: float | None = None
    scale_floor: float | None = None
    is_noise: bool = False


@dataclass(frozen=True)
class AutocastError:
    """An exception of the user's code that autocast causes and FP32 would not raise; ``code`` is a finding's.

    ``module`` is the innermost that ran.
    """

    code: str
    step: Count
    message: str
    source: Source | None = None
    module: str = ""


@dataclass(frozen=True)
class Misuse:
    """A call of the training loop in the wrong place: ``count`` times, first at ``step``.

    ``source`` is the line to blame. ``raised`` is the first line of the error, where there was one.
    """

    code: str
    step: Count
    count: Count = 1
    source: Source | None = None
    raised: str = ""


@dataclass(frozen=True)
class Unseen:
    """What could not be watched; from step ``since`` on nothing, as ampdbg itself had failed.

    ``unmeasured`` names, in the plural, what a range profile has no numbers of.
    """

    modules_never_called: tuple[str, ...] = ()
    parameters_without_gradient: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    since: Count | None = None
    unmeasured: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScriptRun:
    """A script that was watched: what was started, with which arguments, and the exit code that it ended with.

    ``captures`` are the files that its failing steps were written to. Of ``processes`` that train together this one
    is of rank ``rank``.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    exit_code: int = 0
    captures: tuple[str, ...] = ()
    rank: Count = 0
    processes: Count = 1

    @property
    def command_line(self) -> str:
        """What was started, as a shell takes it."""
        return shlex.join([self.name, *self.arguments])

    def again(self, environment: Environment) -> str:
        """What starts it again with ampdbg, as a shell takes it."""
        options = [*["--emulate"] * environment.emulated, *["-m"] * self.is_module]
        return " ".join(["ampdbg run", *options, self.command_line])


@dataclass(frozen=True)
class LeftOut:
    """How many of the steps that went wrong a long run leaves out of its record: all of them, those that were skipped,
    and those whose loss is not finite."""

    unhealthy: Count = 0
    skipped: Count = 0
    lost: Count = 0

    def and_these(self, steps: Iterable[Step]) -> LeftOut:
        """With these steps as well; healthy ones do not count."""
        bad = [step for step in steps if step.found_inf or step.skipped or not math.isfinite(step.loss)]
        skipped, lost = sum(step.skipped for step in bad), sum(not math.isfinite(step.loss) for step in bad)
        return LeftOut(self.unhealthy + len(bad), self.skipped + skipped, self.lost + lost)


@dataclass(frozen=True)
class Record:
    """One run of one command. ``config`` is the resolved config as plain data; ``created`` is UTC, ISO 8601.

    ``steps`` are those that have ended; of a long run some are left out: ``steps_run`` counts all, and ``left_out``
    those of them that were not healthy.
    ``interrupted`` says that the run was stopped before its last step, ``error`` what the workload raised, if that
    stopped it; ``steps`` has what was seen by then. ``scales_gradients`` says that the loss is made of gradients at the
    loss scale, as of a penalty: then it may be lost at one scale, and not at a lower one.
    ``config_folder`` is what the config's paths are relative to, itself relative to where the run was started.
    ``planned_steps`` is how many were asked for; ``groups`` names every parameter group in order.
    ``checks`` are what a range profile is held against: its step in bfloat16, in which it was measured; then in FP16 at
    a loss scale that it allows, or in FP32 where it is not finite in bfloat16.
    ``listings`` are the files that sites and findings name, or of long ones the lines around those.
    """

    command: str
    created: str
    environment: Environment
    config: Mapping[str, Any]
    verdict: Verdict
    steps: tuple[Step, ...] = ()
    sites: tuple[Site, ...] = ()
    checks: tuple[Replay, ...] = ()
    findings: tuple[Finding, ...] = ()
    pins: tuple[Pin, ...] = ()
    trials: tuple[Trial, ...] = ()
    search: Search | None = None
    handover: Handover | None = None
    verification: Proof | None = None
    costs: Costs | None = None
    unseen: Unseen = field(default_factory=Unseen)
    autocast_error: AutocastError | None = None
    investigations: tuple[Investigation, ...] = ()
    misuses: tuple[Misuse, ...] = ()
    half_updates: HalfUpdates | None = None
    trends: tuple[Trend, ...] = ()
    script: ScriptRun | None = None
    listings: tuple[Listing, ...] = ()
    groups: tuple[str, ...] = ()
    planned_steps: Count = 0
    left_out: LeftOut = LeftOut()
    scales_gradients: bool = False
    interrupted: bool = False
    error: str = ""
    elapsed: Annotated[float, Interval(ge=0, le=1e12)] = 0.0
    config_folder: str = ""
    format: str = RECORD_FORMAT
    version: int = RECORD_VERSION

    @property
    def steps_run(self) -> int:
        """How many steps have ended: of a long run ``steps`` leaves some out, but never the last."""
        return self.steps[-1].step + 1 if self.steps else 0

    @property
    def steps_skipped(self) -> int:
        """How many steps were skipped, those that are left out as well."""
        return sum(step.skipped for step in self.steps) + self.left_out.skipped

    @property
    def took_no_step(self) -> bool:
        """Whether steps ended, and every one of them was skipped: the weights are those of the start."""
        return 0 < self.steps_run == self.steps_skipped
