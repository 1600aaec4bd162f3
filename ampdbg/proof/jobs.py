"""The jobs of a proof: experiments with the patch in force, in this process or in a fresh one.

A job runs the failing steps and further batches, or trains.
"""

from __future__ import annotations

import contextlib
import functools
import io
import linecache
import math
import os
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import SourceFileLoader
from importlib.util import decode_source
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal
from unittest.mock import patch

import torch

from ampdbg.config.schema import Config, LossScale
from ampdbg.costs.step import use_of_a_pass
from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.errors import AmpdbgError, WorkloadError, first_line, named_error
from ampdbg.formats import FLOAT16
from ampdbg.observer import Observer
from ampdbg.patch.file_edits import Patched, file_key
from ampdbg.pinning.experiment import gradients_far, health_of, judged, on_further_batches
from ampdbg.precision.emulation import is_emulating
from ampdbg.probes.source_lines import tracing
from ampdbg.proof.processes import Deliver, FreshProcess, Task, fresh_process
from ampdbg.proof.swap import CannotSwapError, swapped
from ampdbg.quantities import listed
from ampdbg.record.codes import catalogued
from ampdbg.record.findings import Finding
from ampdbg.record.run import Investigation, Producer, Record, Step
from ampdbg.replay.pinned_replays import PinnedReplays, ScaleRange
from ampdbg.replay.replay import Manner, replay_step
from ampdbg.replay.run import Run, prepared
from ampdbg.replay.snapshot import FailingStep, rewound, weights_of
from ampdbg.script.capture import Capture, CaptureError
from ampdbg.script.restart import RestoredStep, restore_in_script
from ampdbg.training.fp32_twin import Losses, fp32_losses, last_quarter
from ampdbg.training.loop import train
from ampdbg.workload.build import Workload
from ampdbg.workload.losses import call_model
from ampdbg.workload.targets import imports_apart


@dataclass(frozen=True)
class StepUse:
    """The cost of one forward and backward pass: the median time in seconds, or None if CUDA is emulated, and bytes.

    ``saved_bytes`` is what autograd saves for the backward pass of one micro-batch, without the weights. ``peak_bytes``
    is the peak of CUDA's allocator, or None on other devices.
    """

    seconds: float | None
    saved_bytes: int
    peak_bytes: int | None = None


@dataclass(frozen=True)
class CapturedStep:
    """The capture of a script's failing step, with the investigation of its replays; ``script`` as in Capture."""

    path: Path
    made: Investigation
    script: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """The experiments to run together for a patch.

    ``patched`` runs the failing steps and further batches with the patch. ``dropped`` runs the failing steps with a
    part of the patch. ``reference`` runs them without it.

    ``config`` is that of the training run, and ``begins_at`` its first loss scale. ``scales`` has one entry for each
    failing step, and each step runs ``repeats`` times. With ``captured``, the failing step is a script's and has no
    training run. ``survived_scale`` is the largest loss scale that suits the failing steps with the patch. ``threads``
    is torch's number of threads.
    """

    kind: Literal["patched", "dropped", "reference"]
    config: Config
    patched: Patched
    scales: tuple[ScaleRange, ...]
    is_silent: bool
    repeats: int = 1
    captured: CapturedStep | None = None
    begins_at: float = 1.0
    survived_scale: float = 1.0
    threads: int = field(default_factory=torch.get_num_threads)


@dataclass(frozen=True)
class Tried:
    """A failing step's replays, ``made`` at the usable loss ``scale``, and ``why`` it still fails, or ""."""

    made: Investigation
    why: str
    scale: float

    @property
    def healthy(self) -> bool:
        return not self.why


@dataclass(frozen=True)
class Trained:
    """A training run: the loss of each step, the steps with a skipped update, the last loss scale.

    ``steps`` is the planned length, and ``begun_at`` the first loss scale if it is below the config's. ``faults``
    describe findings that count against the patch, and ``beside`` has the codes of the other findings. ``failure`` is
    the reason for an early end.
    """

    steps: int = 0
    losses: tuple[float, ...] = ()
    skipped: tuple[int, ...] = ()
    scale: float = 1.0
    begun_at: float | None = None
    faults: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    failure: str = ""


@dataclass(frozen=True)
class JobResult:
    """The results of a job.

    ``failure`` is the reason why it did not run. ``unused`` names patched files that were never imported.
    ``eval_failure`` is the error of the first failing step in eval mode. ``uses`` has the keys "patched", "unpatched"
    and "float32".
    """

    failure: str = ""
    reimport_reason: str = ""
    """The reason why everything was imported again, or ""."""
    unused: tuple[str, ...] = ()
    tried: tuple[Tried, ...] = ()
    further: tuple[Tried, ...] = ()
    further_failure: str = ""
    eval_failure: str = ""
    uses: Mapping[str, StepUse] = field(default_factory=dict)
    trained: Trained | None = None


# Fresh processes

Pending = Callable[[Observer], JobResult]
"""Waits for the results of a job. A failure or crash becomes their ``failure``."""

JobStarter = Callable[[Task, Job], Pending]
"""Starts a job."""


class FreshProcesses(contextlib.ExitStack):
    """Starts each job in a new process with the working directory ``folder``, and kills all of them on exit."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._waiting: list[FreshProcess] = []

    def warm(self) -> None:
        """Start a process in advance, since importing torch takes seconds."""
        with contextlib.suppress(OSError):  # the first job will fail with the same error
            self._waiting.append(self._started())

    def __call__(self, task: Task, job: Job) -> Pending:
        try:
            process = self._waiting.pop() if self._waiting else self._started()
            process.begin(task, job)
        except OSError as error:
            why = f"no process can be started: {error}"
            return lambda observer: JobResult(failure=why)
        return functools.partial(_seen_by, process)

    def _started(self) -> FreshProcess:
        return self.enter_context(fresh_process("output", cwd=self._folder))


def _seen_by(process: FreshProcess, observer: Observer) -> JobResult:
    process.pass_on(observer)
    ending = process.ending()
    seen: JobResult | None = process.result()
    return seen or JobResult(failure=ending)


# The patch in force


@contextlib.contextmanager
def prepared_with(patched: Patched, config: Config) -> Iterator[Run]:
    """Prepare the workload with a patch's pins in force. The patch's files must be :func:`overlaid`."""
    precision = config.precision.model_copy(update={"pins": (*config.precision.pins, *patched.pins)})
    with prepared(config.model_copy(update={"precision": precision})) as run:
        _pin_by_file(patched, run)
        yield run


@contextlib.contextmanager
def in_force(patched: Patched, run: Run, failing: Sequence[FailingStep]) -> Iterator[None]:
    """Put a patch in force in an existing run until the context exits.

    Raises:
        CannotSwapError: the code cannot be swapped, or replays of the failing steps do not run it.
        AmpdbgError: the file of pins or its arguments cannot be used.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(run.pinned(patched.pins))
        if patched.pins_file is not None:
            for module in run.workload.model.modules():  # restores its attributes, including an own `forward`
                stack.enter_context(patch.dict(vars(module)))
            _pin_by_file(patched, run)
        else:
            changed = stack.enter_context(swapped(patched.files))
            if changed and (idle := changed.keys() - _codes_run(run, failing)):
                raise CannotSwapError(f"a replay of the step does not run {listed({changed[one] for one in idle})}")
        yield


def _codes_run(run: Run, failing: Sequence[FailingStep]) -> set[int]:
    """Return the ``id`` of the code of each function that the failing steps run in this thread."""
    seen: dict[int, CodeType] = {}

    def on_call(frame: FrameType, event: str, argument: Any) -> None:
        seen[id(frame.f_code)] = frame.f_code

    for step in failing:
        with weights_of(run.workload.model, step), tracing(on_call):
            replay_step(run, step.snapshot, Manner(run.mode.format.name, step.scale, is_lifted=False))
    return set(seen)


def _pin_by_file(patched: Patched, run: Run) -> None:
    if patched.pins_file is not None:
        model, names = run.workload.model, dict[str, Any]()
        given = {root.argument: model.get_submodule(root.name) for root in patched.roots}
        exec(compile(patched.files[patched.pins_file], patched.pins_file, "exec", dont_inherit=True), names)
        names["pin_fp32"](**given) if given else names["pin_fp32"](model)


@contextlib.contextmanager
def overlaid(files: Mapping[Path, bytes]) -> Iterator[set[Path]]:
    """Import these bytes instead of the files' contents, and show their lines in tracebacks and traces.

    This covers imports by path, by name and from packages, without bytecode caches. Earlier imports are unchanged.
    Yield the paths of the files imported so far.
    """
    given = {file_key(path): path for path in files}
    taken: set[Path] = set()
    shown: set[str] = set()
    original = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
        path = loader.get_filename(fullname)
        file = given.get(file_key(path))
        if file is None:
            return original(loader, fullname)
        source = files[file]
        code: CodeType = loader.source_to_code(source, path)
        # inspect, tracebacks and traces read linecache. An entry without a time is not checked against the disk.
        linecache.cache[path] = (len(source), None, io.StringIO(decode_source(source)).readlines(), path)
        shown.add(path)
        taken.add(file)
        return code

    try:
        with patch.object(SourceFileLoader, "get_code", get_code):
            yield taken
    finally:
        for path in shown:
            linecache.cache.pop(path, None)


# The experiments


def run_in_live_workload(run: Run, failing: Sequence[FailingStep], job: Job, observer: Observer) -> JobResult:
    """Run a job's experiments in an existing run, with the job's patch temporarily in force.

    Raises:
        CannotSwapError: the patch cannot be put in force there.
    """

    def seen() -> JobResult:
        of_disk = replace(job, patched=Patched(moves_constants=job.patched.moves_constants))  # its lines are on disk
        with in_force(job.patched, run, failing):
            return experiments(run, failing, of_disk, observer)

    return _without_raising(seen)


def run_in_rebuilt_workload(failing: Sequence[FailingStep], job: Job, observer: Observer) -> JobResult:
    """Run a job's experiments in a workload rebuilt from the patched files, and keep the running workload unchanged."""

    def seen() -> JobResult:
        with contextlib.redirect_stdout(io.StringIO()), imports_apart(), prepared_with(job.patched, job.config) as run:
            return experiments(run, tuple(_moved(failing, run.workload)), job, observer)

    return _of_patched_files(job, seen)


def train_alone(job: Job, observer: Observer, deliver: Deliver, folder: Path) -> None:
    """Train with the patched files, in a process that has imported no user code."""
    torch.set_num_threads(job.threads)
    deliver(_of_patched_files(job, lambda: JobResult(trained=trained_with_the_patch(job, observer))))


def see_in_script(job: Job, observer: Observer, deliver: Deliver, folder: Path) -> None:
    """Restart a capture's script with the patched files, and deliver the results of the job in its step.

    The process then exits in the middle of the script, so that no more of the script runs.
    """
    captured, texts = job.captured, {os.path.realpath(path): text for path, text in job.patched.files.items()}
    assert captured is not None
    torch.set_num_threads(job.threads)
    capture = Capture(captured.path, captured.script)
    script = os.path.realpath(capture.start.name)  # for a module, not an existing file

    with overlaid(job.patched.files) as taken:

        def use(step: RestoredStep | CaptureError) -> None:
            if isinstance(step, CaptureError):
                there = JobResult(failure=first_line(step))
            else:
                there = _without_raising(lambda: experiments(step.run, (step.failing(captured.made),), job, observer))
            others = texts.keys() - {script, *map(os.path.realpath, taken)}
            deliver(replace(there, unused=tuple(map(os.path.basename, others))))
            os._exit(0)

        def restarted() -> JobResult:
            restore_in_script(capture, use, folder, texts.get(script))
            raise AssertionError("the process ends in the script")

        deliver(_without_raising(restarted))  # the script could not be taken over


def _of_patched_files(job: Job, see: Callable[[], JobResult]) -> JobResult:
    with overlaid(job.patched.files) as taken:
        seen = _without_raising(see)
        unused = job.patched.files.keys() - {*taken, job.patched.pins_file}
        return replace(seen, unused=tuple(path.name for path in unused))


def _moved(failing: Sequence[FailingStep], workload: Workload) -> Iterator[FailingStep]:
    """Yield the steps for a rebuilt model."""
    shapes = [parameter.shape for parameter in workload.model.parameters()]
    for step in failing:
        if [weight.shape for weight in step.snapshot.weights] != shapes:
            raise WorkloadError("the model has other parameters than the failing step")
        state = step.snapshot.state.packed().unpacked(workload.model)
        yield replace(step, snapshot=replace(step.snapshot, state=state, beside=(workload.step.of,)))


def _without_raising(see: Callable[[], JobResult]) -> JobResult:
    """Return the results, or a ``failure`` with the error that the user's or the patched code raised."""
    try:
        return see()
    except AmpdbgError as error:
        return JobResult(failure=first_line(error))
    except CannotSwapError:
        raise
    except Exception as error:  # noqa: BLE001 - a patched model may raise anything
        return JobResult(failure=named_error(error))


def experiments(run: Run, steps: Sequence[FailingStep], job: Job, observer: Observer) -> JobResult:
    """Try the failing steps, then measure the first one further. The job's patch must be in force."""
    is_patched = job.kind == "patched"
    tried = tuple(_each_tried(run, steps, job))
    if job.kind == "dropped" or (is_patched and not tried[-1].healthy):
        return JobResult(tried=tried)
    with weights_of(run.workload.model, steps[0]):
        further, further_failure = _further(run, steps[0], tried[0].scale, job, observer) if is_patched else ((), "")
        low = run.mode.format.name
        ways = {"patched": low} if is_patched else {"unpatched": low, "float32": "float32"}
        if steps[0].made.reach == "modules":  # no backward pass runs
            ways = {}
        uses = {way: use for way, dtype in ways.items() if (use := step_use(run, steps[0], dtype))}
        eval_failure = raised_in_eval_mode(run, steps[0])
    return JobResult(
        tried=tried, further=further, further_failure=further_failure, eval_failure=eval_failure, uses=uses
    )


def _each_tried(run: Run, steps: Sequence[FailingStep], job: Job) -> Iterator[Tried]:
    """Yield for each failing step its first unhealthy try, or its last of ``repeats``.

    Unless the job is the reference, stop after the first unhealthy step.
    """
    for failing, scales in zip(steps, job.scales, strict=True):
        replays = PinnedReplays(run, failing, scales)
        with weights_of(run.workload.model, failing):
            for _ in range(job.repeats):
                tried = _tried(replays, job)
                if not tried.healthy:
                    break
        yield tried
        if not tried.healthy and job.kind != "reference":
            return


def _tried(replays: PinnedReplays, job: Job) -> Tried:
    _, made = judged(replays, (), "unhealthy" if job.kind == "patched" else "always", is_silent=job.is_silent)
    health = health_of(on_disk(made, job.patched), is_silent=job.is_silent)
    # A moved constant differs between half and FP32, so the gradients must show that it does no harm.
    why = health.why or (gradients_far(made) if job.patched.moves_constants else "")
    return Tried(made, why, replays.scale)


def on_disk(made: Investigation, patched: Patched) -> Investigation:
    """Return the investigation of a patched step with its first replay's lines mapped to the user's files."""
    line_of = functools.cache(patched.line_on_disk)  # many ops share a line

    def moved(one: Producer) -> Producer:
        at = one.source
        return one if at is None else replace(one, source=replace(at, line=line_of(at.file, at.line)))

    return replace(made, low=replace(made.low, producers=tuple(map(moved, made.low.producers))))


def _further(
    run: Run, failing: FailingStep, scale: float, job: Job, observer: Observer
) -> tuple[tuple[Tried, ...], str]:
    """Return the step on later batches with a finite FP32 loss, and the reason for having no more."""
    if job.captured is not None:
        return (), "a capture holds only the batch of its own step"
    observer.stage("further batches with the patch")
    seen: list[Tried] = []
    try:
        for replays in on_further_batches(run, replace(failing, scale=scale), job.scales[0]):
            seen.append(_tried(replays, job))  # noqa: PERF401 - keeps earlier results if an error is raised
    except AmpdbgError as error:
        return tuple(seen), first_line(error)
    return tuple(seen), ""


# The forward pass in eval mode, where user code may take other branches and raise


def raised_in_eval_mode(run: Run, failing: FailingStep) -> str:
    """Return the error of one forward pass in eval mode as one line, or "".

    It runs the step's first batch under the run's autocast without a graph. The model must have the step's weights. Its
    state and mode are restored.
    """
    model, user, is_training = run.workload.model, run.workload.user, run.workload.model.training
    try:
        with (
            rewound(model, failing.snapshot),
            user.running(type(model).__name__),
            torch.no_grad(),
            run.mode.forward(),
        ):
            try:
                model.eval()
                batch = failing.snapshot.batches[0]
                if run.config.step is None and run.config.loss is not None:
                    call_model(model, batch)  # the loss function may not accept the output of eval mode
                else:
                    run.workload.step.call(batch, 0)
            finally:
                # An overridden `train` may do more than set the mode, and undo it here.
                model.train(is_training)
    except AmpdbgError as error:
        return first_line(error)
    return ""


# Cost of one step on this machine: time, bytes saved for the backward pass, the GPU's peak memory

TIMED_STEPS = 3
"""The reported time is the median of this many steps, after an untimed warm-up step."""


def step_use(run: Run, failing: FailingStep, dtype: str) -> StepUse | None:
    """Measure the step in ``dtype``, or return None if it raises. The model must have the step's weights."""
    manner = Manner(dtype, failing.scale, is_lifted=False)
    forward = run.mode.forward if dtype == run.mode.format.name else contextlib.nullcontext
    try:
        with rewound(run.workload.model, failing.snapshot):
            use = use_of_a_pass(run.workload, failing.snapshot.batches[0], forward)
    except AmpdbgError:
        return None
    seconds = peak_bytes = None
    if not is_emulating():  # a CPU's time says nothing about a GPU
        timed = [replay_step(run, failing.snapshot, manner).seconds for _ in range(1 + TIMED_STEPS)]
        seconds = round(statistics.median(timed[1:]), 4)
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.device)
        replay_step(run, failing.snapshot, manner)
        peak_bytes = torch.cuda.max_memory_allocated(run.device)
    return StepUse(seconds, use.activations + use.casts, peak_bytes)


REPLAYED_STEPS = 2
"""Up to this many unhealthy steps of each kind are replayed in the run with the patch."""


def trained_with_the_patch(job: Job, observer: Observer) -> Trained:
    """Train with the patch, from a loss scale that suits the failing steps, since skipped steps prove nothing."""
    observer.stage(f"{job.config.train.steps} steps with the patch")
    precision, survived_scale = job.config.precision, job.survived_scale
    scale = precision.loss_scale
    if precision.format is not FLOAT16 or not isinstance(scale, LossScale) or job.begins_at <= survived_scale:
        return _trained(job)
    settled = precision.model_copy(update={"loss_scale": scale.model_copy(update={"init": survived_scale})})
    changed = job.config.model_copy(update={"precision": settled, "continues_scale": False})
    trained = _trained(replace(job, config=changed))
    return replace(trained, begun_at=survived_scale)


def trained_in_fp32(job: Job, withheld: Collection[int], observer: Observer, *, is_rounded: bool = False) -> Trained:
    """Train the same steps without the patch in FP32; with ``is_rounded``, from weights rounded to half."""
    observer.stage(f"{job.config.train.steps} steps in FP32{' from rounded weights' * is_rounded}")
    try:
        with contextlib.redirect_stdout(io.StringIO()), imports_apart():
            losses = fp32_losses(job.config, withheld=withheld, is_rounded=is_rounded)
    except AmpdbgError as error:
        return Trained(steps=job.config.train.steps, failure=first_line(error))
    return Trained(steps=job.config.train.steps, losses=losses)


def disproves(finding: Finding, steps: Sequence[Step]) -> bool:
    """True if a finding disproves the patch; ``steps`` are the steps of the run with the patch.

    A warning does not, since its step agrees with FP32. A loss scale finding does not if the last steps were taken.
    Growing gradients cause a few skips, and a gradient of 1e-15 is lost at any scale.
    """
    code = catalogued(finding.code)
    if finding.severity != "error" or not code.counts_against_a_patch:
        return False
    end = last_quarter(steps)
    goes_on = bool(end) and all(math.isfinite(step.loss) and not step.skipped for step in end)
    return not (code.passes and goes_on)


def _trained(job: Job) -> Trained:
    """Train like ``ampdbg scan``, and diagnose as far as the replays allow."""
    losses, failure = Losses(), ""
    try:
        record = train(
            job.config,
            observer=losses,
            prepare=functools.partial(prepared_with, job.patched),
            replays=REPLAYED_STEPS,
        )
    except AmpdbgError as error:
        if not isinstance(error.record, Record):
            return Trained(steps=job.config.train.steps, failure=first_line(error))
        record, failure = error.record, first_line(error)
    if record.interrupted:
        raise KeyboardInterrupt
    findings = diagnose(record).faults
    return Trained(
        steps=job.config.train.steps,
        losses=tuple(losses.seen),
        skipped=losses.skipped,
        scale=record.steps[-1].scale if record.steps else 1.0,
        faults=tuple(f"{finding.code}: {finding.message}" for finding in findings if disproves(finding, record.steps)),
        beside=tuple(finding.code for finding in findings if not disproves(finding, record.steps)),
        failure=failure,
    )
