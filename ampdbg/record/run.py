"""The Record of one run and the frozen dataclasses that it contains (no torch). Each run makes one record, and every
report reads only the record."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from annotated_types import Interval

from ampdbg.formats import HALF_NAMES
from ampdbg.record.findings import Count, Exponent, Finding, Listing, Phase, Source
from ampdbg.record.pins import Handover, Pin, Proof, RootModel, Search, Trial

RECORD_FORMAT = "ampdbg.record"
RECORD_VERSION = 3
READABLE_VERSIONS = (2, 3)

EXITED = "the script ended with exit code"
"""Prefix of a record's ``error`` when the script ended the run within a step without raising an error."""

NOT_CAPTURED = "was not captured"
"""Text of the record's note about a step that ampdbg should have captured and did not."""

Verdict = Literal["healthy", "precision", "other", "inconclusive"]


SUM = "the sum of its module outputs"
"""How messages name the value that replaces the loss when a step has none."""

Reach = Literal["whole", "modules", "none"]
"""How much of a step was replayed: all (``whole``), or its modules, with the sum of their outputs as the loss.
``none`` occurs only for steps of version 2 that were traced as they trained."""


def what_of(reach: Reach) -> str:
    """Return how messages name the loss of a replay."""
    return SUM if reach == "modules" else "the loss"


OpSite = tuple[Phase, str, int, str, Source | None]
"""Location of an op in a step: phase, module, number of the module call, op name and source line."""


@dataclass(frozen=True)
class Producer:
    """An op where inf or NaN starts: its inputs are finite and its output is not.

    Attributes:
        call: which call of the module ran the op.
        input_largest, output_largest: the largest finite magnitudes.
        fp32_largest: the largest magnitude of the same op on the same line in the FP32 replay; None if absent there.
        finite_in_fp32: the same op is finite in the FP32 replay; None if absent there.
        is_constant: every value that overflows comes from one constant, such as a mask.
        divides_by_zero: a divisor, or the argument of a logarithm or root, contains exact zeros.
        leaf: path of the batch leaf, if the op casts only values of that leaf.
        distance: for a finite op that is far from FP32: norm of the difference over the norm of the FP32 result.
        is_erased: a finite number instead of inf and NaN changes no gradient, as after a closed ReLU.
        reaches_gradients: the loss is finite, and gradients are not because of the op. It can be a forward op whose NaN
            is not part of the loss but enters a backward pass.
        is_given: the exception: some inputs are inf or NaN, and no op of the step produced them.
        made_half: for the cast of a gradient to half: the forward ops that made its tensor half, the latest first. If
            one of them runs in FP32, there is no such cast.
    """

    phase: Phase
    module: str
    call: Count
    op: str
    source: Source | None
    dtype: str
    input_largest: float
    output_largest: float
    inf: Count
    nan: Count
    size: Count
    parameter: str = ""
    fp32_largest: float | None = None
    finite_in_fp32: bool | None = None
    is_constant: bool = False
    divides_by_zero: bool = False
    leaf: str | None = None
    distance: float | None = None
    is_erased: bool = False
    reaches_gradients: bool = False
    is_given: bool = False
    made_half: tuple[OpSite, ...] = ()

    @property
    def site(self) -> OpSite:
        return self.phase, self.module, self.call, self.op, self.source


@dataclass(frozen=True)
class Replay:
    """One replayed step: forward and backward, without the optimizer.

    Attributes:
        dtype: the autocast dtype. For ``float32`` and ``float64`` there is no autocast, and explicit half tensors have
            this dtype too.
        scale, loss: the loss scale, and the unscaled loss.
        grad_norm: 2-norm of all gradients after unscaling.
        gradients, buffers: the parameters with non-finite gradients, and the buffers that this step made non-finite.
        producers: the ops where inf or NaN starts, if the replay was traced, in order of execution. Ops that explain a
            NaN loss, and forward ops that reach the gradients, come first.
        error: the error of the user's code, or "".
        refusal: the error that this dtype raised at first. In this replay tensors claimed to be half, and a call that
            takes only half ran in half.
        rounded: the weights were rounded to the run's dtype first. The distance of this replay from FP32 is the noise
            floor (of several roundings the largest distance).
        gradient_distance: norm of the difference from FP32's gradients over their norm, if both are finite.
        lost_energy: share of the sum of squares of FP32's gradients that was flushed to zero.
        lost: the parameters that lost more than half of that sum, if their gradients exceed rounding noise.
        unreached: the parameters whose gradients are zero at every loss scale but not in FP32. No distance covers them.
        inf, nan: how many elements of ``gradients`` are inf and NaN, where they were counted.
        pins: the modules in FP32, besides the run's own pins.
    """

    dtype: str
    scale: float
    loss: float
    grad_norm: float
    gradients: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    producers: tuple[Producer, ...] = ()
    error: str = ""
    refusal: str = ""
    rounded: bool = False
    gradient_distance: float | None = None
    lost_energy: float | None = None
    lost: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    inf: Count = 0
    nan: Count = 0
    pins: tuple[str, ...] = ()


NOT_RUN = Replay("float32", 1.0, math.nan, math.nan, error="the step was not replayed in FP32")


@dataclass(frozen=True)
class Investigation:
    """The replays of one step.

    Attributes:
        why: the reason for the replays: the loss, the gradients, or the end of the run.
        low: the replay of the unchanged step.
        wide: the replay in FP64 if FP32 is not finite, else in bfloat16.
        at_lower: replays at decreasing loss scales, up to the first scale at which every gradient is finite.
        floor: FP32 on weights rounded to half: the effect of rounding alone.
        loss: the loss that the step itself had.
        reproduced, tries: how many replays of the unchanged step failed like the step, and how many there were.
        continuation: the losses of FP32 steps on the same batch from the same state.
        first_far: in a step far from FP32, the first op that is far. With a ``choice``, the op that decides it.
        choice: the op that takes different elements than in FP32, for example by an index or a mask.
        rounded_angles: sines and cosines far from FP32's, because half spaces their angles too far apart; furthest
            first.
        batch_largest, batch_index: the largest finite magnitude of each numeric batch leaf, and its index in the leaf.
        is_of_others: this process computed only finite values, but received values from another process that are not.
        reach, why_no_further: how much of the step was replayed, and the reason if that is not the whole step.
        weights_grew: 2-norm of all weights, divided by the 2-norm when the run began.
        rewritten: buffers that the script wrote right before the step, outside its models' calls. Each has its largest
            magnitude, which is beyond FP16.
    """

    step: Count
    why: Literal["loss", "gradients", "end"]
    low: Replay
    fp32: Replay | None = None
    wide: Replay | None = None
    at_lower: tuple[Replay, ...] = ()
    floor: Replay | None = None
    loss: float = math.nan
    reproduced: Count = 1
    tries: Count = 1
    continuation: tuple[float, ...] = ()
    first_far: Producer | None = None
    choice: Producer | None = None
    rounded_angles: tuple[Producer, ...] = ()
    batch_largest: Mapping[str, float] = field(default_factory=dict)
    batch_index: Mapping[str, tuple[Count, ...]] = field(default_factory=dict)
    is_of_others: bool = False
    reach: Reach = "whole"
    why_no_further: str = ""
    weights_grew: float = 1.0
    rewritten: Mapping[str, float] = field(default_factory=dict)

    @property
    def replays(self) -> tuple[Replay, ...]:
        return tuple(filter(None, (self.low, self.fp32, *self.at_lower, self.floor, self.wide)))

    @property
    def reference(self) -> Replay:
        """The replay in FP32. Without one, a placeholder with an error and NaN for its numbers."""
        return self.fp32 or NOT_RUN

    @property
    def what(self) -> str:
        """How messages name the losses of the replays."""
        return what_of(self.reach)


@dataclass(frozen=True)
class StepMemory:
    """The bytes that one step holds. Memory shared by several tensors counts once.

    ``parameters`` includes buffers, and ``masters`` are FP32 copies of half weights. Autograd keeps ``casts`` (copies
    of weights in another dtype) and ``activations`` (the rest) of one micro-batch for the backward pass.
    """

    parameters: Count
    masters: Count
    gradients: Count
    optimizer: Count
    casts: Count
    activations: Count

    @property
    def total(self) -> int:
        """The sum of all parts, an estimate of the step's use at the end of its forward pass."""
        return self.parameters + self.masters + self.gradients + self.optimizer + self.kept

    @property
    def kept(self) -> int:
        """The memory that autograd keeps for the backward pass."""
        return self.casts + self.activations


@dataclass(frozen=True)
class BatchFit:
    """How often the config's batch fits into the memory budget.

    Attributes:
        times: a power of two; 0 if the batch does not fit at all.
        measured: bytes of activations at 1, 2, 4 … times the batch.
        is_reckoned: larger sizes were not measured but extrapolated from the growth.
        why: the reason, besides the budget, why the batch cannot be larger.
    """

    times: Count
    measured: tuple[Count, ...] = ()
    is_reckoned: bool = False
    why: str = ""


@dataclass(frozen=True)
class LevelCost:
    """The result and the cost of training at one precision level.

    Attributes:
        verdict, finding: the verdict of ``ampdbg scan`` and its root finding.
        steps, skipped: how many steps ran, and how many were skipped.
        loss: the loss of the last step.
        apart: distance of the losses from FP32's: the median relative difference over the last quarter of the steps.
        noise: the same distance for FP32 when it begins with weights rounded to the dtype.
        flops: FLOPs of one micro-batch by dtype, forward and backward.
        seconds, peak: the time of a step and its peak memory in bytes, measured only on a GPU.
    """

    name: str
    level: str
    dtype: str
    pins: tuple[str, ...] = ()
    verdict: Verdict = "inconclusive"
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
        """True if the level finished without an error or a finding."""
        return self.verdict == "healthy" and not self.error


@dataclass(frozen=True)
class Costs:
    """The costs of the levels, FP32 first. ``batch`` is the size of a micro-batch, ``budget`` the memory in bytes
    for larger batches."""

    levels: tuple[LevelCost, ...] = ()
    batch: Count | None = None
    budget: Count | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ParameterCounts:
    """Counts of infinite and NaN elements in one parameter's gradient; ``size`` is the element count. The counts are
    lower bounds if the loop rewrote the gradient on a GPU before ampdbg counted."""

    name: str
    inf: Count
    nan: Count
    size: Count


@dataclass(frozen=True)
class GroupOverflow:
    """A parameter group with a non-finite gradient in one step; ``index`` counts across all optimizers."""

    index: Count
    name: str
    parameters: tuple[ParameterCounts, ...]


@dataclass(frozen=True)
class TensorCounts:
    """A batch leaf, parameter or buffer that holds non-finite values.

    Attributes:
        name: the qualified name, or the path to the batch leaf (``[0]``, ``["input_ids"]``).
        first_index: index of the first non-finite element. In a batch leaf its first number is the sample.
        when: the values were non-finite before the step's forward pass, or only seen after the step.
        frozen: the parameter requires no gradient.
        dtype: "" in records of earlier versions.
    """

    kind: Literal["batch", "parameter", "buffer"]
    name: str
    inf: Count
    nan: Count
    size: Count
    first_index: tuple[Count, ...] = ()
    when: Literal["before", "after"] = "before"
    frozen: bool = False
    dtype: str = ""


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    Attributes:
        loss: the unscaled loss: the mean over a config's micro-batches, or the sum over a script's ``passes``.
        losses: each loss by name, if the workload returns several.
        scale: the loss scale of the step, including one that the script applies itself; 1 without any.
        scaler: number of the loop's scaler, from 1; 0 without a scaler.
        succeeds: at the first step of a scaler that replaces another for the same optimizer, the other's number.
        grad_norm: 2-norm of all gradients after unscaling and before clipping; inf or NaN if any gradient is. None if
            not measured, as in most healthy steps of a long run.
        skipped: an optimizer's step was withheld.
        repaired: gradients were not finite after a backward pass, and finite when the optimizer stepped on them.
        groups_hit: number of groups with non-finite gradients. After a run's first unhealthy steps ``groups`` is empty.
        optimizer: number of the optimizer, from 0, by first step. Of several that step on the same losses, the first.
        others: number of earlier steps that belong to other optimizers.
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
    optimizer: Count = 0
    others: Count = 0
    passes: Annotated[int, Interval(ge=1, lt=2**63)] = 1
    repaired: bool = False

    @property
    def iteration(self) -> int:
        """Index of the step within its own optimizer's steps, from 0."""
        return self.step - self.others

    @property
    def is_healthy(self) -> bool:
        """True if the loss and all gradients are finite, and the script has repaired none."""
        return math.isfinite(self.loss) and not (self.found_inf or self.repaired)


@dataclass(frozen=True)
class Trend:
    """The largest magnitude of an activation or gradient, or the loss scale, over the sampled steps.

    Attributes:
        name: module of a float16 activation, or parameter of a gradient; "" for the loss scale. Gradients are unscaled.
        steps, values: ``values[i]`` was measured at ``steps[i]``; all values are above 0.
        op, source: the torch function that made the activation, and its line. Without a recorded function, "".
    """

    kind: Literal["activation", "gradient", "scale"]
    name: str
    steps: tuple[Count, ...]
    values: tuple[Annotated[float, Interval(gt=0, lt=math.inf)], ...]
    op: str = ""
    source: Source | None = None


@dataclass(frozen=True)
class Environment:
    """Versions and hardware of the run. ``emulated`` means that the run emulated CUDA's autocast on a CPU.

    ``policy`` names the source of autocast's op lists: ``cuda`` or ``native``. It is ``none`` for a watched loop in
    which no examined op ran in half precision.
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
    """A half parameter that hardly moves: the updates are too small to change its rounded values. Of ``entries``
    sampled values, ``moved`` changed in any window. ``lost`` is the share of the float32 movement that it does not
    make."""

    name: str
    entries: Count
    moved: Count
    lost: float


@dataclass(frozen=True)
class StillParameter:
    """A half parameter that hardly moves under an optimizer whose updates cannot be compared with float32's. Of
    ``entries`` sampled values with gradients, ``moved`` have changed in ``steps`` steps."""

    name: str
    kind: str
    entries: Count
    moved: Count
    steps: Count


@dataclass(frozen=True)
class StuckMoment:
    """A second moment in half that cannot decay: multiplication by ``beta`` rounds back to the old value. After
    ``steps`` optimizer steps it is ``times`` as large as in float32, or as small if ``is_too_large`` is False."""

    parameter: str
    beta: float
    times: float
    is_too_large: bool
    steps: Count


@dataclass(frozen=True)
class KeptAverage:
    """An average of a parameter that the script keeps in half.

    Attributes:
        decay, first_decay: the factor that a step applies to the average, and the factor at the beginning.
        steps: number of steps in all windows that were compared with float32.
        entries, moved: sampled values that move in float32, and how many moved in half.
        way: sum of squares of the movement in float32.
        lost: share of the float32 movement that the average did not make.
    """

    name: str
    kind: str
    dtype: str
    decay: float
    steps: Count
    entries: Count
    moved: Count
    lost: float
    way: float = 1.0
    first_decay: float | None = None


@dataclass(frozen=True)
class KindUpdates:
    """The updates of the half parameters of one kind, such as norms, compared with float32 masters.

    Attributes:
        lost: share of the masters' movement that the half parameters do not make; None without any.
        lost_gradient, lost_decay: the same for the parts that come from the gradient and a decoupled weight decay.
        unmoved: mean share of entries that a step does not change.
        descent: the kind's share of the decrease of the loss, to first order.
        freezes_below: learning rate below which most entries do not move, because their updates are too small.
    """

    kind: str
    parameters: Count
    lost: float | None
    lost_gradient: float | None
    lost_decay: float | None
    unmoved: float
    descent: float
    freezes_below: float | None


@dataclass(frozen=True)
class KindDtypes:
    """The dtypes of the parameters of one kind that an ``optimizer`` trains.

    A field has several dtypes if parameters differ, and none if there are none or they are unknown.

    Attributes:
        stored, computed: dtypes of the parameters, and of their values in the first op that uses them.
        gradients, accumulated, reduced: dtypes after a backward pass, after accumulation, and in a reduction of
            processes.
        states: dtypes of the optimizer states that have the parameters' shapes.
        masters: dtypes of the copies that the optimizer steps instead of the parameters.
        averages: dtypes of the parameters in averaged models.
        optimizer: its module and class, with a note if the script replaced the step of that class.
    """

    kind: str
    parameters: Count
    stored: tuple[str, ...]
    gradients: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()
    accumulated: tuple[str, ...] = ()
    masters: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()
    averages: tuple[str, ...] = ()
    optimizer: str = ""


@dataclass(frozen=True)
class CastBuffer:
    """A float32 buffer that the line ``source`` cast to half together with its model.

    Attributes:
        off: largest change of a value by the cast.
        reach: for frequencies, the model's last position: at most 1,000, and 1,000 if unknown.
        is_written: the loop has written into the buffer since.
        momentum: share that a running average takes from each batch.
    """

    name: str
    dtype: str
    off: float
    reach: Count = 1000
    is_written: bool = False
    momentum: float | None = None
    source: Source | None = None


@dataclass(frozen=True)
class HalfCount:
    """A scalar in half to which each write adds the same ``step``; ``value`` is the last one, and ``expected`` the same
    without rounding."""

    name: str
    dtype: str
    step: Annotated[float, Interval(gt=0, lt=1e38)]
    value: float
    expected: float


@dataclass(frozen=True)
class Updates:
    """The ledger of updates: the movement of half parameters, compared with float32 masters.

    The same optimizer steps the masters, with float32 states, on the same gradients. ampdbg samples windows of steps.

    Attributes:
        steps: number of steps in all windows.
        lost, lost_gradient, lost_decay: as in :class:`KindUpdates`, over all parameters together.
        decay: share of weight decay in the sum of squares of the movement.
        lost_accumulation: relative distance of a sum of ``passes`` gradients in half from the float32 sum.
        cost: share of the loss decrease, to first order, that half weights lose; None if ``judged`` is less than
            ``half``.
        cost_of_still: the part of ``cost`` that comes from ``frozen``.
        stuck: second moments that are far from float32's.
        still: parameters that hardly move under optimizers that cannot be compared with float32.
        half, judged: number of half parameters, and how many were compared with float32.
        vanishing_eps: the optimizer's eps, if it is 0 in float16.
        spoilt: the parameters that the update of ``spoilt_step`` made inf or NaN. Every gradient and the float32 update
            are finite.
        times: movement of half parameters in the direction of float32's, as a multiple of float32's.
    """

    steps: Count
    kinds: tuple[KindUpdates, ...] = ()
    lost: float | None = None
    lost_gradient: float | None = None
    lost_decay: float | None = None
    decay: float = 0.0
    lost_accumulation: float | None = None
    passes: Count = 0
    frozen: tuple[FrozenParameter, ...] = ()
    cost: float | None = 0.0
    cost_of_still: float | None = 0.0
    stuck: tuple[StuckMoment, ...] = ()
    still: tuple[StillParameter, ...] = ()
    half: Count = 0
    judged: Count = 0
    averages: tuple[KeptAverage, ...] = ()
    vanishing_eps: float | None = None
    spoilt_step: Count | None = None
    spoilt: tuple[str, ...] = ()
    times: float = 1.0

    @property
    def unjudged(self) -> int:
        """The number of half parameters whose updates were not compared with float32."""
        return max(self.half - self.judged, 0)


@dataclass(frozen=True)
class Site:
    """The tensors of one op on one source line over all its calls in one step, compared with FP16's range.

    They were measured in a format with a wider range, so that no inf hides values. Gradients are at a loss scale of 1.

    Attributes:
        dtype: the dtype of the tensors in the run itself.
        order: rank of the site by first execution.
        calls, call: how often the op ran, and the module call in which ``abs_max`` occurred.
        inf, nan, size: numbers of inf and NaN elements (in the wider format too), and of all elements.
        abs_max: the largest finite magnitude.
        headroom_bits: doublings left before ``abs_max`` overflows; negative if it overflows.
        overflow: the overflow ``starts`` at this op, or an input ``carried`` it here; "" without overflow.
        exponents: the i-th estimates the number of values in [2**(lowest_exponent + i), 2**(lowest_exponent + i + 1)).
        scale_ceiling: for gradients only: the largest power of two that is a loss scale without overflow.
        scale_floor: for gradients only: the smallest that keeps 99 % of the sum of squares.
        is_noise: the gradient consists only of rounding error.
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

    @property
    def ceiling(self) -> float:
        """The highest loss scale without overflow; inf if nothing bounds it."""
        return math.inf if self.scale_ceiling is None else self.scale_ceiling

    @property
    def floor(self) -> float:
        """The lowest loss scale that keeps the gradient; 0 if nothing bounds it, as for noise, which may be lost."""
        return 0.0 if self.scale_floor is None or self.is_noise else self.scale_floor


@dataclass(frozen=True)
class Readiness:
    """The prediction of a range profile: would a step that runs in bfloat16 train in FP16?

    Attributes:
        trains: None if the profile does not decide it.
        largest: the largest magnitude that an op of the forward pass makes.
        floor, ceiling: bounds of the usable loss scales.
        pins: modules that must run in FP32, as the config takes them. An FP16 replay is finite only with these pins.
    """

    trains: bool | None
    largest: float
    floor: float
    ceiling: float
    pins: tuple[str, ...] = ()


@dataclass(frozen=True)
class AutocastError:
    """An exception in the user's code that autocast causes and FP32 would not raise. ``code`` is the code of the
    finding, ``module`` the innermost module that ran."""

    code: str
    step: Count
    message: str
    source: Source | None = None
    module: str = ""


@dataclass(frozen=True)
class Misuse:
    """A call of the training loop in the wrong place: ``count`` times, first at ``step``. ``source`` is the line to
    blame. ``raised`` is the first line of the error, if there was one."""

    code: str
    step: Count
    count: Count = 1
    source: Source | None = None
    raised: str = ""


@dataclass(frozen=True)
class Unseen:
    """The parts of the run that ampdbg could not watch. From step ``since`` on it watched nothing, because ampdbg
    itself had failed. ``unmeasured`` names, in the plural, the tensors without numbers in a range profile."""

    modules_never_called: tuple[str, ...] = ()
    parameters_without_gradient: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    since: Count | None = None
    unmeasured: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScriptRun:
    """A watched script: its name, its arguments and its exit code. ``captures`` are the files with its failing
    steps. ``rank`` is its rank among ``processes`` that train together."""

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    exit_code: int = 0
    captures: tuple[str, ...] = ()
    rank: Count = 0
    processes: Count = 1

    @property
    def command_line(self) -> str:
        """The script and its arguments, quoted for a shell."""
        return shlex.join([self.name, *self.arguments])

    def again(self, environment: Environment, capture_step: int = 0) -> str:
        """Return the shell command that reruns the script with ampdbg and captures a step; 0 captures none."""
        options = {
            "--emulate": environment.emulated,
            f"--capture-step {capture_step}": capture_step > 0,
            "-m": self.is_module,
        }
        typed = [option for option, is_given in options.items() if is_given]
        return " ".join(["ampdbg run", *typed, self.command_line])


@dataclass(frozen=True)
class LeftOut:
    """Counts of unhealthy steps that a long run omits from its record: all, skipped, and with a non-finite loss."""

    unhealthy: Count = 0
    skipped: Count = 0
    lost: Count = 0

    def and_these(self, steps: Iterable[Step]) -> LeftOut:
        """Return the counts with the unhealthy steps of ``steps`` added."""
        bad = [step for step in steps if step.skipped or not step.is_healthy]
        skipped, lost = sum(step.skipped for step in bad), sum(not math.isfinite(step.loss) for step in bad)
        return LeftOut(self.unhealthy + len(bad), self.skipped + skipped, self.lost + lost)


@dataclass(frozen=True)
class Record:
    """One run of one command.

    Attributes:
        created: UTC, ISO 8601.
        config: the resolved config as plain data.
        steps: the completed steps of all optimizers. A long run omits some, and ``left_out`` counts the unhealthy.
        checks: replays that test a range profile. The first is in bfloat16, the format of the measurement. If it is
            finite, the second is in FP16 at an allowed loss scale, else in FP32. A bfloat16 step is replayed in FP16
            with more and more pins, until it is finite.
        asked: the requested precision by its source, as ``config.dtype``: bfloat16.
        listings: the files that sites and findings name. Of a long file only the lines around those.
        groups: the name of every parameter group, in order.
        planned_steps: the requested number of steps.
        scales_gradients: the loss is computed from scaled gradients, as for a gradient penalty. Such a loss can be lost
            at one loss scale and finite at a lower one.
        interrupted: the run was stopped before its last step. ``steps`` has the steps until then.
        error: the error of the workload, if it stopped the run.
        config_folder: the base of the config's paths. The path is relative to the start folder of the run.
    """

    command: str
    created: str
    environment: Environment
    config: Mapping[str, Any]
    verdict: Verdict
    steps: tuple[Step, ...] = ()
    sites: tuple[Site, ...] = ()
    checks: tuple[Replay, ...] = ()
    readiness: Readiness | None = None
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
    dtypes: tuple[KindDtypes, ...] = ()
    asked: Mapping[str, str] = field(default_factory=dict)
    cast_buffers: tuple[CastBuffer, ...] = ()
    half_counts: tuple[HalfCount, ...] = ()
    updates: Updates | None = None
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
    def faults(self) -> tuple[Finding, ...]:
        """The findings that are not only information."""
        return tuple(finding for finding in self.findings if finding.severity != "info")

    @property
    def half_weights(self) -> tuple[str, ...]:
        """The half dtypes in which trained weights are stored."""
        return tuple(sorted({name for kind in self.dtypes for name in kind.stored} & HALF_NAMES))

    @property
    def steps_run(self) -> int:
        """The number of completed steps of the optimizer with the most steps: the iterations of the loop. It
        includes the steps that a long run omits, because ``steps`` always has the last one."""
        return max((step.iteration + 1 for step in self.steps), default=0)

    @property
    def scaled_steps(self) -> tuple[Step, ...]:
        """The steps with a scaler; all steps if there is none."""
        return tuple(step for step in self.steps if step.scaler) or self.steps

    @property
    def steps_skipped(self) -> int:
        """The number of skipped steps, including omitted steps."""
        return sum(step.skipped for step in self.steps) + self.left_out.skipped

    @property
    def last_failing_step(self) -> int:
        """The number of the last step that is not healthy; 0 if there is none."""
        return max((one.step for one in self.steps if not one.is_healthy), default=0)

    def whose(self, part: Record) -> str:
        """Return the suffix that names the optimizer of ``part``; "" if the record has only one optimizer."""
        return f" of optimizer {part.steps[0].optimizer}" if len(self.timelines) > 1 else ""

    @property
    def has_masters(self) -> bool:
        """True if float32 copies of half weights were found, so that half weights are intended."""
        return any(one.masters for one in self.dtypes)

    @property
    def captures(self) -> tuple[str, ...]:
        """The capture files of a script's run, with the paths as the run wrote them."""
        return tuple(self.script.captures) if self.script is not None else ()

    @property
    def pin_names(self) -> tuple[str, ...]:
        """The pins as the config takes them. Pinned lines outside modules have no name."""
        return tuple(pin.name for pin in self.pins if pin.source is None)

    @property
    def exit_code(self) -> int:
        """The exit code of the script; 0 for a config."""
        return self.script.exit_code if self.script is not None else 0

    @property
    def rank(self) -> int:
        """The rank of the script's process; 0 for a config."""
        return self.script.rank if self.script is not None else 0

    @property
    def ledger(self) -> Updates:
        """The ledger of updates; an empty one if none was kept."""
        return self.updates or Updates(0)

    @property
    def roots(self) -> tuple[RootModel, ...]:
        """The models that prefix the names of the pins, if a script has several models."""
        return self.search.roots if self.search is not None else ()

    @property
    def took_no_step(self) -> bool:
        """True if every completed step was skipped, so that the weights never changed."""
        return bool(self.steps) and all(step.skipped for step in self.steps)

    @property
    def timelines(self) -> tuple[Record, ...]:
        """One record for each optimizer with only its steps and their replays, most skipped steps first. Each
        contains the replays of a step that never ended."""
        rows: dict[int, list[Step]] = {}
        for step in self.steps:
            rows.setdefault(step.optimizer, []).append(step)
        owner = {step.step: step.optimizer for step in self.steps}
        apart = [
            replace(
                self,
                steps=tuple(steps),
                investigations=tuple(
                    made for made in self.investigations if owner.get(made.step, optimizer) == optimizer
                ),
            )
            for optimizer, steps in rows.items()
        ]
        return tuple(sorted(apart, key=lambda one: -sum(step.skipped for step in one.steps))) or (self,)
