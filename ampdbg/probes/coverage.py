"""What an analysis of a step does not touch: modules never called, parameters without a gradient, modules that refuse
hooks, compiled code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from ampdbg.record.run import Unseen


class Coverage:
    """The modules of a model that were called while :func:`coverage` was entered."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._called: dict[int, None] = {}
        self._scripted = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]

    @property
    def callable(self) -> tuple[str, ...]:
        """The names of all modules that a step can call: those that were, in the order of their first calls, then
        those that another step may."""
        modules = {id(module): name for name, module in self._model.named_modules()}
        called = [modules[one] for one in self._called if one in modules]
        others = [name for name, module in self._model.named_modules() if not _is_container(module)]
        return tuple(dict.fromkeys(called + [name for name in others if name not in self._scripted]))

    def unseen(self) -> Unseen:
        """What was not touched; to be asked after the backward pass, while the gradients are there."""
        return Unseen(
            modules_never_called=tuple(
                name
                for name, module in self._model.named_modules()
                if id(module) not in self._called and name not in self._scripted and not _is_container(module)
            ),
            parameters_without_gradient=tuple(
                name
                for name, parameter in self._model.named_parameters()
                if parameter.requires_grad and parameter.grad is None
            ),
            notes=tuple(f"module {name!r} is scripted and cannot be watched inside" for name in self._outer_scripted()),
        )

    def _outer_scripted(self) -> Iterator[str]:
        for name in self._scripted:
            if not any(name.startswith(f"{other}.") for other in self._scripted if other) or "" not in self._scripted:
                yield name


@contextlib.contextmanager
def coverage(model: torch.nn.Module) -> Iterator[Coverage]:
    """Notes which modules are called inside; its hooks are gone afterwards."""
    seen = Coverage(model)
    with ExitStack() as stack:
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                hook = module.register_forward_pre_hook(lambda module, args: seen._called.setdefault(id(module)))
                stack.callback(hook.remove)
        yield seen


def _is_container(module: torch.nn.Module) -> bool:
    """Containers are indexed, never called."""
    return type(module).forward is torch.nn.Module.forward or isinstance(
        module, (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
    )


def run_eagerly() -> AbstractContextManager[Any]:
    """While this is entered, compiled functions and modules run their eager code."""
    # Without dynamo nothing has been compiled yet, and asking for a stance would import it: that takes seconds.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def compiled_modules(model: torch.nn.Module) -> tuple[str, ...]:
    """The qualified names of the modules that ``torch.compile`` or ``module.compile()`` was called on."""
    return tuple(name for name, module in model.named_modules() if _is_compiled(module))


def _is_compiled(module: torch.nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_torchdynamo_orig_callable")


def compiled_notes(model: torch.nn.Module) -> tuple[str, ...]:
    """What there is to say of an analysis of the model: one note for each compiled module."""
    return tuple(f"module {name!r} is compiled; its eager code was analysed" for name in compiled_modules(model))
