"""Code swapped in the live process: every reference to a function runs the new code, and then its own again."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ampdbg.proof.swap import CannotSwapError, swapped

HELD = """\
import functools

COUNT = 0


def wrapped(function):
    def call(*args):
        return function(*args)

    return call


@functools.lru_cache
def plain(x):
    return x + 1


class Net:
    scale = 1

    @property
    def size(self):
        return 2

    @size.setter
    def size(self, value):
        self.value = value

    @staticmethod
    @wrapped
    def twice(x):
        return 2 * x

    def forward(self, x):
        def inner(y):
            return x + y

        return inner(1)


def make(offset):
    other = 1

    def loss(x):
        return x - offset

    return loss


made = make(10)
"""


@pytest.fixture
def held(tmp_path: Path) -> Iterator[ModuleType]:
    path = tmp_path / "held.py"
    path.write_text(HELD)
    spec = importlib.util.spec_from_file_location("held", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["held"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["held"]


def patch(held: ModuleType, *edits: tuple[str, str], text: str = HELD) -> dict[Path, bytes]:
    for before, after in edits:
        assert before in text
        text = text.replace(before, after)
    return {Path(held.__file__ or ""): text.encode()}


EDITS = {
    "a decorated function": ("return x + 1", "return x + 100", "plain", lambda held: held.plain.__wrapped__(0), 1, 100),
    "one behind a decorator that hides it": ("2 * x", "20 * x", "twice", lambda held: held.Net.twice(1), 2, 20),
    "a property": ("return 2\n", "return 3\n", "size", lambda held: held.Net().size, 2, 3),
    "a function in a method": ("return x + y", "return x * y", "inner", lambda held: held.Net().forward(5), 6, 5),
    "a function that another has made": ("x - offset", "x + offset", "loss", lambda held: held.made(1), -9, 11),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_function_runs_the_swapped_code_and_then_its_own_code_again(name: str, held: ModuleType) -> None:
    before, after, function, call, was, then = EDITS[name]
    shifted = patch(held, (before, f"_ = 0\n{' ' * 12}{after}" if name.endswith("method") else after))
    assert call(held) == was
    with swapped(shifted) as changed:
        assert list(changed.values()) == [function]
        assert call(held) == then
    assert call(held) == was


def test_swapped_code_keeps_the_lines_of_the_file_and_new_imports_end_with_the_swap(held: ModuleType) -> None:
    names, lines = set(vars(held)), [line for *_, line in held.make.__code__.co_lines()]
    edits = ("import functools\n", "import functools\nimport math\n"), ("return x + 1", "return math.floor(x + 1.5)")
    with swapped(patch(held, *edits)):
        assert held.plain(0.0) == 1
        code = held.plain.__wrapped__.__code__
        assert code.co_firstlineno == HELD[: HELD.index("@functools.lru_cache")].count("\n") + 1
        assert {line for *_, line in code.co_lines()} <= {code.co_firstlineno, 0, None}
        assert [line for *_, line in held.make.__code__.co_lines()] == lines
    assert set(vars(held)) == names


def test_an_error_in_swapped_code_restores_the_original_code(held: ModuleType) -> None:
    with pytest.raises(ZeroDivisionError), swapped(patch(held, ("return x + 1", "return 7 / x"))):
        held.plain(0)
    assert held.plain(0) == 1


WHY_NOT = {
    "a global": (("COUNT = 0", "COUNT = 1"), "it changes code that runs when held.py is imported"),
    "a class's attribute": (("scale = 1", "scale = 2"), "it changes code that runs when held.py is imported"),
    "a default": (("def plain(x)", "def plain(x=1)"), "it changes code that runs when held.py is imported"),
    "a new function": (("COUNT = 0", "def new():\n    pass"), "it changes code that runs when held.py is imported"),
    "other names of its enclosing function": (
        ("x - offset", "x - offset * other"),
        "make.<locals>.loss uses other names of its enclosing function",
    ),
    "no Python": (("COUNT = 0", "COUNT ="), "held.py cannot be read or parsed: "),
}


@pytest.mark.parametrize("name", WHY_NOT)
def test_a_change_that_cannot_be_swapped_is_refused_with_the_reason(name: str, held: ModuleType) -> None:
    edit, why = WHY_NOT[name]
    with pytest.raises(CannotSwapError, match=why), swapped(patch(held, edit)):
        pass


def test_a_file_that_was_not_imported_cannot_be_swapped(tmp_path: Path) -> None:
    path = tmp_path / "another_file.py"
    path.write_text("X = 1\n")
    with (
        pytest.raises(CannotSwapError, match=r"another_file\.py is imported under 0 names"),
        swapped({path: b"X = 2\n"}),
    ):
        pass


def test_code_whose_file_has_changed_since_the_import_is_not_swapped(held: ModuleType) -> None:
    Path(held.__file__ or "").write_text(HELD.replace("x + 1", "x * 5"))
    with swapped(patch(held, ("x + 1", "x + 100"))):
        assert held.plain(30) == 31
