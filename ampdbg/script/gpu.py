"""A simulated GPU for scripts that request one under ``ampdbg run --emulate``.

It reports compute capability 8.0, like the A100. Scripts that choose a dtype themselves then choose bfloat16, as on
nearly every current GPU. Accelerate and the Trainer allow it. An environment variable selects an older or newer GPU.
:mod:`ampdbg.precision.emulation` computes the GPU's results on the CPU.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from ampdbg.errors import ScriptError
from ampdbg.precision.emulation import Stream, cuda_on_cpu, returning
from ampdbg.script.launch import CAPABILITY, processes_here
from ampdbg.script.ranks import groups_without_gpus

NAME = "a GPU that ampdbg emulates"
MEMORY = 40 * 2**30
"""The reported memory, in bytes."""

AMPERE = (8, 0)
"""The first compute capability with bfloat16."""

CUDA = "12.8"
"""The CUDA version that scripts read and parse: the last one for which torch is built for old GPUs too."""

ANSWERS: Mapping[str, Any] = {
    "is_available": True,
    "is_initialized": True,
    "is_current_stream_capturing": False,  # called by the optimizers of a torch built for CUDA before 2.15
    "get_device_name": NAME,
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "memory_stats": {},
    "mem_get_info": (MEMORY, MEMORY),
    "empty_cache": None,
    "ipc_collect": None,
    "get_per_process_memory_fraction": 1.0,
    "reset_accumulated_memory_stats": None,
    "reset_max_memory_cached": None,
    "reset_peak_memory_stats": None,
    "manual_seed": None,
    "manual_seed_all": None,
    "seed": None,
    "seed_all": None,
    "utilization": 0,
}
"""The result of each function of ``torch.cuda``. Seeding does nothing: the CPU's generator has its own seed."""

ANSWERS_OF_ACCELERATOR: Mapping[str, Any] = {
    "is_available": True,
    "current_accelerator": torch.device("cuda"),
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_reserved": 0,
    "memory_stats": {},
    "get_memory_info": (MEMORY, MEMORY),
    "current_stream": Stream(),
    "current_device_index": 0,
    "current_device_idx": 0,
    **dict.fromkeys(("synchronize", "set_stream", "set_device_index", "set_device_idx", "empty_cache")),
    **dict.fromkeys(("reset_peak_memory_stats", "reset_accumulated_memory_stats")),
}
"""The same for ``torch.accelerator``, where a torch built for CUDA calls the driver; its optimizers do from 2.15 on."""


def emulated_capability() -> tuple[int, int]:
    """Return the compute capability that the environment variable selects, or the first with bfloat16.

    Raises:
        ScriptError: the variable is not a compute capability.
    """
    asked = os.environ.get(CAPABILITY) or ".".join(map(str, AMPERE))
    given = re.fullmatch(r"(\d{1,2})\.(\d)", asked)
    if given is None:
        raise ScriptError(f"{CAPABILITY} is {asked!r}: it takes the compute capability of a GPU, such as 7.5 or 8.0")
    return int(given[1]), int(given[2])


def _of_capability(major: int, minor: int) -> Mapping[str, Any]:
    """Return the results of ``torch.cuda`` functions for a GPU of this compute capability."""
    own = SimpleNamespace(
        name=NAME,
        major=major,
        minor=minor,
        total_memory=MEMORY,
        multi_processor_count=108,
        gcnArchName="",
        uuid="",
    )
    return {
        "is_bf16_supported": (major, minor) >= AMPERE,
        "get_device_capability": (major, minor),
        "get_device_properties": own,
        "get_arch_list": [f"sm_{major}{minor}"],
    }


@contextlib.contextmanager
def emulated_gpu(count: int = 1) -> Iterator[None]:
    """Simulate a GPU inside this context, with CUDA's FP16 emulated on the CPU.

    On a machine with a GPU nothing changes.

    Args:
        count: the number of GPUs to report, or more if a launcher has started more processes here: each uses its own.
    """
    if torch.cuda.is_available():
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(cuda_on_cpu())
        stack.enter_context(groups_without_gpus())
        counted = {"device_count": max(count, processes_here())}
        answers_of_cuda = {**ANSWERS, **_of_capability(*emulated_capability())}
        for owner, answers in ((torch.cuda, answers_of_cuda), (torch.accelerator, ANSWERS_OF_ACCELERATOR)):
            for name, answer in {**answers, **counted}.items():
                if hasattr(owner, name):
                    stack.enter_context(patch.object(owner, name, returning(answer)))
        stack.enter_context(patch.object(torch.version, "cuda", torch.version.cuda or CUDA))
        stack.enter_context(_stream_of_the_compiler())
        for name in ("get_rng_state_all", "set_rng_state_all"):
            stack.enter_context(patch.object(torch.cuda, name, _RANDOM[name]))
            stack.enter_context(patch.object(torch.cuda.random, name, _RANDOM[name]))
        yield


@contextlib.contextmanager
def _stream_of_the_compiler() -> Iterator[None]:
    """Give code generated by ``torch.compile`` the emulated stream, which it requests from torch 2.15 on. The compiler
    looks the function up when it is imported, possibly inside this context."""
    name, own = "get_current_stream", vars(torch._C._dynamo).get("utils")
    real = getattr(own, name, None)
    if real is None:
        yield
        return
    answering = returning(ANSWERS_OF_ACCELERATOR["current_stream"])

    def put(function: Any) -> None:
        for module in (own, sys.modules.get("torch._dynamo.utils")):
            if module is not None:
                setattr(module, name, function)

    put(answering)
    try:
        yield
    finally:
        put(real)


_RANDOM: Mapping[str, Any] = {
    "get_rng_state_all": lambda: [torch.get_rng_state()],
    "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
}
