"""From pins to edits: the function that is edited, the lines that change, and the notes for the reader."""

import importlib.util
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from ampdbg.costs.step import OwnCosts, StepCosts
from ampdbg.patch.edits import LinePin
from ampdbg.patch.file_edits import lines_title
from ampdbg.patch.own_lines import OwnLines, UsersCall
from ampdbg.patch.plan import Patch, PlanInputs, lines_that_may_be_edited, planned
from ampdbg.precision.emulation import cuda_on_cpu
from ampdbg.probes.half_names import names_seen
from ampdbg.probes.makings import Constructions
from ampdbg.probes.op_trace import placed
from ampdbg.record.findings import Source
from ampdbg.record.pins import Pin, PinSite
from ampdbg.source.ownership import Line

HEAD = """\
import functools

import torch
from torch import nn


"""


@dataclass(frozen=True)
class Written:
    """A file with a model; pins on it are planned after a trace of one forward pass."""

    file: Path
    model: torch.nn.Module
    makings: Constructions

    def line(self, text: str) -> int:
        """The number of the only line that contains the text."""
        (number,) = (n for n, line in enumerate(self.file.read_text().splitlines(), 1) if text in line)
        return number

    def pin(self, name: str, line: str, function: str = "forward") -> Pin:
        """A pin with one site, on the line that contains the text."""
        source = Source(str(self.file), self.line(line), function, line)
        module = name.removesuffix(":own")
        site = PinSite("forward", module, "aten.mul.Tensor", source, 1e6)
        return Pin(module, own=name.endswith(":own"), sites=(site,))

    def planned(
        self, *pins: Pin, calls: Mapping[tuple[str, int], UsersCall] = MappingProxyType({}), close: Sequence[Line] = ()
    ) -> Patch:
        """The patch. ``calls`` map library lines to user calls; every module has the lines ``close`` to the limit."""
        lines = OwnLines(dict.fromkeys((pin.module for pin in pins), frozenset(close)), frozenset(), calls)
        wanted = lines_that_may_be_edited(pins, lines, self.model)
        autocast = torch.autocast("cpu", dtype=torch.float16)
        with names_seen(wanted) as names, cuda_on_cpu(), autocast, placed(self.model, OwnCosts) as seen:
            self.model(torch.ones(2, 3, 4))
        costs = StepCosts(seen.flops, seen.sizes)
        return planned(PlanInputs(self.model, tuple(pins), lines, names, self.makings, costs))

    def changed(self, patch: Patch) -> str:
        """The lines that the patch adds, without their common indentation."""
        (edit,) = patch.edits
        before = edit.before.decode().splitlines()
        return textwrap.dedent("\n".join(line for line in edit.after.decode().splitlines() if line not in before))


Write = Callable[[str], Written]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str) -> Written:
        file = tmp_path / "net.py"
        file.write_text(HEAD + text)
        spec = importlib.util.spec_from_file_location("net", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        with Constructions() as makings:
            return Written(file, module.build(), makings)

    return written


def titles(patch: Patch) -> Sequence[str]:
    assert patch.refused == ()
    return [unit.title for unit in patch.units]


PROJ = "self.proj = nn.Linear(4, 4)"


def module(name: str, forward: str, made: str = "", *, base: str = "nn.Module", takes: str = "x") -> str:
    """The source of a module class: ``forward`` are the lines of its forward, and ``made`` creates its children."""
    init = f"    def __init__(self):\n        super().__init__()\n        {made}\n\n" * bool(made)
    lines = forward.replace("\n", "\n        ")
    return f"class {name}({base}):\n{init}    def forward(self, {takes}):\n        {lines}\n\n\n"


def build(model: str) -> str:
    return f"def build():\n    return {model}\n"


TWO_CLASSES = (
    module("Small", "return x + self.proj(x)", PROJ)
    + module("Big", "return y - self.proj(y)", PROJ, takes="y")
    + build("nn.Sequential(Small(), Big(), Small())")
)


def test_a_call_is_edited_only_in_the_class_that_contains_the_call(write: Write) -> None:
    net = write(TWO_CLASSES)
    patch = net.planned(net.pin("1.proj", "y - self"))
    assert titles(patch) == ["self.proj() in Big.forward of net.py"]
    assert "self.proj(y" in net.changed(patch)
    assert b"return x + self.proj(x)" in patch.edits[0].after
    assert patch.units[0].notes == ()


INHERITED = (
    module("Block", "return x + self.proj(x)", PROJ)
    + "class Plain(Block):\n    pass\n\n\n"
    + module("Scaled", "return 2 * super().forward(x)", base="Block")
    + module("Gated", "return z - self.proj(z)", base="Block", takes="z")
    + module("Dispatched", "return self.run(z)", base="Block", takes="z").rstrip()
    + """

    def run(self, z):
        return z / self.proj(z)


def logged(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)

    return inner


"""
    + module("Decorated", "return w * self.proj(w)", base="Block", takes="w").replace("    def", "    @logged\n    def")
    + build("nn.Sequential(Plain(), Scaled(), Gated(), Dispatched(), Decorated())")
)


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("0.proj", "self.proj() in Block.forward of net.py"),
        ("1.proj", "self.proj() in Block.forward of net.py"),
        ("2.proj", "self.proj() in Gated.forward of net.py"),
        ("3.proj", "3.proj, by name"),
        ("4.proj", "self.proj() in Decorated.forward of net.py"),
    ],
)
def test_a_call_is_edited_in_an_inherited_or_decorated_forward(write: Write, name: str, title: str) -> None:
    net = write(INHERITED)
    assert titles(net.planned(net.pin(name, "return x + self.proj(x)"))) == [title]


def sharing(kind: str, instances: int, pinned: int, cost: str) -> str:
    """The note of an edit that more modules run than are pinned."""
    counts = f"applies to all {instances} instances of {kind}, {pinned} of them in the set"
    return f"{counts}: {cost} more of the step's FLOPs in FP32"


def test_a_note_counts_the_unpinned_instances_that_inherit_the_edited_forward(write: Write) -> None:
    net = write(INHERITED)
    (inherited,) = net.planned(net.pin("0.proj", "return x + self.proj(x)")).units
    assert inherited.notes == (sharing("Block", 2, 1, "20%"),)
    pins = [net.pin(f"{i}.proj", "return x + self.proj(x)") for i in (0, 1)]
    assert [unit.notes for unit in net.planned(*pins).units] == [()]


OWN = module("GLU", "h = self.proj(x)\nreturn h * h.abs()", PROJ) + build("nn.Sequential(GLU(), GLU(), GLU())")


def test_a_note_counts_all_instances_and_pinned_instances_of_an_edited_class(write: Write) -> None:
    net = write(OWN)
    pins = [net.pin(f"{i}:own", "h * h.abs()") for i in range(3)]
    assert net.planned(pins[1]).units[0].notes == (sharing("GLU", 3, 1, "0%"),)
    assert net.planned(*pins[1:]).units[0].notes == (sharing("GLU", 3, 2, "0%"),)
    assert net.planned(*pins).units[0].notes == ()
    assert net.planned(net.pin("1:own", "h * h.abs()"), Pin("")).units[0].notes == ()


def test_a_line_close_to_the_limit_that_cannot_be_edited_does_not_block_the_patch(write: Write) -> None:
    net = write(OWN)
    close = (str(net.file), net.line("h = self.proj(x)"), "forward")
    patch = net.planned(*(net.pin(f"{i}:own", "h * h.abs()") for i in range(3)), close=[close])
    assert titles(patch) == [f"line {net.line('h * h.abs()')} of net.py"]


HELPERS = (
    module(
        "Net",
        'h = self.proj(x)\nreturn self.head(self.pairs({"a": h}) + self.energy(h) + self.mixed(h) + self.through(h))',
        "self.proj, self.head = nn.Linear(4, 4), nn.Linear(4, 4)",
    ).rstrip()
    + """

    def pairs(self, feats):
        prods = [a * self.first(feats) for a in feats.values()]
        return sum(prods)

    def first(self, feats):
        return feats["a"]

    def energy(self, f, scale=2.0):
        return (lambda t: t * t)(f)

    def mixed(self, f):
        return (lambda t: t - t)(self.head(f))

    def through(self, f):
        return (lambda t: t / t)(f) + self.mixed(f)


"""
    + build("Net()")
)


@pytest.mark.parametrize(
    ("line", "function"),
    [("a * self.first", "<listcomp>"), ("t - t", "<lambda>"), ("t / t", "<lambda>")],
    ids=["half tensors in a dict", "a child in the line", "a child through a method"],
)
def test_own_lines_that_cannot_be_wrapped_are_pinned_by_name_without_the_children(
    write: Write, line: str, function: str
) -> None:
    net = write(HELPERS)
    patch = net.planned(net.pin(":own", line, function))
    assert titles(patch) == ["Net (its own lines), by name"]
    assert patch.units[0].notes[0].startswith(f"line {net.line(line)} of net.py cannot be edited: ")


CHILDREN = "self.embed, self.cross = nn.Linear(4, 4), nn.MultiheadAttention(4, 2, batch_first=True)"


@pytest.mark.parametrize(
    ("line", "cast"),
    [
        ("pooled, _ = self.cross(h, h + 1, h)", "h = h.float()\npooled, _ = self.cross(h, h + 1, h)"),
        (
            "pooled = self.cross(key=h, value=x, query=h)[0]",
            "h = h.float()\npooled = self.cross(key=h, value=x, query=h)[0]",
        ),
    ],
)
def test_a_call_with_an_unpacked_or_indexed_result_is_wrapped_with_cast_inputs(
    write: Write, line: str, cast: str
) -> None:
    net = write(module("Pooler", f"h = self.embed(x)\n{line}\nreturn pooled", CHILDREN) + build("Pooler()"))
    patch = net.planned(net.pin("cross", line))
    assert titles(patch) == ["self.cross() in Pooler.forward of net.py"]
    assert cast in net.changed(patch).replace("    ", "")
    assert "with torch.autocast(device_type=h.device.type, enabled=False):" in net.changed(patch)


WITH_SIZES = (
    module("Energy", "return (h * h).mean(dims[0])", takes="h, dims")
    + module("Net", "return self.energy(x.half(), [0])", "self.energy = Energy()")
    + build("Net()")
)


def test_names_that_the_trace_saw_in_half_are_cast(write: Write) -> None:
    net = write(WITH_SIZES)
    patch = net.planned(net.pin("energy", "h * h"))
    assert titles(patch) == ["line 9 of net.py"]
    assert "    h = h.float()\n" in net.changed(patch)


@pytest.mark.parametrize(
    ("lines", "title"), [((7,), "line 7 of a.py"), ((7, 9), "lines 7 and 9 of a.py"), ((7, 8), "lines 7 to 8 of a.py")]
)
def test_a_title_names_one_line_or_two_lines_or_a_range_of_lines(lines: tuple[int, ...], title: str) -> None:
    assert lines_title("/x/a.py", lines) == title


WRAPPER = module("Layer", "return torch.relu(self.proj(x))", PROJ) + build(
    "nn.Sequential(*(Layer() for _ in range(5)))"
)


def test_a_module_is_pinned_by_name_if_its_siblings_would_cost_more_than_the_pins(write: Write) -> None:
    net = write(WRAPPER)
    patch = net.planned(net.pin("1.proj", "self.proj(x)"))
    assert titles(patch) == ["1.proj, by name"]
    assert patch.units[0].notes == (f"self.proj() in Layer.forward of net.py {sharing('Layer', 5, 1, '80%')}",)


def test_a_pin_by_name_on_a_copied_model_is_refused(write: Write) -> None:
    looped = module(
        "Net", "for layer in self.layers:\n    x = layer(x)\nreturn x", "self.layers = nn.ModuleList([nn.GELU()])"
    )
    net = write(f"import copy\n\n\n{looped}def build():\n    model = Net()\n    return copy.deepcopy(model)\n")
    (refused,) = net.planned(net.pin("layers.0", "x = layer(x)")).unneeded_refusals
    assert refused.reason.startswith("no line of your code is known to create or call layers.0: a copied or unpickled")


def attention(line: str) -> str:
    """A model of six modules with the same own lines, each with a layer of 8 units for each of the 4 inputs."""
    lines = f"q = self.wide(x)\nsimilar = {line}\nreturn x + similar.mean()"
    made = "self.wide, self.gate = nn.Linear(4, 32), nn.Parameter(torch.ones(32, 32))"
    return module("Attention", lines, made) + build("nn.Sequential(*(Attention() for _ in range(6)))")


def test_a_cheap_line_of_few_instances_is_edited_in_the_class(write: Write) -> None:
    net = write(attention("q.mean(-1) @ q.mean(-1).T"))
    patch = net.planned(*(net.pin(f"{i}:own", "similar =") for i in (2, 4)))
    assert titles(patch) == [f"line {net.line('similar =')} of net.py"]
    assert patch.units[0].notes == (sharing("Attention", 6, 2, "1%"),)


def test_a_costly_line_of_few_instances_is_pinned_by_name(write: Write) -> None:
    net = write(attention("q @ self.gate"))
    patch = net.planned(*(net.pin(f"{i}:own", "similar =") for i in (2, 4)))
    assert titles(patch) == ["module 2 (its own lines), by name", "module 4 (its own lines), by name"]
    cost = sharing("Attention", 6, 2, "59%")
    assert patch.units[0].notes[0] == f"line {net.line('similar =')} of net.py {cost}"


def test_a_class_is_edited_if_most_of_its_instances_are_pinned(write: Write) -> None:
    net = write(WRAPPER)
    patch = net.planned(*(net.pin(f"{i}.proj", "self.proj(x)") for i in range(3)))
    assert titles(patch) == ["self.proj() in Layer.forward of net.py"]


def tower(lines: str, first: str, given: str) -> str:
    """A model of one child; ``first`` and ``lines`` are the lines of the child's forward."""
    return (
        module("Tower", f"h = {first}\n{lines}\nreturn h")
        + module("Net", f"return self.tower({given})", "self.tower = Tower()", takes="y")
        + build("Net()")
    )


def test_a_module_without_children_has_its_own_line_wrapped_and_not_its_call(write: Write) -> None:
    net = write(tower("h = h + h", "x", "y.half()"))
    assert titles(net.planned(net.pin("tower", "h = h + h"))) == ["line 10 of net.py"]


TWO_CALLS = (
    module("Net", "first = energy(x.half())\nsecond = energy(x.half() + first)\nreturn first + second")
    + "def energy(x):\n    return x * x\n\n\n"
    + build("Net()")
)


def test_a_library_function_that_is_called_on_two_lines_is_wrapped_on_both(write: Write, tmp_path: Path) -> None:
    net = write(TWO_CALLS)
    library = str(tmp_path / "site-packages" / "energies.py")
    sites = tuple(PinSite("forward", "", "aten.mul.Tensor", Source(library, at, "f", ""), 1e6) for at in (3, 4))
    called = {3: net.line("first = energy"), 4: net.line("second = energy")}
    calls = {(library, at): (str(net.file), LinePin("forward", (line,), "energy")) for at, line in called.items()}
    patch = net.planned(Pin("", own=True, sites=sites), calls=calls)
    assert titles(patch) == ["energy() on lines 9 to 10 of net.py"]
    assert net.changed(patch).count("energy(") == 2
