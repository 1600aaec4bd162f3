"""What a run runs on: the versions and the device."""

from __future__ import annotations

import platform

import torch

from ampdbg import __version__
from ampdbg.record.run import Environment


def environment_of(device: torch.device, policy: str, *, emulated: bool, notes: tuple[str, ...] = ()) -> Environment:
    """The versions and the device of this run, as the record keeps them.

    Args:
        device: what the model is on.
        policy: whose autocast op lists are in force: ``cuda`` or ``native``.
        emulated: CUDA's autocast is emulated on a CPU.
        notes: what the report has to say about it.
    """
    return Environment(
        ampdbg=__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        platform=platform.platform(),
        device=str(device),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        policy=policy,
        emulated=emulated,
        notes=notes,
    )
