"""All that a forward pass can change in a model, found by a walk over what its modules hold, and put back as it was."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import NoneType, SimpleNamespace
from typing import Any

import torch

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
