"""Every function that writes a file, in Python and in torch, led to what a restarted script is to write instead."""

from __future__ import annotations

import _io
import builtins
import contextlib
import functools
import io
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import safetensors.torch
import torch
from torch.jit._script import RecursiveScriptModule

from ampdbg.probes.seams import replaced
from ampdbg.script.scratch_files import WRITES, Function, ScratchFiles

BELOW_OS = sys.modules.get("posix")
"""Has the functions of ``os`` under their own names; None on Windows."""


@contextlib.contextmanager
def scratch_files(folder: Path) -> Iterator[ScratchFiles]:
    """While this is entered, this process writes into ``folder`` what it would write over, and reads that again.

    Afterwards what it has made anew below the working folder is gone.
    """
    files = ScratchFiles(folder)
    paths = getattr(pathlib, "_normal_accessor", None)  # before Python 3.11 a Path has the functions from here
    of_paths = (
        ("chmod", files.writing("path", 0, is_kept=True)),
        ("unlink", files.removing),
        ("symlink", files.linking),
        ("link", files.sharing),
        ("rename", files.renaming),
        ("replace", files.renaming),
        ("rmdir", files.removing_a_folder),
        ("mkdir", files.making_a_folder),
    )
    of_os = (
        *of_paths,
        ("open", files.opening_a_descriptor),
        ("truncate", files.writing("path", 0, is_kept=True)),
        ("utime", files.writing("path", 0, is_kept=True)),
        ("remove", files.removing),
    )
    replacements = (
        *((owner, name, replacement) for owner in (os, BELOW_OS) for name, replacement in of_os),
        *((paths, name, replacement) for name, replacement in of_paths),
        *((owner, "open", files.opening) for owner in (builtins, io, _io, paths)),
        (shutil, "rmtree", files.removing_a_folder),
        (torch, "save", files.writing("f", 1)),
        (torch, "from_file", files.mapping),
        (torch.UntypedStorage, "from_file", files.mapping),
        (torch.jit, "save", files.writing("f", 1)),
        *((kind, "save", files.writing("f", 1)) for kind in (torch.jit.ScriptModule, RecursiveScriptModule)),
        (torch._C, "PyTorchFileWriter", files.writing("file_name", 0, is_written=False)),
        *((owner, "load", files.reading) for owner in (torch.jit, torch.export)),
        (torch.autograd.profiler.profile, "export_chrome_trace", files.writing("path", 1)),
        (safetensors.torch, "save_file", files.writing("filename", 1)),
        (sys.modules.get("numpy.lib._datasource"), "open", files.opening),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in (*_bound_elsewhere(replacements), *replacements):
            if owner is not None:
                stack.enter_context(replaced(owner, name, replacement))
        stack.enter_context(_guarded(files))
        try:
            yield files
        finally:
            files.remove_new()


Replacement = tuple[Any, str, Callable[[Function], Function]]


def _bound_elsewhere(replacements: Sequence[Replacement]) -> Iterator[Replacement]:
    """The same functions where a module has them under a name of its own, as tarfile does with ``open``."""
    known = {id(owner) for owner, _, _ in replacements}
    of_functions = {
        id(getattr(owner, name)): replacement for owner, name, replacement in replacements if owner is not None
    }
    modules: list[Any] = list(sys.modules.values())  # a script may put anything there
    for module in modules:
        if isinstance(module, ModuleType) and id(module) not in known:
            for name, value in list(vars(module).items()):
                if id(value) in of_functions:
                    yield module, name, of_functions[id(value)]


_guarding: list[ScratchFiles] = []


@contextlib.contextmanager
def _guarded(files: ScratchFiles) -> Iterator[None]:
    """While this is entered, what comes past the replaced functions and would write over a file raises."""
    if not _guarding:
        _add_guard()
    _guarding.append(files)
    try:
        yield
    finally:
        _guarding.remove(files)


@functools.cache
def _add_guard() -> None:
    """Python takes no audit hook back: this one is there once, and does nothing unless it is asked to."""
    sys.addaudithook(_guard)


def _guard(event: str, given: tuple[Any, ...]) -> None:
    if event == "open" and _guarding and given[2] & (WRITES | os.O_TRUNC) and not given[2] & os.O_EXCL:
        for files in tuple(_guarding):
            files.check_write(given[0])
