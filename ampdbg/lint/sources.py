"""The files to lint: found below folders and decoded, with notebooks as the text of their cells."""

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
"""Folders without code of the user's own. Hidden folders and virtual environments are skipped too."""

MARKS = frozenset({".git", "pyproject.toml", "setup.py", "setup.cfg", "requirements.txt"})
"""The entries that mark a folder as the root of a project."""

MOST_BYTES = {".py": 2_000_000, ".ipynb": 50_000_000}
"""The largest size of a file to lint: programs write larger files, and notebooks contain pictures."""

_MAGIC = re.compile(r"^(\s*)([%!?].*|.*\?\s*)$", re.MULTILINE)
"""A line of a notebook in IPython's own syntax, which Python cannot parse."""


@dataclass(frozen=True)
class SourcePath:
    """A file to lint, and the folder of its project ("" if none); ``problem`` says why it cannot be linted."""

    path: str
    root: str
    problem: str = ""


@dataclass(frozen=True)
class SourceText:
    """The text of a file and its encoding; of a notebook also its JSON, and each code cell's number and first line."""

    text: str
    encoding: str = "utf-8"
    cells: tuple[tuple[int, int], ...] = ()
    notebook: str = ""

    def cell_of(self, line: int) -> tuple[int, int]:
        """Return the cell that has a line of the text, and the line's number within the cell; cell 0 for a file."""
        number, first = next((cell for cell in reversed(self.cells) if cell[1] <= line), (0, 1))
        return number, line - first + 1


class UnreadableSource(Exception):  # noqa: N818 - it becomes a line of the report
    """A file that cannot be linted; ``str(error)`` says why."""


def files_below(paths: Sequence[str], exclude: Sequence[str] = ()) -> Iterator[SourcePath]:
    """Yield the files at the given paths, each once, in the order of their names.

    Raises:
        AmpdbgError: one of the paths does not exist.
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
    """Yield a file itself, or the files below a folder, without linked folders."""
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
    """Return the folder of the project that a folder is in, even above the given folders. Without a mark return "": all
    such files are one project."""
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
    """Return the content of a file.

    Raises:
        UnreadableSource: the file cannot be read, or is too large.
    """
    try:
        return read_file(Path(path), MOST_BYTES.get(Path(path).suffix, MOST_BYTES[".py"]))
    except OSError as error:
        raise UnreadableSource(f"cannot be read: {reason_of(error)}") from None


def source_of(path: str, content: bytes) -> SourceText:
    """Return the text of a file, or of a notebook's cells.

    Raises:
        UnreadableSource: the file cannot be decoded, or is not a notebook.
    """
    if path.endswith(".ipynb"):
        return _notebook(content)
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return SourceText(content.decode(encoding), encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise UnreadableSource(f"cannot be decoded: {str(error).partition(chr(10))[0]}") from None


def _notebook(content: bytes) -> SourceText:
    """Return the code cells, each below a comment with its number, so that fixes can be written back."""
    try:
        notebook = content.decode("utf-8")
        cells = [(number, "".join(cell["source"])) for number, cell in enumerate(json.loads(notebook)["cells"], start=1)
                 if cell["cell_type"] == "code"]  # fmt: skip
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UnreadableSource("is no notebook of version 4") from None
    text, places = "", list[tuple[int, int]]()
    for number, cell in cells:
        if not cell.lstrip().startswith("%%"):  # another language
            places.append((number, text.count("\n") + 2))
            plain = _MAGIC.sub(lambda line: f"{line[1]}{_STANDS_IN}{line[2].encode().hex()}", cell)
            text += f"{_HEAD.format(number)}\n{plain}\n"
    return SourceText(text, "utf-8", tuple(places), notebook)


_HEAD = "# ampdbg-cell {}"
_HEADS = re.compile(r"^# ampdbg-cell (\d+)\n", re.MULTILINE)
_STANDS_IN = "pass  # ampdbg-magic "
_STOOD_IN = re.compile(rf"{_STANDS_IN}([0-9a-f]+)")
"""The placeholder for a line in IPython's syntax, which it holds in hexadecimal."""


def content_of(source: SourceText, text: str) -> bytes:
    """Return the content of a file with another text.

    Raises:
        UnreadableSource: a notebook would not keep its format.
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
