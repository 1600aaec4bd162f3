"""A patch in force, and the files on disk as they were: importing a patched file takes the patched bytes."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import linecache
import os
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import SourceFileLoader
from importlib.util import decode_source
from pathlib import Path
from types import CodeType, ModuleType

from ampdbg.config import Config
from ampdbg.precision.attributes import replaced
from ampdbg.proof.jobs import Patched
from ampdbg.replay.run import Run, prepared


@contextlib.contextmanager
def prepared_with(patched: Patched, config: Config) -> Iterator[Run]:
    """The workload with the pins of a patch in force; its files have to be :func:`overlaid`."""
    with prepared(patched.config_of(config)) as run:
        if patched.pins_file is not None:
            _imported(patched.pins_file).pin_fp32(run.workload.model)
        yield run


def _imported(file: Path) -> ModuleType:
    """The file as a module that no other import meets."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GetCode = Callable[[SourceFileLoader, str], CodeType | None]
GetData = Callable[[SourceFileLoader, str], bytes]


@contextlib.contextmanager
def overlaid(files: Mapping[Path, bytes]) -> Iterator[set[Path]]:
    """Imports take these bytes instead of what the files hold, and tracebacks and traces show their lines.

    It makes no difference how a file is imported: by path, by name, as part of a package. No bytecode is read or
    written for it. A module that was imported before stays as it is: this is for a process that has imported none.

    Args:
        files: the bytes of each file, encoded as the file says, by path.

    Yields:
        The paths, as they were given, of the files that have been imported by now.
    """
    overlay = _Overlay(files)
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(SourceFileLoader, "get_code", overlay.get_code(SourceFileLoader.get_code)))
        stack.enter_context(replaced(SourceFileLoader, "get_data", overlay.get_data(SourceFileLoader.get_data)))
        stack.callback(overlay.forget_lines)
        yield overlay.taken


class _Overlay:
    def __init__(self, files: Mapping[Path, bytes]) -> None:
        self.taken: set[Path] = set()
        self._paths = {_key(path): path for path in files}
        self._files = files
        self._shown: set[str] = set()

    def find(self, path: object) -> Path | None:
        """The file that ``path`` leads to, under the name that it was given by; None where it is not overlaid."""
        return self._paths.get(_key(path)) if isinstance(path, (str, os.PathLike)) else None

    # What stands in for a method of a loader takes the loader first, hence the functions inside.

    def get_code(self, original: GetCode) -> GetCode:
        def get_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
            path = loader.get_filename(fullname)
            file = self.find(path)
            if file is None:
                return original(loader, fullname)
            code: CodeType = loader.source_to_code(self._files[file], path)
            self._show_lines(path, self._files[file])
            self.taken.add(file)
            return code

        return get_code

    def get_data(self, original: GetData) -> GetData:
        def get_data(loader: SourceFileLoader, path: str) -> bytes:
            file = self.find(path)
            return original(loader, path) if file is None else self._files[file]

        return get_data

    def _show_lines(self, path: str, source: bytes) -> None:
        """``inspect``, tracebacks and traces take a line from linecache. Without a time it is not held against disk."""
        lines = io.StringIO(decode_source(source)).readlines()
        linecache.cache[path] = (len(source), None, lines, path)
        self._shown.add(path)

    def forget_lines(self) -> None:
        for path in self._shown:
            linecache.cache.pop(path, None)


def _key(path: str | os.PathLike[str]) -> str:
    """Two spellings of one file have one key."""
    return os.path.normcase(os.path.realpath(path))
