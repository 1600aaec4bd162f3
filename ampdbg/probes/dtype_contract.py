"""The dtype contract of a loop: in which dtypes its parameters are stored, computed with, summed and stepped.

Looked at once for each optimizer, right behind its first step: nothing is read from a device, and nothing held. What
casts a model is noted while it is built.
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
"""The kinds of parameter, by a part of the module's class or of the parameter's name; the first that fits."""


FIRST = 3
"""Behind so many steps of a loop its cast buffers are looked at: by then it has written those that it writes."""

KEPT_IN_FLOAT32 = re.compile(r"inv_freq|running_(mean|var)|expert_bias|score_correction_bias")
"""Buffers that half may not do for: frequencies that positions multiply, and what grows in small steps."""

POSITIONS = ("max_seq_len_cached", "max_position_embeddings", "max_seq_len")
"""How modules that hold rotary frequencies call the number of positions that they are for."""

FAR = 1000
"""A position at which frequencies are to be right, where a model has so many."""

MASTERS = re.compile("master|fp32")
"""What apex, TransformerEngine, DeepSpeed and Megatron call float32 copies that are stepped in place of weights."""

COMPRESSED = {"bf16_compress": torch.bfloat16, "fp16_compress": torch.float16}
"""The dtype in which DistributedDataParallel's hook of this name sums gradients up."""


ASKED: Mapping[str, Callable[[Any], Any]] = {
    "Accelerate's mixed_precision": lambda root: (
        root._is_accelerate_prepared
        and sys.modules["accelerate.state"].AcceleratorState._shared_state["_mixed_precision"]
    ),
    "Lightning's precision": lambda root: root._trainer.precision,
    "Fabric's precision": lambda root: root._strategy.precision.precision,
    "the model's config.dtype": lambda root: callable(root.from_pretrained) and unwrapped(root).config.dtype,
}
"""Where a framework keeps what it was asked for, by an outermost module; those raise that are none of its own."""


def kind_of(module: str, name: str) -> str:
    """The kind of a parameter as people read them, by its name and the class of its module."""
    found = f"{module} {'.'.join(name.split('.')[-2:])}".lower()
    return next((kind for part, kind in KINDS if part in found), OTHERS)


def kinds_in(models: Models | nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """The name and the kind of each parameter of the models, and the parameter."""
    for path, module in models.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}".lstrip(".")
            yield full, kind_of(type(module).__name__, full), parameter


def names_and_kinds(models: Models) -> dict[int, tuple[str, str]]:
    """The name and the kind of each parameter of the models, by ``id``."""
    return {id(parameter): (name, kind) for name, kind, parameter in kinds_in(models)}


def names_of(models: Models, stepped: Mapping[int, torch.Size]) -> dict[int, tuple[str, str]]:
    """As :func:`names_and_kinds`; what is stepped and has the shapes of the models' parameters, one after the other, is
    copies of them, and has their names."""
    names, trained = names_and_kinds(models), [one for _, one in models.named_parameters() if one.requires_grad]
    are_copies = names.keys().isdisjoint(stepped) and [one.shape for one in trained] == [*stepped.values()]
    copies = zip(stepped, trained, strict=True) if are_copies else ()
    return names | {copy: names[id(one)] for copy, one in copies}


class CastPolicy(NamedTuple):
    """What a wrapper for several processes casts parameters to, and sums their gradients in; None: as they are."""

    name: str = ""
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    is_on: bool = False


Cast = tuple[weakref.ref[nn.Module], str, int, float, Line | None]
"""A buffer that was cast to half: its module, its name and version, by how much that changed a value, and where."""


class DtypeContract:
    """What the optimizers of a loop hold in which dtypes, since each has stepped.

    Args:
        models: name the parameters.
        computed: in which dtype each parameter is computed with, by its ``id``.
    """

    def __init__(self, models: Models, computed: Mapping[int, torch.dtype]) -> None:
        self._models, self._computed = models, computed
        self._of: dict[int, tuple[weakref.ref[Optimizer], tuple[KindDtypes, ...]]] = {}
        self._inside: dict[int, weakref.ref[Optimizer]] = {}
        """The optimizers that have stepped inside of the step under way."""
        self._averages: dict[str, set[torch.dtype]] = {}
        self._casts: list[Cast] = []
        self._steps = 0
        self.lowers_to: Callable[[str], torch.dtype | None] = lambda device: None
        """What autocast of a kind of device lowers to around the calls of the step under way; None where it is off."""
        self._asked: dict[str, str] = {}
        self._cast_buffers: dict[str, CastBuffer] = {}

    def after(self, optimizer: Optimizer) -> None:
        """To be called right behind a step of the optimizer, while the gradients are still there."""
        known, self._steps = self._of.get(id(optimizer)), self._steps + 1
        if known is None or known[0]() is not optimizer:
            inside = (one for alive in self._inside.values() if (one := alive()) not in (None, optimizer))
            self._of[id(optimizer)] = weakref.ref(optimizer), self._look((optimizer, *inside))
        self._inside.clear()
        if self._steps <= FIRST:
            self._cast_buffers |= {buffer.name: buffer for buffer in self._cast_now()}

    def inside(self, optimizer: Optimizer) -> None:
        """An optimizer steps inside of another's step, which may leave to it what it keeps."""
        self._inside[id(optimizer)] = weakref.ref(optimizer)

    @property
    def seen(self) -> dict[str, Any]:
        """What was seen so far, by the fields of a record."""
        every = (of_kind for _, of_it in self._of.values() for of_kind in of_it)
        dtypes = tuple(replace(one, averages=_names(self._averages.get(one.kind, ()))) for one in every)
        return {"dtypes": dtypes, "asked": {**self._asked}, "cast_buffers": tuple(self._cast_buffers.values())}

    def cast(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs what casts a module or moves it, ``Module._apply``, and notes which float32 buffers of its own are half
        then; its children go through the same."""
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
        """Runs what an averaged model takes the weights of now with: by what the first one is, averages are known."""
        for _, kind, parameter in () if self._averages else kinds_in(model):
            self._averages.setdefault(kind, set()).add(parameter.dtype)
        return original(model, *args, **kwargs)

    def _cast_now(self) -> Iterator[CastBuffer]:
        """The buffers that were cast, belong to the models and are still half."""
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
        """What an optimizer that has stepped holds, with those that have stepped inside of it, by kind of parameter."""
        models = self._models
        names, policies = names_and_kinds(models), _policies(models.roots)
        of_each = list(map(stepped_by, optimizers))
        shown: Sequence[torch.Tensor] = of_each[0]
        self._note_asked(models.roots, policies.values(), shown)
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
            # As mistral-finetune keeps them; Megatron's main_grad hangs there too, and is no master.
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

    def _note_asked(self, roots: Iterable[nn.Module], policies: Iterable[CastPolicy], stepped: Sequence[Any]) -> None:
        """Which precision was asked for, as far as frameworks keep it."""
        for root, (who, ask) in product(roots, ASKED.items()):
            with contextlib.suppress(Exception):  # it may be anybody's
                self._asked |= {who: _name(answer)} if (answer := ask(root)) else {}
        given = {policy.name: f"param_dtype={_name(policy.param_dtype)}" for policy in policies if policy.param_dtype}
        lowered = next((self.lowers_to(one.device.type) for one in stepped), None)
        self._asked |= given | ({"autocast": _name(lowered)} if lowered is not None else {})


def _policies(roots: Iterable[nn.Module]) -> dict[int, CastPolicy]:
    """Of wrappers for several processes, by the ``id`` of each parameter inside of them: the innermost counts."""
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
    """The float32 tensors among values, and in lists and dicts of them."""
    found = (leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, torch.Tensor))
    return [leaf for leaf in found if leaf.ndim and leaf.dtype is torch.float32]


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _names(found: Iterable[torch.Tensor | torch.dtype | None]) -> tuple[str, ...]:
    """The names of dtypes, and of those of tensors."""
    dtypes = (one.dtype if isinstance(one, torch.Tensor) else one for one in found)
    return tuple(sorted({_name(dtype) for dtype in dtypes if dtype is not None}))
