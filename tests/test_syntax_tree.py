"""Tests that source is parsed as Python parses it, also in several threads at once."""

import ast
import gc
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ampdbg.syntax_tree import syntax_tree

TEXT = (Path(__file__).parent / "siblings.py").read_text(encoding="utf-8")


@pytest.fixture
def switches() -> Iterator[None]:
    """Threads take turns within a parse, as they do if a finalizer or a garbage-collection callback is Python code."""
    interval = sys.getswitchinterval()

    def collected(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)

    gc.callbacks.append(collected)
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
    gc.callbacks.remove(collected)


def test_threads_that_parse_at_once_all_get_the_right_tree(switches: None) -> None:
    expected = ast.dump(ast.parse(TEXT * 20))
    with ThreadPoolExecutor(4) as pool:
        trees = pool.map(lambda _: syntax_tree(TEXT * 20), range(80))
        assert all(ast.dump(tree) == expected for tree in trees)


def test_an_expression_and_a_syntax_error_are_parsed_as_python_does() -> None:
    assert ast.dump(syntax_tree("a + 1", mode="eval")) == ast.dump(ast.parse("a + 1", mode="eval"))
    with pytest.raises(SyntaxError, match="invalid syntax"):
        syntax_tree("a +* 1")
