"""The environment of a run: the device, the versions, and whether CUDA is emulated."""

from __future__ import annotations

import json
import platform
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ampdbg import __version__
from ampdbg.config.schema import Config
from ampdbg.errors import WorkloadError, first_line
from ampdbg.formats import FLOAT32
from ampdbg.precision import autocast_policy, half_kernels
from ampdbg.quantities import counted
from ampdbg.record.run import Environment

FUSED_ATTENTION_NOTE = (
    "ampdbg assumes that scaled_dot_product_attention runs as a fused kernel, which keeps its scores in float32"
)


def choose_device(asked: str) -> torch.device:
    """Return the device of ``train.device``; ``auto`` is the current GPU, or else the CPU.

    Raises:
        WorkloadError: the config names a GPU that this machine does not have.
    """
    # A run on the CPU asks no driver: a broken driver may raise or hang.
    count = torch.cuda.device_count() if asked != "cpu" and torch.cuda.is_available() else 0
    if asked == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if count else torch.device("cpu")
    device = torch.device(asked)
    if device.type == "cuda" and (device.index or 0) >= count:
        has = counted(count, "CUDA device") if count else "no CUDA device"
        raise WorkloadError(
            f"train.device: {asked} was asked for, and this machine has {has}; "
            "with --device cpu ampdbg emulates CUDA's autocast"
        )
    return torch.device("cuda", torch.cuda.current_device()) if asked == "cuda" else device


def is_emulated(config: Config, device: torch.device) -> bool:
    """True if CUDA's autocast must be emulated: the config's policy is CUDA's, and the device is the CPU."""
    return config.precision.policy == "cuda" and device.type == "cpu"


def describe_environment(config: Config, device: torch.device) -> Environment:
    """Return the versions and the device of a run that has ended, as the record keeps them."""
    emulated = is_emulated(config, device) and config.precision.format is not FLOAT32
    attention = emulated and not half_kernels.ran.isdisjoint(half_kernels.FUSED_ATTENTION.split())
    notes = (FUSED_ATTENTION_NOTE,) if attention else ()
    return environment_of(device, config.precision.policy, emulated=emulated, notes=notes)


def environment_of(device: torch.device, policy: str, *, emulated: bool, notes: tuple[str, ...] = ()) -> Environment:
    """Return the versions and the device of this run, as the record keeps them.

    Args:
        device: the device of the model.
        policy: the autocast op lists in force: ``cuda`` or ``native``.
        emulated: CUDA's autocast is emulated on a CPU.
        notes: sentences for the report.
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


# The questions of ampdbg doctor. A separate process answers them: each may raise, crash or hang.


def _flags() -> dict[str, bool]:
    """Return torch's settings for matrix products at startup, by name, if this version of torch has them."""
    owners = {"cuda.matmul": torch.backends.cuda.matmul, "cudnn": torch.backends.cudnn}
    names = ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation")
    settings = {f"{place}.{name}": getattr(owner, name, None) for place, owner in owners.items() for name in names}
    return {name: value for name, value in settings.items() if isinstance(value, bool)}


def _attention() -> list[str]:
    backends = {"flash": "flash_sdp", "memory-efficient": "mem_efficient_sdp", "cuDNN": "cudnn_sdp", "math": "math_sdp"}
    return [name for name, switch in backends.items() if getattr(torch.backends.cuda, f"{switch}_enabled")()]


def _gpus() -> list[tuple[str, tuple[int, ...]]]:
    """Return the name and compute capability of each GPU; () for an AMD GPU, which is not on NVIDIA's scale."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [
        (torch.cuda.get_device_name(index), () if torch.version.hip else torch.cuda.get_device_capability(index))
        for index in range(count)
    ]


QUESTIONS: Mapping[str, Callable[[], Any]] = {
    "imported": lambda: torch.__version__,
    "cuda": lambda: torch.version.cuda,
    "hip": lambda: torch.version.hip,
    "flags": _flags,
    "attention": _attention,
    "op_lists": lambda: autocast_policy.lists_by_origin(Path(torch.__file__).parent),
    "notes": lambda: [FUSED_ATTENTION_NOTE],
    "has_mps": torch.backends.mps.is_available,
    "gpus": _gpus,
    "kernels": torch.cuda.get_arch_list,
    "device": lambda: str(choose_device("auto")),
}
"""Questions to the driver come last: if one hangs, the questions before it have been answered."""


def main() -> None:
    """Print a line of JSON for each question as soon as it is answered: its name, its answer, and its error or ""."""
    for name, question in QUESTIONS.items():
        reply, raised = None, ""
        with warnings.catch_warnings(record=True) as warned:
            try:
                reply = question()
            except Exception as error:  # noqa: BLE001 - a driver's calls raise anything
                raised = first_line(error)
        # With a driver that is too old for it, torch only warns and reports no GPU.
        raised = raised or next((str(warning.message).partition("\n")[0] for warning in warned), "")
        sys.stdout.write(json.dumps({"ampdbg": [name, reply, raised]}) + "\n")
        sys.stdout.flush()
