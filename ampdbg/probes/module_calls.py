"""Follows the calls of a model's modules: the running module, the number of its call, and modules never called.

It also lists what else the analysis of a step misses: parameters without a gradient, scripted modules, compiled code.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ampdbg.probes.models import Models
from ampdbg.record.run import Unseen

Where = tuple[str, int]
"""A module's qualified name and the number of its call in this step, from 0; ``("", 0)`` is the root or no module."""

OUTSIDE: Where = ("", 0)


class ModulePaths:
    """The stack of a model's running modules, and the number of calls of each module.

    A shared module has the name that it was registered under first. If a module runs during a backward pass, a
    checkpoint recomputes an earlier call. Such a run is not a new call, and the last call is recomputed first.
    """

    def __init__(self, model: torch.nn.Module | Models) -> None:
        self._model = model
        self._watched = {id(module): name for name, module in model.named_modules() if not _is_scripted(module)}
        self._stack: list[Where] = []
        self._recomputed: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()  # in the order of the first calls

    @property
    def current(self) -> Where:
        return self._stack[-1] if self._stack else OUTSIDE

    def enter(self, module: torch.nn.Module, args: Any) -> None:
        """Note the call of a module; a hook."""
        name = self._watched.get(id(module))
        if name is None:
            return
        if torch._C._current_autograd_node() is not None and self._calls[name] > 0:
            self._recomputed[name] += 1
            call = max(0, self._calls[name] - self._recomputed[name])
        else:
            call = self._calls[name]
            self._calls[name] += 1
        self._stack.append((name, call))

    def leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """End a call of a module, together with inner calls that raised an error which the module caught; a hook."""
        name = self._watched.get(id(module))
        while name is not None and self._stack and self._stack.pop()[0] != name:
            pass

    @property
    def callable(self) -> tuple[str, ...]:
        """The names of the modules that a step can call: called modules in the order of first calls, then the rest."""
        return tuple(dict.fromkeys([*self._calls, *self._names()]))

    def unseen(self) -> Unseen:
        """Return what the step missed; call this after the backward pass, while the gradients exist."""
        return Unseen(
            modules_never_called=tuple(name for name in self._names() if name not in self._calls),
            parameters_without_gradient=tuple(
                name
                for name, parameter in self._model.named_parameters()
                if parameter.requires_grad and parameter.grad is None
            ),
            notes=tuple(f"module {name!r} is scripted and cannot be watched inside" for name in self._outer_scripted()),
        )

    def _names(self) -> list[str]:
        # Containers have no forward of their own: they are indexed, never called.
        owners = ((name, module) for name, module in self._model.named_modules() if not _is_scripted(module))
        return [name for name, module in owners if type(module).forward is not torch.nn.Module.forward]

    def _outer_scripted(self) -> list[str]:
        outer: list[str] = []
        for name, module in self._model.named_modules():
            if _is_scripted(module) and not any(other == "" or name.startswith(f"{other}.") for other in outer):
                outer.append(name)
        return outer


@contextlib.contextmanager
def module_paths(model: torch.nn.Module | Models) -> Iterator[ModulePaths]:
    """Follow the calls of the model's modules, except scripted modules.

    The hooks are torch's global hooks, so a module that is copied or pickled meanwhile carries none of them.
    """
    paths = ModulePaths(model)
    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(paths.enter).remove)
        stack.callback(register_module_forward_hook(paths.leave, always_call=True).remove)
        stack.enter_context(_unwarned())
        yield paths


@contextlib.contextmanager
def _unwarned() -> Iterator[None]:
    """Silence the warning of compiled modules about global hooks; ampdbg's hooks ignore the compiled wrappers."""
    warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global hooks")
    ours = warnings.filters[0]
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the script has replaced the list
            warnings.filters.remove(ours)  # type: ignore[attr-defined]


def _is_scripted(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


@contextlib.contextmanager
def run_eagerly() -> Iterator[None]:
    """Make compiled functions and modules run their eager code inside the ``with`` block.

    A compiled function may be running, such as an optimizer's step with hooks. It is continued afterwards.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled yet, and to import dynamo takes seconds
        yield
        return
    from torch._C._dynamo.eval_frame import set_eval_frame

    compiling = set_eval_frame(None)  # torch sets no stance while it is not None
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        set_eval_frame(compiling)


def recorded_graphs(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of modules with a forward pass that torch.cuda.make_graphed_callables has recorded.

    The recording keeps its precision: autocast has no effect on it.
    """
    forwards = ((name, vars(module).get("forward")) for name, module in model.named_modules())
    return tuple(name for name, forward in forwards if getattr(forward, "__module__", "") == "torch.cuda.graphs")


def compiled_notes(model: torch.nn.Module) -> tuple[str, ...]:
    """Return a note for each module that ``torch.compile`` or ``module.compile()`` has compiled."""
    return tuple(
        f"module {name!r} is compiled; its eager code was analysed"
        for name, module in model.named_modules()
        if module._compiled_call_impl is not None or hasattr(module, "_torchdynamo_orig_callable")
    )
