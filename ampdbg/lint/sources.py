"""The files to lint: found below folders, read in their encoding, notebooks as the text of their cells."""

from __future__ import annotations

import fnmatch
import io
import json
import os
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ampdbg.errors import AmpdbgError, reason_of
from ampdbg.files import read_file

SUFFIXES = (".py", ".ipynb")
NEVER = frozenset({"__pycache__", "node_modules", "build", "dist", "venv"})
"""Folders that hold nothing of the user's own; hidden ones and virtual environments neither."""

MARKS = frozenset({".git", "pyproject.toml", "setup.py", "setup.cfg", "requirements.txt"})
"""A folder with one of them is a project of its own."""

MOST_BYTES = {".py": 2_000_000, ".ipynb": 50_000_000}
"""Larger files are made by programs; notebooks hold pictures."""

_MAGIC = re.compile(r"^(\s*)([%!?].*|.*\?\s*)$", re.MULTILINE)
"""A line of a notebook that is IPython's, not Python's."""


@dataclass(frozen=True)
class SourcePath:
    """A file that is to be linted, and the folder of its project ("" of none); ``problem`` says why it cannot be."""

    path: str
    root: str
    problem: str = ""


@dataclass(frozen=True)
class NotebookCell:
    """A code cell of a notebook: its number, and the first line of the whole text that is its own."""

    number: int
    first_line: int


@dataclass(frozen=True)
class SourceText:
    """A file's text, its encoding, and of a notebook its cells."""

    text: str
    encoding: str = "utf-8"
    cells: tuple[NotebookCell, ...] = ()
    notebook: str = ""

    def cell_of(self, line: int) -> tuple[int, int]:
        """The number of the cell that a line of the text is in, and the line there; cell 0 of a file."""
        cell = next((one for one in reversed(self.cells) if one.first_line <= line), None)
        return (cell.number, line - cell.first_line + 1) if cell else (0, line)


class UnreadableSource(Exception):  # noqa: N818 - it becomes a line of the report
    """A file that cannot be linted; ``str(error)`` says why."""


def files_below(paths: Sequence[str], exclude: Sequence[str] = ()) -> Iterator[SourcePath]:
    """The files of the paths that were given, each once, in the order of their names.

    Raises:
        AmpdbgError: there is nothing at one of the paths.
    """
    done: set[str] = set()
    for given in paths:
        if not os.path.lexists(given):
            raise AmpdbgError(f"{given}: there is no such file or folder")
        for found in _below(given, exclude):
            real = os.path.realpath(found.path)
            if real not in done or found.problem:
                done.add(real)
                yield found


def _below(given: str, exclude: Sequence[str]) -> Iterator[SourcePath]:
    """A file as it is; of a folder what is below it, but for linked folders."""
    if not os.path.isdir(given):
        yield SourcePath(given, _project_around(os.path.dirname(given) or "."))
        return
    unreadable: list[OSError] = []
    for folder, folders, files in os.walk(given, onerror=unreadable.append):
        root = _project_around(folder)
        folders[:] = sorted(name for name in folders if not _is_excluded(folder, name, exclude))
        kept = sorted(name for name in files if not _is_excluded(folder, name, exclude))
        yield from (SourcePath(_shown(folder, name), root) for name in kept if name.endswith(SUFFIXES))
    for error in unreadable:
        yield SourcePath(error.filename, _project_around(error.filename), f"cannot be read: {error.strerror}")


def _project_around(folder: str) -> str:
    """The project that a folder is in, whichever of its folders were given; "" where nothing marks one, and all is one
    project."""
    here = Path(os.path.abspath(folder))
    around = (one for one in (here, *here.parents) if any(os.path.lexists(one / mark) for mark in MARKS))
    return str(next(around, ""))


def _shown(folder: str, name: str) -> str:
    return os.path.join(folder, name).removeprefix("./")


def _is_excluded(folder: str, name: str, exclude: Sequence[str]) -> bool:
    path = _shown(folder, name)
    by_pattern = any(fnmatch.fnmatch(what, pattern) for pattern in exclude for what in (path, name))
    return by_pattern or name.startswith(".") or name in NEVER or os.path.exists(os.path.join(path, "pyvenv.cfg"))


def read_bytes(path: str) -> bytes:
    """The content of a file.

    Raises:
        UnreadableSource: it cannot be read, or is too large.
    """
    try:
        return read_file(Path(path), MOST_BYTES.get(Path(path).suffix, MOST_BYTES[".py"]))
    except OSError as error:
        raise UnreadableSource(f"cannot be read: {reason_of(error)}") from None


def source_of(path: str, content: bytes) -> SourceText:
    """The text of a file, or of a notebook's cells.

    Raises:
        UnreadableSource: it cannot be decoded, or is no notebook.
    """
    if path.endswith(".ipynb"):
        return _notebook(content)
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return SourceText(content.decode(encoding), encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise UnreadableSource(f"cannot be decoded: {str(error).partition(chr(10))[0]}") from None


def _notebook(content: bytes) -> SourceText:
    """The code cells, each under a comment with its place, so that a fix can be put back into it."""
    try:
        notebook = content.decode("utf-8")
        cells = [(number, "".join(cell["source"])) for number, cell in enumerate(json.loads(notebook)["cells"], start=1)
                 if cell["cell_type"] == "code"]  # fmt: skip
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UnreadableSource("is no notebook of version 4") from None
    text, places = "", []
    for number, cell in cells:
        if not cell.lstrip().startswith("%%"):  # not Python at all
            places.append(NotebookCell(number, text.count("\n") + 2))
            plain = _MAGIC.sub(lambda line: f"{line[1]}{_STANDS_IN}{line[2].encode().hex()}", cell)
            text += f"{_HEAD.format(number)}\n{plain}\n"
    return SourceText(text, "utf-8", tuple(places), notebook)


_HEAD = "# ampdbg-cell {}"
_HEADS = re.compile(r"^# ampdbg-cell (\d+)\n", re.MULTILINE)
_STANDS_IN = "pass  # ampdbg-magic "
_STOOD_IN = re.compile(rf"{_STANDS_IN}([0-9a-f]+)")
"""The line of a cell that stands for one which is IPython's alone."""


def content_of(source: SourceText, text: str) -> bytes:
    """The file with another text.

    Raises:
        UnreadableSource: of a notebook, which would not keep its form.
    """
    if not source.notebook:
        return text.encode(source.encoding)
    data = json.loads(source.notebook)
    end = "\n" if source.notebook.endswith("\n") else ""
    before, *parts = _HEADS.split(text)
    if before or json.dumps(data, indent=1, ensure_ascii=False) + end != source.notebook:
        raise UnreadableSource("cannot be fixed in its own format; open it in Jupyter, save it, and try again")
    for number, cell in zip(parts[::2], parts[1::2], strict=True):
        made = _STOOD_IN.sub(lambda line: bytes.fromhex(line[1]).decode(), cell.removesuffix("\n"))
        old = data["cells"][int(number) - 1]["source"]
        data["cells"][int(number) - 1]["source"] = made if isinstance(old, str) else made.splitlines(keepends=True)
    return (json.dumps(data, indent=1, ensure_ascii=False) + end).encode()
