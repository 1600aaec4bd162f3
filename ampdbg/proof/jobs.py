"""The experiments of a proof: as a process is given them, in force in it, and their results as it returns them."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import linecache
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import SourceFileLoader
from importlib.util import decode_source
from pathlib import Path
from types import CodeType, ModuleType
from typing import Literal
from unittest.mock import patch

import torch

from ampdbg.config.schema import Config
from ampdbg.errors import AmpdbgError, UserCodeError, first_line
from ampdbg.patch.file_edits import counterpart
from ampdbg.record.pins import RootModel
from ampdbg.record.run import Investigation, Reach
from ampdbg.replay.pinned_replays import ScaleRange
from ampdbg.replay.run import Run, prepared
from ampdbg.replay.snapshot import FailingStep, ModelState, PackedState
from ampdbg.workload.build import Workload


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
    than in FP32.
    """

    files: Mapping[Path, bytes] = field(default_factory=dict)
    pins_file: Path | None = None
    roots: tuple[RootModel, ...] = ()
    pins: tuple[str, ...] = ()
    moves_constants: bool = False

    @property
    def changes_nothing(self) -> bool:
        """Whether the files hold these bytes anyway, and nothing is pinned besides."""
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
    """What one process runs.

    ``patched``: the failing steps, further batches and a training run, with the patch. ``dropped``: the failing
    steps with a part of the patch. ``reference``: the failing steps without it, and training runs in FP32.

    ``scales`` has one entry a failing step, and each step is run ``repeats`` times. The training runs have
    ``train_steps`` steps, and those in FP32 withhold the updates of the steps in ``withheld``. With ``captured`` the
    failing step is a script's, which is started again for it; there is no config that could be trained by.
    """

    kind: Literal["patched", "dropped", "reference"]
    config: Config
    patched: Patched
    scales: tuple[ScaleRange, ...]
    is_silent: bool
    repeats: int = 1
    train_steps: int = 0
    withheld: frozenset[int] = field(default_factory=frozenset)
    captured: CapturedStep | None = None


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
    """What a process saw of its job.

    ``failure`` is why it could not be run at all, and it ``is_over`` where nothing more is to be run. ``unused`` names
    patched files that were never imported, ``eval_failure`` is what the first failing step raised in eval mode.
    ``runs`` and ``uses`` are by what ran: "patched", "unpatched", "float32", and "rounded" for FP32 from weights
    rounded to half.
    """

    failure: str = ""
    unused: tuple[str, ...] = ()
    tried: tuple[Tried, ...] = ()
    further: tuple[Tried, ...] = ()
    further_failure: str = ""
    eval_failure: str = ""
    is_over: bool = False
    runs: Mapping[str, Trained] = field(default_factory=dict)
    uses: Mapping[str, StepUse] = field(default_factory=dict)


@contextlib.contextmanager
def prepared_with(patched: Patched, config: Config) -> Iterator[Run]:
    """The workload with the pins of a patch in force; its files have to be :func:`overlaid`."""
    precision = config.precision.model_copy(update={"pins": (*config.precision.pins, *patched.pins)})
    with prepared(config.model_copy(update={"precision": precision})) as run:
        _pin_by_file(patched, run)
        yield run


@contextlib.contextmanager
def pinned_by(patched: Patched, run: Run) -> Iterator[None]:
    """The pins of a patch in force in a run that stands already."""
    with run.mode.pinned(run.workload.model, patched.pins):
        _pin_by_file(patched, run)
        yield


def _pin_by_file(patched: Patched, run: Run) -> None:
    if patched.pins_file is not None:
        model = run.workload.model
        given = {root.argument: model.get_submodule(root.name) for root in patched.roots}
        pin_fp32 = _imported(patched.pins_file).pin_fp32
        pin_fp32(**given) if given else pin_fp32(model)


def _imported(file: Path) -> ModuleType:
    """The file as a module that no other import meets."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def overlaid(files: Mapping[Path, bytes]) -> Iterator[set[Path]]:
    """Imports take these bytes instead of what the files hold, and tracebacks and traces show their lines.

    It makes no difference how a file is imported: by path, by name, as part of a package. No bytecode is read or
    written for it. A module that was imported before stays as it is: this is for a process that has imported none.

    Args:
        files: the bytes of each file, encoded as the file says, by path.

    Yields:
        The paths, as they were given, of the files that have been imported by now.
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
        # inspect, tracebacks and traces take a line from linecache. Without a time it is not held against the disk.
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


def save_steps(steps: Sequence[FailingStep], path: Path) -> None:
    """Writes the steps with their batches, random states, buffers, attributes and weights.

    Raises:
        AmpdbgError: a batch holds what cannot be pickled, or the disk is full; the message is one line.
    """
    try:
        torch.save([_taken_out(step) for step in steps], path)
    except Exception as error:
        # Pickling runs the code of whatever a batch holds, which may raise anything.
        raise AmpdbgError(first_line(error)) from error


def load_steps(path: Path, workload: Workload) -> tuple[FailingStep, ...]:
    """Reads what :func:`save_steps` wrote, tensors on the devices that they were on.

    Args:
        path: a file that this ampdbg has written itself, a moment ago: only so may all of pickle be allowed in it
            (``weights_only=False``), which a batch of any class needs.
        workload: it is built, so that the modules that define those classes can be found.

    Raises:
        AmpdbgError: a class of a batch is not to be found in this process.
    """
    try:
        with workload.user.running("reading the failing steps"):
            steps: list[tuple[FailingStep, PackedState]] = torch.load(path, weights_only=False)
    except UserCodeError as error:
        raise AmpdbgError(first_line(error.__cause__ or error)) from error
    return tuple(_put_into(step, workload, state) for step, state in steps)


def _taken_out(step: FailingStep) -> tuple[FailingStep, PackedState]:
    # What is beside the model is code of this process, and the patched one has its own.
    snapshot = replace(step.snapshot, state=ModelState(), beside=())
    return replace(step, snapshot=snapshot), step.snapshot.state.packed()


def _put_into(step: FailingStep, workload: Workload, state: PackedState) -> FailingStep:
    snapshot = replace(step.snapshot, state=state.unpacked(workload.model), beside=(workload.step.of,))
    return replace(step, snapshot=snapshot)
