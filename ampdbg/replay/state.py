"""The state of a model, a batch and a process: how to save it, restore it in place, and copy it.

One table has the functions for each kind of value: read its contents, restore them in place, and rebuild the value.
:class:`SavedContents` restores the same objects; ``copies`` builds new objects.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import random
import sys
import threading
import traceback
from collections import UserDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from types import CellType, FunctionType, MethodType, ModuleType, NoneType, SimpleNamespace
from typing import Any, NamedTuple

import numpy
import numpy.random
import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils import _pytree

from ampdbg.probes.tensors import distinct, is_emptied, may_be_bad, nbytes
from ampdbg.source.ownership import is_users_file

LARGEST = 2**24
"""The most bytes of state in a tensor or array: more are data, or an activation that is kept for inspection."""

MOST = 1000
"""The most values of a container that is state: more are a vocabulary or similar data."""

LARGEST_APART = 2**20
"""The most bytes of state in a tensor or array outside a model, such as in a global."""

ANY = sys.maxsize

OBJECTS_IN_A_BATCH = 3
"""The depth to which objects in a batch are followed; an object may refer to the whole data set."""

IN_A_MODEL, IN_A_BATCH = (ANY, LARGEST, LARGEST_APART), (ANY,) * (OBJECTS_IN_A_BATCH + 1)
BEFORE_A_STEP = (LARGEST, LARGEST, LARGEST_APART)
"""The size limits of saved values: outside of objects, in an object, in an object within an object."""

CONSTANTS = frozenset(
    {int, float, complex, bool, str, bytes, NoneType, slice, range}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)
"""The types of immutable values."""

REGISTERS = frozenset({"_parameters", "_buffers", "_modules"})

# Hooks and pins belong to the code that sets them. Parameters, buffers and submodules are not plain attributes.
NOT_OWN = (frozenset(vars(torch.nn.Module())) | {"forward"}) - {"training"}


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of value.

    ``save`` returns the contents of a value: a dict or list of values for a container that ``holds`` values, else a
    copy. ``write`` restores contents in the same object. ``make`` returns a similar new value with new contents; it is
    None if no copy can replace the object. A kind that ``draws`` has generators of random numbers.
    """

    of: type | tuple[type, ...]
    save: Callable[[Any], Any]
    write: Callable[[Any, Any], None]
    make: Callable[[Any, Any], Any] | None = None
    holds: bool = False
    draws: bool = False

    def inner(self, contents: Any) -> Iterable[Any]:
        """Return the values in these contents."""
        if not self.holds:
            return ()
        return contents.values() if isinstance(contents, dict) else contents


class SavedValue(NamedTuple):
    """A value with its earlier contents."""

    value: Any
    kind: Kind
    contents: Any


class SavedContents:
    """Values with their contents at one moment, to be restored in the same objects.

    Every tensor is copied. A write in a forward pass cannot be undone later, and ``.data`` hides it from version
    counters. Values that cannot be copied are left out. Tensors with an autograd graph are left out too: a tensor
    computed from weights, such as a transpose, follows them.
    """

    def __init__(self, saved: Mapping[int, SavedValue]) -> None:
        self._saved = saved

    @staticmethod
    def now(values: Iterable[tuple[Any, ...]]) -> SavedContents:
        """Save the contents of values. Each value comes with its kind, and with its contents if they are known.

        If a value appears twice, its last kind counts.
        """
        found = {}
        with torch.no_grad():
            for value, kind, *known in {id(one[0]): one for one in values}.values():
                try:
                    found[id(value)] = SavedValue(value, kind, known[0] if kind.holds and known else kind.save(value))
                except Exception:  # noqa: BLE001 - a class of the user's own may raise anything
                    continue
        return SavedContents(found)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every saved tensor, once."""
        return [one.value for one in self._saved.values() if isinstance(one.value, torch.Tensor)]

    @property
    def values(self) -> Iterator[tuple[Any, Kind]]:
        """Every saved value with its kind, once."""
        return ((one.value, one.kind) for one in self._saved.values())

    def __contains__(self, value: Any) -> bool:
        """True if this same object was saved."""
        return id(value) in self._saved

    def contents(self, value: Any) -> Any:
        """Return the saved contents of this object, in the form of its kind.

        Raises:
            KeyError: the object was not saved.
        """
        return self._saved[id(value)].contents

    def values_in(self, value: Any, kind: Kind) -> Any:
        """Return the saved contents of a value. Parts that were not saved are returned as they are now."""
        now: Any = kind.save(value) if kind.holds else ()
        then = self.contents(value) if value in self and kind is not SCRIPTED else now
        return {**{name: now[name] for name in REGISTERS}, **then} if kind is MODULE else then

    def buffers_of(self, module: torch.nn.Module) -> Mapping[str, Any]:
        """Return the buffers that a module had. A scripted module still has them."""
        return self.contents(module._buffers) if module._buffers in self else module._buffers

    def attributes_of(self, module: torch.nn.Module) -> Mapping[str, Any]:
        """Return the saved plain attributes of a module; none if it was not saved."""
        contents = self.contents(module) if module in self else {}
        return {name: value for name, value in contents.items() if name not in REGISTERS}

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the saved copy of a tensor, in the shape of the tensor."""
        contents = self.contents(tensor)
        return _spread(contents.values, contents.memory)

    def plain(self, but: Iterable[torch.Tensor]) -> SavedContents:
        """Return the saved data without the user's own objects, and without ``but``."""
        aside = set(map(id, but))
        return SavedContents(
            {key: one for key, one in self._saved.items() if one.kind is not OBJECT and key not in aside}
        )

    def with_earlier(self, other: SavedContents) -> SavedContents:
        """Return this state, but with the values of ``other`` where it has them."""
        return SavedContents({**self._saved, **other._saved})

    def restore(self, *, draws_only: bool = False) -> None:
        """Restore all saved values, or only the generators of random numbers."""
        with torch.no_grad():
            for value, kind, contents in self._saved.values():
                # A tensor of the user's own class may reject a write; the rest is restored anyway.
                with contextlib.suppress(Exception):
                    if kind.draws or not draws_only:
                        kind.write(value, contents)

    def is_as_saved(self, value: Any) -> bool:
        """True if a container holds the same objects, or a tensor the same numbers, or the value is neither."""
        saved = self._saved.get(id(value))
        if saved is not None and saved.kind.holds:
            return _is_same(saved.kind.save(value), saved.contents)
        return saved is None or not isinstance(value, torch.Tensor) or _is_equal(value, self.copy_of(value))

    @property
    def bad(self) -> int:
        """The number of saved tensors with inf or NaN, without masks of -inf."""
        return sum(may_be_bad(self.copy_of(tensor)) for tensor in self.tensors)


@contextlib.contextmanager
def restored(
    *roots: Any, batches: Sequence[Any] = (), also: Iterable[tuple[Any, Kind]] = ()
) -> Iterator[SavedContents]:
    """Restore models and batches on exit: the same objects with the same contents.

    Gradients are cleared while it is entered. Objects in batches are followed deeper than objects in a model.
    """
    held = SavedContents.now([*also, *_walk(batches, IN_A_BATCH), *_walk(roots, IN_A_MODEL)])
    try:
        for tensor in held.tensors:
            tensor.grad = None
        yield held
    finally:
        held.restore()


def saved_before_step(model: torch.nn.Module) -> SavedContents:
    """Save the state of a model except its weights."""
    found = [*_walk(model.modules(), BEFORE_A_STEP, STATE), *_walk(model.buffers(), (ANY,))]
    return SavedContents.now(one for one in found if not isinstance(one[0], torch.nn.Parameter))


def held_by(optimizers: Iterable[torch.optim.Optimizer]) -> SavedContents:
    """Save the state of optimizers, the settings of their groups, and the parameters in these."""
    parts = [part for optimizer in optimizers for part in (optimizer.state, optimizer.param_groups)]
    return SavedContents.now(_walk(parts, IN_A_MODEL))


def are_held_whole(optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    """True if :func:`held_by` saves all state. The user's own optimizer may keep weights in attributes."""
    own = [{**vars(optimizer), "state": None, "param_groups": None} for optimizer in optimizers]
    return not any(isinstance(leaf, torch.Tensor) for leaf in _pytree.tree_leaves(own))


def tensors_in(model: torch.nn.Module, held: SavedContents | None = None) -> list[torch.Tensor]:
    """Return the model's parameters, buffers, and tensors in attributes; with ``held``, in the saved attributes."""
    return [value for value, *_ in _walk([model], (ANY, LARGEST), held=held) if isinstance(value, torch.Tensor)]


def notes_on(model: torch.nn.Module) -> tuple[str, ...]:
    """Return a note on each iterator and each tensor that cannot be copied: replays change these for good."""
    notes = []
    for name, module in model.named_modules():
        holds = f"{f'module {name!r}' if name else 'the model'} holds"
        for key, value in {**STATE.save(module), **module._buffers}.items():
            if isinstance(value, Iterator):
                notes.append(f"{holds} an iterator, {key!r}, which every replay advances")
            elif (
                isinstance(value, torch.Tensor) and value.is_leaf and value not in SavedContents.now([(value, TENSOR)])
            ):
                notes.append(f"{holds} {key!r}, a tensor that cannot be copied: replays may change it")
    return tuple(notes)


def _walk(
    roots: Iterable[Any], largest: Sequence[int], *first: Kind, held: SavedContents | None = None
) -> Iterator[tuple[Any, Kind, Any]]:
    """Yield each mutable value reachable from the roots once, with its kind and the values that it holds.

    Modules that only a list holds count as modules. A user's own objects are followed as deep as ``largest`` has
    entries after its first. Larger values are left out: an object may refer to the whole data set and the whole
    program. The ``first`` kinds precede the table. Contents saved in ``held`` replace current contents.
    """
    held, kinds, met = held or SavedContents({}), Kinds(*first), {}
    waiting = [(root, 0) for root in roots]
    while waiting:
        value, depth = waiting.pop()
        kind = kinds[type(value)]
        is_too_far = kind is OBJECT and depth + 1 == len(largest)
        if kind is None or id(value) in met or is_too_far or _is_large(value, largest[depth]):
            continue
        met[id(value)] = value
        try:
            contents = held.values_in(value, kind)
        except Exception:  # noqa: BLE001 - a class of the user's own may raise anything
            continue
        yield value, kind, contents
        inside = depth + 1 if kind is OBJECT else 0 if isinstance(value, torch.nn.Module) else depth
        waiting += [(one, inside) for one in kind.inner(contents) if type(one) not in CONSTANTS]


def _is_large(value: Any, largest: int) -> bool:
    if largest == ANY:
        return False
    if isinstance(value, (list, dict, set, tuple, deque)):
        return len(value) > MOST
    if isinstance(value, torch.Tensor):
        return nbytes(value) > largest
    return hasattr(type(value), "nbytes") and int(value.nbytes) > largest


class TensorContents(NamedTuple):
    """The state of a leaf: a copy of its distinct values, its memory, its gradient, and its version counter.

    A graph of the script may have saved the tensor for its backward pass, and checks the counter. On exit the context
    ``version`` restores it.
    """

    values: torch.Tensor
    memory: torch.Tensor
    requires_grad: bool
    gradient: torch.Tensor | None
    version: AbstractContextManager[Any]


def _save_tensor(tensor: torch.Tensor) -> TensorContents:
    if not tensor.is_leaf:
        raise RuntimeError("it depends on the tensors that it was computed from")
    version = nullcontext() if tensor.is_inference() else _unsafe_preserve_version_counter(tensor)
    return TensorContents(_values(tensor.data), tensor.data, tensor.requires_grad, tensor.grad, version)


def _write_tensor(tensor: torch.Tensor, before: TensorContents) -> None:
    if not tensor.is_leaf:
        tensor.detach_()  # an in-place write gave it a graph
    tensor.requires_grad_(before.requires_grad)
    tensor.grad = None  # it may not fit the restored memory
    tensor.data = before.memory
    # Write through the bare memory, so that no graph sees a write that changes nothing.
    if not _is_equal(distinct(before.memory), before.values) and not written(before.memory, before.values):
        tensor.data = _spread(before.values, before.memory)
    tensor.grad = before.gradient
    before.version.__exit__(None, None, None)


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the distinct part of a tensor.

    Raises:
        RuntimeError: the tensor cannot be copied.
    """
    part = distinct(tensor.detach() if tensor.requires_grad else tensor)
    if is_emptied(part):
        raise RuntimeError("its memory was freed")
    try:
        return part.clone()
    except RuntimeError:  # such as a tensor quantized by channel
        return copy.deepcopy(part)


def _spread(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the values, expanded to the shape of their tensor."""
    return values if values.is_nested or values.shape == like.shape else values.expand(like.shape)


def duplicated(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor with the same repeated values."""
    return _spread(_values(tensor), tensor)


def written(tensor: torch.Tensor, contents: torch.Tensor) -> bool:
    """Write the contents into the memory of a tensor. Return False if they do not fit."""
    try:
        distinct(tensor).copy_(distinct(contents))
    except (RuntimeError, TypeError):
        return False
    return True


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return torch.equal(one, other)
    except (RuntimeError, TypeError, AttributeError):  # torch cannot compare sparse, nested or masked tensors
        return False


def _entries(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _fill(container: Any, entries: Any) -> None:
    if not _is_same(_entries(container), entries):
        container.clear()
        (container.extend if hasattr(type(container), "extend") else container.update)(entries)


def _is_same(one: Any, other: Any) -> bool:
    """True if both hold the same objects in the same order."""
    flat = [[*each, *each.values()] if isinstance(each, dict) else each for each in (one, other)]
    return len(flat[0]) == len(flat[1]) and all(map(operator.is_, *flat))


def _copied(copied: Callable[[Any], Any], write: Callable[[Any, Any], None]) -> Callable[[Any, Any], Any]:
    """Return a function that copies a value, with its class, length limit and default, but with new contents."""

    def make(value: Any, contents: Any) -> Any:
        made = copied(value)
        write(made, contents)
        return made

    return make


def _make_tuple(value: tuple[Any, ...], entries: list[Any]) -> Any:
    return type(value)(*entries) if hasattr(value, "_fields") else tuple.__new__(type(value), entries)


def _fill_object(value: Any, attributes: Any) -> None:
    _fill(vars(value), attributes)


def _modules(aside: Collection[str]) -> Kind:
    """Return the kind of modules without the attributes ``aside``, such as hooks, which come from elsewhere."""

    def save(module: torch.nn.Module) -> dict[str, Any]:
        return {name: value for name, value in vars(module).items() if name not in aside}

    def write(module: torch.nn.Module, before: dict[str, Any]) -> None:
        for name in save(module).keys() - before.keys():
            del vars(module)[name]
        vars(module).update(before)

    return Kind(torch.nn.Module, save, write, holds=True)


def _nothing(value: Any, contents: Any) -> None:
    """Do nothing: the value is immutable."""


def _leaf(of: Any, save: Callable[[Any], Any], write: Callable[[Any, Any], None], *, draws: bool = False) -> Kind:
    """Return a kind of values that hold no values and can be copied."""
    return Kind(of, save, write, _copied(copy.deepcopy, write), draws=draws)


def _generator(of: Any, save: str, write: str) -> Kind:
    """Return a kind of random number generators from the names of their methods."""
    return _leaf(of, methodcaller(save), lambda value, state: getattr(value, write)(state), draws=True)


def _write_generator(generator: numpy.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


TENSOR = Kind(torch.Tensor, _save_tensor, _write_tensor)
# A scripted module keeps its attributes in C++. Only the contents of its tensors can be restored.
SCRIPTED = Kind(torch.jit.ScriptModule, lambda module: [*module.parameters(), *module.buffers()], _nothing, holds=True)
MODULE = _modules(aside=NOT_OWN - REGISTERS)
STATE = _modules(aside=NOT_OWN - {"_buffers"})
"""The part of a module that a step may change: no parameters and no submodules."""
KINDS = (
    TENSOR,
    SCRIPTED,
    MODULE,
    Kind((dict, list, deque, set), _entries, _fill, _copied(copy.copy, _fill), holds=True),
    Kind(tuple, list, _nothing, _make_tuple, holds=True),
    _generator(torch._C.Generator, "get_state", "set_state"),
    _generator(random.Random, "getstate", "setstate"),
    _generator(numpy.random.RandomState, "get_state", "set_state"),
    _leaf(numpy.random.Generator, lambda value: value.bit_generator.state, _write_generator, draws=True),
    _leaf(numpy.ndarray, methodcaller("copy"), numpy.copyto),
    _leaf(numpy.generic, lambda value: value, _nothing),
)


def _attributes(value: Any) -> dict[str, Any]:
    return dict(getattr(value, "__dict__", {}))


OBJECT = Kind(object, _attributes, _fill_object, _copied(copy.copy, _fill_object), holds=True)
"""An object of a class that is not from torch, Python or NumPy: the user's own, or from a library."""


class Kinds(dict[type, "Kind | None"]):
    """The kind for each class; None if its values are immutable or not the model's to change.

    Args:
        first: kinds that precede the table.
    """

    def __init__(self, *first: Kind) -> None:
        super().__init__()
        self._first = first

    def __missing__(self, cls: type) -> Kind | None:
        known = next((kind for kind in (*self._first, *KINDS) if issubclass(cls, kind.of)), None)
        self[cls] = known or (OBJECT if _is_users(cls) else None)
        return self[cls]


def _is_users(cls: type) -> bool:
    library = cls.__module__.partition(".")[0]
    is_foreign = library in {"torch", "numpy", "ampdbg"} or library in sys.stdlib_module_names
    return (not is_foreign or cls in (SimpleNamespace, UserDict)) and not issubclass(cls, type)


# A forward pass may change data outside the model: a counter of calls, a list of losses, or a generator of random
# numbers. A global may refer to all data, so only its own contents are followed.


@contextlib.contextmanager
def surroundings_restored(model: torch.nn.Module, left: set[str]) -> Iterator[None]:
    """On exit, restore the names in the user's modules and the small data that they refer to. Also restore what the
    hooks and methods of the model refer to, as a closure of ``main`` does.

    Another running thread of the user may write such data meanwhile, and its writes must stay. Then only random
    generators are restored, and the names that changed are added to ``left``.
    """
    held, are_shared = SavedContents.now(_surroundings(model)), _others_run()
    try:
        yield
    finally:
        left.update(_names_changed(held) if are_shared else ())
        held.restore(draws_only=are_shared)


def _surroundings(model: torch.nn.Module) -> list[tuple[Any, Kind]]:
    """Return the user's modules, the user's classes and objects and functions in them, and small data in all of these.
    The model's classes, attributes and hooks count as in a module."""
    modules = [(one, NAMES) for one in list(sys.modules.values()) if type(one) is ModuleType and _is_of_users_file(one)]
    bound = [*_inside(modules), *_of_kinds(_called_by(model))]
    spaces = _spaces(bound)
    names = [*bound, *_inside(spaces)]
    parts = _parts_of_functions(names)
    apart = _spaces(parts)
    data = [(one, kind) for one, kind in (*names, *parts, *_inside(apart)) if kind not in NO_DATA]
    data = [(one, kind) for one, kind in data if not _is_large(one, LARGEST_APART)]
    draws = [(one, kind) for one, kind in _inside(one for one in data if one[1].holds) if kind.draws]
    return [*modules, *spaces, *apart, *data, *draws]


def _called_by(model: torch.nn.Module) -> Iterator[Any]:
    """Yield what a forward or backward pass of the model may call: classes, attributes and hooks."""
    for module in model.modules():
        hooks = [hooks for name, hooks in vars(module).items() if name.endswith("_hooks")]
        own = [one for one in module._parameters.values() if one is not None]
        hooks += [hooks for one in own for hooks in (one._backward_hooks, one._post_accumulate_grad_hooks)]
        yield type(module)
        yield from (value for name, value in vars(module).items() if name not in NOT_OWN)
        yield from (hook for each in hooks if isinstance(each, dict) for hook in each.values())


def _spaces(values: Iterable[tuple[Any, Kind]]) -> list[tuple[Any, Kind]]:
    return [(one, kind) for one, kind in values if kind in (NAMES, OBJECT) and _is_users_own(one)]


def _parts_of_functions(values: Iterable[tuple[Any, Kind]]) -> list[tuple[Any, Kind]]:
    """Return the cells, default arguments and attributes of the user's functions among the values. Functions in these
    count too."""
    found, met = list[tuple[Any, Kind]](), set[int]()
    while functions := [(one, kind) for one, kind in values if kind in CALLS and id(one) not in met]:
        met |= {id(one) for one, _ in functions}
        parts = _inside((one, kind) for one, kind in functions if kind is not FUNCTION or _is_users_own(one))
        values = [*parts, *_inside(one for one in parts if one[1] is CELL)]
        found += values
    return found


def _inside(holders: Iterable[tuple[Any, Kind]]) -> list[tuple[Any, Kind]]:
    """Return the values in these holders, each with its kind."""
    found = list[tuple[Any, Kind]]()
    for holder, kind in holders:
        with contextlib.suppress(Exception):  # the user's own class may raise anything
            found += _of_kinds(kind.inner(kind.save(holder)))
    return found


def _of_kinds(values: Iterable[Any]) -> list[tuple[Any, Kind]]:
    return [(one, kind) for one in values if (kind := KINDS_APART[type(one)]) is not None]


def _is_users_own(value: Any) -> bool:
    """True if the class or function, or the class of the object, is the user's. So is a decorated function."""
    own = value if isinstance(value, (type, FunctionType)) else type(value)
    return _is_of_users_file(sys.modules.get(own.__module__))


@functools.cache
def _is_of_users_file(module: ModuleType | None) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and is_users_file(file)


def _bindings(space: Any) -> dict[str, Any]:
    return {name: value for name, value in list(vars(space).items()) if not name.startswith("__")}


def _bind(space: Any, before: dict[str, Any]) -> None:
    for name in _others(vars(space), before):
        setattr(space, name, before[name])


def _others(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Return the names that are unbound now, or bound to a different object."""
    return [name for name, value in before.items() if name not in now or now[name] is not value]


def _fill_cell(cell: CellType, before: list[Any]) -> None:
    (cell.cell_contents,) = before


NAMES = Kind((ModuleType, type), _bindings, _bind, holds=True)
CELL = Kind(CellType, lambda cell: [cell.cell_contents], _fill_cell, holds=True)
FUNCTION = Kind(
    FunctionType,
    lambda one: [*(one.__closure__ or ()), *(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values(), vars(one)],
    _nothing,
    holds=True,
)
METHOD = Kind(MethodType, lambda method: [method.__func__, method.__self__], _nothing, holds=True)
PARTIAL = Kind(functools.partial, lambda call: [call.func, *call.args, *call.keywords.values()], _nothing, holds=True)
CALLS = (FUNCTION, METHOD, PARTIAL)
KINDS_APART = Kinds(NAMES, *CALLS, CELL)
"""The kinds outside of a model."""

NO_DATA = (NAMES, *CALLS, OBJECT, MODULE, SCRIPTED)
"""The kinds that are reached from a global, but are not saved as data."""


def _others_run() -> bool:
    """True if another thread runs user code, and does not only wait in Python's ``threading``."""
    others = [frame for thread, frame in sys._current_frames().items() if thread != threading.get_ident()]
    running = [frame for frame in others if frame.f_globals.get("__name__") != threading.__name__]
    return any(is_users_file(one.f_code.co_filename) for frame in running for one, _ in traceback.walk_stack(frame))


def _names_changed(held: SavedContents) -> Iterator[str]:
    for space, before in [(space, held.contents(space)) for space, kind in held.values if kind in (NAMES, OBJECT)]:
        place = Path(getattr(space, "__file__", getattr(space, "__name__", type(space).__name__))).name
        changed = [name for name, value in before.items() if not held.is_as_saved(value)]
        yield from (f"{name} of {place}" for name in dict.fromkeys([*_others(vars(space), before), *changed]))
