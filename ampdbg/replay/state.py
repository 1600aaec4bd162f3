"""What a model, a batch and a process hold: how it is saved, restored in place, and made again.

One table of kinds says what each kind of value holds, how its contents are restored in place, and how a new one is
made of other contents. :class:`Held` restores the very same objects; ``copies`` makes others like them.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import random
import sys
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import NoneType, SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree

from ampdbg.probes.tensors import distinct, is_emptied

Restore = Callable[[], None]

LARGEST = 2**24
"""A tensor or array of more bytes is data, or an activation that is kept to be looked at: no state of a step."""

MOST = 1000
"""A container of more values is a vocabulary or the like."""

LARGEST_APART = 2**20
"""A tensor or array of more bytes that belongs to no model is data: one in a global, or in an object's object."""

OBJECTS_IN_A_BATCH = 3
"""Objects within objects of a batch are followed so far: one may lead to the whole data set."""

IN_A_MODEL, IN_A_BATCH = (LARGEST, LARGEST, LARGEST_APART), (sys.maxsize,) * (OBJECTS_IN_A_BATCH + 1)
"""So large is what is saved of them at most: outside of all objects, in an object, in an object within one …"""

CONSTANTS = frozenset(
    {int, float, complex, bool, str, bytes, NoneType, slice, range}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)
"""The types of values that nothing can change."""

# Hooks and pins come and go with whoever set them; parameters, buffers and children are no plain attributes.
NOT_OWN = (frozenset(vars(torch.nn.Module())) | {"forward"}) - {"training"}


@dataclass(frozen=True)
class Kind:
    """A kind of value.

    ``inner`` are the values that it holds. ``save`` returns what restores its own contents in place. ``make`` returns
    a new value like the given one that holds ``inner``; None where only the very object will do.
    """

    of: type | tuple[type, ...]
    inner: Callable[[Any], Iterable[Any]]
    save: Callable[[Any], Restore]
    make: Callable[[Any, list[Any]], Any] | None = None


class Held:
    """All that some roots hold, saved at one moment, to be restored into the very same objects.

    It costs a copy of every tensor: what a forward pass writes into them cannot be undone after the fact, and
    ``.data`` hides it from version counters. Graphs of tensors are not copied.

    Args:
        roots: models, optimizers' states, tensors.
        batches: their objects are followed further than those of a model.
    """

    def __init__(self, *roots: Any, batches: Sequence[Any] = ()) -> None:
        with torch.no_grad():
            found = {id(value): (value, kind) for value, kind in _walk(batches, IN_A_BATCH)}
            found.update((id(value), (value, kind)) for value, kind in _walk(roots, IN_A_MODEL))
            self._saved = [(value, _saved(value, kind)) for value, kind in found.values()]
        self.ids = frozenset(found)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor among them, once."""
        return [value for value, _ in self._saved if isinstance(value, torch.Tensor)]

    def restore(self) -> None:
        """Makes everything what it was when it was saved."""
        with torch.no_grad():
            for _, restore in self._saved:
                # A tensor of the user's own class may refuse to be written; the rest is restored all the same.
                with contextlib.suppress(Exception):
                    restore()


@contextlib.contextmanager
def restored(*roots: Any, batches: Sequence[Any] = ()) -> Iterator[Held]:
    """Afterwards models and batches hold the very same objects with the same contents, whatever was done to them.

    Gradients are cleared meanwhile.
    """
    held = Held(*roots, batches=batches)
    try:
        for tensor in held.tensors:
            if tensor.is_leaf:
                tensor.grad = None
        yield held
    finally:
        held.restore()


def held_by(optimizers: Iterable[torch.optim.Optimizer]) -> Held:
    """All that optimizers hold: their states, their groups' settings and the parameters in these."""
    return Held(*(part for optimizer in optimizers for part in (optimizer.state, optimizer.param_groups)))


def are_held_whole(optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    """Whether that is all: an optimizer of the user's may keep copies of weights in attributes of its own."""
    own = [{**vars(optimizer), "state": None, "param_groups": None} for optimizer in optimizers]
    return not any(isinstance(leaf, torch.Tensor) for leaf in _pytree.tree_leaves(own))


def tensors_in(model: torch.nn.Module) -> list[torch.Tensor]:
    """The model's parameters, its buffers, and every tensor among its modules' attributes."""
    return [value for value, _ in _walk([model]) if isinstance(value, torch.Tensor)]


def notes_on(model: torch.nn.Module) -> tuple[str, ...]:
    """What replays change for good: a note for each iterator, and each tensor that cannot be copied."""
    return tuple(
        f"{f'module {name!r}' if name else 'the model'} holds {problem}"
        for name, module in model.named_modules()
        for key, value in (*own_attributes(module).items(), *module._buffers.items())
        if (problem := _unrestorable(key, value))
    )


def own_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """The plain attributes of a module by name; without hooks and pins, and what torch has registers for."""
    return {name: value for name, value in vars(module).items() if name not in NOT_OWN}


def _unrestorable(key: str, value: Any) -> str:
    if isinstance(value, Iterator):
        return f"an iterator, {key!r}, which every replay moves on"
    if isinstance(value, torch.Tensor):
        try:
            _contents(value)
        except Exception:  # noqa: BLE001 - whatever it raises
            return f"{key!r}, a tensor that cannot be copied: what a replay writes into it stays"
    return ""


def _walk(roots: Iterable[Any], largest: Sequence[int] = (LARGEST, LARGEST)) -> Iterator[tuple[Any, Kind]]:
    """Every value, once, that can be changed and that the roots lead to.

    Modules that only a list holds are modules too. A user's own objects are followed as deep as ``largest`` has
    entries behind its first, but to nothing larger: one may lead to the whole data set and the whole program.
    """
    kinds, met = Kinds(), {}
    waiting = [(root, 0) for root in roots]
    while waiting:
        value, depth = waiting.pop()
        kind = kinds[type(value)]
        if kind is None or id(value) in met:
            continue
        if depth and ((kind is OBJECT and depth + 1 == len(largest)) or _is_large(value, largest[depth])):
            continue
        met[id(value)] = value
        yield value, kind
        inside = depth + 1 if kind is OBJECT else 0 if isinstance(value, torch.nn.Module) else depth
        waiting += [(one, inside) for one in kind.inner(value) if type(one) not in CONSTANTS]


def _is_large(value: Any, largest: int) -> bool:
    if isinstance(value, (list, dict, set, tuple, deque)):
        return len(value) > MOST
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size() > largest  # a sparse one has no ``nbytes``
    return hasattr(type(value), "nbytes") and int(value.nbytes) > largest


def _saved(value: Any, kind: Kind) -> Restore:
    try:
        return kind.save(value)
    except Exception:  # noqa: BLE001 - what cannot be copied is left as the replay leaves it
        return lambda: None


def _save_module(module: torch.nn.Module) -> Restore:
    before = own_attributes(module)

    def restore() -> None:
        space = vars(module)
        for name in [name for name in space if name not in before and name not in NOT_OWN]:
            del space[name]
        space.update(before)

    return restore


def _save_tensor(tensor: torch.Tensor) -> Restore:
    is_leaf, wants, memory = tensor.is_leaf, tensor.requires_grad, tensor.data
    gradient = tensor.grad if is_leaf else None
    contents = _contents(memory)

    def restore() -> None:
        if is_leaf and not tensor.is_leaf:
            tensor.detach_()  # a tensor that wants gradients was written into it
        if is_leaf:
            tensor.requires_grad_(wants)
            tensor.grad = None  # may not fit the memory that comes back
        tensor.data = memory
        # Through the bare memory: no graph is to learn of a write that changes nothing.
        if not _is_equal(distinct(memory), contents) and not written(memory, contents):
            tensor.data = _spread(contents, memory)
        if is_leaf:
            tensor.grad = gradient

    return restore


def _contents(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the distinct part of a tensor.

    Raises:
        RuntimeError: it cannot be copied.
    """
    part = distinct(tensor.detach() if tensor.requires_grad else tensor)
    if is_emptied(part):
        raise RuntimeError("its memory was taken away")
    try:
        return part.clone()
    except RuntimeError:  # as of a tensor that is quantized by channel
        return copy.deepcopy(part)


def _spread(contents: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Contents in the shape of the tensor that they are of."""
    return contents if contents.is_nested or contents.shape == like.shape else contents.expand(like.shape)


def duplicated(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor that repeats what the tensor repeats."""
    return _spread(_contents(tensor), tensor)


def written(tensor: torch.Tensor, contents: torch.Tensor) -> bool:
    """Whether the contents could be written into the memory of a tensor."""
    try:
        distinct(tensor).copy_(distinct(contents))
    except (RuntimeError, TypeError):
        return False
    return True


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return torch.equal(one, other)
    except (RuntimeError, TypeError, AttributeError):  # torch compares no sparse, nested and masked tensors
        return False


def _save_container(value: Any) -> Restore:
    before, flat = dict(value) if isinstance(value, dict) else list(value), _flat(value)

    def restore() -> None:
        if not _is_same(_flat(value), flat):
            _fill(value, before)

    return restore


def _flat(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def _fill(container: Any, entries: Any) -> None:
    container.clear()
    (container.extend if hasattr(container, "extend") else container.update)(entries)


def _is_same(one: list[Any], other: list[Any]) -> bool:
    """Whether they hold the very same objects."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _inside(module: torch.nn.Module) -> Iterable[Any]:
    return (*own_attributes(module).values(), module._parameters, module._buffers, module._modules)


def _made_container(value: Any, inner: list[Any]) -> Any:
    """A container like another, of other values; it keeps the other's class, length limit and default."""
    made = copy.copy(value)
    _fill(made, dict(zip(value, inner, strict=True)) if isinstance(value, dict) else inner)
    return made


def _made_tuple(value: tuple[Any, ...], inner: list[Any]) -> Any:
    return type(value)(*inner) if hasattr(value, "_fields") else tuple.__new__(type(value), inner)


def _made_object(value: Any, inner: list[Any]) -> Any:
    made = copy.copy(value)
    vars(made).update(zip(vars(value), inner, strict=True))
    return made


def _copy_of(value: Any, inner: list[Any]) -> Any:
    return copy.deepcopy(value)


def _nothing(value: Any) -> tuple[()]:
    return ()


def _unchanged(value: Any) -> Restore:
    return lambda: None


KINDS = (
    Kind(torch.Tensor, _nothing, _save_tensor),
    # A scripted module holds its own in C++, where the contents of tensors can be restored and nothing else.
    Kind(torch.jit.ScriptModule, lambda module: (*module.parameters(), *module.buffers()), _unchanged),
    Kind(torch.nn.Module, _inside, _save_module),
    Kind(dict, dict.values, _save_container, _made_container),
    Kind((list, deque), iter, _save_container, _made_container),
    Kind(set, iter, _save_container, _made_container),
    Kind(tuple, iter, _unchanged, _made_tuple),
    Kind(torch._C.Generator, _nothing, lambda value: partial(value.set_state, value.get_state()), _copy_of),
    Kind(random.Random, _nothing, lambda value: partial(value.setstate, value.getstate()), _copy_of),
)

OBJECT = Kind(
    object,
    lambda value: getattr(value, "__dict__", {}).values(),
    lambda value: _save_container(vars(value)),
    _made_object,
)
"""An object of the user's own, or of a library that is not torch's, Python's or NumPy's."""


def _numpy_kinds() -> tuple[Kind, ...]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return ()
    generators, old_ones = numpy.random.Generator, numpy.random.RandomState

    def save_generator(value: Any) -> Restore:
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)

    return (
        Kind(numpy.ndarray, _nothing, lambda value: partial(numpy.copyto, value, value.copy()), _copy_of),
        Kind(numpy.generic, _nothing, _unchanged, _copy_of),
        Kind(generators, _nothing, save_generator, _copy_of),
        Kind(old_ones, _nothing, lambda value: partial(value.set_state, value.get_state()), _copy_of),
    )


class Kinds(dict[type, "Kind | None"]):
    """The kind of a class's values; None where they cannot be changed, or are not the model's to change."""

    def __missing__(self, cls: type) -> Kind | None:
        known = next((kind for kind in (*KINDS, *_numpy_kinds()) if issubclass(cls, kind.of)), None)
        self[cls] = known or (OBJECT if _is_users(cls) else None)
        return self[cls]


def _is_users(cls: type) -> bool:
    library = cls.__module__.partition(".")[0]
    is_foreign = library in {"torch", "numpy", "ampdbg"} or library in sys.stdlib_module_names
    return (not is_foreign or cls in (SimpleNamespace, UserDict)) and not issubclass(cls, type)
