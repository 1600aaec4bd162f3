"""Source files as LibCST reads them: the statement on a line, and the bytes that an edit leaves unchanged."""

import os
from pathlib import Path

import libcst as cst
import pytest

from ampdbg.source.source_file import EditError, SourceFile, read_source
from tests.siblings import slow_except

STANDARD_LIBRARY = Path(os.__file__).parent
EVERY = 24


def corpus() -> list[Path]:
    """One in 24 modules of the standard library, with packages and without tests of broken syntax."""
    files = sorted(STANDARD_LIBRARY.glob("*.py")) + sorted(STANDARD_LIBRARY.glob("[a-z]*/*.py"))
    kept = (file for file in files if not {"site-packages", "test", "lib2to3"} & set(file.parts))
    return [file for file in kept if file.stat().st_size][::EVERY]


def name_of(file: Path) -> str:
    return file.relative_to(STANDARD_LIBRARY).as_posix()


SHORT = [file for file in corpus() if file.stat().st_size < 20_000 and file.name != "forkserver.py"][::2]


@pytest.mark.parametrize("file", slow_except(SHORT, corpus()), ids=name_of)
def test_an_inserted_line_leaves_all_other_bytes_unchanged(file: Path) -> None:
    """The only difference is the line inserted before the last statement."""
    source = file.read_bytes()
    text = read_source(source)
    assert text.with_module(text.module) == source
    line = cst.SimpleStatementLine([cst.Expr(cst.SimpleString("'here'"))])
    body = text.module.body
    edited = text.with_module(text.module.with_changes(body=[*body[:-1], line, *body[-1:]]))
    before, here, after = edited.partition(b"'here'" + text.module.default_newline.encode())
    assert here
    assert before + after == source


@pytest.mark.parametrize("source", [b"x = 1\ry = x @ x\r", b"x = 1\r\n\x0cy = 2\r\n", b"", b"\n", b"# only a comment"])
def test_unusual_files_without_an_edit_are_unchanged(source: bytes) -> None:
    text = read_source(source)
    assert text.with_module(text.module) == source


def test_an_edit_is_refused_if_libcst_loses_line_endings() -> None:
    text = SourceFile("x = 1\n\n", "utf-8", cst.parse_module("x = 1\n"))
    with pytest.raises(EditError, match="line endings cannot be kept"):
        text.with_module(cst.parse_module("y = 1\n"))


NET = b"""\
import torch


class Net:
    def forward(self, x):
        if x is None:
            return 0
        with torch.autocast("cuda", enabled=False):
            y = x @ x
        return y
"""


@pytest.mark.parametrize(("line", "is_off"), [(7, False), (9, True), (10, False)])
def test_a_statement_is_found_by_line_with_its_function_and_autocast_state(line: int, is_off: bool) -> None:
    found = read_source(NET).at(line)
    assert found.span == range(line, line + 1)
    assert found.qualname == ("Net", "forward")
    assert found.is_in("Net.forward")
    assert found.is_off == is_off


@pytest.mark.parametrize(
    ("line", "reason"),
    [(2, "no statement is there"), (5, "the head of a compound"), (6, "the head of a compound"), (99, "has 11 lines")],
)
def test_a_line_without_a_statement_of_its_own_is_refused(line: int, reason: str) -> None:
    with pytest.raises(EditError, match=reason) as caught:
        read_source(NET).at(line)
    assert caught.value.line == line


def test_equal_sources_are_parsed_once() -> None:
    assert read_source(NET) is read_source(bytes(bytearray(NET)))
