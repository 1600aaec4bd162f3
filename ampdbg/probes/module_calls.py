"""The modules of a model while it runs: which one is running, which of its calls this is, which were never called.

Also what else an analysis of a step does not touch: parameters without a gradient, scripted modules, compiled code.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ampdbg.probes.models import Models
from ampdbg.record.run import Unseen

Where = tuple[str, int]
"""A qualified module name and the number of its call in this step, from 0; ``("", 0)`` is outside or the root."""

OUTSIDE: Where = ("", 0)


class ModulePaths:
    """The stack of a model's modules that are running now, and which of them were called.

    A shared module has the name it was registered under first.
    A module that runs during a backward pass is computed again, by a checkpoint: that is no new call but an
    earlier one, and they come back last first.
    """

    def __init__(self, model: torch.nn.Module | Models) -> None:
        self._model = model
        self._stack: list[Where] = []
        self._recomputed: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        """How often each module was called, in the order of the first calls."""

    @property
    def current(self) -> Where:
        """The innermost running module."""
        return self._stack[-1] if self._stack else OUTSIDE

    def enter(self, name: str) -> None:
        """A call of a module begins."""
        recomputed = torch._C._current_autograd_node() is not None and self.calls[name] > 0
        if recomputed:
            self._recomputed[name] += 1
            call = max(0, self.calls[name] - self._recomputed[name])
        else:
            call = self.calls[name]
            self.calls[name] += 1
        self._stack.append((name, call))

    def leave(self, name: str) -> None:
        """A call of a module has ended; one that raised inside it, and was caught by it, is left behind."""
        while self._stack and self._stack.pop()[0] != name:
            pass

    @property
    def callable(self) -> tuple[str, ...]:
        """The names of all modules that a step can call: those that were, in the order of their first calls, then
        those that another step may."""
        return tuple(dict.fromkeys([*self.calls, *self._names()]))

    def unseen(self) -> Unseen:
        """What was not touched; to be asked after the backward pass, while the gradients are there."""
        return Unseen(
            modules_never_called=tuple(name for name in self._names() if name not in self.calls),
            parameters_without_gradient=tuple(
                name
                for name, parameter in self._model.named_parameters()
                if parameter.requires_grad and parameter.grad is None
            ),
            notes=tuple(f"module {name!r} is scripted and cannot be watched inside" for name in self._outer_scripted()),
        )

    def _names(self) -> list[str]:
        modules = self._model.named_modules()
        return [name for name, module in modules if not _is_scripted(module) and not _is_container(module)]

    def _outer_scripted(self) -> list[str]:
        outer: list[str] = []
        for name, module in self._model.named_modules():
            if _is_scripted(module) and not any(other == "" or name.startswith(f"{other}.") for other in outer):
                outer.append(name)
        return outer


@contextlib.contextmanager
def module_paths(model: torch.nn.Module | Models) -> Iterator[ModulePaths]:
    """Follows the calls of the model's modules, but for scripted ones.

    The hooks are torch's global ones: a module that is copied or pickled meanwhile carries none of them.
    """
    paths = ModulePaths(model)
    names = {id(module): name for name, module in model.named_modules() if not _is_scripted(module)}

    def enter(module: torch.nn.Module, args: Any) -> None:
        if id(module) in names:
            paths.enter(names[id(module)])

    def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
        if id(module) in names:
            paths.leave(names[id(module)])

    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(enter).remove)
        stack.callback(register_module_forward_hook(leave, always_call=True).remove)
        stack.enter_context(_unwarned())
        yield paths


@contextlib.contextmanager
def _unwarned() -> Iterator[None]:
    """While this is entered, compiled modules do not warn of global hooks: ours leave their wrappers out."""
    warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global hooks")
    ours = warnings.filters[0]
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the script has made a list of its own since
            warnings.filters.remove(ours)  # type: ignore[attr-defined]


def _is_scripted(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _is_container(module: torch.nn.Module) -> bool:
    """Containers are indexed, never called."""
    return type(module).forward is torch.nn.Module.forward


def run_eagerly() -> AbstractContextManager[Any]:
    """While this is entered, compiled functions and modules run their eager code."""
    # Without dynamo nothing has been compiled yet, and asking for a stance would import it: that takes seconds.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def recorded_graphs(model: torch.nn.Module) -> tuple[str, ...]:
    """The names of modules whose forward pass torch.cuda.make_graphed_callables has recorded.

    That runs as it was then, in the precision that it had, whatever autocast says by now.
    """
    forwards = ((name, vars(module).get("forward")) for name, module in model.named_modules())
    return tuple(name for name, forward in forwards if getattr(forward, "__module__", "") == "torch.cuda.graphs")


def compiled_notes(model: torch.nn.Module) -> tuple[str, ...]:
    """A note for each module that ``torch.compile`` or ``module.compile()`` was called on."""
    return tuple(
        f"module {name!r} is compiled; its eager code was analysed"
        for name, module in model.named_modules()
        if module._compiled_call_impl is not None or hasattr(module, "_torchdynamo_orig_callable")
    )
