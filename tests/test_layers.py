"""Tests that a module of ampdbg imports only from its own layer and the layers below it (DESIGN.md)."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ampdbg"

# Lowest first. A layer is the first part of the module's path; several names share a layer if they are one thing in
# several files. A new module needs an entry here.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "obstacles"),
    ("files", "syntax_tree"),
    ("formats", "quantities", "escapes"),
    ("levels", "ops"),
    ("source",),
    ("record",),
    ("observer",),
    ("agreement", "call_order"),
    ("diagnosis",),
    ("lint",),
    ("config",),
    ("workload",),
    ("precision",),
    ("environment",),
    ("machine",),
    ("probes",),
    ("replay",),
    ("training",),
    ("script",),
    ("costs",),
    ("search",),
    ("pinning",),
    ("patch",),
    ("proof",),
    ("given",),
    ("api",),
    ("report",),
    ("commands",),
    ("callbacks",),
    ("__init__", "__main__"),
)
FLOOR = {name: floor for floor, names in enumerate(LAYERS) for name in names}

# Layers that work on a live model. All others run without torch, so that `ampdbg --help` is fast.
TORCH_LAYERS = frozenset(
    "workload precision environment probes replay training script costs pinning patch proof".split()
)


@dataclass(frozen=True)
class Import:
    """One import of ``torch`` or ``ampdbg.x.y``; a ``deferred`` import is in a function or only for types."""

    target: str
    line: int
    deferred: bool


def imports_of(path: Path, package: Path) -> Iterator[Import]:
    """Every import of a module; relative imports are resolved to absolute names."""
    folder = (package.name, *path.relative_to(package).parent.parts)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield from _imports(tree, folder, deferred=False)


def _imports(node: ast.AST, folder: tuple[str, ...], deferred: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, deferred) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (Import(target, child.lineno, deferred) for target in _from_targets(child, folder))
        elif isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from _imports(ast.Module(child.body, []), folder, deferred=True)
            yield from _imports(ast.Module(child.orelse, []), folder, deferred)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from _imports(child, folder, deferred or inside)


def _from_targets(node: ast.ImportFrom, folder: tuple[str, ...]) -> Iterator[str]:
    start = folder[: len(folder) - node.level + 1] if node.level else ()
    module = ".".join((*start, *(node.module or "").split("."))).strip(".")
    # `from .. import record` imports a module by name; `from ..record import Record` does not.
    for alias in node.names:
        yield f"{module}.{alias.name}" if "." not in module else module


def layer_of(dotted: str) -> str:
    """The layer of ``ampdbg.x.y`` is ``x``; the layer of the package itself is ``__init__``."""
    return (*dotted.split("."), "__init__")[1]


def broken_rules(package: Path) -> list[str]:
    """One sentence for each import that points up, and for each import of torch in a layer without torch."""
    return [
        f"{path.relative_to(package.parent).as_posix()}:{item.line}: {rule}"
        for path in sorted(package.rglob("*.py"))
        for item in imports_of(path, package)
        if (rule := broken_rule(path.relative_to(package).parts[0].removesuffix(".py"), item, package.name))
    ]


def broken_rule(layer: str, item: Import, package: str) -> str:
    """The rule that an import by a module of ``layer`` breaks, or ""."""
    if layer not in FLOOR:
        return f"{layer} has no place in LAYERS (tests/test_layers.py)"
    top = item.target.partition(".")[0]
    if top == "torch":
        return "" if layer in TORCH_LAYERS else f"{layer} imports torch"
    if top != package or item.target == f"{package}.__version__":
        return ""  # the version is a constant of the package, which loads before its modules
    target = layer_of(item.target)
    if target not in FLOOR:
        return f"{target} has no place in LAYERS (tests/test_layers.py)"
    if FLOOR[target] > FLOOR[layer]:
        return f"{layer} imports from {target}, which stands above it"
    if target in TORCH_LAYERS and layer not in TORCH_LAYERS and not item.deferred:
        return f"{layer} imports {target}, and with it torch, before a function needs it"
    return ""


def test_every_import_points_down_and_torch_is_imported_only_in_its_layers() -> None:
    assert broken_rules(PACKAGE) == []


def test_every_module_has_a_layer() -> None:
    names = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    assert "errors" in names, "the package was not found"
    assert names <= FLOOR.keys(), "give the new ones a place in LAYERS"


PLANTED = {
    "from the layer above": ("record.py", "from .config import Config", "record imports from config"),
    "from far above": ("precision/lists.py", "from ..commands.app import main", "precision imports from commands"),
    "by absolute name": ("formats.py", "import ampdbg.record", "formats imports from record"),
    "by the name of a sibling": ("errors.py", "from . import formats", "errors imports from formats"),
    "by absolute sibling": ("errors.py", "from ampdbg import record", "errors imports from record"),
    "from the package itself": ("config.py", "from . import scan", "scan has no place"),
    "inside a function": ("formats.py", "def f():\n    from .report import text", "formats imports from report"),
    "for types only": ("config.py", "if TYPE_CHECKING:\n    from .workload import W", "config imports from workload"),
    "torch in the report": ("report/text.py", "import torch.nn as nn", "report imports torch"),
    "torch deferred in a command": ("commands/scan.py", "def f():\n    import torch", "commands imports torch"),
    "torch by way of a layer": ("commands/scan.py", "from ..training import train", "commands imports training, and"),
    "torch in a class body": ("config.py", "class C:\n    from torch import nn", "config imports torch"),
    "a module without a place": ("helpers.py", "import os", "helpers has no place"),
}
ALLOWED = {
    "from below": ("config.py", "from .errors import ConfigError"),
    "from its own layer": ("precision/pins.py", "from .half_kernels import EMULATED"),
    "a command that defers torch": ("commands/scan.py", "def f():\n    from ..training import train"),
    "a command that needs types": ("commands/scan.py", "if TYPE_CHECKING:\n    from ..training import train"),
    "torch where a model is": ("probes/gradients.py", "import torch"),
    "the version": ("training/loop.py", "from .. import __version__"),
    "torch's namesake": ("config.py", "import torchlike"),
    "the package on top of all": ("__init__.py", "from .record import Record"),
}


def plant(folder: Path, file: str, source: str) -> Path:
    """A package named ampdbg with one module."""
    path = folder / "ampdbg" / file
    path.parent.mkdir(parents=True)
    path.write_text(source, encoding="utf-8")
    return folder / "ampdbg"


@pytest.mark.parametrize(("file", "source", "sentence"), PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_wrong_import_is_named(tmp_path: Path, file: str, source: str, sentence: str) -> None:
    (broken,) = broken_rules(plant(tmp_path, file, source))
    assert broken.startswith(f"ampdbg/{file}:")
    assert sentence in broken


@pytest.mark.parametrize(("file", "source"), ALLOWED.values(), ids=ALLOWED.keys())
def test_an_allowed_import_passes(tmp_path: Path, file: str, source: str) -> None:
    assert broken_rules(plant(tmp_path, file, source)) == []
