"""Twins of an optimizer: the same class with the same options, which steps copies of sampled entries.

The code of an optimizer that is not torch's may do anything. Its twin gets copies of plain attributes only, and it runs
guarded: it may write no other tensor, draw no random number and communicate with no other process.

A second run of a step must leave nothing behind. Only its byte code is read for that. A step may use torch and a few
modules without state, functions whose code is as harmless, and constants. Any other global object, cell or class
attribute may change with each run, and the step is refused.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import io
import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy
import torch
from torch.optim import Optimizer
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampdbg.probes.op_trace import storage_of, traits_of, written_by
from ampdbg.probes.step_hooks import is_of_class, is_torchs, step_of_class, unhooked_steps
from ampdbg.probes.tensors import HALVES, tensors_in
from ampdbg.source.ownership import codes_within
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

MODULES = frozenset(
    {"builtins", "torch", "math", "typing", "functools", "operator", "collections", "random", "numpy", "copy"}
)
"""Modules without state that lasts, but for the random state, which is restored. Others may log or write."""

SHAPES = frozenset({"ndim", "dim", "ndimension", "shape", "size", "numel", "norm"})
"""Names that read the shape of a parameter or all its entries: a step with these needs whole parameters."""

OUTWARD = frozenset({"__class__", "__dict__", "save", "savez", "savetxt", "tofile", "manual_seed", "seed_all"})
"""Attributes and names with which code reaches its class, writes a file, or seeds torch."""

REFUSED = frozenset({"vars", "open", "input", "exec", "eval", "globals", "setattr", "exit", "quit"})
"""Builtins with which code reaches what outlives it, or ends the process."""

CODE = (FunctionType, BuiltinFunctionType, functools.partial, classmethod, staticmethod, property)
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
    if why_not := _why_not_repeatable(kind):
        return why_not
    odd = (key for key, value in _own_attributes(optimizer).items() if not _is_plain(value))
    return next((f"its twin may not share its attribute {key}" for key in odd), "")


def by_parameter(optimizer: Optimizer) -> bool:
    """True if the update of an entry may depend on its parameter's shape or other entries. Others are found out."""
    kind: Any = type(optimizer)
    return _is_one_of(BY_PARAMETER, optimizer) or (not is_torchs(optimizer.step) and _reads_shapes(kind))


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


@functools.lru_cache(maxsize=64)
def _why_not_repeatable(kind: type[Any]) -> str:
    """Return why a second run of the class's step may leave something behind, or ""."""
    with suppress(Exception):  # such as a class without a step, or a cell without contents
        for own in _own_classes(kind):
            for name, value in vars(own).items():
                if not (name.startswith("__") or _is_harmless(value)):
                    return f"its step may change {own.__name__}.{name}"
        return next(filter(None, map(_why_not, _reached(kind))), "")
    return "the code of its step cannot be read"


@functools.lru_cache(maxsize=64)
def _reads_shapes(kind: type[Any]) -> bool:
    """True if the class's step may depend on the shape of a parameter, or on all of its entries."""
    with suppress(Exception):  # then the step does not run a second time
        return any(not SHAPES.isdisjoint(function.__code__.co_names) for function in _reached(kind))
    return False


def _own_classes(kind: type[Any]) -> list[type[Any]]:
    return [one for one in kind.__mro__ if not one.__module__.startswith(("torch.", "builtins", "typing"))]


def _reached(kind: type[Any]) -> Iterator[FunctionType]:
    """Yield the functions that a step can call, as far as their names show."""
    methods = [pair for own in _own_classes(kind) for pair in vars(own).items()]
    names, seen = {"step"}, set[FunctionType]()
    waiting: list[Any] = []
    while names or waiting:
        waiting += [value for name, value in methods if name in names]
        found = {inspect.unwrap(getattr(one, "__func__", getattr(one, "fget", one))) for one in waiting}
        new = {one for one in found if isinstance(one, FunctionType) and not _is_of_torch(one)} - seen
        yield from new
        seen |= new
        names = {name for one in new for name in _named(one, "LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")}
        waiting = [value for one in new for value in _used(one)]


def _used(function: FunctionType) -> list[Any]:
    """Return the global objects that a function loads, the contents of its cells, and its defaults."""
    cells = dict(inspect.getclosurevars(function).nonlocals)
    cells.pop("__class__", None)  # for super()
    named = [function.__globals__[name] for name in _named(function, "LOAD_GLOBAL") & function.__globals__.keys()]
    return [*cells.values(), *named, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _named(function: FunctionType, *kinds: str) -> set[str]:
    """Return the names in the instructions of these kinds, inner functions included."""
    codes = codes_within(function.__code__)
    return {str(one.argval) for code in codes for one in dis.get_instructions(code) if one.opname in kinds}


def _why_not(function: FunctionType) -> str:
    set_outside = _named(function, "STORE_GLOBAL", "DELETE_GLOBAL")
    set_outside |= _named(function, "STORE_DEREF") & {*function.__code__.co_freevars}
    reached = _named(function, "LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD") & OUTWARD
    refused = REFUSED | ({"type"} if _named(function, "STORE_ATTR") else set())
    reached |= _named(function, "LOAD_GLOBAL") & refused
    reached |= {one for one in _named(function, "IMPORT_NAME") if one.partition(".")[0] not in MODULES}
    if found := sorted(set_outside | reached):
        return f"its step uses or sets {found[0]}, which outlives it"
    odd = next((one for one in _used(function) if not _is_harmless(one)), None)
    return "" if odd is None else f"its step uses an object that outlives it, a {type(odd).__name__}"


def _is_harmless(value: Any) -> bool:
    """True for code, for constants, and for modules and classes without state that lasts."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_harmless, value))
    origin = str(getattr(value, "__module__", getattr(value, "__name__", "")))
    is_known = isinstance(value, (ModuleType, type)) and origin.partition(".")[0] in MODULES
    return is_known or isinstance(value, (*CODE, *PLAIN))


def _is_of_torch(function: FunctionType) -> bool:
    return function.__module__.partition(".")[0] == "torch"


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
