"""Models with the helper applied as a user would: its text is in a file, which is imported by name."""

import importlib.util
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

import tests.models.torchvision_on_cpu  # noqa: F401 - transformers imports torchvision if it is installed
from ampdbg.patch.by_name import module_text
from ampdbg.precision.emulation import cuda_on_cpu

AnyModel = TypeVar("AnyModel", bound=nn.Module)

_numbers = itertools.count()


class Pair(NamedTuple):
    """A container that models pass as an argument."""

    a: torch.Tensor
    b: int


class Scores(nn.Module):
    """Own lines between two layers, one of them nested; accepts tensors in every place that can hold them."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.query = nn.Linear(4, 4)
        self.keys = nn.ModuleList([nn.Linear(4, 4)])
        self.inner = inner
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, *, scale: float = 1.0, extra: Any = None) -> dict[str, torch.Tensor]:
        q, k = self.query(x), self.keys[0](x)
        if self.inner is not None:
            q = q + self.inner(x)["scores"]
        for part in extra or ():
            q = q + part["x"][0].a
        scores = q @ k.transpose(-1, -2)
        return {"scores": scores * scale}


class Model(nn.Module):
    """A layer under autocast, the scores of its half output, and a layer after them."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.attn = Scores(inner)
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(self.attn(h, scale=2.0, extra=[{"x": (Pair(h, 1),)}])["scores"])


def pin_function(folder: Path, names: Sequence[str], **options: Any) -> Any:
    """The ``pin_fp32`` of a file in the module form, which pickle can import by name."""
    name = f"ampdbg_pins_{next(_numbers)}"
    path = folder / f"{name}.py"
    path.write_text(module_text(names, **options), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module.pin_fp32


def pinned(model: AnyModel, names: Sequence[str], folder: Path) -> AnyModel:
    """The model with the helper for ``names`` applied."""
    result = pin_function(folder, names)(model)
    assert result is model
    return model


def dtypes_of_outputs(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, torch.dtype]:
    """The dtype of each module's output, by module name."""
    seen: dict[str, torch.dtype] = {}

    def note(name: str, output: Any) -> None:
        first = next(iter(output.values())) if isinstance(output, dict) else output
        first = first[0] if isinstance(first, tuple) else first
        if isinstance(first, torch.Tensor):
            seen[name] = first.dtype

    handles = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: note(name, output))
        for name, module in model.named_modules()
    ]
    try:
        model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


@contextmanager
def autocast_as_on_cuda() -> Iterator[None]:
    """CUDA's FP16 autocast on a CPU."""
    with cuda_on_cpu(), torch.autocast("cpu", dtype=torch.float16):
        yield
