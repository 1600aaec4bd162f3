"""Runs the experiments of a proof, in whatever process it is called, and returns what came out."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ampdbg.agreement import is_finite
from ampdbg.errors import AmpdbgError, WorkloadError
from ampdbg.observer import Observer
from ampdbg.pinning.experiment import health_of
from ampdbg.proof.jobs import Job, Seen, StepUse, Tried, first_line
from ampdbg.proof.overlay import overlaid, prepared_with
from ampdbg.proof.training_runs import reference_runs, trained_with_the_patch
from ampdbg.replay.investigation import PinnedReplays, ScaleRange
from ampdbg.replay.replay import Manner, replay_step
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import FailingStep, further_steps, rewound, weights_of
from ampdbg.workload.losses import call_model

Load = Callable[[Run], Sequence[FailingStep]]
"""The failing steps; called once the workload is built, whose classes a batch may need."""

FURTHER_BATCHES = 3
"""The patch is tried on so many batches besides those of the failing steps."""


def perform(job: Job, load: Load, observer: Observer) -> Seen:
    """Runs the job with its files in the place of those on disk.

    Whatever the user's code or its patched form raises is the ``failure`` of what was seen.

    Raises:
        BrokenPipeError: the observer has gone.
    """
    with overlaid(job.patched.files) as taken:
        try:
            seen = KINDS[job.kind](job, load, observer)
        except BrokenPipeError:
            raise
        except AmpdbgError as error:
            return Seen(failure=first_line(error))
        except Exception as error:  # noqa: BLE001 - a patched model may break what every other model keeps to
            return Seen(failure=f"{type(error).__name__}: {first_line(error)}")
        unused = tuple(path.name for path in job.patched.files if path not in taken)
    return seen.model_copy(update={"unused": unused})


def _patched(job: Job, load: Load, observer: Observer) -> Seen:
    observer.stage("building the workload with the patch")
    with prepared_with(job.patched, job.config) as run:
        steps = _fitting(load(run), run)
        observer.stage("the failing step with the patch")
        tried = tuple(_try(run, *each, job) for each in zip(steps, job.scales, strict=True))
        if not all(one.healthy for one in tried):
            return Seen(tried=tried)
        observer.stage("further batches with the patch")
        with weights_of(run.workload.model, steps[0]):
            further, failure = _further(run, steps[0], tried[0].scale, job)
            use = step_use(run, steps[0])
            raised = raised_in_eval_mode(run, steps[0])
    return Seen(
        tried=tried,
        further=further,
        further_failure=failure,
        eval_failure=raised,
        runs={"patched": trained_with_the_patch(job, tried, observer)},
        uses={"patched": use} if use else {},
    )


def _dropped(job: Job, load: Load, observer: Observer) -> Seen:
    """Ends at the first step that is unhealthy: that one is enough."""
    with prepared_with(job.patched, job.config) as run:
        tried: list[Tried] = []
        for each in zip(_fitting(load(run), run), job.scales, strict=True):
            tried.append(_try(run, *each, job))
            if not tried[-1].healthy:
                break
    return Seen(tried=tuple(tried))


def _reference(job: Job, load: Load, observer: Observer) -> Seen:
    observer.stage("the failing step without the patch")
    with prepared_with(job.patched, job.config) as run:
        steps = _fitting(load(run), run)
        tried = tuple(_try(run, *each, job) for each in zip(steps, job.scales, strict=True))
        with weights_of(run.workload.model, steps[0]):
            ways = {"unpatched": step_use(run, steps[0]), "float32": step_use(run, steps[0], in_fp32=True)}
            raised = raised_in_eval_mode(run, steps[0])
    uses = {name: use for name, use in ways.items() if use is not None}
    return Seen(tried=tried, eval_failure=raised, runs=reference_runs(job, uses, observer), uses=uses)


KINDS: dict[str, Callable[[Job, Load, Observer], Seen]] = {
    "patched": _patched,
    "dropped": _dropped,
    "reference": _reference,
}


def _fitting(steps: Sequence[FailingStep], run: Run) -> Sequence[FailingStep]:
    shapes = [parameter.shape for parameter in run.workload.model.parameters()]
    if any([weight.shape for weight in step.snapshot.weights] != shapes for step in steps):
        raise WorkloadError("the model has other parameters than the failing step")
    return steps


def _try(run: Run, failing: FailingStep, scales: ScaleRange, job: Job) -> Tried:
    """The first of the job's repeats that is unhealthy, else the last."""
    replays = PinnedReplays(run, failing, scales)
    with weights_of(run.workload.model, failing):
        for _ in range(job.repeats):
            tried = _tried(replays, failing, job)
            if not tried.healthy:
                break
    return tried


def _tried(replays: PinnedReplays, failing: FailingStep, job: Job) -> Tried:
    made = replays.with_pins(())
    health = health_of(made, is_silent=job.is_silent)
    low, fp32 = made.replays[:2]
    return Tried(
        step=failing.snapshot.step,
        healthy=health.healthy,
        why=health.why,
        loss=low.loss,
        scale=replays.scale,
        fp32_loss=fp32.loss,
        fp32_grad_norm=fp32.grad_norm,
    )


def _further(run: Run, failing: FailingStep, scale: float, job: Job) -> tuple[tuple[Tried, ...], str]:
    """The step on the batches that come after its own, where FP32 is finite on them; and why there were no more."""
    seen: list[Tried] = []
    try:
        for snapshot in further_steps(run, failing, FURTHER_BATCHES):
            further = replace(failing, snapshot=snapshot, scale=scale)
            replays = PinnedReplays(run, further, job.scales[0])
            if is_finite(replays.fp32.replay):
                seen.append(_tried(replays, further, job))
    except AmpdbgError as error:
        return tuple(seen), first_line(error)
    return tuple(seen), ""


# The forward pass in eval mode: the user's code may take other branches there, and raise in them


def raised_in_eval_mode(run: Run, failing: FailingStep) -> str:
    """What one forward pass in eval mode raises, in a line; "" where it runs.

    It is that of the step's first batch, under the run's autocast and without a graph. Mode, buffers and random state
    are put back; the model must have the step's weights.
    """
    model, user = run.workload.model, run.workload.user
    try:
        with (
            rewound(model, failing.snapshot),
            user.running(type(model).__name__),
            _in_eval_mode(model),
            torch.no_grad(),
            run.mode.forward(),
        ):
            _forward(run, failing.snapshot.batches[0])
    except AmpdbgError as error:
        return str(error).partition("\n")[0]
    return ""


def _forward(run: Run, batch: Any) -> None:
    """The model alone where the loss comes after it: in eval mode its output may be none that the loss takes."""
    if run.config.step is None and run.config.loss is not None:
        call_model(run.workload.model, batch)
    else:
        run.workload.step.call(batch, 0)


@contextlib.contextmanager
def _in_eval_mode(model: torch.nn.Module) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    is_training = model.training
    try:
        model.eval()
        yield
    finally:
        # A method of the user's own may do more than to set the mode, and undo that in the same way.
        model.train(is_training)
        for module, mode in before:
            module.training = mode


# What one step takes on this machine: its time, what it keeps for the backward pass, the GPU's peak memory


TIMED_STEPS = 3
"""The median of so many steps is the time of one; an untimed one goes before them."""

View = tuple[int | torch.SymInt, torch.Size, tuple[int, ...]]
"""The offset, shape and strides by which a tensor looks at its memory."""


def step_use(run: Run, failing: FailingStep, *, in_fp32: bool = False) -> StepUse | None:
    """Measures the step as it was, or in FP32; the model must have its weights. None where the step raises."""
    dtype = "float32" if in_fp32 else run.mode.format.name
    manner = Manner(dtype, failing.scale, is_lifted=False)
    saved = _saved_bytes(run, failing, manner)
    if saved is None:
        return None
    return StepUse(_seconds(run, failing, manner), saved, _peak_bytes(run, failing, manner))


def _seconds(run: Run, failing: FailingStep, manner: Manner) -> float:
    """The median time of one forward and backward pass."""
    seconds = [replay_step(run, failing.snapshot, manner).seconds for _ in range(1 + TIMED_STEPS)]
    return round(statistics.median(seconds[1:]), 4)


def _saved_bytes(run: Run, failing: FailingStep, manner: Manner) -> int | None:
    """None where the step raises."""
    model = run.workload.model
    weights = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    storages: dict[int, int] = {}
    views: dict[int, dict[View, int]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() not in weights:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            view = (tensor.storage_offset(), tensor.shape, tensor.stride())
            views.setdefault(storage.data_ptr(), {})[view] = tensor.nbytes
        return tensor

    # Of several micro-batches the first: the graph of each is freed before the next, whose memory may be the same.
    snapshot = replace(failing.snapshot, batches=failing.snapshot.batches[:1])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        replayed = replay_step(run, snapshot, manner)
    if replayed.replay.error:
        return None
    # Memory counts once, however many ops keep a view of it; of a data set a batch counts that is a slice of it.
    return sum(min(size, sum(views[storage].values())) for storage, size in storages.items())


def _peak_bytes(run: Run, failing: FailingStep, manner: Manner) -> int | None:
    if run.device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(run.device)
    replay_step(run, failing.snapshot, manner)
    return torch.cuda.max_memory_allocated(run.device)
