"""What a model holds: saved as a step finds it, and restored after a replay."""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import gc
import random
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType, SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils.weak import WeakIdKeyDictionary

from ampdbg.precision.widening import Alteration, altered
from ampdbg.probes.tensors import is_finite
from ampdbg.replay.run import Run

PutBack = Callable[[], None]

LARGEST = 2**24
"""A tensor or array of more bytes is data, or an activation that is kept to be looked at: no state of a step."""

MOST = 1000
"""A container of more values is a vocabulary or the like."""

CONSTANTS = frozenset(
    {int, float, complex, bool, str, bytes, NoneType, slice, range}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)
"""The types of values that nothing can change."""

# Hooks and pins come and go with whoever set them; parameters, buffers and children are no plain attributes.
_NOT_OWN = (frozenset(vars(torch.nn.Module())) | {"forward"}) - {"training"}


@dataclass(frozen=True)
class Kind:
    """A kind of value: what it holds itself, and how to keep it; ``keep`` returns what puts it back."""

    of: type | tuple[type, ...]
    inner: Callable[[Any], Iterable[Any]]
    keep: Callable[[Any], PutBack]


def held_in(model: torch.nn.Module) -> Iterator[tuple[Any, Kind]]:
    """Every value, once, that the model's modules hold and that can be changed.

    Modules that only a list holds are modules too. Of a user's own objects the attributes are looked at, but of what
    those hold no other objects and nothing large: an object may lead to the whole data set and the whole program.
    """
    kinds: dict[type, Kind | None] = {}
    met: dict[int, Any] = {}
    waiting: list[tuple[Any, bool]] = [(model, False)]
    while waiting:
        value, in_object = waiting.pop()
        if id(value) in met:
            continue
        cls = type(value)
        if cls not in kinds:
            kinds[cls] = _kind_of(cls)
        kind = kinds[cls]
        if kind is None or (in_object and (kind is _OBJECT or _is_large(value))):
            continue
        met[id(value)] = value
        yield value, kind
        in_object = kind is _OBJECT or (in_object and not isinstance(value, torch.nn.Module))
        waiting += [(one, in_object) for one in kind.inner(value) if type(one) not in CONSTANTS]


def _is_large(value: Any) -> bool:
    if isinstance(value, (list, dict, set, tuple, deque)):
        return len(value) > MOST
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size() > LARGEST  # a sparse one has no ``nbytes``
    return int(getattr(value, "nbytes", 0)) > LARGEST


def tensors_in(model: torch.nn.Module) -> list[torch.Tensor]:
    """The model's parameters, its buffers, and every tensor among its modules' attributes."""
    return [value for value, _ in held_in(model) if isinstance(value, torch.Tensor)]


def notes_on(model: torch.nn.Module) -> tuple[str, ...]:
    """What there is to say of what a replay moves on for good: one note for each iterator that a module holds."""
    return tuple(
        f"{f'module {name!r}' if name else 'the model'} holds an iterator, {key!r}, which every replay moves on"
        for name, module in model.named_modules()
        for key, value in own_attributes(module).items()
        if isinstance(value, Iterator)
    )


@contextlib.contextmanager
def put_back(model: torch.nn.Module, weights: Sequence[torch.Tensor] = ()) -> Iterator[dict[int, Any]]:
    """Afterwards every module holds the very same objects with the same contents, whatever was done to them.

    Gradients are cleared, and come back too. It costs a copy of the parameters: what a forward pass writes into them
    cannot be undone after the fact, and ``.data`` hides it from version counters. Graphs of tensors are not copied.

    Args:
        model: the model.
        weights: a copy of its parameters, in order, where there is one: what is equal to it needs no other.

    Yields:
        By their ids the objects that come back as they are.
    """
    with torch.no_grad(), _uncollected():
        held = list(held_in(model))
        copies = {id(parameter): weight for parameter, weight in zip(model.parameters(), weights, strict=False)}
        kept = [_kept(value, kind, copies.get(id(value))) for value, kind in held]
    try:
        for value, _ in held:
            if isinstance(value, torch.Tensor) and value.is_leaf:
                value.grad = None
        yield {id(value): value for value, _ in held}
    finally:
        with torch.no_grad(), _uncollected():
            for restore in kept:
                # A tensor of the user's own class may refuse to be written; the rest is to come back all the same.
                with contextlib.suppress(Exception):
                    restore()


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Pauses the garbage collector, which would look again and again at thousands of new objects that all stay."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor without the repetitions that ``expand`` makes: it can be copied, and written."""
    if tensor.layout is not torch.strided or tensor.is_nested or 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def own_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """The plain attributes of a module by name; without hooks and pins, and what torch has registers for."""
    return {name: value for name, value in vars(module).items() if name not in _NOT_OWN}


def _kept(value: Any, kind: Kind, copied: torch.Tensor | None) -> PutBack:
    try:
        return kind.keep(value) if copied is None else _keep_tensor(value, copied)
    except Exception:  # noqa: BLE001 - what cannot be copied is left as the replay leaves it
        return lambda: None


def _keep_module(module: torch.nn.Module) -> PutBack:
    before = own_attributes(module)

    def restore() -> None:
        space = vars(module)
        for name in own_attributes(module).keys() - before.keys():
            del space[name]
        space.update(before)

    return restore


def _keep_tensor(tensor: torch.Tensor, copied: torch.Tensor | None = None) -> PutBack:
    is_leaf, wants, memory = tensor.is_leaf, tensor.requires_grad, tensor.data
    gradient = tensor.grad if is_leaf else None
    written = distinct(memory)
    contents = copied if copied is not None and _is_equal(written, copied) else written.clone()

    def restore() -> None:
        if is_leaf and not tensor.is_leaf:
            tensor.detach_()  # a tensor that wants gradients was written into it
        if is_leaf:
            tensor.requires_grad_(wants)
            tensor.grad = None  # may not fit the memory that comes back
        if not _is_same_memory(tensor, memory):
            tensor.data = memory
        # Through the bare memory: no graph is to learn of a write that changes nothing.
        if not _is_equal(written, contents):
            written.copy_(contents)
        if is_leaf:
            tensor.grad = gradient

    return restore


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    def place(tensor: torch.Tensor) -> tuple[Any, ...]:
        return tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr()

    is_plain = one.layout is other.layout is torch.strided and not one.is_nested
    return is_plain and type(one) in (torch.Tensor, torch.nn.Parameter) and place(one) == place(other)


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return torch.equal(one, other)
    except RuntimeError:  # torch compares no sparse and no quantized tensors
        return False


def _keep_dict(value: dict[Any, Any]) -> PutBack:
    if not value:
        return value.clear
    before = dict(value)

    def restore() -> None:
        if not _is_same([*value, *value.values()], [*before, *before.values()]):
            value.clear()
            value.update(before)

    return restore


def _keep_sequence(value: list[Any] | deque[Any]) -> PutBack:
    before = list(value)

    def restore() -> None:
        if not _is_same(list(value), before):
            value.clear()
            value.extend(before)

    return restore


def _keep_set(value: set[Any]) -> PutBack:
    before = set(value)

    def restore() -> None:
        if value != before:
            value.clear()
            value.update(before)

    return restore


def _is_same(one: list[Any], other: list[Any]) -> bool:
    """Whether they hold the very same objects."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _keep_array(array: Any) -> PutBack:
    if not array.flags.writeable:
        return lambda: None
    before = array.copy()

    def restore() -> None:
        array[...] = before

    return restore


def _keep_object(value: Any) -> PutBack:
    return _keep_dict(vars(value))


def _keep_random(generator: random.Random) -> PutBack:
    return functools.partial(generator.setstate, generator.getstate())


def _keep_generator(generator: torch.Generator) -> PutBack:
    before = generator.get_state()

    def restore() -> None:
        generator.set_state(before)

    return restore


def _keep_numpy_generator(generator: Any) -> PutBack:
    return functools.partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)


def _keep_random_state(generator: Any) -> PutBack:
    return functools.partial(generator.set_state, generator.get_state())


def _nothing(value: Any) -> tuple[()]:
    return ()


def _keep_nothing(value: Any) -> PutBack:
    return lambda: None


def _in_module(module: torch.nn.Module) -> Iterable[Any]:
    return (*own_attributes(module).values(), module._parameters, module._buffers, module._modules)


def _scripted_tensors(module: torch.nn.Module) -> Iterable[Any]:
    return (*module.parameters(), *module.buffers())


_KINDS = (
    Kind(torch.Tensor, _nothing, _keep_tensor),
    # A scripted module holds its own in C++, where the contents of tensors can be put back and nothing else.
    Kind(torch.jit.ScriptModule, _scripted_tensors, _keep_nothing),
    Kind(torch.nn.Module, _in_module, _keep_module),
    Kind(dict, dict.values, _keep_dict),
    Kind((list, deque), iter, _keep_sequence),
    Kind(set, iter, _keep_set),
    Kind(tuple, iter, _keep_nothing),
    Kind(torch._C.Generator, _nothing, _keep_generator),
    Kind(random.Random, _nothing, _keep_random),
)

_OBJECT = Kind(object, lambda value: getattr(value, "__dict__", {}).values(), _keep_object)


def _kind_of(cls: type) -> Kind | None:
    """The kind of a class's values; None where they cannot be changed, or are not the model's to change."""
    known = next((kind for kind in (*_KINDS, *_numpy_kinds()) if issubclass(cls, kind.of)), None)
    library = cls.__module__.partition(".")[0]
    is_foreign = library in {"torch", "numpy", "ampdbg"} or library in sys.stdlib_module_names
    is_users = (not is_foreign or cls is SimpleNamespace) and not issubclass(cls, type)
    return known or (_OBJECT if is_users else None)


def _numpy_kinds() -> tuple[Kind, ...]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return ()
    return (
        Kind(numpy.ndarray, _nothing, _keep_array),
        Kind(numpy.random.Generator, _nothing, _keep_numpy_generator),
        Kind(numpy.random.RandomState, _nothing, _keep_random_state),
    )


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


State = dict[Any, dict[str, tuple[Any, Any]]]
"""For each parameter the optimizer's state, each value with a copy."""


@dataclass(frozen=True)
class KeptWeights:
    """A copy of every parameter of a run, of its optimizers' states, and of their groups' settings."""

    parameters: Mapping[torch.nn.Parameter, torch.Tensor]
    states: tuple[tuple[torch.optim.Optimizer, State], ...]
    groups: tuple[tuple[dict[str, Any], dict[str, Any]], ...]

    @staticmethod
    def now(run: Run) -> KeptWeights:
        """What they are at this moment."""
        optimizers = run.workload.optimizers
        return KeptWeights(
            parameters={parameter: parameter.detach().clone() for parameter in run.workload.model.parameters()},
            states=tuple((optimizer, _state_of(optimizer)) for optimizer in optimizers),
            groups=tuple((group, dict(group)) for optimizer in optimizers for group in optimizer.param_groups),
        )

    def restore(self) -> None:
        """Makes them so again."""
        with torch.no_grad():
            for parameter, value in self.parameters.items():
                parameter.copy_(value)
            for optimizer, state in self.states:
                optimizer.state.clear()
                for parameter, kept in state.items():
                    optimizer.state[parameter] = {key: _put_back(*pair) for key, pair in kept.items()}
        for group, values in self.groups:
            group.update(values)


@contextlib.contextmanager
def weights_kept(run: Run) -> Iterator[None]:
    """Parameters and optimizers may change while this is entered; afterwards they are as before."""
    kept = KeptWeights.now(run)
    try:
        yield
    finally:
        kept.restore()


def _state_of(optimizer: torch.optim.Optimizer) -> State:
    return {
        parameter: {key: (value, copy.deepcopy(value)) for key, value in state.items()}
        for parameter, state in optimizer.state.items()
    }


def _put_back(value: Any, before: Any) -> Any:
    return value.copy_(before) if isinstance(value, torch.Tensor) else before


def altered_model(model: torch.nn.Module, alter: Alteration) -> contextlib.AbstractContextManager[None]:
    """The model's parameters, its buffers and the tensors among its modules' attributes altered: see ``altered``."""
    return altered(tensors_in(model), alter)


def altered_batch(batch: Any, alter: Alteration) -> Any:
    """The batch with its tensors altered; the one that was given is left as it is."""
    return _pytree.tree_map_only(torch.Tensor, alter, batch)
