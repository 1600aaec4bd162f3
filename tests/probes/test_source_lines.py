"""The line that an op belongs to, where libraries stand around a forward pass and below it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ampdbg.probes.op_trace import placed
from ampdbg.probes.producer_trace import ProducerTrace

PACKAGES = {
    "model_library": """
        import torch
        from model_library_losses import mean

        class Model(torch.nn.Module):
            def forward(self, x):
                return mean(x.abs())
        """,
    "model_library_losses": """
        def mean(x):
            return x.sum() / 3
        """,
    "loop_library": """
        def prepared(model):
            inner = model.forward

            def forward(*args):
                return inner(*args) * 1.0

            model.forward = forward
            return model
        """,
}
"""By the name of the package; a name with ``_losses`` is a module of the one before."""


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports what is installed in a folder of packages of its own."""
    folder = tmp_path / "site-packages"
    for name, text in PACKAGES.items():
        package, _, module = name.partition("_losses")
        file = folder / package / ("losses.py" if _ or module else "__init__.py")
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = text.replace("model_library_losses", "model_library.losses").splitlines()[1:]
        file.write_text("\n".join(line[8:] for line in lines), encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module
    for name in [name for name in sys.modules if name.partition(".")[0] in ("model_library", "loop_library")]:
        del sys.modules[name]


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_wrapped_forward_pass_is_of_who_has_written_its_class(
    is_prepared: bool, libraries: Callable[[str], Any]
) -> None:
    model = libraries("model_library").Model()
    if is_prepared:
        model = libraries("loop_library").prepared(model)
    with placed(model, ProducerTrace) as trace:
        model(torch.ones(4))
    lines = {seen.op: seen.place.line for seen in trace.ops}
    names = {op: (Path(line[0]).name, *line[1:]) for op, line in lines.items() if line is not None}
    assert names["aten.abs.default"] == ("__init__.py", 6, "forward")
    assert names["aten.div.Tensor"] == ("losses.py", 2, "mean")
