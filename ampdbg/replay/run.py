"""A prepared run: a config's workload on its device, under its precision policy, seeded and pinned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from ampdbg.config.schema import Config
from ampdbg.environment import choose_device, is_emulated
from ampdbg.precision.emulation import cuda_on_cpu
from ampdbg.precision.modes import PrecisionMode, mode_of
from ampdbg.precision.pins import pin_fp32
from ampdbg.replay.state import seeded
from ampdbg.workload.build import Workload, build_workload


@dataclass(frozen=True)
class Run:
    """A workload on its device, and the config it is trained by."""

    config: Config
    workload: Workload
    device: torch.device
    mode: PrecisionMode


@contextlib.contextmanager
def prepared(config: Config) -> Iterator[Run]:
    """Builds the workload; while this is entered CUDA is emulated where it has to be, and the pins are in force.

    Raises:
        WorkloadError: a target cannot be used, a pin names no module, or the device is not there.
        UserCodeError: the user's code raised.
    """
    device = choose_device(config.train.device)
    with ExitStack() as stack:
        stack.enter_context(seeded(config.train.seed))
        if is_emulated(config, device):
            stack.enter_context(cuda_on_cpu())
        workload, mode = build_workload(config, device), mode_of(config.precision, device)
        mode.prepare(workload.model, workload.optimizers)
        stack.enter_context(pin_fp32(workload.model, config.precision.pins))
        with workload.user.reading("running the workload"):
            yield Run(config, workload, device, mode)
