"""What a run runs on: the device, the versions, and whether CUDA is emulated."""

from __future__ import annotations

import platform

import torch

from ampdbg import __version__
from ampdbg.config.schema import Config
from ampdbg.errors import WorkloadError
from ampdbg.formats import FLOAT32
from ampdbg.precision import half_kernels
from ampdbg.record.run import Environment

FUSED_ATTENTION_NOTE = (
    "scaled_dot_product_attention is taken to run as a fused kernel, which keeps its scores in float32"
)


def choose_device(asked: str) -> torch.device:
    """The device of ``train.device``; ``auto`` is the first GPU, or the CPU where there is none.

    Raises:
        WorkloadError: a GPU is asked for that this machine does not have.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if count else torch.device("cpu")
    device = torch.device(asked)
    if device.type == "cuda" and (device.index or 0) >= count:
        has = f"{count} CUDA device{'' if count == 1 else 's'}" if count else "no CUDA device"
        raise WorkloadError(
            f"train.device: {asked} was asked for, and this machine has {has}; "
            "with --device cpu ampdbg emulates CUDA's autocast"
        )
    return torch.device("cuda", torch.cuda.current_device()) if asked == "cuda" else device


def is_emulated(config: Config, device: torch.device) -> bool:
    """Whether CUDA's autocast must be emulated: its policy is asked for and the device is none of CUDA's."""
    return config.precision.policy == "cuda" and device.type == "cpu"


def describe_environment(config: Config, device: torch.device) -> Environment:
    """The versions and the device of a run that has ended, as the record keeps them."""
    emulated = is_emulated(config, device) and config.precision.format is not FLOAT32
    attention = emulated and not half_kernels.ran.isdisjoint(half_kernels.FUSED_ATTENTION.split())
    notes = (FUSED_ATTENTION_NOTE,) if attention else ()
    return environment_of(device, config.precision.policy, emulated=emulated, notes=notes)


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
