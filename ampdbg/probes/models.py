"""The models of a loop: which modules own the parameters that its optimizers train, and under which names."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, starmap
from types import FunctionType
from typing import Any, TypeVar
from weakref import ReferenceType

import torch
from torch import nn

from ampdbg.probes.garbage import uncollected

WRAPPERS: Mapping[str, bool] = {"module": False, "_orig_mod": False, "_forward_module": True}
"""Where DataParallel, DistributedDataParallel, torch.compile and Fabric keep the model that they wrap; and whether who
keeps it there always readies it for a backward pass of its own, and refuses others."""

NO_MODULES: Mapping[type, tuple[()]] = dict.fromkeys((tuple, dict, list, set, FunctionType, ReferenceType), ())
"""Most objects are of these types."""

_Kind = TypeVar("_Kind")


class Together(nn.Module):
    """Several models as the parts of one, which is never called."""


class Models:
    """The models of one loop, those first that were given or found first.

    The only one gives its parameters their names as they are. Of several, each puts a name of its own before them: the
    name that the script has for it, or else its class.

    Args:
        model: one that is known from the beginning. Those that are found later are held weakly.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._held: list[Callable[[], nn.Module | None]] = [] if model is None else [lambda: model]
        self.called: Callable[[], Iterable[nn.Module]] = tuple
        """The modules that the loop has called in the pass under way, those within others left out."""

    def learn(self, parameters: Sequence[torch.Tensor]) -> None:
        """Finds the outermost modules that own parameters of an optimizer and adds those that are new.

        It looks through all objects of the process, which takes a tenth of a second: once for each optimizer. They
        come in the order of their parameters in the optimizer, as in each run of a script: that of Python's objects
        changes with the moment of its last garbage collection.
        """
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        trained = set(places)
        known = {id(parameter) for _, parameter in self.named_parameters()}
        if not trained <= known:
            own = {id(root) for root in self.roots}
            found = [root for root in outermost_owners(trained) if id(root) not in own]
            found.sort(key=lambda root: min(places.get(id(one), len(places)) for one in root.parameters()))
            self._held += [weakref.ref(root) for root in _that_run(found, trained, self.called())]

    def replace(self, copies: Iterable[torch.Tensor], originals: Sequence[torch.Tensor]) -> None:
        """Finds the owners of weights that an optimizer steps ``copies`` of; the owners of those go."""
        copied = set(map(id, copies))
        held = [(one, root) for one in self._held if (root := one()) is not None]
        self._held = [one for one, root in held if copied.isdisjoint(map(id, root.parameters()))]
        self.learn(originals)

    def adopt(self, called: Iterable[nn.Module]) -> None:
        """Takes these for its models, where none is known."""
        if not self.roots:
            self._held += [weakref.ref(root) for root in dict.fromkeys(called)]

    @property
    def roots(self) -> list[nn.Module]:
        """The outermost modules that are alive, wrappers and all."""
        return [root for held in self._held if (root := held()) is not None]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of all models, by qualified name."""
        for prefix, root in self._named():
            yield from root.named_parameters(prefix=prefix)

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers of all models, by qualified name."""
        for prefix, root in self._named():
            yield from root.named_buffers(prefix=prefix)

    def together(self) -> nn.Module:
        """The only model; of several one that has them for its parts, under their names."""
        whole = Together()
        for name, root in self._named():
            if not name:
                return root
            whole.add_module(name.replace(".", "_"), root)
        return whole

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules of all models, by qualified name."""
        for prefix, root in self._named():
            yield from root.named_modules(prefix=prefix)

    def _named(self) -> Iterator[tuple[str, nn.Module]]:
        roots = self.roots
        if len(roots) == 1:
            yield "", unwrapped(roots[0])
            return
        taken: set[str] = set()
        for root in roots:
            inner = unwrapped(root)
            name = _name_in_script(root, inner) or type(inner).__name__
            while name in taken:
                name += "_"
            taken.add(name)
            yield name, inner


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside the wrappers of DistributedDataParallel, torch.compile and their like."""
    if isinstance(module, torch.jit.ScriptModule):  # none of them, and its children are no dict
        return module
    name = next(iter(module._modules), "")
    inner = module._modules.get(name)
    if inner is None or name not in WRAPPERS or any(other is not inner for other in module._modules.values()):
        return module
    return unwrapped(inner)


def outermost_owners(parameters: set[int]) -> list[nn.Module]:
    """The modules that own any of the parameters, given by ``id``, and stand in no other module."""
    modules = alive_in_process(nn.Module)
    inner = {id(child) for module in modules for child in _children(module)}
    roots = [module for module in modules if id(module) not in inner]
    return [root for root in roots if any(id(parameter) in parameters for parameter in root.parameters())]


def alive_in_process(kind: type[_Kind]) -> list[_Kind]:
    """All objects of a kind that there are, such as modules.

    A tuple that another thread makes of a generator is among Python's objects before it is whole, and to make it fails
    while anybody else holds it. So one call of C code leaves tuples out, in which no other thread and no garbage
    collection can run.
    """
    with uncollected():
        by_type = groupby(chain.from_iterable(map(gc.get_objects, (None,))), type)
        found: list[Any] = list(chain.from_iterable(starmap(NO_MODULES.get, by_type)))  # type: ignore[arg-type]
    return [one for one in found if issubclass(type(one), kind)]


def _that_run(roots: list[nn.Module], trained: set[int], called: Iterable[nn.Module]) -> list[nn.Module]:
    """The owners, without those whose trained parameters all belong to others that were called later.

    Such is a model that ``torch.jit.script``, ``torch.jit.trace`` or ``torch.fx`` has made another one of, which trains
    in its place.
    """
    places = {id(module): place for place, module in enumerate(called)}
    latest = {id(root): max(places.get(id(module), -1) for module in root.modules()) for root in roots}
    covered, left_out = set[int](), set[int]()
    for root in sorted(roots, key=lambda root: latest[id(root)], reverse=True):
        own = trained.intersection(map(id, root.parameters()))
        left_out |= {id(root)} if own <= covered else set()
        covered |= own if latest[id(root)] >= 0 else set()
    return [root for root in roots if id(root) not in left_out]


def _children(module: nn.Module) -> list[nn.Module]:
    held = vars(module).get("_modules") or {}  # none where __init__ has not come to it yet
    return [child for child in held.values() if child is not None]


def is_global_of_script(name: str, model: nn.Module) -> bool:
    """The running script has this name for the model, or for what wraps it."""
    value = vars(sys.modules["__main__"]).get(name)
    return isinstance(value, nn.Module) and unwrapped(value) is model


def _name_in_script(*modules: nn.Module) -> str:
    """The global name that the running script has for one of the modules; "" where it has none."""
    script = vars(sys.modules["__main__"])
    names = (name for name, value in script.items() if any(value is module for module in modules))
    return next((name for name in names if not name.startswith("_")), "")
