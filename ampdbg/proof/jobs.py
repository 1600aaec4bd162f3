"""The experiments of a proof, as a process is given them, and their results, as it returns them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from ampdbg.config import Config
from ampdbg.errors import text_of
from ampdbg.replay.investigation import ScaleRange


@dataclass(frozen=True)
class StepUse:
    """One forward and backward pass: its median time in seconds, and bytes.

    ``saved_bytes`` is what autograd keeps for the backward pass of one micro-batch, without the weights
    themselves; ``peak_bytes`` is the most that CUDA's allocator had handed out, None on other devices.
    """

    seconds: float
    saved_bytes: int
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Patched:
    """A workload with its pins in force, in any form that a suggestion has; nothing of it for the workload as it is.

    ``files`` are the patched bytes by absolute path; a file that does not exist is made by them. ``pins_file`` is the
    one among them whose ``pin_fp32`` is called with the model. ``pins`` are added to the config's.
    """

    files: Mapping[Path, bytes] = field(default_factory=dict)
    pins_file: Path | None = None
    pins: tuple[str, ...] = ()

    @property
    def changes_nothing(self) -> bool:
        """Whether the files hold these bytes anyway, and nothing is pinned besides."""
        return not self.pins and all(path.exists() and path.read_bytes() == now for path, now in self.files.items())

    def config_of(self, config: Config) -> Config:
        """The config with the pins in it."""
        precision = config.precision.model_copy(update={"pins": (*config.precision.pins, *self.pins)})
        return config.model_copy(update={"precision": precision}) if self.pins else config


@dataclass(frozen=True)
class Job:
    """What one process runs.

    ``patched``: the failing steps, further batches and a training run, with the patch. ``dropped``: the failing
    steps with a part of the patch. ``reference``: the failing steps without it, and training runs in FP32.

    ``scales`` has one entry a failing step, and each step is run ``repeats`` times. The training runs have
    ``train_steps`` steps (with the patch more, where the loss scale needs them to settle), and those in FP32 withhold
    the updates of the steps in ``withheld``.
    """

    kind: Literal["patched", "dropped", "reference"]
    config: Config
    patched: Patched
    scales: tuple[ScaleRange, ...]
    is_silent: bool
    repeats: int = 1
    train_steps: int = 0
    withheld: frozenset[int] = field(default_factory=frozenset)


class _Seen(BaseModel):
    # NaN is what a proof is about; it passes through JSON by name.
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")


class Tried(_Seen):
    """A failing step that was run: ``loss`` in FP16 at the usable ``scale``, and FP32's of the very same code."""

    step: int
    healthy: bool
    why: str
    loss: float
    scale: float
    fp32_loss: float
    fp32_grad_norm: float


class Trained(_Seen):
    """A training run: the loss of each step, the steps whose update was skipped, the last loss scale.

    It was to have so many ``steps``. ``faults`` are codes and messages of findings that speak against the patch,
    ``beside`` the codes of those that do not. ``failure`` is why it ended early.
    """

    steps: int = 0
    losses: tuple[float, ...] = ()
    skipped: tuple[int, ...] = ()
    scale: float = 1.0
    faults: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    failure: str = ""


class Seen(_Seen):
    """What a process saw of its job.

    ``failure`` is why it could not be run at all. ``unused`` names patched files that were never imported,
    ``eval_failure`` is what the first failing step raised in eval mode. ``runs`` and ``uses`` are by what ran:
    "patched", "unpatched", "float32", and "rounded" for FP32 from weights rounded to half.
    """

    failure: str = ""
    unused: tuple[str, ...] = ()
    tried: tuple[Tried, ...] = ()
    further: tuple[Tried, ...] = ()
    further_failure: str = ""
    eval_failure: str = ""
    runs: Mapping[str, Trained] = {}
    uses: Mapping[str, StepUse] = {}


def first_line(error: BaseException) -> str:
    """What an error says, in a line; its type where it says nothing."""
    return text_of(error).strip().partition("\n")[0] or type(error).__name__
