"""The Record of one run, and everything it holds: frozen data (no torch).

One run makes one record; every report is made from it alone.
"""

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
"""How the ``error`` of a record begins where no error, but the script itself has ended the run within a step."""

NOT_CAPTURED = "was not captured"
"""What a note of a record says of a step that should have been captured."""

Verdict = Literal["healthy", "precision", "other", "inconclusive"]


SUM = "the sum of its module outputs"
"""The substitute for the loss of a step that has none, in words."""

Reach = Literal["whole", "modules", "none"]
"""How far a step could be replayed: with its own loss, or its modules alone, for whose loss stands the sum of what they
give; or not at all, as steps of version 2 that were traced as they trained."""


def what_of(reach: Reach) -> str:
    """What the loss of a replay is, in words."""
    return SUM if reach == "modules" else "the loss"


OpSite = tuple[Phase, str, int, str, Source | None]
"""Where an op is in a step: its phase, its module, which call of that, its name and its line."""


@dataclass(frozen=True)
class Producer:
    """An op where inf or NaN starts: its inputs are finite and its output is not.

    ``input_largest`` and ``output_largest`` are the largest finite magnitudes, ``fp32_largest`` is what the
    same op on the same line has in the FP32 replay (None when it was not met there), ``call`` says which
    call of the module it was.

    ``is_constant`` says that all it overflows on is one constant, such as a mask; ``divides_by_zero`` that a
    divisor, or the argument of a logarithm or root, holds exact zeros. ``leaf`` is the path of the batch's leaf
    where the op casts values of that leaf and nothing else. ``is_erased`` says that no gradient is another one where it
    makes a finite number instead of inf and NaN, as behind a closed ReLU. ``distance`` is set where the op is not
    infinite but far from FP32: the norm of the difference over that of the FP32 result. ``reaches_gradients`` says that
    the loss is finite, and that gradients are not because of it: an op of the forward pass too, whose NaN the loss
    leaves out and a backward pass takes up. ``is_given`` says that inf or NaN is among what it is given, and that no op
    of the step has made it. Of a cast of a gradient back to half ``made_half`` are the ops of the forward pass that
    have made its tensor half: with them in FP32 there is no such cast.
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
        """Where it is in the step."""
        return self.phase, self.module, self.call, self.op, self.source


@dataclass(frozen=True)
class Replay:
    """One replayed step: forward and backward, without the optimizer.

    ``dtype`` is what autocast lowers to (``float32`` and ``float64``: none, and half tensors that the code
    asks for are that wide too), ``scale`` the loss scale. ``rounded`` says that the weights were
    rounded to the run's dtype first: how far that is from FP32, of several roundings at most, is the noise floor.

    ``loss`` is unscaled; ``grad_norm`` is the norm of all gradients after unscaling. ``gradients`` and
    ``buffers`` name the parameters whose gradient is not finite, and the buffers that this step made so; ``inf`` and
    ``nan`` are how many elements of those gradients are, where they were counted. ``error`` is what the user's code
    raised, if it did. ``pins`` ran in FP32 beside the run's own. ``producers`` are in the order of execution, and only
    there when the replay was traced.

    Against FP32's gradients, where both are finite: ``gradient_distance`` is the norm of the difference over
    that of FP32's, ``lost_energy`` the share of the sum of squares that was flushed to zero, and ``lost``
    names the parameters that lost more than half of theirs, and have more than rounding noise to lose. ``unreached``
    names those that have no gradient at any loss scale, and one in FP32: no distance shows them.
    """

    dtype: str
    scale: float
    loss: float
    grad_norm: float
    gradients: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    producers: tuple[Producer, ...] = ()
    error: str = ""
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
    """The replays of one step. ``why`` says what called for them: the loss, the gradients, or the end of the run.

    ``low`` is the step as it was, ``fp32`` the step in FP32, and ``wide`` in FP64 where FP32 is not finite, else in
    bfloat16. ``at_lower`` are those at ever lower loss scales, up to the first at which every gradient is finite, and
    ``floor`` is FP32 on weights rounded to half: what rounding alone changes. ``loss`` is what the step
    itself had; ``reproduced`` of ``tries`` replays as it was went wrong like it. ``continuation`` has the losses of
    FP32 steps on the same batch from the same state. ``first_far`` is the first op whose result is far from FP32's,
    where the step's is; where that takes other elements than in FP32, as by an index or a mask, it is the ``choice``,
    and ``first_far`` the op whose rounding decides it. ``rounded_angles`` are sines and cosines that are far from
    FP32's, the furthest first, for half spaces their angles too far apart. ``is_of_others`` says that all that this
    process computed was finite, and what it got from another one was not. ``reach`` is how far the step could be
    replayed, and ``why_no_further`` the reason where that is not the whole of it. ``weights_grew`` is how many times as
    large all weights together are in it as when the run began, by their 2-norm. ``batch_largest`` is the largest finite
    magnitude in the batch's numeric leaves, by leaf, and ``batch_index`` where in the leaf it stands. ``rewritten`` are
    the buffers that the script wrote right before the step, outside of its models' calls, each with its largest
    magnitude, where that is beyond FP16.
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
        """Every replay that was made."""
        return tuple(filter(None, (self.low, self.fp32, *self.at_lower, self.floor, self.wide)))

    @property
    def reference(self) -> Replay:
        """The replay in FP32; of a step that was not replayed there one with an error, and NaN for its numbers."""
        return self.fp32 or NOT_RUN

    @property
    def what(self) -> str:
        """What the losses of its replays are, in words."""
        return what_of(self.reach)


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
        """Every step was taken and nothing was found."""
        return self.verdict == "healthy" and not self.error


@dataclass(frozen=True)
class Costs:
    """The levels, FP32 first. ``batch`` is the size of a micro-batch, ``budget`` what larger ones had to fit into."""

    levels: tuple[LevelCost, ...] = ()
    batch: Count | None = None
    budget: Count | None = None
    notes: tuple[str, ...] = ()


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
    needs no gradient. ``dtype`` is "" in records of earlier versions.
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
    """What was seen in one optimizer step.

    ``loss`` is the mean over the accumulated micro-batches of a config, and the sum over the ``passes`` of a script's
    own loop, before scaling; ``losses`` has each by name when the workload returns several. ``scale`` is the loss
    scale during the step, also one that a script multiplies its loss by itself (1 of none), and ``scaler`` numbers the
    loop's scalers from 1; it is 0 where there is none. At the first step of one that has taken the place of another,
    for the same optimizer, ``succeeds`` is the number of that.
    ``grad_norm`` is the 2-norm of all gradients after unscaling and before clipping; inf or NaN when any of them is
    not finite, and None where it was not taken, as of most healthy steps of a long run. ``skipped`` says that an
    optimizer's step was withheld. ``groups_hit`` is how many groups had a non-finite gradient where ``groups`` does not
    list them: only a run's first unhealthy steps do. ``optimizer`` numbers the loop's optimizers, from 0,
    in the order in which they first step; of several that step on the same losses it is the first. ``others`` is how
    many steps of other optimizers lie before it.
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

    @property
    def iteration(self) -> int:
        """Which step of its own optimizer it is, from 0."""
        return self.step - self.others

    @property
    def is_healthy(self) -> bool:
        """Its loss and its gradients are finite."""
        return math.isfinite(self.loss) and not self.found_inf


@dataclass(frozen=True)
class Trend:
    """The largest magnitude of one thing at the steps that were sampled: ``values[i]`` at ``steps[i]``, all above 0.

    ``name`` is the module of an activation, in float16, or the parameter of a gradient, which is without the loss
    scale; "" for the loss scale itself. ``op`` is torch's name of the function that has made the activation, in the
    line ``source``; "" for the output of a module in which no such function was noted.
    """

    kind: Literal["activation", "gradient", "scale"]
    name: str
    steps: tuple[Count, ...]
    values: tuple[Annotated[float, Interval(gt=0, lt=math.inf)], ...]
    op: str = ""
    source: Source | None = None


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
    """A half parameter that the optimizer's updates hardly move: they are too small to change its rounded values.

    ``entries`` of it were looked at; over all windows ``moved`` of them moved. ``lost`` is the share of its way that
    it did not go.
    """

    name: str
    entries: Count
    moved: Count
    lost: float


@dataclass(frozen=True)
class StillParameter:
    """A half parameter under an optimizer whose updates cannot be compared with float32's: of the ``entries`` that were
    looked at and have gradients hardly any have ``moved`` in so many ``steps``."""

    name: str
    kind: str
    entries: Count
    moved: Count
    steps: Count


@dataclass(frozen=True)
class StuckMoment:
    """A second moment in half that is ``times`` as large as in float32, or as small where it is not ``too_large``:
    what decays by ``beta`` rounds back to what it was. The optimizer had taken ``steps`` steps then."""

    parameter: str
    beta: float
    times: float
    is_too_large: bool
    steps: Count


@dataclass(frozen=True)
class KeptAverage:
    """An average of a parameter that the script keeps in half, with ``decay`` of it left by a step: of the ``entries``
    that float32's would have moved in windows of ``steps`` steps in all ``moved`` have moved. ``lost`` is the share of
    that ``way``, a sum of squares, which those make that have not. The decay was ``first_decay`` at first."""

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
    """The updates of the half parameters of one kind, such as norms.

    ``lost`` is the share of the way that float32 masters go which they do not, ``lost_gradient`` and ``lost_decay``
    that in what comes of the gradient and of a decoupled weight decay; None where there is none. ``unmoved`` is the
    mean share of entries that a step leaves where they are, ``descent`` the kind's share in what the loss falls by, to
    first order. Below the learning rate ``freezes_below`` the updates of most entries are too small to move them.
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
    """The dtypes of the parameters of one kind that an ``optimizer`` trains, named by its class and module, and by
    whether its step is that class's.

    They are ``stored`` so, the first op ``computed`` with them gives that, their ``gradients`` come so from a backward
    pass, are ``accumulated`` in that and ``reduced`` in that over processes. ``states`` are the optimizer's, of their
    own shape, ``masters`` copies of them that it steps in their place, ``averages`` those of averaged models. Several
    where parameters differ; none where there is nothing, or that is not known.
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
    """A float32 buffer that was cast to half with its model, in the line ``source``.

    The cast changed a value by ``off`` at most; of a frequency it matters at the model's last position, ``reach``, or
    1,000 where there are more, or nobody says how many. The loop ``is_written`` into it since, as into an average that
    takes a share of ``momentum`` from each batch.
    """

    name: str
    dtype: str
    off: float
    reach: Count = 1000
    is_written: bool = False
    momentum: float | None = None
    source: Source | None = None


@dataclass(frozen=True)
class Updates:
    """The ledger of updates: what windows of ``steps`` steps in all want of half parameters, and what those get.

    They are compared with float32 masters with float32 states, which the same optimizer steps on the same gradients.
    ``lost`` and its like are as of :class:`KindUpdates`, of all parameters together; ``decay`` is what part of the way
    is that of the weight decay, by sums of squares. Of steps that add up the gradients of ``passes`` backward passes,
    ``lost_accumulation`` is how far the sum in half is from that in float32, relative to that. ``frozen`` are the
    parameters that stand still. ``cost`` is the share of what the loss falls by, to first order, that half weights do
    not add, and ``cost_of_still`` that of those that stand still; None where some of the ``half`` parameters are not
    among those ``judged``, beside float32's: ``still`` are those of the others that stand still, whatever float32's do.
    ``stuck`` are second moments far from float32's, and ``times`` is how many times as far as float32's the updates go
    its way. ``averages`` are those that the script keeps in half. ``spoilt`` names those that the update of
    ``spoilt_step`` made infinite or NaN although every gradient and float32's update are finite. ``vanishing_eps`` is
    the optimizer's eps, where it is 0 in float16.
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
class Readiness:
    """The answer to a question: would a step that runs in bfloat16 train in FP16, by a range profile?

    ``trains`` is None where it is open, ``largest`` is the largest magnitude that an op of the forward pass makes,
    ``floor`` and ``ceiling`` bound the loss scales that work. ``pins`` have to run in FP32, as the config takes them:
    without them a replay in FP16 fails, with them it does not.
    """

    trains: bool | None
    largest: float
    floor: float
    ceiling: float
    pins: tuple[str, ...] = ()


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

    def again(self, environment: Environment, capture_step: int = 0) -> str:
        """What starts it again with ampdbg, as a shell takes it, and captures a step; 0 for none."""
        options = {
            "--emulate": environment.emulated,
            f"--capture-step {capture_step}": capture_step > 0,
            "-m": self.is_module,
        }
        typed = [option for option, is_given in options.items() if is_given]
        return " ".join(["ampdbg run", *typed, self.command_line])


@dataclass(frozen=True)
class LeftOut:
    """How many of the steps that went wrong a long run leaves out of its record: all of them, those that were skipped,
    and those whose loss is not finite."""

    unhealthy: Count = 0
    skipped: Count = 0
    lost: Count = 0

    def and_these(self, steps: Iterable[Step]) -> LeftOut:
        """With these steps as well; healthy ones do not count."""
        bad = [step for step in steps if step.skipped or not step.is_healthy]
        skipped, lost = sum(step.skipped for step in bad), sum(not math.isfinite(step.loss) for step in bad)
        return LeftOut(self.unhealthy + len(bad), self.skipped + skipped, self.lost + lost)


@dataclass(frozen=True)
class Record:
    """One run of one command. ``config`` is the resolved config as plain data; ``created`` is UTC, ISO 8601.

    ``steps`` are those that have ended, of all optimizers; of a long run some are left out: ``left_out`` counts those
    of them that were not healthy. ``interrupted`` says that the run was stopped before its last step, ``error`` what
    the workload raised, if that stopped it; ``steps`` has what was seen by then. ``scales_gradients`` says that the
    loss is made of gradients at the loss scale, as of a penalty: then it may be lost at one scale, and not at a lower
    one.
    ``config_folder`` is what the config's paths are relative to, itself relative to where the run was started.
    ``planned_steps`` is how many were asked for; ``groups`` names every parameter group in order.
    ``checks`` test a range profile: its step in bfloat16, in which it was measured; then in FP16 at a loss scale that
    it allows, or in FP32 where it is not finite in bfloat16. A step that runs in bfloat16 is tried in FP16 with ever
    more pins, up to a set that cures it, and has ``readiness``.
    ``asked`` has by whose word which precision was asked for, as ``config.dtype``: bfloat16.
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
        """The findings that are more than information."""
        return tuple(finding for finding in self.findings if finding.severity != "info")

    @property
    def half_weights(self) -> tuple[str, ...]:
        """The half dtypes that weights which an optimizer trains are stored in."""
        return tuple(sorted({name for kind in self.dtypes for name in kind.stored} & HALF_NAMES))

    @property
    def steps_run(self) -> int:
        """How many steps have ended of the optimizer that has stepped the most, as often as the loop has gone round: of
        a long run ``steps`` leaves some out, but never the last."""
        return max((step.iteration + 1 for step in self.steps), default=0)

    @property
    def scaled_steps(self) -> tuple[Step, ...]:
        """The steps whose loss a scaler has scaled; all of them where none has."""
        return tuple(step for step in self.steps if step.scaler) or self.steps

    @property
    def steps_skipped(self) -> int:
        """How many steps were skipped, those that are left out as well."""
        return sum(step.skipped for step in self.steps) + self.left_out.skipped

    @property
    def last_failing_step(self) -> int:
        """The number of the last step that was skipped or lost its loss; 0 of none."""
        return max((one.step for one in self.steps if one.skipped or not math.isfinite(one.loss)), default=0)

    def whose(self, part: Record) -> str:
        """The optimizer of which a part of the record is, to be said behind what that counts; "" of the only one."""
        return f" of optimizer {part.steps[0].optimizer}" if len(self.timelines) > 1 else ""

    @property
    def has_masters(self) -> bool:
        """Float32 copies of half weights were found: those are half on purpose."""
        return any(one.masters for one in self.dtypes)

    @property
    def captures(self) -> tuple[str, ...]:
        """The captures that a script's run has made, as it wrote their paths."""
        return tuple(self.script.captures) if self.script is not None else ()

    @property
    def pin_names(self) -> tuple[str, ...]:
        """Its pins, as the config takes them; a line outside of the modules has no name."""
        return tuple(pin.name for pin in self.pins if pin.source is None)

    @property
    def exit_code(self) -> int:
        """The exit code that a script ended with; 0 of a config."""
        return self.script.exit_code if self.script is not None else 0

    @property
    def rank(self) -> int:
        """That of the process of a script; 0 of a config."""
        return self.script.rank if self.script is not None else 0

    @property
    def ledger(self) -> Updates:
        """The ledger of updates; an empty one where none was kept."""
        return self.updates or Updates(0)

    @property
    def roots(self) -> tuple[RootModel, ...]:
        """The models that the names of its pins begin with, where a script has several."""
        return self.search.roots if self.search is not None else ()

    @property
    def took_no_step(self) -> bool:
        """Every step that ended was skipped: the weights are those of the start."""
        return bool(self.steps) and all(step.skipped for step in self.steps)

    @property
    def timelines(self) -> tuple[Record, ...]:
        """The record once for each optimizer, with the steps of that one and their replays, the one that was skipped
        most first. A replay of a step that never ended is in all of them."""
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
