"""Several processes that train one model together: which operations one process can do alone, and which it cannot."""

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

from ampdbg.probes.models import live_in_process
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
"""The environment that a launcher gives to the only process it starts. The port is never opened."""


def is_in_group() -> bool:
    """True if other processes are training together with this one."""
    is_used = distributed.is_available() and distributed.is_initialized()
    return is_used and distributed.get_world_size() > 1


def hooks_half_weights(model: torch.nn.Module) -> bool:
    """True if half weights have hooks on their gradient accumulators, from DistributedDataParallel or a similar
    library. A replay in FP32 would remove those hooks, because torch creates a new accumulator when a weight's dtype
    changes."""
    is_used = distributed.is_available() and distributed.is_initialized()
    half = [one for one in model.parameters() if is_used and one.requires_grad and one.dtype.itemsize < 4]
    wrappers = live_in_process(DistributedDataParallel) if half else []
    wrapped = {id(one) for wrapper in wrappers for one in wrapper.parameters()}  # DDP's hooks are not in Python
    return any(id(one) in wrapped or _hooks_behind_sum(one) for one in half)


def _hooks_behind_sum(weight: torch.Tensor) -> int:
    """Count the Python hooks on a weight's gradient accumulator. torch exposes them only to code that adds a
    hook."""
    sums = get_gradient_edge(weight).node  # keep a reference: otherwise the node and its hooks are freed
    added = sums.register_hook(lambda *_: None)
    count = len(added.hooks_dict_ref() or {}) - 1
    added.remove()
    return count


def with_rank(start: Start) -> Start:
    """Return how the script was started, with its rank if it has joined a group since, by any launcher."""
    if start.processes > 1 or not is_in_group():
        return start
    return replace(start, rank=distributed.get_rank(), processes=distributed.get_world_size())


def why_in_parts(model: torch.nn.Module) -> str:
    """Return why a file cannot hold the model's weights as this process has them, or "" if it can."""
    for name, parameter in model.named_parameters():
        if wraps_others(parameter) or hasattr(parameter, "_is_flat_param") or hasattr(parameter, "ds_id"):
            return f"{name} is a sharded or wrapped tensor, and a capture holds only whole, plain ones"
    return ""


def has_its_state(optimizer: Optimizer) -> bool:
    """True if its ``state_dict`` is torch's own. Another one may gather parts and wait for every process."""
    hooks = (vars(optimizer).get(f"_optimizer_state_dict_{when}_hooks") for when in ("pre", "post"))
    return type(optimizer).state_dict is Optimizer.state_dict and not any(hooks)


@contextlib.contextmanager
def alone(*, has_launcher: bool) -> Iterator[None]:
    """Inside this context, a script that would join a group of processes forms a group of this process alone.

    No port is opened, because the process that started this one may still hold it. With ``has_launcher``, set the
    environment of a launcher's only process.
    """

    def init(original: Callable[..., Any], given: dict[str, Any]) -> Any:
        from torch._C._distributed_c10d import HashStore  # missing in some builds of torch

        kept = {name: value for name, value in given.items() if name not in ("init_method", "store", "device_id")}
        return original(**{**kept, "rank": 0, "world_size": 1, "store": HashStore()})

    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, ONE_PROCESS if has_launcher else {}))
        if distributed.is_available():
            stack.enter_context(_around("init_process_group", init))
        yield


@contextlib.contextmanager
def groups_without_gpus() -> Iterator[None]:
    """Inside this context, groups that request NCCL use gloo. DDP accepts a model on the CPU in place of one on the
    named GPU."""
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
    """Route a function of torch.distributed through ``call``, with its arguments by name, inside this context."""
    original = getattr(distributed, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def instead(*args: Any, **kwargs: Any) -> Any:
        return call(original, dict(signature.bind(*args, **kwargs).arguments))

    with patch.object(distributed, name, instead), patch.object(distributed.distributed_c10d, name, instead):
        yield
