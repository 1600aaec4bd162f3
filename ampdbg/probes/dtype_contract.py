"""The dtype contract of a loop: the dtypes in which it stores, computes, sums and steps its parameters.

ampdbg checks each optimizer once, right after its first step. The check reads no data from a device and keeps no
tensor. Casts of a model are recorded while the script builds the model.
"""

from __future__ import annotations

import contextlib
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import Any, NamedTuple

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ampdbg.probes.models import Models, unwrapped
from ampdbg.probes.optimizers import stepped_by
from ampdbg.probes.running_counts import RunningCounts
from ampdbg.probes.source_lines import innermost_line, source_if_known
from ampdbg.probes.step_hooks import name_of
from ampdbg.probes.tensors import HALVES
from ampdbg.record.run import CastBuffer, KindDtypes
from ampdbg.source.ownership import Line

OTHERS = "other weights"
KINDS = (
    ("norm", "norms"),
    ("embed", "embeddings"),
    ("bias", "biases"),
    ("conv", "convolutions"),
    ("linear", "linears"),
)
"""Part of the module's class name or of the parameter's name, and the kind that it means; the first match counts."""


FIRST = 3
"""Check cast buffers after each of the first 3 optimizer steps: the loop has then written all that it ever writes."""

KEPT_IN_FLOAT32 = re.compile(r"inv_freq|running_(mean|var)|expert_bias|score_correction_bias")
"""Buffers that may need float32: frequencies that positions multiply, and values that grow in small steps."""

POSITIONS = ("max_seq_len_cached", "max_position_embeddings", "max_seq_len")
"""Attributes in which modules with rotary frequencies store their number of positions."""

FAR = 1000
"""The position at which frequencies must be accurate, if the model has this many positions."""

MASTERS = re.compile("master|fp32")
"""Matches the names that apex, TransformerEngine, DeepSpeed and Megatron give to float32 masters."""

COMPRESSED = {"bf16_compress": torch.bfloat16, "fp16_compress": torch.float16}
"""The dtype in which DistributedDataParallel's communication hook of this name sums gradients."""


REQUESTED_PRECISION: Mapping[str, Callable[[Any], Any]] = {
    "Accelerate's mixed_precision": lambda root: (
        root._is_accelerate_prepared
        and sys.modules["accelerate.state"].AcceleratorState._shared_state["_mixed_precision"]
    ),
    "Lightning's precision": lambda root: root._trainer.precision,
    "Fabric's precision": lambda root: root._strategy.precision.precision,
    "the model's config.dtype": lambda root: callable(root.from_pretrained) and unwrapped(root).config.dtype,
}
"""Functions that read the precision setting of a framework from an outermost module; they raise for other modules."""


def kind_of(module: str, name: str) -> str:
    """Return the kind of a parameter, as shown to the user, from its name and the class of its module."""
    found = f"{module} {'.'.join(name.split('.')[-2:])}".lower()
    return next((kind for part, kind in KINDS if part in found), OTHERS)


def kinds_in(models: Models | nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield the name, the kind and the tensor of each parameter of the models."""
    for path, module in models.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}".lstrip(".")
            yield full, kind_of(type(module).__name__, full), parameter


def names_and_kinds(models: Models) -> dict[int, tuple[str, str]]:
    """Return the name and the kind of each parameter of the models, by ``id``."""
    return {id(parameter): (name, kind) for name, kind, parameter in kinds_in(models)}


def names_of(models: Models, stepped: Mapping[int, torch.Size]) -> dict[int, tuple[str, str]]:
    """Return :func:`names_and_kinds`, with the same names for copies of the parameters. Stepped tensors are copies if
    their shapes equal those of the trained parameters, in order, and none is a parameter."""
    names, trained = names_and_kinds(models), [one for _, one in models.named_parameters() if one.requires_grad]
    are_copies = names.keys().isdisjoint(stepped) and [one.shape for one in trained] == [*stepped.values()]
    copies = zip(stepped, trained, strict=True) if are_copies else ()
    return names | {copy: names[id(one)] for copy, one in copies}


class CastPolicy(NamedTuple):
    """The dtypes to which a distributed wrapper, such as FSDP, casts parameters and summed gradients; None: no cast."""

    name: str = ""
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    is_on: bool = False


Cast = tuple[weakref.ref[nn.Module], str, int, float, Line | None]
"""A buffer cast to half: its module, name and version, the largest error of the cast, and the source line."""


class DtypeContract:
    """The dtypes of a loop's parameters, gradients and optimizer states, taken after each optimizer's first step.

    Args:
        models: give the names of the parameters.
        computed: the dtype in which ops compute with each parameter, by its ``id``.
    """

    def __init__(self, models: Models, computed: Mapping[int, torch.dtype]) -> None:
        self._models, self._computed = models, computed
        self._of: dict[int, tuple[weakref.ref[Optimizer], tuple[KindDtypes, ...]]] = {}
        self._inside: dict[int, weakref.ref[Optimizer]] = {}
        """The optimizers that stepped inside the current step, by ``id``."""
        self._averages: dict[str, set[torch.dtype]] = {}
        self._casts: list[Cast] = []
        self._steps = 0
        self.autocast_dtype: Callable[[str], torch.dtype | None] = lambda device: None
        """Returns the autocast dtype of a device type around the current step's calls; None if autocast is off."""
        self._asked: dict[str, str] = {}
        self._cast_buffers: dict[str, CastBuffer] = {}
        self._counts = RunningCounts(models)

    def after(self, optimizer: Optimizer) -> None:
        """Check the optimizer's dtypes, if it is new. Call this right after its step, while the gradients exist."""
        known, self._steps = self._of.get(id(optimizer)), self._steps + 1
        if known is None or known[0]() is not optimizer:
            inside = (one for alive in self._inside.values() if (one := alive()) not in (None, optimizer))
            self._of[id(optimizer)] = weakref.ref(optimizer), self._look((optimizer, *inside))
        self._inside.clear()
        self._counts.after_step()
        if self._steps <= FIRST:
            self._cast_buffers |= {buffer.name: buffer for buffer in self._cast_now()}

    def inside(self, optimizer: Optimizer) -> None:
        """Record an optimizer that steps inside another optimizer's step, and may hold that optimizer's state."""
        self._inside[id(optimizer)] = weakref.ref(optimizer)

    @property
    def seen(self) -> dict[str, Any]:
        every = (of_kind for _, of_it in self._of.values() for of_kind in of_it)
        dtypes = tuple(replace(one, averages=_names(self._averages.get(one.kind, ()))) for one in every)
        casts, counts = tuple(self._cast_buffers.values()), self._counts.seen
        return {"dtypes": dtypes, "asked": {**self._asked}, "cast_buffers": casts, "half_counts": counts}

    def cast(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run ``Module._apply``, which casts or moves a module, and record its own float32 buffers that became half.
        The children get calls of their own."""
        own = [(name, one) for name, one in module.named_buffers(recurse=False) if KEPT_IN_FLOAT32.search(name)]
        before = {name: one for name, one in own if not is_lazy(one) and one.numel() and not one.is_meta}
        result, line = original(module, *args, **kwargs), innermost_line() if before else None
        now = dict(module.named_buffers(recurse=False))
        for name in before.keys() & now.keys():
            buffer, cast = before[name].detach(), now[name].detach()
            if buffer.dtype is torch.float32 and cast.dtype in HALVES:
                off = float((cast.to(buffer) - buffer).abs().amax())
                self._casts.append((weakref.ref(module), name, cast._version, off, line))
        return result

    def averaged(self, original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run an averaged model's update, and record the dtypes of the loop's first averaged model by kind."""
        for _, kind, parameter in () if self._averages else kinds_in(model):
            self._averages.setdefault(kind, set()).add(parameter.dtype)
        return original(model, *args, **kwargs)

    def _cast_now(self) -> Iterator[CastBuffer]:
        paths = {id(module): path for path, module in self._models.named_modules()} if self._casts else {}
        for owner, name, version, off, line in self._casts:
            module: Any = owner()
            now = getattr(module, name) if id(module) in paths else None
            if now is not None and now.dtype in HALVES:
                momentum = getattr(module, "momentum", None)
                is_written = now._version > version or (module.training and momentum is not None)
                full, source = f"{paths[id(module)]}.{name}".lstrip("."), source_if_known(line)
                reach = min([FAR, *(one for key in POSITIONS if type(one := getattr(module, key, FAR)) is int)])
                yield CastBuffer(full, _name(now.dtype), off, reach, is_written, momentum, source)

    def _look(self, optimizers: Sequence[Optimizer]) -> tuple[KindDtypes, ...]:
        """Return the dtypes of the first optimizer by kind of parameter, with the state of the optimizers inside it."""
        models = self._models
        names, policies = names_and_kinds(models), cast_policies(models.roots)
        of_each = list(map(stepped_by, optimizers))
        shown: Sequence[torch.Tensor] = of_each[0]
        self._record_requested_precision(models.roots, policies.values(), shown)
        attributes = chain.from_iterable(vars(optimizer).items() for optimizer in optimizers)
        masters = _float32(value for key, value in attributes if MASTERS.search(key))
        halves = [one for _, one in models.named_parameters() if one.dtype in HALVES and one.requires_grad]
        copies = _float32(chain.from_iterable(of_it for of_it in of_each if names.keys().isdisjoint(map(id, of_it))))
        if halves and sum(one.numel() for one in copies) >= sum(one.numel() for one in halves):
            shown, masters = halves, copies
        by_kind: dict[str, list[Any]] = {}
        for one in shown:
            by_kind.setdefault(names.get(id(one), ("", OTHERS))[1], []).append(one)

        def of_kind(kind: str, of_it: list[Any]) -> KindDtypes:
            holders = chain.from_iterable(of_each) if shown is halves else of_it
            kept = (optimizer.state.get(one, {}).items() for one, optimizer in product(holders, optimizers))
            states = [(key, value) for key, value in chain.from_iterable(kept) if torch.is_tensor(value) and value.ndim]
            own = [(one, one.grad, policies.get(id(one), CastPolicy())) for one in of_it]
            # mistral-finetune stores masters as attributes. Megatron's main_grad is one too, but is a gradient.
            beside = _float32(value for one in of_it for key, value in vars(one).items() if "grad" not in key)
            sums = [policy.reduce_dtype or policy.param_dtype or grad for _, grad, policy in own if policy.is_on]
            return KindDtypes(
                kind=kind,
                parameters=len(of_it),
                optimizer=name_of(optimizers[0]),
                stored=_names(of_it),
                computed=_names(policy.param_dtype or self._computed.get(id(one)) for one, _, policy in own),
                gradients=_names(policy.param_dtype or grad for _, grad, policy in own),
                accumulated=_names(getattr(one, "main_grad", grad) for one, grad, _ in own),
                reduced=_names(sums),
                states=_names(value for key, value in states if not MASTERS.search(key)),
                masters=_names([*masters, *beside, *(value for key, value in states if MASTERS.search(key))]),
            )

        return tuple(of_kind(kind, of_it) for kind, of_it in by_kind.items())

    def _record_requested_precision(
        self, roots: Iterable[nn.Module], policies: Iterable[CastPolicy], stepped: Sequence[Any]
    ) -> None:
        for root, (who, ask) in product(roots, REQUESTED_PRECISION.items()):
            with contextlib.suppress(Exception):  # the module may belong to no framework
                self._asked |= {who: _name(answer)} if (answer := ask(root)) else {}
        given = {policy.name: f"param_dtype={_name(policy.param_dtype)}" for policy in policies if policy.param_dtype}
        lowered = next((self.autocast_dtype(one.device.type) for one in stepped), None)
        self._asked |= given | ({"autocast": _name(lowered)} if lowered is not None else {})


def cast_policies(roots: Iterable[nn.Module]) -> dict[int, CastPolicy]:
    """Return the policy of the innermost distributed wrapper of each parameter, by the parameter's ``id``."""
    found: dict[int, CastPolicy] = {}
    are_several = distributed.is_available() and distributed.is_initialized()
    for module in (module for root in roots if are_several for module in root.modules()):
        policy = _policy_of(module)
        found.update((id(parameter), policy) for parameter in module.parameters() if policy.is_on)
    return found


def _policy_of(module: Any) -> CastPolicy:
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else module
    given: Any = getattr(state, "_mp_policy", getattr(state, "mixed_precision", None))
    if hasattr(given, "reduce_dtype"):
        return CastPolicy(type(given).__name__.lstrip("_"), given.param_dtype, given.reduce_dtype, is_on=True)
    hooks = " ".join(getattr(hook, "__qualname__", "") for hook, _ in getattr(module, "_comm_hooks", ()))
    reduced = next((dtype for name, dtype in COMPRESSED.items() if name in hooks), None)
    return CastPolicy("", None, reduced, is_on=isinstance(module, DistributedDataParallel))


def _float32(values: Any) -> list[torch.Tensor]:
    """Return the float32 tensors, but scalars, among values and in their lists and dicts."""
    found = (leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, torch.Tensor))
    return [leaf for leaf in found if leaf.ndim and leaf.dtype is torch.float32]


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _names(found: Iterable[torch.Tensor | torch.dtype | None]) -> tuple[str, ...]:
    """Return the sorted names of dtypes and of tensors' dtypes, without None."""
    dtypes = (one.dtype if isinstance(one, torch.Tensor) else one for one in found)
    return tuple(sorted({_name(dtype) for dtype in dtypes if dtype is not None}))
