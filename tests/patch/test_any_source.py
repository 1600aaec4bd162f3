"""Edits of arbitrary files: the result parses, and the rest of the file is unchanged."""

import ast
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampdbg.patch.edits import LinePin, edit_source
from ampdbg.probes.half_names import LineNames
from ampdbg.source.source_file import read_source
from tests.siblings import slow_except
from tests.source.test_source_file import SHORT, corpus, name_of


def operations(file: Path) -> list[int]:
    """The lines with a binary operation."""
    return sorted({node.lineno for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, ast.BinOp)})


def seen_in(source: bytes) -> dict[int, LineNames]:
    """A trace that saw a half tensor in every name of every statement."""
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    names = ((one.lineno, [node.id for node in ast.walk(one) if isinstance(node, ast.Name)]) for one in statements)
    return {line: LineNames(dict.fromkeys(some)) for line, some in names}


@pytest.mark.parametrize("file", slow_except(SHORT, filter(operations, corpus())), ids=name_of)
def test_pinning_arbitrary_operations_gives_a_file_that_parses(file: Path) -> None:
    """The edits parse, and a file whose lines are not all refused is edited."""
    source, lines = file.read_bytes(), operations(file)
    pins = [LinePin("", (line,)) for line in lines[:: max(1, len(lines) // 4)]]
    edited = edit_source(source, pins, seen_in(source))
    ast.parse(edited.source)
    assert (edited.source != source) == (len(edited.refused) < len(pins))


STATEMENTS = st.sampled_from(
    [
        "y = x @ x",
        "y = x + self.f(x)  # residual",
        "x += y * 2",
        "if x: y = x @ y",
        "y = [q @ q for q in x]; z = 1",
        "y = self.g(x * y, key=lambda t: t)",
        "\x0c",
        "",
        "# Kommentar: größer",
        "y = (x\n         @ y)",
        "y = x @ \\\n        y",
        "for y in x @ x:\n        x = y * y",
        "z = '''\n  x @ y\n'''",
        "return x * y",
    ]
)
FILES = st.builds(
    lambda statements, indent, end, bom, last: (
        ("def f(self, x, y):\n" + "".join(f"    {line}\n" if line.strip() else f"{line}\n" for line in statements))
        .replace("    ", indent)
        .replace("\n", end)
        .removesuffix(end)
        .encode(bom)
        + last.replace("\n", end).encode()
    ),
    st.lists(STATEMENTS, min_size=1, max_size=8).map(lambda lines: [*lines, "pass"]),
    st.sampled_from(["    ", "\t", "  "]),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from(["utf-8", "utf-8-sig"]),
    st.sampled_from(["", "\n", "\n\n# the end"]),
)


def pinned(source: bytes, traced: bool) -> bytes:
    names = {0: LineNames(dict.fromkeys("xyq"))} if traced else {}
    lines = source.decode("utf-8-sig").count("\n") + 1
    return edit_source(source, [LinePin("f", (line,)) for line in range(1, lines + 1)], names).source


@settings(max_examples=25)
@given(source=FILES, traced=st.booleans())
def test_edits_of_generated_files_parse_and_keep_comments_and_line_endings(source: bytes, traced: bool) -> None:
    read_source(source)
    edited = pinned(source, traced)
    ast.parse(edited)
    assert edited.startswith(b"\xef\xbb\xbf") == source.startswith(b"\xef\xbb\xbf")
    assert b"\r\n" in source or b"\r" not in edited
    for kept in ("# Kommentar: größer".encode(), b"\x0c", b"# residual", b"# the end", b"'''"):
        assert edited.count(kept) == source.count(kept)
