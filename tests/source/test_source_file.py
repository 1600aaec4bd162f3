"""Source files: the statement on a line, and the bytes that an edit leaves unchanged."""

import os
from pathlib import Path

import pytest

from ampdbg.patch.edits import LinePin, edit_source
from ampdbg.probes.half_names import LineNames
from ampdbg.source.edits import Fix, above, applied
from ampdbg.source.source_file import EditError, read_source
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
    document = text.document
    assert document.text.encode(text.encoding) == source
    edited = applied(document, [Fix((above(document, document.tree.body[-1], "'here'"),))]).encode(text.encoding)
    before, here, after = edited.partition(b"'here'" + document.newline.encode())
    assert here
    assert before + after == source


@pytest.mark.parametrize("source", [b"x = 1\ry = x @ x\r", b"x = 1\r\n\x0cy = 2\r\n", b"", b"\n", b"# only a comment"])
def test_unusual_files_without_an_edit_are_unchanged(source: bytes) -> None:
    text = read_source(source)
    assert applied(text.document, []).encode(text.encoding) == source


def test_a_file_whose_lines_end_in_carriage_returns_is_edited() -> None:
    source = b"import torch\r\rdef f(x):\r    return x @ x\r"
    names = {4: LineNames(half={"x": None})}
    edited = edit_source(source, [LinePin("f", (4,))], names).source
    assert edited.split(b"\r")[3:5] == [
        b"    with torch.autocast(device_type=x.device.type, enabled=False):",
        b"        x = x.float()",
    ]
    assert b"\n" not in edited


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
