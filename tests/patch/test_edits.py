"""Edits of source files: `NAME.in.py` becomes `NAME.out.py`, which runs only the pinned lines in FP32.

The pins of a fixture are comments at the end of its lines: ``#! pin half: q, k; full: w`` pins a statement,
and ``#! call self.attn`` pins a call on that line.
"""

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest
import torch

from ampdbg.patch.edits import LinePin, edit_source
from ampdbg.precision.emulation import cuda_on_cpu
from ampdbg.probes.half_names import LineNames
from tests.conftest import Golden
from tests.siblings import slow_except

Traced = dict[int, LineNames]
"""The names that a trace of a file saw, by line."""

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.name.removesuffix(".in.py") for path in FIXTURES.glob("*.in.py"))

_MARK = re.compile(r"[ ]+#! (pin|call) ?(?P<callee>[\w.\[\]]+(?= |$))?(?P<names>.*)$")


def marked(name: str) -> tuple[str, list[LinePin], Traced]:
    """A fixture's source without its marks, the pins of the marks, and the names that a trace saw."""
    return without_marks((FIXTURES / f"{name}.in.py").read_text(encoding="utf-8"))


def without_marks(text: str) -> tuple[str, list[LinePin], Traced]:
    """The text without its marks, the pins, and the names."""
    lines = text.split("\n")
    found = [(number, line, match) for number, line in enumerate(lines, 1) if (match := _MARK.search(line))]
    stripped = [_MARK.sub("", line) for line in lines]
    pins = [LinePin(_function(number, stripped), (number,), match["callee"] or "") for number, _, match in found]
    seen: Traced = {}
    for number, line, match in found:
        names = dict(_names(match["names"] if match[1] != "pin" else line[match.end(1) :]))
        if names:
            seen[number] = line_names(names.get("half", ()), names.get("full", ()))
    return "\n".join(stripped), pins, seen


def line_names(half: Iterable[str] = (), full: Iterable[str] = ()) -> LineNames:
    """The names of one line."""
    return LineNames(dict.fromkeys(half), dict.fromkeys(full))


def _names(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    for part in filter(None, text.split(";")):
        kind, _, names = part.partition(":")
        yield kind.strip(), tuple(name.strip() for name in names.split(","))


def _function(number: int, lines: list[str]) -> str:
    """The name of the function around a line: the last ``def`` above it that is indented less."""
    indent = len(lines[number - 1]) - len(lines[number - 1].lstrip())
    for line in reversed(lines[: number - 1]):
        start = len(line) - len(line.lstrip())
        if line.strip() and start < indent:
            indent = start
            if match := re.match(r"\s*(?:async )?def (\w+)", line):
                return match[1]
    return ""


@functools.cache
def edited(name: str) -> str:
    """A fixture with the edits of its pins, none of which is refused; several tests read it."""
    text, pins, names = marked(name)
    made = edit_source(text.encode(), pins, names)
    assert made.refused == ()
    assert made.source != text.encode()
    return made.source.decode()


@pytest.mark.parametrize("name", NAMES)
def test_an_edited_fixture_equals_its_golden_file(name: str, golden: Golden) -> None:
    golden(FIXTURES / f"{name}.out.py", edited(name))


def run_example(text: str, *, autocast: bool) -> list[torch.Tensor]:
    """The result of a fixture's example for each edit, under CUDA's autocast on this CPU or in full precision."""
    code: CodeType = compile(text, "<fixture>", "exec")
    namespace: dict[str, Any] = {"__name__": "fixture"}
    exec(code, namespace)
    torch.manual_seed(0)
    example: Callable[[], Any] = namespace["example"]
    function, inputs = example()
    if not autocast:
        with in_full_precision():
            result = function(*inputs)
    else:
        with cuda_on_cpu(), torch.autocast("cpu", dtype=torch.float16):
            result = function(*inputs)
    return result if isinstance(result, list) else [result]


class in_full_precision(torch.utils._python_dispatch.TorchDispatchMode):  # noqa: N801 - a context manager
    """Turns casts to half into casts to float, so that the example runs in FP32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float16:
            kwargs["dtype"] = torch.float32
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_an_edit_makes_an_overflowing_result_finite_and_close_to_fp32(name: str) -> None:
    text, _, _ = marked(name)
    plain, wide, cured = (
        run_example(text, autocast=True),
        run_example(text, autocast=False),
        run_example(edited(name), autocast=True),
    )
    for before, expected, after in zip(plain, wide, cured, strict=True):
        assert not before.isfinite().all(), "the example shows no overflow"
        largest = expected.abs().max().item()
        torch.testing.assert_close(after.float(), expected.float(), rtol=0, atol=0.01 * largest)


@pytest.mark.parametrize("name", NAMES)
def test_pinning_lines_that_are_already_edited_changes_nothing(name: str) -> None:
    """The second run's trace names the lines at their new places."""
    text, pins, names = marked(name)
    once = edited(name)
    lines = sorted({statement.lineno for statement in statements_in_blocks(ast.parse(once))})
    again = [LinePin("", (line,)) for line in lines]
    again_calls = [replace(pin, lines=()) for pin in pins if pin.callee]
    assert again
    seen = names_after(names, text, once)
    assert edit_source(once.encode(), [*again, *again_calls], seen).source == once.encode()


def names_after(names: Traced, before: str, after: str) -> Traced:
    """The names that a trace of the edited file sees in half and in full: a block assigns only FP32 tensors."""
    traced: Traced = {}
    for old, new in zip(functions_of(before), functions_of(after), strict=True):
        lines = range(new.lineno, (new.end_lineno or 0) + 1)
        assigns = (one for one in statements_in_blocks(new) if isinstance(one, ast.Assign))
        made = {ast.unparse(target) for one in assigns for target in one.targets}
        here = [found for line, found in names.items() if old.lineno <= line <= (old.end_lineno or 0)]
        half = {name for found in here for name in found.half} - made
        full = {name for found in here for name in found.full} | made
        traced |= dict.fromkeys(lines, line_names(sorted(half), ("_", *sorted(full))))
    return traced


def functions_of(text: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods, except nested ones."""
    bodies = [node.body if isinstance(node, ast.ClassDef) else [node] for node in ast.parse(text).body]
    return [node for body in bodies for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def seen_anywhere(half: Sequence[str] = (), full: Sequence[str] = ()) -> Traced:
    """Names that a trace saw, but on none of the edited lines."""
    return {0: line_names(half, full)}


def statements_in_blocks(tree: ast.AST) -> list[ast.stmt]:
    """All statements under ``enabled=False``."""
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.With))
    return [line for block in blocks if "enabled=False" in ast.unparse(block.items[0]) for line in block.body]


AS_IN_OTHER_FILES: dict[str, Callable[[str], bytes]] = {
    "CRLF": lambda text: text.replace("\n", "\r\n").encode(),
    "tabs": lambda text: re.sub(r"^( {4})+", lambda m: "\t" * (len(m[0]) // 4), text, flags=re.MULTILINE).encode(),
    "two spaces": lambda text: re.sub(
        r"^( {4})+", lambda m: "  " * (len(m[0]) // 4), text, flags=re.MULTILINE
    ).encode(),
    "no newline at the end": lambda text: text.rstrip("\n").encode(),
    "a byte order mark": lambda text: text.encode("utf-8-sig"),
    "non-ASCII": lambda text: f"{text}\nMØNSTER = '\N{GREEK SMALL LETTER MU} ≈ 3'  # ünïcode\n".encode(),
    "latin-1": lambda text: f"# -*- coding: latin-1 -*-\n{text}\nNAME = 'é'\n".encode("latin-1"),
    "form feeds": lambda text: f"{text}\n\x0c\nclass Last:\n    x = 1\n\x0c\n    y = 2\n".encode(),
}


@pytest.mark.parametrize("name", slow_except(["layout"], NAMES))
@pytest.mark.parametrize("written", AS_IN_OTHER_FILES.values(), ids=AS_IN_OTHER_FILES.keys())
def test_an_edit_keeps_line_endings_indentation_and_encoding(name: str, written: Callable[[str], bytes]) -> None:
    text, pins, names = marked(name)
    source = written(text)
    shift = source[: source.find(text.encode().split(b"\n")[0])].count(b"\n")
    pins = [moved(pin, shift) for pin in pins]
    names = {number + shift: seen for number, seen in names.items()}
    assert edit_source(source, pins, names).source == written((FIXTURES / f"{name}.out.py").read_text(encoding="utf-8"))


def moved(pin: LinePin, shift: int) -> LinePin:
    """The pin in a file that begins with ``shift`` more lines."""
    return replace(pin, lines=tuple(line + shift for line in pin.lines))


REFUSED = {
    "await": ("async def f(self, q, k):\n    return await self.g(q @ k)  #! pin half: q, k", "it awaits"),
    "yield": ("def f(q, k):\n    yield q @ k  #! pin half: q, k", "it yields"),
    "lambda": ("def f(x):\n    return sorted(x, key=lambda q: q @ q)  #! pin half: q", "a lambda runs after the block"),
    "lambda alone": ("f = lambda q: q @ q  #! pin half: q", "a lambda runs after the block"),
    "generator": (
        "def f(xs):\n    return (q @ q for q in xs)  #! pin half: q",
        "a generator expression runs after the block",
    ),
    "while": (
        "def f(x):\n    while (x @ x).sum() > 0:  #! pin half: x\n        x = x - 1",
        "the head of a compound statement",
    ),
    "elif": (
        "def f(x):\n    if x is None:\n        pass\n    elif (x @ x).sum() > 0:  #! pin half: x\n        pass",
        "the head of a compound statement",
    ),
    "with": ("def f(x):\n    with g(x @ x):  #! pin half: x\n        pass", "the head of a compound statement"),
    "default": ("def f(x, y=a @ b):  #! pin half: a\n    pass", "the head of a compound statement"),
    "decorator": ("@g(a @ b)  #! pin half: a\ndef f(x):\n    pass", "a decorator"),
    "blank": ("x = 1\n  #! pin half: x\ny = 2", "no statement is there"),
    "calls alone": ("def f(self, x):\n    return self.norm(self.attn(x))  #! pin half: x", "it only calls modules"),
    "a number's sum": (
        "def f(self, x, i):\n    return self.attn(x, i + 1)  #! pin half: x; full: y",
        "it only calls modules",
    ),
    "a variable that may hold the user's function": (
        "import torch\ndef f(self, x):\n    g = torch.exp if x else self.g\n    return g(x)  #! pin half: x",
        "it only calls modules",
    ),
    "in place": ("def f(x, y):\n    x.add_(y)  #! pin half: x, y", "writes into an existing tensor"),
    "out": ("def f(x, y):\n    torch.add(x, y, out=x)  #! pin half: x, y", "writes into an existing tensor"),
    "element": ("def f(x, y):\n    x[0] = y @ y  #! pin half: x, y", "into part of a half tensor"),
    "what a call computes, changed in place": (
        "def f(self, x, d):\n    d[self.i()] *= x * 2  #! pin half: x",
        "a call computes what it assigns to",
    ),
    "walrus": ("def f(self, x):\n    return (y := self.f(x)) + y * x  #! pin half: x", "binds a name with :="),
    "mixed list": (
        "def f(self, x):\n    y = [self.f(q) * q for q in x]  #! pin half: q",
        "it calls on a condition or in a comprehension",
    ),
    "mixed if": (
        "def f(self, x):\n    y = x + (self.f(x) if x else x @ x)  #! pin half: x",
        "it calls on a condition or in a comprehension",
    ),
    "off already": (
        "import torch\ndef f(x):\n    with torch.autocast('cuda', enabled=False):\n        x @ x  #! pin half: x",
        "autocast is already off there",
    ),
    "off by a name of the function's": (
        "def f(x):\n    from torch import autocast as a\n    with a(enabled=False):\n        x @ x  #! pin half: x",
        "autocast is already off there",
    ),
    "a list's elements": (
        "def f(queries, keys):\n    return [q @ k.T for q, k in zip(queries, keys)]  #! pin half: q, k",
        "it has no named tensor",
    ),
    "a product in what is called": (
        "def f(self, q, k):\n    return self.g(q @ k)  #! call self.g half: q, k",
        "a product",
    ),
    "a number's call": ("def f(self, x):\n    return self.g(x)  #! pin", "no replay runs this line itself"),
    "no tensor": ("import torch\ndef f():\n    return torch.ones(2) * 2.0  #! pin full: y", "it has no named tensor"),
    "torch is taken": ("def f(torch):\n    return torch @ torch  #! pin half: torch", "the name torch"),
    "no call": ("def f(self, x):\n    return x @ x  #! call self.attn half: x", "self.attn is not called here"),
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_line_that_cannot_be_edited_is_unchanged_and_refused_with_a_reason(text: str, reason: str) -> None:
    source, pins, names = without_marks(text + "\n")
    edited = edit_source(source.encode(), pins, names)
    assert edited.source == source.encode()
    (refused,) = edited.refused
    assert reason in refused.reason
    marked_line = next(number for number, line in enumerate(text.split("\n"), 1) if "#!" in line)
    assert refused.line in (marked_line, marked_line + 1, 0)


def test_a_lifted_pin_on_a_line_that_only_calls_modules_is_refused() -> None:
    source = b"import torch\n\ndef f(self, x):\n    return self.g(x)\n"
    edited = edit_source(source, [LinePin("f", (4,), casts_to_fp32=True)], seen_anywhere(("x",)))
    assert [one.reason for one in edited.refused] == ["it only calls modules or functions; pin what it calls"]


def test_of_two_pins_on_a_line_one_that_casts_to_fp32_is_enough() -> None:
    source = b"import torch\n\ndef f(x):\n    return (x / 2).half()\n"
    pins = [LinePin("f", (4,)), LinePin("f", (4,), casts_to_fp32=True)]
    alone, *together = (edit_source(source, one, seen_anywhere(("x",))) for one in (pins[1:], pins, pins[::-1]))
    assert b".half()" not in alone.source
    assert [one.source for one in together] == [alone.source] * 2


ARGUMENTS: dict[str, tuple[str, str]] = {
    "a cast to half": ("iou(p, (t * 8).half())", "iou(p.float(), (t * 8).float())"),
    "a cast to the dtype of a half tensor": ("iou(p, b=(t * 8).type(p.dtype))", "iou(p.float(), b=(t * 8).float())"),
    "a cast that the text does not show": ("iou(p, (t * 8).to(kind))", "iou(p.float(), (t * 8).to(kind).float())"),
    "such a cast of a half tensor": ("iou(p, p.to(kind))", "iou(p.float(), p.to(kind).float())"),
    "a sum of such casts": ("iou(p, t.to(kind) + 1)", "iou(p.float(), (t.to(kind) + 1).float())"),
    "half tensors in a list": ("iou(p, torch.cat(parts))", "iou(p.float(), torch.cat(parts).float())"),
    "a product of a half tensor": ("iou(1, p * 2)", "iou(1, p.float() * 2)"),
    "a dtype that may be any": ("iou(p, torch.arange(4, dtype=kind))", "iou(p.float(), torch.arange(4, dtype=kind))"),
    "a cast to FP32": ("iou(p, t.to(other))", "iou(p.float(), t.to(other))"),
}
"""Arguments of a pinned call, and the call with all of them in FP32. The last two are no half tensors."""


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_in_half_of_a_pinned_call_is_cast(name: str) -> None:
    before, after = ARGUMENTS[name]
    given = ("(t * 8).to(kind)", "p.to(kind)", "t.to(kind) + 1", "torch.cat(parts)", "p * 2")
    source = f"import torch\n\ndef f(p, t, parts, kind, other):\n    return {before}\n"
    seen = {4: line_names(("p", *given), ("t", "t.to(other)"))}
    edited = edit_source(source.encode(), [LinePin("f", (4,), "iou")], seen)
    assert edited.source.decode() == source.replace(
        f"    return {before}",
        f"    with torch.autocast(device_type=p.device.type, enabled=False):\n        return {after}",
    )


def test_the_reason_for_an_untraced_line_says_how_to_edit_by_hand() -> None:
    (refused,) = edit_source(b"import torch\n\ndef f(x):\n    return x / 2\n", [LinePin("f", (4,))], {}).refused
    assert refused.reason.startswith("no replay runs this line itself, so ampdbg does not know which of its names hold")
    assert refused.reason.endswith(
        "put it under torch.autocast(enabled=False) yourself, and cast its inputs with .float()"
    )


def test_a_refused_pin_does_not_block_the_other_pins() -> None:
    source = b"import torch\n\ndef f(x):\n    y = x @ x\n    y.add_(x)\n    return y * x\n"
    edited = edit_source(source, [LinePin("f", (4, 5, 6))], seen_anywhere(("x", "y")))
    assert [item.line for item in edited.refused] == [5]
    assert edited.source.count(b"enabled=False") == 2


def test_a_line_past_the_end_of_the_file_is_refused() -> None:
    (refused,) = edit_source(b"x = 1\n", [LinePin("f", (7,))], seen_anywhere(("x",))).refused
    assert (refused.line, refused.reason) == (7, "the file has 2 lines")


def test_a_file_that_does_not_parse_is_refused_with_the_line_of_the_error() -> None:
    edited = edit_source(b"x = 1\ny = = 2\n", [LinePin("f", (1,))], seen_anywhere(("x",)))
    assert [item.line for item in edited.refused] == [2]
    assert edited.source == b"x = 1\ny = = 2\n"


def test_a_file_that_cannot_be_decoded_is_refused() -> None:
    (refused,) = edit_source("x = 'é'\n".encode("latin-1"), [LinePin("f", (1,))], seen_anywhere(("x",))).refused
    assert "cannot be decoded" in refused.reason


def test_a_line_that_has_moved_to_another_function_is_refused() -> None:
    source = b"class A:\n    def g(self, x):\n        return x @ x\n"
    (refused,) = edit_source(source, [LinePin("A.forward", (3,))], seen_anywhere(("x",))).refused
    assert "the line is in A.g, not in A.forward" in refused.reason


@pytest.mark.parametrize("function", ["", "g", "A.g", "A.g.<locals>.<listcomp>", "g.<locals>.<lambda>"])
def test_a_pin_accepts_the_bare_or_qualified_name_of_its_function(function: str) -> None:
    source = b"import torch\nclass A:\n    def g(self, x):\n        return x @ x\n"
    assert edit_source(source, [LinePin(function, (4,))], seen_anywhere(("x",))).refused == ()


def test_a_file_without_pins_is_unchanged_even_if_it_does_not_parse() -> None:
    source = b"x = 1\r\n\ty = (\n"
    assert edit_source(source, [], {}).source == source


@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < "2.7", reason="torch.compile of torch 2.6 cannot trace it"
)
@pytest.mark.parametrize("name", ["einsum_chain", "residuals"])
def test_an_edited_function_compiles_without_a_graph_break(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("fixture")
    monkeypatch.setitem(sys.modules, "fixture", module)  # up to torch 2.10 torch.compile imports it by its name
    exec(compile((FIXTURES / f"{name}.out.py").read_text(encoding="utf-8"), name, "exec"), vars(module))
    function, inputs = vars(module)["example"]()
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.float16):
        torch.testing.assert_close(compiled(*inputs), function(*inputs))


@pytest.mark.parametrize("test", ["TYPE_CHECKING", "typing.TYPE_CHECKING"])
def test_torch_that_is_imported_only_for_type_checking_is_imported_again(test: str) -> None:
    source = f"import typing\nif {test}:\n    import torch\n\ndef f(x):\n    return x @ x\n".encode()
    edited = edit_source(source, [LinePin("f", (6,))], seen_anywhere(("x",))).source
    assert edited.startswith(b"import typing\n\nimport torch\n")


def test_a_call_pin_edits_only_the_function_of_its_qualified_name() -> None:
    source = b"class A:\n    def f(self, x):\n        return self.a(x)\n\n"
    source += source.replace(b"class A", b"class B")
    edited = edit_source(source, [LinePin("B.f", (7,), "self.a")], seen_anywhere(("x",))).source
    assert edited.startswith(b"import torch\n\n\n" + source[: source.index(b"class B")])
    assert edited.count(b"enabled=False") == 1


def test_a_name_is_cast_only_on_lines_where_the_trace_saw_it_in_half() -> None:
    source = b"import torch\ndef f(q, k):\n    return q @ k\ndef g(q, k):\n    return q @ k\n"
    names = {3: line_names(full=("q", "k")), 5: line_names(("q", "k"))}
    edited = edit_source(source, [LinePin("f", (3,)), LinePin("g", (5,))], names)
    assert edited.refused == ()
    off = "    with torch.autocast(device_type=q.device.type, enabled=False):\n"
    assert off + "        return q @ k\n" in edited.source.decode()
    assert off + "        return q.float() @ k.float()\n" in edited.source.decode()


def test_the_device_is_that_of_an_argument_if_the_block_reads_no_tensor_by_name() -> None:
    source = b"import torch\ndef f(self, n, x):\n    rows = [self.a(x)]\n    return torch.cat(rows).sum()\n"
    edited = edit_source(source, [LinePin("f", (4,))], seen_anywhere(full=("x",)))
    assert edited.refused == ()
    assert b"    with torch.autocast(device_type=x.device.type, enabled=False):\n" in edited.source


@pytest.mark.parametrize(
    ("line", "cast"),
    [
        ("return q @ k", "return q.float() @ k.float()"),
        ("return torch.matmul(q, k)", "return torch.matmul(q.float(), k.float())"),
        (
            "return x * 2.0 if q is None else x * q.sum()",
            "if q is not None:\n            q = q.float()\n        return x * 2.0 if q is None else x * q.sum()",
        ),
    ],
)
def test_an_argument_that_defaults_to_none_is_cast_only_where_it_is_not_none(line: str, cast: str) -> None:
    source = f"import torch\ndef f(x, q=None, k=None):\n    {line}\n".encode()
    edited = edit_source(source, [LinePin("f", (3,))], {3: line_names(("x", "q", "k"))})
    assert edited.refused == ()
    device = "x" if "x" in line.split() else "q"
    assert f"device_type={device}.device.type" in edited.source.decode()
    assert cast in edited.source.decode()


def test_a_name_that_may_hold_a_number_is_cast_only_in_calls_of_its_methods() -> None:
    source = (
        b"import torch\ndef f(xs):\n    h = 0\n    for x in xs:\n        h = h + x\n        y = h.mul(3e4).mul(h)\n"
    )
    edited = edit_source(source, [LinePin("f", (5, 6))], seen_anywhere(("h", "x"))).source.decode()
    assert "            h = h + x.float()\n            y = h.mul(3e4).mul(h)\n" in edited
    edited = edit_source(source, [LinePin("f", (6,))], seen_anywhere(("h", "x"))).source.decode()
    assert "            y = h.float().mul(3e4).mul(h)\n" in edited


def test_a_name_that_may_be_none_is_guarded_despite_a_later_assignment() -> None:
    lines = "    k = q * (q if k is None else k)\n    y = k * 2.0 + q\n"
    source = f"import torch\ndef f(q, k=None):\n{lines}    return y\n".encode()
    edited = edit_source(source, [LinePin("f", (3, 4))], seen_anywhere(("q", "k"))).source.decode()
    assert "        if k is not None:\n            k = k.float()\n" in edited


def test_a_store_between_two_pinned_lines_stays_outside_the_fp32_blocks() -> None:
    source = b"import torch\ndef f(self, h):\n    a = h * h\n    self.last = h\n    b = h + a\n    return b\n"
    edited = edit_source(source, [LinePin("f", (3, 5))], seen_anywhere(("h", "a"))).source
    assert b"\n    self.last = h\n" in edited


@pytest.mark.parametrize("element", ['d["a"]', "d['a']"])
def test_the_device_expression_keeps_the_quotes_of_the_source(element: str) -> None:
    source = f"import torch\ndef f(d):\n    return {element} * 2.0\n".encode()
    edited = edit_source(source, [LinePin("f", (3,))], seen_anywhere((element,))).source.decode()
    assert f"device_type={element}.device.type, enabled=False" in edited
    assert f"return {element}.float() * 2.0" in edited
