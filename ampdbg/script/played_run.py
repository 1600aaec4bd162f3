"""A step of a script that a tape was made of, as a run: what investigations and searches take for that of a config."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ampdbg.config.schema import Precision, config_of_script
from ampdbg.precision.emulation import is_emulating
from ampdbg.precision.modes import mode_of
from ampdbg.replay.played_step import PlayedStep
from ampdbg.replay.run import Run
from ampdbg.workload.build import Workload
from ampdbg.workload.losses import StepFunction
from ampdbg.workload.user_code import UserCode

Half = Literal["float16", "bfloat16"]


@dataclass
class _Parts:
    """The parts of one step, as the batches of a workload: there are no further ones."""

    played: PlayedStep
    position: int = 0

    def batches(self) -> Iterator[Any]:
        """The parts of the step."""
        return iter(self.played.given)

    def describe(self, batch: Any) -> str:
        """How many calls a part makes."""
        return f"the step makes {len(batch)} calls"


def run_of(
    played: PlayedStep,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    device: torch.device,
    half: Half | None,
) -> Run:
    """The step as a run of one step, under the autocast of its device; ``half`` is what that lowers to."""
    share = len(played.given)

    def losses(batch: Any, index: int) -> torch.Tensor:
        # A pass gives each part an equal share; the script's own shares are on the tape.
        return played.loss(batch) * share if share > 1 else played.loss(batch)

    policy: Literal["cuda", "native"] = "cuda" if device.type == "cuda" or is_emulating() else "native"
    precision = Precision(dtype=half or "float32", policy=policy)
    config = config_of_script(precision)
    step = StepFunction("the script's step", losses)
    workload = Workload(model, tuple(optimizers), _Parts(played), step, UserCode(()))
    return Run(config, workload, device, mode_of(precision, device), time.monotonic())
