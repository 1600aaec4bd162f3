"""A patch in force, and the files on disk as they were: importing a patched file takes the patched bytes."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import linecache
import os
from collections.abc import Iterator, Mapping
from importlib.machinery import SourceFileLoader
from importlib.util import decode_source
from pathlib import Path
from types import CodeType, ModuleType
from unittest.mock import patch

from ampdbg.config import Config
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
    given = {_key(path): path for path in files}
    taken: set[Path] = set()
    shown: set[str] = set()
    original = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
        path = loader.get_filename(fullname)
        file = given.get(_key(path))
        if file is None:
            return original(loader, fullname)
        source = files[file]
        code: CodeType = loader.source_to_code(source, path)
        # inspect, tracebacks and traces take a line from linecache. Without a time it is not held against the disk.
        linecache.cache[path] = (len(source), None, io.StringIO(decode_source(source)).readlines(), path)
        shown.add(path)
        taken.add(file)
        return code

    try:
        with patch.object(SourceFileLoader, "get_code", get_code):
            yield taken
    finally:
        for path in shown:
            linecache.cache.pop(path, None)


def _key(path: str | Path) -> str:
    """Two spellings of one file have one key."""
    return os.path.normcase(os.path.realpath(path))
