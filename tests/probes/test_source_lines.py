"""The line that an op belongs to, where libraries stand around a forward pass and below it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ampdbg.probes.op_trace import OpTrace, placed

PACKAGES = {
    "maths/__init__.py": "def product(a, b):\n    return a @ b\n",
    "blocks/__init__.py": "from blocks.parts import Block\n",
    "blocks/losses.py": "from maths import product\n\ndef squared(x):\n    return product(x, x.mT) / 3\n",
    "blocks/parts.py": "import torch\nfrom blocks.losses import squared\n\nclass Block(torch.nn.Module):\n"
    "    def forward(self, x):\n        return squared(x.abs())\n",
    "loops/__init__.py": "def prepared(model):\n    inner = model.forward\n\n    def forward(*args):\n"
    "        return inner(*args) * 1.0\n\n    model.forward = forward\n    return model\n",
}


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports what is installed in a folder of packages of its own."""
    folder = tmp_path / "site-packages"
    for name, text in PACKAGES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module
    for name in [name for name in sys.modules if name.partition(".")[0] in ("maths", "blocks", "loops")]:
        del sys.modules[name]


def lines_of(code: Callable[[], object], model: torch.nn.Module) -> dict[str, tuple[str, int, str]]:
    """By the op: the file in its folder, line and function of the last that ran."""
    with placed(model, OpTrace) as trace:
        code()
    lines = {seen.op: seen.place.line for seen in trace.ops}
    return {op: ("/".join(Path(line[0]).parts[-2:]), *line[1:]) for op, line in lines.items() if line is not None}


@pytest.mark.parametrize("is_prepared", [False, True], ids=["as it is", "wrapped by a library of loops"])
def test_a_line_of_a_librarys_module_is_its_own(is_prepared: bool, libraries: Callable[[str], Any]) -> None:
    model = libraries("blocks").Block()
    if is_prepared:
        model = libraries("loops").prepared(model)
    lines = lines_of(lambda: model(torch.ones(2, 2)), model)
    assert lines["aten.abs.default"] == ("blocks/parts.py", 6, "forward")
    assert lines["aten.mm.default"] == lines["aten.div.Tensor"] == ("blocks/losses.py", 4, "squared")


def test_a_line_of_the_users_module_is_the_users_and_not_that_of_a_library(libraries: Callable[[str], Any]) -> None:
    product = libraries("maths").product

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = product(x, x.mT)
            return made

    net, x = Net(), torch.ones(2, 2)
    own = ("probes/test_source_lines.py", Net.forward.__code__.co_firstlineno + 1, "forward")
    assert lines_of(lambda: net(x), net)["aten.mm.default"] == own
    assert lines_of(lambda: product(x, x), net)["aten.mm.default"][0] == "maths/__init__.py"
