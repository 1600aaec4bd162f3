"""A GPU in name: what a script that asks for one is told under ``ampdbg run --emulate``.

It is one of compute capability 8.0, as the A100: scripts that choose for themselves choose bfloat16, as they do on
nearly every GPU of today, and Accelerate and the Trainer let them. A variable makes it an older one, or a newer. What
it computes is :mod:`ampdbg.precision.emulation`'s, on the CPU.
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
from ampdbg.precision.emulation import Stream, cuda_on_cpu, gives
from ampdbg.script.launch import CAPABILITY, processes_here
from ampdbg.script.ranks import groups_without_gpus

NAME = "a GPU that ampdbg emulates"
MEMORY = 40 * 2**30
"""Bytes."""

AMPERE = (8, 0)
"""The compute capability that has bfloat16 first."""

CUDA = "12.8"
"""The version of CUDA that scripts read, and take apart: the last of which torch is built for old GPUs too."""

ANSWERS: Mapping[str, Any] = {
    "is_available": True,
    "is_initialized": True,
    "is_current_stream_capturing": False,  # asked by the optimizers of a torch built for CUDA before 2.15
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
"""What each function of ``torch.cuda`` returns; the seed of the CPU is that of its generator."""

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
"""The same for ``torch.accelerator``, which a torch built for CUDA takes to the driver, its optimizers from 2.15 on."""


def emulated_capability() -> tuple[int, int]:
    """The compute capability that the variable asks for, or the first with bfloat16.

    Raises:
        ScriptError: the variable holds something else.
    """
    asked = os.environ.get(CAPABILITY) or ".".join(map(str, AMPERE))
    given = re.fullmatch(r"(\d{1,2})\.(\d)", asked)
    if given is None:
        raise ScriptError(f"{CAPABILITY} is {asked!r}: it takes the compute capability of a GPU, such as 7.5 or 8.0")
    return int(given[1]), int(given[2])


def _of_capability(major: int, minor: int) -> Mapping[str, Any]:
    """What functions of ``torch.cuda`` return of a GPU of this compute capability."""
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
    """While this is entered code that asks for a GPU finds one, and FP16 on it is CUDA's, emulated on the CPU.

    On a machine that has a GPU nothing changes.

    Args:
        count: so many are found, or as many as a launcher has started processes here: each takes one of its own.
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
                    stack.enter_context(patch.object(owner, name, gives(answer)))
        stack.enter_context(patch.object(torch.version, "cuda", torch.version.cuda or CUDA))
        stack.enter_context(_stream_of_the_compiler())
        for name in ("get_rng_state_all", "set_rng_state_all"):
            stack.enter_context(patch.object(torch.cuda, name, _RANDOM[name]))
            stack.enter_context(patch.object(torch.cuda.random, name, _RANDOM[name]))
        yield


@contextlib.contextmanager
def _stream_of_the_compiler() -> Iterator[None]:
    """While this is entered code that ``torch.compile`` makes, which asks for the current stream from 2.15 on, gets the
    emulated one. The compiler takes the function when it is imported, maybe meanwhile."""
    name, own = "get_current_stream", vars(torch._C._dynamo).get("utils")
    real = getattr(own, name, None)
    if real is None:
        yield
        return
    answering = gives(ANSWERS_OF_ACCELERATOR["current_stream"])

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
