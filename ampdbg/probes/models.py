"""Finds the models of a loop, which own the parameters that its optimizers train, and names the parameters."""

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
"""Attributes in which DataParallel, DistributedDataParallel, torch.compile and Fabric keep the wrapped model. True if
the wrapper always prepares the model for its own backward pass, and refuses any other pass."""

SKIPPED_TYPES: Mapping[type, tuple[()]] = dict.fromkeys((tuple, dict, list, set, FunctionType, ReferenceType), ())
"""Types of most Python objects, which a search for modules or tensors skips."""

_Kind = TypeVar("_Kind")


class ModelGroup(nn.Module):
    """A container of several models, which is never called."""


class Models:
    """The models of one loop, in the order in which they were given or found.

    The parameters of a single model keep their names. With several models, each name starts with the model's name: its
    global variable in the script, or else its class.

    Args:
        model: the model known from the beginning, kept alive. Models found later are held weakly.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._held: list[Callable[[], nn.Module | None]] = [] if model is None else [lambda: model]
        self.called: Callable[[], Iterable[nn.Module]] = tuple
        """Returns the modules that the loop has called in the current pass, without calls inside other modules."""

    def learn(self, parameters: Sequence[torch.Tensor]) -> None:
        """Find the outermost modules that own parameters of an optimizer, and add the new modules.

        This searches all objects of the process, which takes a tenth of a second, once for each optimizer. The order of
        the modules is that of their parameters in the optimizer: the same in each run of a script. The order of
        Python's objects depends on the time of the last garbage collection.
        """
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        trained = set(places)
        known = {id(parameter) for _, parameter in self.named_parameters()}
        if not trained <= known:
            own = {id(root) for root in self.roots}
            found = [root for root in outermost_owners(trained) if id(root) not in own]
            found.sort(key=lambda root: min(places.get(id(one), len(places)) for one in root.parameters()))
            self._held += [weakref.ref(root) for root in _without_superseded(found, trained, self.called())]

    def replace(self, copies: Iterable[torch.Tensor], originals: Sequence[torch.Tensor]) -> None:
        """Add the owners of the weights ``originals``, and drop the owners of an optimizer's ``copies`` of them."""
        copied = set(map(id, copies))
        held = [(one, root) for one in self._held if (root := one()) is not None]
        self._held = [one for one, root in held if copied.isdisjoint(map(id, root.parameters()))]
        self.learn(originals)

    def adopt(self, called: Iterable[nn.Module]) -> None:
        if not self.roots:
            self._held += [weakref.ref(root) for root in dict.fromkeys(called)]

    @property
    def roots(self) -> list[nn.Module]:
        return [root for held in self._held if (root := held()) is not None]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for prefix, root in self._named():
            yield from root.named_parameters(prefix=prefix)

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, root in self._named():
            yield from root.named_buffers(prefix=prefix)

    def as_one_module(self) -> nn.Module:
        """Return the only model, or a :class:`ModelGroup` with several models under their names."""
        whole = ModelGroup()
        for name, root in self._named():
            if not name:
                return root
            whole.add_module(name.replace(".", "_"), root)
        return whole

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
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
            script = vars(sys.modules["__main__"]).items()
            public = (name for name, value in script if not name.startswith("_") and (value is root or value is inner))
            name = next(public, type(inner).__name__)
            while name in taken:
                name += "_"
            taken.add(name)
            yield name, inner


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside wrappers such as DistributedDataParallel and torch.compile."""
    if isinstance(module, torch.jit.ScriptModule):  # not a wrapper, and its _modules is not a dict
        return module
    name = next(iter(module._modules), "")
    inner = module._modules.get(name)
    if inner is None or name not in WRAPPERS or any(other is not inner for other in module._modules.values()):
        return module
    return unwrapped(inner)


def outermost_owners(parameters: set[int]) -> list[nn.Module]:
    """Return the modules that own any of the parameters, given by ``id``, and are not inside another module."""
    modules = live_in_process(nn.Module)
    # _modules is missing until nn.Module's __init__ has run
    inner = {id(child) for module in modules for child in (vars(module).get("_modules") or {}).values()}
    roots = [module for module in modules if id(module) not in inner]
    return [root for root in roots if any(id(parameter) in parameters for parameter in root.parameters())]


def live_in_process(kind: type[_Kind]) -> list[_Kind]:
    """Return all objects of a kind in this process, such as modules.

    A tuple that another thread builds from a generator is among Python's objects before it is complete. The thread
    fails to complete it while there is another reference to it. So one call of C code skips tuples: meanwhile no
    other thread and no garbage collection can run.
    """
    with uncollected():
        by_type = groupby(chain.from_iterable(map(gc.get_objects, (None,))), type)
        found: list[Any] = list(chain.from_iterable(starmap(SKIPPED_TYPES.get, by_type)))  # type: ignore[arg-type]
    return [one for one in found if issubclass(type(one), kind)]


def _without_superseded(roots: list[nn.Module], trained: set[int], called: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the owners, but drop an owner if models called later own all its trained parameters.

    ``torch.jit.script``, ``torch.jit.trace`` and ``torch.fx`` create such a later model, which trains in its place.
    """
    places = {id(module): place for place, module in enumerate(called)}
    latest = {id(root): max(places.get(id(module), -1) for module in root.modules()) for root in roots}
    covered, left_out = set[int](), set[int]()
    for root in sorted(roots, key=lambda root: latest[id(root)], reverse=True):
        own = trained.intersection(map(id, root.parameters()))
        left_out |= {id(root)} if own <= covered else set()
        covered |= own if latest[id(root)] >= 0 else set()
    return [root for root in roots if id(root) not in left_out]


def is_global_of_script(name: str, model: nn.Module) -> bool:
    """True if ``name`` is a global of the running script for the model or for its wrapper."""
    value = vars(sys.modules["__main__"]).get(name)
    return isinstance(value, nn.Module) and unwrapped(value) is model
