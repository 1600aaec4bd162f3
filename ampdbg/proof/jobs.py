"""The experiments of a proof: what is run, how a patch comes into force for it, and what was seen."""

from __future__ import annotations

import contextlib
import io
import linecache
import os
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
from ampdbg.patch.file_edits import counterpart
from ampdbg.probes.source_lines import tracing
from ampdbg.proof.swap import CannotSwapError, swapped
from ampdbg.quantities import listed
from ampdbg.record.pins import RootModel
from ampdbg.record.run import Investigation, Reach
from ampdbg.replay.pinned_replays import ScaleRange
from ampdbg.replay.replay import Manner, replay_step
from ampdbg.replay.run import Run, prepared
from ampdbg.replay.snapshot import FailingStep, weights_of


@dataclass(frozen=True)
class StepUse:
    """One forward and backward pass: its median time in seconds, and bytes.

    ``saved_bytes`` is what autograd keeps for the backward pass of one micro-batch, without the weights
    themselves; ``peak_bytes`` is the most that CUDA's allocator had handed out, None on other devices. Where CUDA
    ``is_emulated`` the time says nothing of a GPU's.
    """

    seconds: float
    saved_bytes: int
    peak_bytes: int | None = None
    is_emulated: bool = False


@dataclass(frozen=True)
class Patched:
    """A workload with its pins in force, in any form that a suggestion has; nothing of it for the workload as it is.

    ``files`` are the patched bytes by absolute path; a file that does not exist is made by them. ``pins_file`` is the
    one among them whose ``pin_fp32`` is called with the model, or with those of several that are its ``roots``.
    ``pins`` are added to the config's. ``moves_constants`` says that the files compute with other constants in half
    than in FP32. ``standing`` does the same in a model that stands: what files do as the model is made, pins do there.
    """

    files: Mapping[Path, bytes] = field(default_factory=dict)
    pins_file: Path | None = None
    roots: tuple[RootModel, ...] = ()
    pins: tuple[str, ...] = ()
    moves_constants: bool = False
    standing: Patched | None = None

    @property
    def changes_nothing(self) -> bool:
        """The files hold these bytes already, and nothing else is pinned."""
        return not self.pins and all(path.exists() and path.read_bytes() == now for path, now in self.files.items())

    def line_on_disk(self, file: str, line: int) -> int:
        """Which line of a file, as its user has it, is ``line`` of the patched one; 0 where only the patch has it."""
        path = next((path for path in self.files if _key(path) == _key(file)), None)
        return counterpart(line, self.files[path], path.read_bytes()) if path is not None and path.exists() else line


@dataclass(frozen=True)
class CapturedStep:
    """The capture of a script's failing step, and what replays of it have shown; ``script`` as of a Capture."""

    path: Path
    made: Investigation
    script: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """What is run of a patch at once.

    ``patched``: the failing steps with it, and further batches. ``dropped``: the failing steps with a part of it.
    ``reference``: the failing steps without it.

    ``scales`` has one entry a failing step, and each step is run ``repeats`` times. The training run has
    ``train_steps`` steps. With ``captured`` the failing step is a script's, and there is no config that could be
    trained by. ``begins_at`` is the loss scale that the training run would begin with, ``borne`` the largest one that
    suits the failing steps with the patch; torch has so many ``threads``.
    """

    kind: Literal["patched", "dropped", "reference"]
    config: Config
    patched: Patched
    scales: tuple[ScaleRange, ...]
    is_silent: bool
    repeats: int = 1
    train_steps: int = 0
    captured: CapturedStep | None = None
    begins_at: float = 1.0
    borne: float = 1.0
    threads: int = field(default_factory=torch.get_num_threads)


@dataclass(frozen=True)
class Tried:
    """A failing step that was run: ``loss`` in FP16 at the usable ``scale``, and FP32's of the very same code.

    ``reach`` is as of its investigation, ``unreached`` as of its FP16 replay.
    """

    step: int
    healthy: bool
    why: str
    loss: float
    scale: float
    fp32_loss: float
    fp32_grad_norm: float
    reach: Reach = "whole"
    unreached: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trained:
    """A training run: the loss of each step, the steps whose update was skipped, the last loss scale.

    It was to have so many ``steps``; ``begun_at`` is its first loss scale where that is lower than the config's.
    ``faults`` are codes and messages of findings that speak against the patch, ``beside`` the codes of those that do
    not. ``failure`` is why it ended early.
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
class Seen:
    """What was seen of a job.

    ``failure`` is why it could not be run at all, ``anew`` why all was imported again for it. ``unused`` names patched
    files that were never imported, ``eval_failure`` is what the first failing step raised in eval mode. ``uses`` are by
    what ran: "patched", "unpatched" and "float32"; ``trained`` is the training run.
    """

    failure: str = ""
    anew: str = ""
    unused: tuple[str, ...] = ()
    tried: tuple[Tried, ...] = ()
    further: tuple[Tried, ...] = ()
    further_failure: str = ""
    eval_failure: str = ""
    uses: Mapping[str, StepUse] = field(default_factory=dict)
    trained: Trained | None = None


@contextlib.contextmanager
def prepared_with(patched: Patched, config: Config) -> Iterator[Run]:
    """The workload with the pins of a patch in force; its files have to be :func:`overlaid`."""
    precision = config.precision.model_copy(update={"pins": (*config.precision.pins, *patched.pins)})
    with prepared(config.model_copy(update={"precision": precision})) as run:
        _pin_by_file(patched, run)
        yield run


@contextlib.contextmanager
def in_force(patched: Patched, run: Run, failing: Sequence[FailingStep]) -> Iterator[None]:
    """A patch in force in a run that stands already, and taken out of it afterwards.

    Raises:
        CannotSwapError: its code cannot be swapped, or the failing steps do not run it when they are replayed.
        AmpdbgError: a file of pins, or what it is called with, cannot be used.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(run.pinned(patched.pins))
        if patched.pins_file is not None:
            for module in run.workload.model.modules():  # its attributes come back, a `forward` of its own too
                stack.enter_context(patch.dict(vars(module)))
            _pin_by_file(patched, run)
        else:
            changed = stack.enter_context(swapped(patched.files))
            if changed and (idle := changed.keys() - _codes_run(run, failing)):
                raise CannotSwapError(f"a replay of the step does not run {listed({changed[one] for one in idle})}")
        yield


def _codes_run(run: Run, failing: Sequence[FailingStep]) -> set[int]:
    """The ``id`` of the code of each function that the failing steps run, in this thread."""
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
    """Imports take these bytes instead of what the files hold, and tracebacks and traces show their lines.

    It makes no difference how a file is imported: by path, by name, as part of a package. No bytecode is read or
    written for it. A module that was imported before stays as it is.

    Args:
        files: the bytes of each file, encoded as the file says, by path.

    Yields:
        The paths, as they were given, of the files that are already imported.
    """
    given = {_key(path): path for path in files}
    taken: set[Path] = set()
    shown: set[str] = set()
    original = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
        path = loader.get_filename(fullname)
        file = given.get(_key(path))
        if file is None:
            return original(loader, fullname)
        source = files[file]
        code: CodeType = loader.source_to_code(source, path)
        # inspect, tracebacks and traces take a line from linecache. Without a time it is not compared with the disk.
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


def _key(path: str | Path) -> str:
    """Two spellings of one file have one key."""
    return os.path.normcase(os.path.realpath(path))
