"""The experiments of a proof: their jobs, the ways to put a patch in force, and their results."""

from __future__ import annotations

import contextlib
import io
import linecache
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from importlib.util import decode_source
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal
from unittest.mock import patch

import torch

from ampdbg.config.schema import Config
from ampdbg.patch.file_edits import Patched, file_key
from ampdbg.probes.source_lines import tracing
from ampdbg.proof.swap import CannotSwapError, swapped
from ampdbg.quantities import listed
from ampdbg.record.run import Investigation
from ampdbg.replay.pinned_replays import ScaleRange
from ampdbg.replay.replay import Manner, replay_step
from ampdbg.replay.run import Run, prepared
from ampdbg.replay.snapshot import FailingStep, weights_of


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
