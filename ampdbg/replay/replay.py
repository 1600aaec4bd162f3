"""Replays: one step run under another precision or loss scale, or as the bfloat16 shadow, with all state restored."""

from __future__ import annotations

import contextlib
import functools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ampdbg.environment import FUSED_ATTENTION_NOTE
from ampdbg.errors import AmpdbgError, UserCodeError, first_line, text_of
from ampdbg.precision.modes import DTYPES, clip
from ampdbg.precision.widening import LIFTS, HalfClaims, Wider, altered, lifted, rounded, spread, widen, widened
from ampdbg.probes.draws import same_random_numbers
from ampdbg.probes.garbage import uncollected
from ampdbg.probes.module_calls import ModulePaths, compiled_notes, module_paths
from ampdbg.probes.op_trace import OpKey, OpTrace, placed
from ampdbg.probes.producer_trace import ProducerTrace, Sampled, SampleTrace
from ampdbg.probes.seams import Seam, applications_replaced, attached, replaced
from ampdbg.probes.shadow_trace import WIDENED_NOTE, RangeSeen, ShadowTrace, bfloat16_for_float16
from ampdbg.probes.step_hooks import step_of_class
from ampdbg.probes.tensors import float_values, is_finite, magnitude_of, nonfinite, stored, to_host, together
from ampdbg.record.run import Replay, Unseen
from ampdbg.replay.copies import altered_batch, duplicate
from ampdbg.replay.run import Run, loss_of, run_pass
from ampdbg.replay.snapshot import Snapshot, rewound
from ampdbg.replay.state import are_held_whole, held_by, tensors_in

TraceKind = Callable[[torch.nn.Module, ModulePaths], OpTrace]


HALF_A_UNIT = 2.0**-25
"""An update that is a smaller share of a float32 weight does not change the weight."""


@dataclass(frozen=True)
class Manner:
    """How a step is replayed.

    ``dtype`` is the autocast dtype; ``float32`` and ``float64`` run without autocast. If ``is_lifted``, half tensors
    that the code or the model itself requests are that wide too; otherwise everything is as in the run. ``rounds_to``
    is a dtype to which weights are rounded first. With a ``draw`` they are moved at random by as much instead. Buffers
    and the batch are not rounded, because autocast rounds them only where an op of its list reads them.
    """

    dtype: str
    scale: float = 1.0
    is_lifted: bool = True
    rounds_to: str = ""
    draw: int = 0

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the parameter that the replay starts with."""
        if not self.rounds_to:
            return weight
        dtype = DTYPES[self.rounds_to]
        return spread(weight, dtype, self.draw) if self.draw else rounded(weight, dtype)

    @property
    def wider(self) -> Wider | None:
        """How half tensors are widened; None if they are not."""
        return LIFTS.get(self.dtype) if self.is_lifted else None

    def altered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that replaces a tensor of the model or the batch."""
        return tensor if self.wider is None else widened(tensor, self.wider)


WIDE = ("float32", "float64")
"""The dtypes of replays without autocast."""

FP32 = Manner("float32")
"""The reference replay."""


@dataclass(frozen=True)
class Replayed:
    """A replay with data too large for the record: its trace, and a copy of its unscaled gradients by name.

    ``idle`` names parameters that their gradients could not change, for a replay in FP32. Such a gradient may be lost
    without harm. ``seconds`` is the time of the forward and backward pass, without the restoring of state.
    """

    replay: Replay
    trace: OpTrace | None = None
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    seconds: float = 0.0
    idle: frozenset[str] = frozenset()

    @property
    def overflows(self) -> bool:
        """True if an op in the trace makes inf or NaN of finite values."""
        return self.trace is not None and any(seen.produces for seen in self.trace.ops)

    @property
    def angular(self) -> Mapping[OpKey, str]:
        """The sines and cosines in the trace whose angles may be rounded, each with the half format."""
        return self.trace.angular if isinstance(self.trace, ProducerTrace) else {}

    @property
    def sampled(self) -> Sequence[Sampled]:
        """The samples of every op; none if the code raised, or if there is another trace."""
        return self.trace.sampled if isinstance(self.trace, SampleTrace) else ()


def replay_step(
    run: Run,
    snapshot: Snapshot,
    manner: Manner,
    *,
    traced: TraceKind | None = None,
    keep_gradients: bool = False,
    stops_at_loss: bool = False,
) -> Replayed:
    """Replay the forward and backward pass of a step.

    Args:
        run: the workload; it must still have the weights of the step.
        snapshot: the step.
        manner: its precision and loss scale.
        traced: the kind of trace that records every op.
        keep_gradients: return a copy of the gradients, in float32 and unscaled.
        stops_at_loss: run no backward pass after a loss that is not finite.

    Returns:
        The replay. An error of the user's code is stored in it and not raised: code that works in FP16 may name a dtype
        and fail in another. Code that refuses a wider dtype runs in it a second time, with :class:`HalfClaims`.
    """
    replayed = functools.partial(_replayed, run, snapshot, manner, traced, keep_gradients, stops_at_loss)
    made = replayed()
    is_refused = bool(made.replay.error) and "OutOfMemoryError" not in made.replay.error
    if is_refused and manner.dtype in WIDE and manner.is_lifted:
        again = replayed(HalfClaims(run.mode.dtype, getattr(torch, manner.dtype)))
        if not again.replay.error:
            return replace(again, replay=replace(again.replay, refusal=made.replay.error))
    return made


def _replayed(
    run: Run,
    snapshot: Snapshot,
    manner: Manner,
    traced: TraceKind | None,
    keep_gradients: bool,
    stops_at_loss: bool,
    claims: HalfClaims | None = None,
) -> Replayed:
    model = run.workload.model
    weights = altered(model.parameters(), manner.rounded)
    # The step showed its warnings when it ran. Python would show them once more for a repeated call.
    unshown = replaced(warnings, "showwarning", lambda shown: lambda *given, **named: None)
    with (
        unshown,
        uncollected(),
        rewound(model, snapshot),
        weights,
        altered(_tensors_of(model, snapshot), manner.altered),
    ):
        with placed(model, traced) if traced else contextlib.nullcontext() as trace:
            _wait(run.device)
            started = time.perf_counter()
            loss, error = _try(run, snapshot, manner, stops_at_loss=stops_at_loss, claims=claims)
            _wait(run.device)
            seconds = time.perf_counter() - started
        if error:
            failed = Replay(manner.dtype, manner.scale, math.nan, math.nan, error=error)
            return Replayed(failed, trace, seconds=seconds)
        found = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        is_whole = math.isfinite(loss) or not stops_at_loss
        before, spoilt = snapshot.state.buffers, nonfinite(model.named_buffers())
        replay = replace(
            _replay(manner, loss, found, is_whole=is_whole),
            buffers=tuple(name for name, _ in spoilt if name in before and is_finite(before[name])),
            rounded=bool(manner.rounds_to),
        )
        gradients = {name: _unscaled(one, manner.scale) for name, one in found.items()} if keep_gradients else {}
        idle = frozenset(_idle(run, gradients)) if manner == FP32 else frozenset()
        return Replayed(replay, trace, gradients, seconds, idle)


def _tensors_of(model: torch.nn.Module, snapshot: Snapshot) -> list[torch.Tensor]:
    """Return the tensors of the model and of modules called beside it, such as a frozen reference, each once."""
    called = [one for one in snapshot.beside if isinstance(one, torch.nn.Module)]
    return list({id(one): one for module in (model, *called) for one in tensors_in(module)}.values())


def _replay(manner: Manner, loss: float, gradients: Mapping[str, torch.Tensor], *, is_whole: bool = True) -> Replay:
    """Return the result of a pass; not ``is_whole`` if no backward pass ran."""
    return Replay(
        dtype=manner.dtype,
        scale=manner.scale,
        loss=loss,
        grad_norm=_unscaled_norm(gradients.values(), manner.scale) if is_whole else math.nan,
        gradients=tuple(name for name, _ in nonfinite(gradients.items())),
    )


def counted(replay: Replay, gradients: Mapping[str, torch.Tensor]) -> Replay:
    """Return the replay with the counts of inf and NaN in its gradients. A GPU syncs for each gradient that has any."""
    counts = together(magnitude_of(gradients[name]) for name in replay.gradients if name in gradients)
    return replace(replay, inf=counts.inf, nan=counts.nan)


def _idle(run: Run, gradients: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Yield the parameters with an update that is below FP32's rounding, given the optimizer's ``eps``."""
    names = {parameter: name for name, parameter in run.workload.model.named_parameters()}
    groups = [group for optimizer in run.workload.optimizers for group in optimizer.param_groups]
    held = [(names.get(parameter, ""), parameter.detach(), group) for group in groups for parameter in group["params"]]
    moved = [one for one in held if one[0] in gradients and one[1].numel()]
    largest = iter(
        to_host([part.abs().max() for name, weight, _ in moved for part in (gradients[name], stored(weight))])
    )
    for name, _, group in moved:
        gradient, weight, eps = next(largest), next(largest), group.get("eps")
        eps = eps if isinstance(eps, (int, float)) else 0.0  # Adafactor has a pair with another meaning
        rate = float(group.get("lr") or group.get("initial_lr") or 1.0)
        if rate * (gradient / (gradient + eps) if eps else gradient) < HALF_A_UNIT * weight:
            yield name


def continued_in_fp32(run: Run, snapshot: Snapshot, steps: int) -> tuple[float, ...]:
    """Return the losses of FP32 steps on the batch of ``snapshot`` from the current weights, ``steps`` at most.
    Gradients are clipped as in the run.

    Weights, optimizer state, buffers and random state are restored. The steps end early at a loss that is not finite or
    an error of the user's code.
    """
    if not are_held_whole(run.workload.optimizers):
        return ()
    with rewound(run.workload.model, snapshot):
        held = held_by(run.workload.optimizers)
        try:
            for tensor in (*tensors_in(run.workload.model), *held.tensors):
                if tensor.is_leaf:
                    widen(tensor, LIFTS["float32"])
            return tuple(_fp32_losses(run, snapshot, steps))
        finally:
            held.restore()


def _fp32_losses(run: Run, snapshot: Snapshot, steps: int) -> Iterator[float]:
    for _ in range(steps):
        run.workload.clear_gradients()
        loss, error = _try(run, replace(snapshot, batches=duplicate(snapshot.batches)), FP32)
        if error:
            return
        yield loss
        if not math.isfinite(loss):
            return
        try:
            with run.workload.user.running("the optimizer's step"):
                clip(run.workload.optimizers, run.config.train.clip_grad_norm)
                for optimizer in run.workload.optimizers:
                    step_of_class(optimizer)
        except AmpdbgError:
            return


def _try(
    run: Run,
    snapshot: Snapshot,
    manner: Manner,
    *,
    stops_at_loss: bool = False,
    claims: HalfClaims | None = None,
) -> tuple[float, str]:
    """Return the loss, or the first line of the error that the user's code raised."""
    has_precision_of_run = not manner.is_lifted and manner.dtype == run.mode.format.name
    run.tail.scale = manner.scale
    try:
        with (
            lifted(manner.dtype, claims.in_half if claims is not None else ())
            if manner.is_lifted
            else contextlib.nullcontext(),
            _in_force(claims) if claims is not None else contextlib.nullcontext(),
            same_random_numbers(snapshot.draws, notes=has_precision_of_run, wider=manner.wider),
        ):
            losses = run_pass(
                run.workload,
                [altered_batch(batch, manner.altered) for batch in snapshot.batches],
                run.mode.forward if has_precision_of_run else functools.partial(_lowered, run, manner.dtype),
                scaled=lambda loss: _scaled(loss, manner.scale),
                stops_at=lambda losses: (
                    stops_at_loss and not math.isfinite(sum(loss.item() for loss in losses.values()))
                ),
            )
            return loss_of(losses), ""
    except AmpdbgError as error:
        return math.nan, first_line(error)


@contextlib.contextmanager
def _in_force(claims: HalfClaims) -> Iterator[None]:
    def around(seam: Seam, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with claims if seam == "engine" else contextlib.nullcontext():  # a checkpoint repeats its forward pass there
            return original(*args, **kwargs)

    applied = applications_replaced(lambda apply, function, args, kwargs: claims.run(apply, args, kwargs))
    with applied, attached(around), claims:
        yield


def _scaled(loss: torch.Tensor, scale: float) -> torch.Tensor:
    with _disable_current_modes():  # not an op of the step: another scale does not change the result
        return loss.float() * scale


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _lowered(run: Run, dtype: str) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if dtype in WIDE else run.mode.in_half(dtype)


def _unscaled_norm(gradients: Iterable[torch.Tensor], scale: float) -> float:
    values = map(float_values, gradients)
    squares = to_host([value.detach().double().square().sum() for value in values if value is not None])
    return math.sqrt(sum(squares)) / scale


def _unscaled(gradient: torch.Tensor, scale: float) -> torch.Tensor:
    """Return a dense float32 copy: pairs for complex numbers, this rank's part for a DTensor."""
    gradient = (stored(gradient) if type(gradient) is not torch.Tensor else gradient).detach()
    dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
    values = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return values.float() / scale


@dataclass(frozen=True)
class Shadow:
    """The shadow of a step: every op with an output that would be FP16, forward and backward, in order of execution.
    ``unseen`` says what the step did not reach and how it was analyzed. ``replay`` has its loss and gradients."""

    ranges: tuple[RangeSeen, ...]
    unseen: Unseen
    replay: Replay


def shadow_step(run: Run, snapshot: Snapshot) -> Shadow:
    """Replay the step as the shadow at a loss scale of 1, and change no state.

    The shadow uses the same policy with bfloat16 instead of float16, and measures every op. It costs two to three plain
    steps and shows every place that would overflow in FP16 at once. Its result is a proposal: code that asks for its
    dtype may take another path, so only a replay in FP16 decides.

    Args:
        run: the workload with the weights of the step; its pins stay in force.
        snapshot: the step.

    Raises:
        UserCodeError: the user's code raised.
    """
    model = run.workload.model
    with uncollected(), rewound(model, snapshot), module_paths(model) as paths:
        weights = altered(_tensors_of(model, snapshot), functools.partial(widened, wider=LIFTS["bfloat16"]))
        with weights:
            with bfloat16_for_float16() as transforms, placed(model, ShadowTrace) as trace:
                loss = _run_in_bfloat16(run, snapshot)
                unseen = paths.unseen()
            found = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
            replay = counted(_replay(Manner("bfloat16"), loss, found), found)
    notes = [*compiled_notes(model)]
    if any(seen.op.startswith("aten._scaled_dot_product_") for seen in trace.ranges):
        notes.append(FUSED_ATTENTION_NOTE)
    if transforms.have_run:
        what = " and ".join(transforms.have_run)
        notes.append(WIDENED_NOTE.format(what=f"{what[0].upper()}{what[1:]}"))
    seen = replace(unseen, notes=(*unseen.notes, *notes), unmeasured=tuple(transforms.have_run))
    return Shadow(tuple(trace.ranges), seen, replay)


def _run_in_bfloat16(run: Run, snapshot: Snapshot) -> float:
    run.tail.scale = 1.0
    try:
        return loss_of(run_pass(run.workload, snapshot.batches, functools.partial(_lowered, run, "bfloat16")))
    except UserCodeError as error:
        if "BFloat16" not in text_of(error.__cause__ or error):
            raise
        # A user who never wrote bfloat16 must know where it is from.
        message = f"{error}; ampdbg runs this step in bfloat16, so that overflows do not hide one another"
        raise UserCodeError(message, error.user_traceback) from error.__cause__
