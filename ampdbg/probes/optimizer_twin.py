"""Twins of an optimizer: the same class with the same options, which steps copies of sampled entries.

The code of an optimizer that is not torch's may do anything. Its twin gets copies of plain attributes only, and it runs
guarded: it may write no other tensor, draw no random number and communicate with no other process.
"""

from __future__ import annotations

import copy
import io
import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

import numpy
import torch
from torch.optim import Optimizer
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampdbg.probes.op_trace import storage_of, traits_of, written_by
from ampdbg.probes.step_code import reads_shapes, why_not_repeatable
from ampdbg.probes.step_hooks import is_of_class, is_torchs, step_of_class, unhooked_steps
from ampdbg.probes.tensors import HALVES, tensors_in
from ampdbg.workload.batches import tensor_leaves

BY_PARAMETER, BY_MORE = frozenset({"Adafactor", "Muon"}), frozenset({"LBFGS", "SparseAdam"})
"""Torch optimizers in which the update of an entry depends on others of its parameter, and on more than these."""

KERNELS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that choose a kernel of torch's own optimizers."""

BY_OTHERS = "the update of an entry depends on others"
KEEPS_THE_REST = "it keeps what rounding takes from the half weights"

NEARLY = 0.1
"""A state is the rounding error of the weights if its relative distance from that error is smaller."""

FEW = 0.01
"""A vector instruction may round another way than its scalar twin: this share of the moved entries may differ."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class NoTwinError(Exception):
    """An optimizer has no twin. The text is the reason."""


class TwinEntries(NamedTuple):
    """Entries that a twin steps: their ``values`` and optimizer ``state``, and the optimizer's ``group`` of them."""

    values: torch.Tensor
    state: dict[str, Any]
    group: Mapping[str, Any]


def why_no_twin(optimizer: Optimizer) -> str:
    """Return why an optimizer has no twin, or "" if it may have one."""
    if is_torchs(optimizer.step):
        return BY_OTHERS if _is_one_of(BY_MORE, optimizer) else ""
    if not is_of_class(optimizer):
        return "the script has set the step itself"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "its step may communicate with other processes"
    kind: Any = type(optimizer)
    if why_not := why_not_repeatable(kind):
        return why_not
    odd = (key for key, value in _own_attributes(optimizer).items() if not _is_plain(value))
    return next((f"its twin may not share its attribute {key}" for key in odd), "")


def by_parameter(optimizer: Optimizer) -> bool:
    """True if the update of an entry may depend on its parameter's shape or other entries. Others are found out."""
    kind: Any = type(optimizer)
    return _is_one_of(BY_PARAMETER, optimizer) or (not is_torchs(optimizer.step) and reads_shapes(kind))


def _is_one_of(names: frozenset[str], optimizer: Optimizer) -> bool:
    return not names.isdisjoint(one.__name__ for one in type(optimizer).__mro__)


def twin_of(optimizer: Optimizer, several: Sequence[TwinEntries]) -> Optimizer:
    """Return a twin that steps these entries, in the groups of the optimizer."""
    twin: Optimizer = object.__new__(type(optimizer))
    own = _own_attributes(optimizer)
    own = own if is_torchs(optimizer.step) else copy.deepcopy(own)
    hooks = {key: OrderedDict[int, Any]() for key in vars(optimizer) if "hook" in key}
    groups = [{"params": [one.values for one in several if one.group is group]} for group in optimizer.param_groups]
    vars(twin).update({**own, **hooks, "state": defaultdict(dict), "param_groups": groups})
    twin.state.update({one.values: one.state for one in several})
    take_options(twin, optimizer)
    return twin


def take_options(twin: Optimizer, optimizer: Optimizer) -> None:
    """Give a twin the current options of its optimizer. Torch's own optimizers run op by op in a twin."""
    for own, group in zip(twin.param_groups, optimizer.param_groups, strict=False):
        options = {key: value for key, value in group.items() if key != "params"}
        if is_torchs(twin.step):
            own.update(options, **dict.fromkeys(KERNELS & group.keys(), False))
        else:
            own.update(copy.deepcopy(options))


def step_twin(twin: Optimizer) -> None:
    """Run one step of a twin, without torch's hooks.

    Raises:
        NoTwinError: the code of an optimizer that is not torch's did what its twin may not do.
    """
    if is_torchs(twin.step):
        step_of_class(twin)
        return
    stepped = [one for group in twin.param_groups for one in group["params"]]
    own = [vars(twin), twin.param_groups, [one.grad for one in stepped], *(twin.state[one] for one in stepped)]
    with _nothing_left_behind(), _Guard({storage_of(tensor) for _, tensor in tensor_leaves(own)}):
        step_of_class(twin)


def keeps_the_rest(
    before: Mapping[str, Any], after: Mapping[str, Any], exact: torch.Tensor, half: torch.Tensor
) -> bool:
    """True if a state holds float32 masters of ``half`` weights, or what rounding took from them.

    Args:
        before: the state of the entries before a step; ``after`` is the state after it.
        exact: the weights after the same step in float32.
        half: the weights after the step.
    """
    rest = exact - half.float()
    for key, value in after.items():
        if not isinstance(value, torch.Tensor) or value.shape != half.shape:
            continue
        if not value.dtype.is_floating_point:  # the lower bits of a float32 master, or a quantized state
            return True
        if value.dtype not in HALVES and bool((value.to(half.dtype) == half).all() & half.any()):
            return True
        change = value.float() - before.get(key, torch.zeros_like(value)).float()
        near = NEARLY * rest.norm()
        if any(bool((one.abs() - rest.abs()).norm() < near) for one in (value.float(), change)):
            return True
    return False


def differs(half: torch.Tensor, twin: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Return a bool tensor: True if a step moved weights elsewhere than its twin's did, from the same ``start``."""
    moved = (half != start) | (twin != start)
    return (half.view(torch.int16) != twin.view(torch.int16)).sum() > FEW * moved.sum()


def _own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer, except those that a twin has of its own."""
    not_own = {"step", "state", "param_groups"}
    return {key: value for key, value in vars(optimizer).items() if "hook" not in key and key not in not_own}


def _is_plain(value: Any) -> bool:
    """True for numbers, texts, scalar tensors and plain containers of them."""
    leaves = _pytree.tree_leaves(value)
    return all(isinstance(one, PLAIN) or (isinstance(one, torch.Tensor) and one.numel() == 1) for one in leaves)


@contextmanager
def _nothing_left_behind() -> Iterator[None]:
    """Keep what the code of a twin prints from the user. Restore the random state of Python and NumPy. Compile nothing,
    since that takes longer than all steps of a window."""
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(numpy.random.set_state, numpy.random.get_state())
        stack.enter_context(unhooked_steps())
        stack.enter_context(redirect_stdout(io.StringIO()))
        stack.enter_context(redirect_stderr(io.StringIO()))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


class _Guard(TorchDispatchMode):
    """Stops the code of a twin at an op that writes to other storages than these and new ones."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, traits = kwargs or {}, traits_of(op)
        if torch.Tag.nondeterministic_seeded in op.tags:
            raise NoTwinError("it draws random numbers")
        if any(storage_of(one) not in self._storages for one in written_by(traits, args, kwargs)):
            raise NoTwinError("its step writes tensors besides its parameters and their states")
        result = op(*args, **kwargs)
        if not traits.is_view:
            self._storages.update(map(storage_of, tensors_in([result])))
        return result
