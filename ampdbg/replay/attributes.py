"""The plain attributes of a model's modules as a step found them, which a replay of it starts with."""

from __future__ import annotations

import copy
import enum
import random
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ampdbg.probes.tensors import is_finite

WRITTEN = -1

Versions = WeakIdKeyDictionary
"""The version of each tensor at the last step, or ``WRITTEN`` where it has changed from one step to another."""


class Left(enum.Enum):
    """In the place of a value that is no plain data: a replay starts with what the model holds by then."""

    AS_IT_IS = "as it is"


@dataclass(frozen=True, eq=False)
class SavedTensor:
    """A tensor as it was. ``contents`` are the model's own memory until something is known to write there.

    ``tensor`` leads to the very object that the model held.
    """

    contents: torch.Tensor
    tensor: weakref.ref[torch.Tensor] | None
    is_leaf: bool
    requires_grad: bool
    is_copy: bool = False

    def made(self, unchanging: Collection[int]) -> torch.Tensor:
        """That object where the model holds it still and it is what it was, else an equal one."""
        own = self.tensor() if self.tensor else None
        # What was made of a parameter, such as its transpose, follows it, and leads the gradients there.
        if own is not None and id(own) in unchanging and not (self.is_copy and self.is_leaf):
            return own
        return _duplicate(self.contents).requires_grad_(self.is_leaf and self.requires_grad)

    def is_still(self, before: SavedTensor) -> bool:
        """Whether it is the tensor that it was before, and nothing was seen to be written there."""
        own = self.tensor() if self.tensor else None
        return not self.is_copy and own is not None and before.tensor is not None and own is before.tensor()

    def settled(self) -> SavedTensor:
        """The same, whatever is written into the model's tensor from now on."""
        return self if self.is_copy else replace(self, contents=_duplicate(self.contents), is_copy=True)


@dataclass(frozen=True, eq=False)
class SavedGenerator:
    """A generator of torch's, which not every version of torch can copy."""

    device: torch.device
    state: torch.Tensor

    def made(self) -> torch.Generator:
        """One that goes on as the saved one would have."""
        generator = torch._C.Generator(self.device)  # the emulation of CUDA has a class of its own in its place
        generator.set_state(self.state)
        return generator


@dataclass(frozen=True, eq=False)
class Attributes:
    """For each module, by its qualified name, its attributes that are plain data, and ``Left`` for every other.

    Plain data are numbers, strings, tensors, arrays, generators of random numbers, and containers of them.
    ``model`` is whose they are: what a module of it has beyond these was made by the step.
    """

    by_module: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    model: weakref.ref[torch.nn.Module] | None = None

    @staticmethod
    def now(model: torch.nn.Module, versions: Versions) -> Attributes:
        """What they are at this moment.

        A tensor is copied only where it was seen to change in place from one step to another: of all others it is
        enough to know which one the model held.
        """
        saving, met = _Saving(model, versions), _Met()
        by_module = {name: _each(own_attributes(one), saving.saved, met) for name, one in _eager_modules(model)}
        return Attributes(by_module, weakref.ref(model))

    def write(self, model: torch.nn.Module, unchanging: Collection[int]) -> None:
        """Makes the model's attributes so; ``unchanging`` are the ids of objects that come back as they are."""
        is_own = self.model is not None and self.model() is model
        by_module, met = self.by_module if is_own else self.for_another_model().by_module, _Met()
        for name, module in _eager_modules(model):
            if name not in by_module:
                continue
            if is_own:
                for other in own_attributes(module).keys() - by_module[name].keys():
                    del vars(module)[other]
            made = _each(by_module[name], lambda one: _made(one, unchanging), met)
            vars(module).update((key, value) for key, value in made.items() if value is not Left.AS_IT_IS)

    def settled(self) -> Attributes:
        """The same, whatever the model does from now on."""
        return self._with_tensors(SavedTensor.settled)

    def for_another_model(self) -> Attributes:
        """The same for a model that is built anew; nothing leads to the tensors of this one."""
        made = self._with_tensors(lambda one: replace(one.settled(), tensor=None) if one.is_leaf else Left.AS_IT_IS)
        return replace(made, model=None)

    def unpoisoned(self, first: Attributes) -> Attributes:
        """The same, but where a value holds inf or NaN that of ``first``, or none where ``first`` had none.

        It is this very object where nothing is spoilt. What is still what it was at first is meant to be so: a mask.
        """
        spoilt = {
            name: [key for key, value in saved.items() if not _is_sound(value, first.by_module.get(name, {}).get(key))]
            for name, saved in self.by_module.items()
        }
        if not any(spoilt.values()):
            return self
        by_module = {name: dict(saved) for name, saved in self.by_module.items()}
        for name, keys in spoilt.items():
            for key in keys:
                del by_module[name][key]
            before = first.by_module.get(name, {})
            by_module[name].update((key, before[key]) for key in keys if key in before)
        return replace(self, by_module=by_module)

    def _with_tensors(self, change: Callable[[SavedTensor], Any]) -> Attributes:
        def changed(saved: Any) -> Any:
            return change(saved) if isinstance(saved, SavedTensor) else saved

        met = _Met()
        return replace(self, by_module={name: _each(saved, changed, met) for name, saved in self.by_module.items()})


def _is_sound(saved: Any, first: Any) -> bool:
    """Whether all tensors of a saved value are finite, or it is one that nothing was written into."""
    if isinstance(saved, SavedTensor) and isinstance(first, SavedTensor) and saved.is_still(first):
        return True
    unsound: list[SavedTensor] = []

    def look(one: Any) -> Any:
        if isinstance(one, SavedTensor) and not is_finite(one.contents):
            unsound.append(one)
        return one

    _mapped(saved, look, {})
    return not unsound


class _Saving:
    """Saves the values of one model's attributes at one moment."""

    def __init__(self, model: torch.nn.Module, versions: Versions) -> None:
        self._buffers = {id(buffer) for buffer in model.buffers()}
        self._versions = versions

    def saved(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value) if self._is_plain(value) else Left.AS_IT_IS
        if isinstance(value, torch._C.Generator):
            return SavedGenerator(value.device, value.get_state())
        return copy.deepcopy(value) if _is_copied(value) else Left.AS_IT_IS

    def _is_plain(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        if tensor.is_nested or tensor.is_inference():
            return False
        return id(tensor) not in self._buffers and tensor.nbytes <= LARGEST

    def _tensor(self, tensor: torch.Tensor) -> SavedTensor:
        saved = SavedTensor(tensor.detach(), weakref.ref(tensor), tensor.is_leaf, tensor.requires_grad)
        # ``WRITTEN`` is no version: such a tensor differs at every step from then on.
        is_written = self._versions.get(tensor, tensor._version) != tensor._version
        self._versions[tensor] = WRITTEN if is_written else tensor._version
        return saved.settled() if is_written and saved.is_leaf else saved


_Met = dict[int, tuple[Any, Any]]
"""By its id each value that was met, and what was made of it: what two attributes share, stays shared."""

CONTAINERS: dict[type, Callable[[Any, list[Any]], Any]] = {
    list: lambda value, inner: inner,
    tuple: lambda value, inner: tuple(inner),
    set: lambda value, inner: set(inner),
    deque: lambda value, inner: deque(inner, value.maxlen),
    dict: lambda value, inner: dict(zip(value, inner, strict=True)),
    OrderedDict: lambda value, inner: OrderedDict(zip(value, inner, strict=True)),
}
"""How each kind is made again of other values."""


def _each(values: Mapping[str, Any], change: Callable[[Any], Any], met: _Met) -> dict[str, Any]:
    return {name: value if type(value) in CONSTANTS else _mapped(value, change, met) for name, value in values.items()}


def _mapped(value: Any, change: Callable[[Any], Any], met: _Met) -> Any:
    """What ``change`` makes of a value, or a container of what it makes of those inside; ``Left`` if of one of them."""
    kind = type(value)
    if kind in CONSTANTS or kind is Left:
        return value
    if id(value) not in met:
        met[id(value)] = value, Left.AS_IT_IS  # should it hold itself
        met[id(value)] = value, _remade(value, change, met) if kind in CONTAINERS else change(value)
    return met[id(value)][1]


def _remade(value: Any, change: Callable[[Any], Any], met: _Met) -> Any:
    is_mapping = isinstance(value, dict)
    if len(value) > MOST or (is_mapping and not all(map(_is_constant, value))):
        return Left.AS_IT_IS
    inner = [_mapped(one, change, met) for one in (value.values() if is_mapping else value)]
    return Left.AS_IT_IS if any(one is Left.AS_IT_IS for one in inner) else CONTAINERS[type(value)](value, inner)


def _is_constant(key: Any) -> bool:
    return type(key) in CONSTANTS or (type(key) is tuple and all(map(_is_constant, key)))


def _made(saved: Any, unchanging: Collection[int]) -> Any:
    if isinstance(saved, SavedTensor):
        return saved.made(unchanging)
    return saved.made() if isinstance(saved, SavedGenerator) else copy.deepcopy(saved)


def _is_copied(value: Any) -> bool:
    """Whether it is a generator, an array or a number that can be copied as it is."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        kinds = (numpy.generic, numpy.random.Generator, numpy.random.RandomState) if numpy else ()
        return isinstance(value, (random.Random, *kinds))
    return value.nbytes <= LARGEST and not value.dtype.hasobject


def _duplicate(tensor: torch.Tensor) -> torch.Tensor:
    return distinct(tensor.detach()).clone().expand(tensor.shape)


def _eager_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            yield name, module
