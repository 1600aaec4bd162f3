"""Compiled models: what is compiled, and running it eagerly for as long as its ops are looked at."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


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
