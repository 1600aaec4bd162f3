"""Several processes that train one model together: what each may do for itself, and what only all of them could."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ampdbg.probes.models import alive_in_process
from ampdbg.probes.tensors import wraps_others
from ampdbg.script.launch import Start

ONE_PROCESS = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "GROUP_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
"""What a launcher tells the only process that it starts; the port is never opened."""


def is_in_group() -> bool:
    """Other processes train with this one now."""
    is_used = distributed.is_available() and distributed.is_initialized()
    return is_used and distributed.get_world_size() > 1


def hooks_half_weights(model: torch.nn.Module) -> bool:
    """Half weights have hooks behind their sums of gradients, DistributedDataParallel's or those of a library like it:
    to run them in FP32 would take those away, as torch makes anew what adds up the gradients of a weight whose dtype
    has changed."""
    is_used = distributed.is_available() and distributed.is_initialized()
    half = [one for one in model.parameters() if is_used and one.requires_grad and one.dtype.itemsize < 4]
    wrappers = alive_in_process(DistributedDataParallel) if half else []
    wrapped = {id(one) for wrapper in wrappers for one in wrapper.parameters()}  # its hooks are none of Python's
    return any(id(one) in wrapped or _hooks_behind_sum(one) for one in half)


def _hooks_behind_sum(weight: torch.Tensor) -> int:
    """How many hooks of Python's are behind what adds up the gradients of a weight: torch hands them to whoever adds
    one."""
    sums = get_gradient_edge(weight).node  # held, or it would be gone with its hooks
    added = sums.register_hook(lambda *_: None)
    count = len(added.hooks_dict_ref() or {}) - 1
    added.remove()
    return count


def in_its_group(start: Start) -> Start:
    """How the script was started, with its rank where it has got one by now, by whatever launcher."""
    if start.processes > 1 or not is_in_group():
        return start
    return replace(start, rank=distributed.get_rank(), processes=distributed.get_world_size())


def why_in_parts(model: torch.nn.Module) -> str:
    """Why this process alone cannot say what the model's weights are; "" where it can."""
    for name, parameter in model.named_parameters():
        if wraps_others(parameter) or hasattr(parameter, "_is_flat_param") or hasattr(parameter, "ds_id"):
            return f"{name} is sharded over the processes, and gathering it would need all of them"
    return ""


def has_its_state(optimizer: Optimizer) -> bool:
    """Its ``state_dict`` is torch's plain one: another may gather parts, and wait for every process."""
    hooks = (vars(optimizer).get(f"_optimizer_state_dict_{when}_hooks") for when in ("pre", "post"))
    return type(optimizer).state_dict is Optimizer.state_dict and not any(hooks)


@contextlib.contextmanager
def alone(*, has_launcher: bool) -> Iterator[None]:
    """While this is entered a script that trains in a group of processes makes one of this process alone.

    No port is opened: the process that has started this one may hold it still. With ``has_launcher`` the environment is
    that of the only process of a launcher.
    """

    def init(original: Callable[..., Any], given: dict[str, Any]) -> Any:
        from torch._C._distributed_c10d import HashStore  # not in every build of torch

        kept = {name: value for name, value in given.items() if name not in ("init_method", "store", "device_id")}
        return original(**{**kept, "rank": 0, "world_size": 1, "store": HashStore()})

    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, ONE_PROCESS if has_launcher else {}))
        if distributed.is_available():
            stack.enter_context(_around("init_process_group", init))
        yield


@contextlib.contextmanager
def groups_without_gpus() -> Iterator[None]:
    """While this is entered groups that are to talk by NCCL do so by gloo, and DDP takes a model on the CPU for one on
    the GPU that it names."""
    if not distributed.is_available():
        yield
        return

    def by_gloo(original: Callable[..., Any], given: dict[str, Any]) -> Any:
        backend = given.get("backend")
        named = {"backend": "gloo"} if isinstance(backend, str) and "nccl" in backend.lower() else {}
        return original(**{**given, **named, **({"device_id": None} if "device_id" in given else {})})

    made = DistributedDataParallel.__init__

    def wrap(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(made).bind(self, module, *args, **kwargs).arguments
        given.update(device_ids=None, output_device=None)
        made(**given)

    with ExitStack() as stack:
        for name in ("init_process_group", "new_group"):
            stack.enter_context(_around(name, by_gloo))
        stack.enter_context(patch.object(DistributedDataParallel, "__init__", wrap))
        yield


@contextlib.contextmanager
def _around(name: str, call: Callable[[Callable[..., Any], dict[str, Any]], Any]) -> Iterator[None]:
    """While this is entered a function of torch.distributed goes through ``call``, with its arguments by name."""
    original = getattr(distributed, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def instead(*args: Any, **kwargs: Any) -> Any:
        return call(original, dict(signature.bind(*args, **kwargs).arguments))

    with patch.object(distributed, name, instead), patch.object(distributed.distributed_c10d, name, instead):
        yield
