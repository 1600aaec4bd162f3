"""Diffs: `git apply` and `patch -p1` apply and reverse them, byte for byte."""

import shutil
import subprocess
import tempfile
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampdbg.patch.file_edits import counterpart, unified_diff

needs_patch = pytest.mark.skipif(shutil.which("patch") is None, reason="patch is not installed")

PATHS = ["model.py", "src/my model.py", "modèles/π.py", 'say "hi".py', "tab\there.py"]
LINE = st.sampled_from(
    [b"def f(x):", b"    return x", b"", b"x = 'caf\xe9'", b"a\x0cb", b"lone\rreturn", b"-- a", b"@@ b"]
)
END = st.sampled_from([b"\n", b"\r\n"])
CONTENT = st.builds(
    lambda lines, last: b"".join(line + end for line, end in lines) + last,
    st.lists(st.tuples(LINE, END), max_size=30),
    st.sampled_from([b"", b"no newline at the end"]),
)


# A repository's configuration must not change line ends.
GIT = ("git", "-c", "core.autocrlf=false")
TOOLS = {"git": (*GIT, "apply", "--whitespace=nowarn"), "patch": ("patch", "-p1", "--binary", "--quiet")}


def assert_applies_and_reverses(tool: str, path: str, before: bytes, after: bytes) -> None:
    """Writes the file into a new folder, applies the diff with the tool, and reverses it."""
    diff = unified_diff(PurePosixPath(path), before, after)
    with tempfile.TemporaryDirectory() as folder:
        file = placed(Path(folder), path, before)
        for options, expected in (((), after), (("-R",), before)):
            command = [*TOOLS[tool], *options]
            subprocess.run(command, cwd=folder, input=diff, check=True, capture_output=True)
            assert file.read_bytes() == expected


def placed(folder: Path, path: str, content: bytes) -> Path:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def test_a_diff_has_git_headers_and_names_the_function_of_its_hunk() -> None:
    before = b"import torch\n\n\ndef f(x):\n    a = 1\n    b = 2\n    c = 3\n    return x @ x\n"
    after = before.replace(b"    return x @ x\n", b"    return x\n")
    assert unified_diff(PurePosixPath("pkg/model.py"), before, after) == (
        b"diff --git a/pkg/model.py b/pkg/model.py\n"
        b"--- a/pkg/model.py\n"
        b"+++ b/pkg/model.py\n"
        b"@@ -5,4 +5,4 @@ def f(x):\n"
        b"     a = 1\n     b = 2\n     c = 3\n-    return x @ x\n+    return x\n"
    )


def test_a_diff_marks_a_missing_newline_at_the_end_of_the_file() -> None:
    diff = unified_diff(PurePosixPath("m.py"), b"a", b"a\nb")
    assert diff.endswith(b"@@ -1 +1,2 @@\n-a\n\\ No newline at end of file\n+a\n+b\n\\ No newline at end of file\n")


def test_equal_contents_give_an_empty_diff() -> None:
    assert unified_diff(PurePosixPath("m.py"), b"a\n", b"a\n") == b""


@pytest.mark.parametrize("path", PATHS)
def test_git_applies_and_reverses_a_diff_for_any_path(path: str) -> None:
    assert_applies_and_reverses("git", path, b"a\r\nb\r\n", b"a\r\nc\r\n")


def test_a_diff_equals_git_diff_apart_from_the_index_line(tmp_path: Path) -> None:
    for path in PATHS:
        file = placed(tmp_path, path, b"a\n")
        subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
        subprocess.run(["git", "add", "--", path], cwd=tmp_path, check=True, capture_output=True)
        file.write_bytes(b"b\n")
        command = [*GIT, "diff", "--no-color", "--no-ext-diff", "--src-prefix=a/", "--dst-prefix=b/"]
        result = subprocess.run([*command, "--", path], cwd=tmp_path, check=True, capture_output=True)
        ours = unified_diff(PurePosixPath(path), b"a\n", b"b\n")
        assert ours == b"".join(line for line in result.stdout.splitlines(True) if not line.startswith(b"index "))


@needs_patch
@pytest.mark.parametrize("path", PATHS[:2])
def test_patch_applies_and_reverses_a_diff(path: str) -> None:
    assert_applies_and_reverses("patch", path, b"a\r\nb\r\nc", b"a\r\nc")


@settings(max_examples=60)
@given(before=CONTENT.filter(bool), after=CONTENT.filter(bool))
def test_git_applies_and_reverses_any_change_byte_for_byte(before: bytes, after: bytes) -> None:
    if before != after:
        assert_applies_and_reverses("git", "m.py", before, after)


def test_counterpart_finds_lines_that_an_edit_moved_or_indented() -> None:
    before = b"a = 1\nb = 2\nc = 3\nd = 4\n"
    after = b"import x\na = 1\nwith x:\n    b = 2\nc = 30\nd = 4\n"
    assert [counterpart(line, before, after) for line in range(1, 5)] == [2, 4, 0, 6]
    assert [counterpart(line, after, before) for line in range(1, 7)] == [0, 1, 0, 2, 0, 4]
