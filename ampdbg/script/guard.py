"""Protect the user's files from a restarted script: existing files never change.

If Python or torch opens an existing file for writing, it gets a copy. This process reads the copy from then on.
Changes that no copy can take, such as a removal, are refused. New files appear in their usual place. They are removed
once the step is found, unless another process has replaced them. Writes from C or other processes are not seen.
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import re
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from multiprocessing import util
from pathlib import Path
from typing import Any

from ampdbg.files import TEMPORARY, marks
from ampdbg.probes.seams import Function, replaced

REDIRECTED = {
    "": "builtins.open io.open os.open pathlib._normal_accessor.open numpy.lib._datasource.open "
    "torch.from_file torch.UntypedStorage.from_file",
    "a": "os.truncate os.chmod os.utime os.setxattr sqlite3.connect",
    "w": "torch._C.PyTorchFileWriter torch._C.ScriptModule.save torch.autograd.profiler.profile.export_chrome_trace "
    "safetensors.torch.serialize_file",
    "r": "torch.jit.load torch.export.load",
    "dst": "os.rename os.replace",
}
"""Functions redirected to the copy of their first path argument, by access mode. "" reads the mode from the call."""
WAYS, NEW = ("mode", "flags", "shared"), os.O_CREAT | os.O_EXCL
REMOVING_EVENTS, OF_TWO = ("os.remove", "os.rmdir", "os.rename", "shutil.rmtree"), ("os.rename", "os.link")
MODIFYING_EVENTS = (
    "open os.link os.truncate os.chmod os.chown os.utime os.setxattr os.removexattr os.chflags sqlite3.connect"
)
CHANGES = (*REMOVING_EVENTS, *MODIFYING_EVENTS.split())
NAMES_PER_LENGTH = 300
"""Temporary names become one letter longer each time this many have been made."""
CREATING_EVENTS = ("open", "os.mkdir", "os.symlink", *OF_TWO)
"""Audit events. The first argument is a path, the last one the descriptor of the folder to which it is relative."""


class FileGuard:
    """The guard of one process. ``folder`` is a temporary folder for its copies. ``refused`` creates the error for a
    refused audit event and its path."""

    def __init__(self, folder: Path, refused: Callable[[str, str], Exception]) -> None:
        self._folder, self._refused, self._is_on = folder, refused, False
        self._root, self._mark = os.path.realpath(os.getcwd()) + os.sep, folder.name.removeprefix(TEMPORARY)
        marks.add(self._mark)
        self._copies, self._made = dict[str, str](), set[tuple[Any, ...]]()  # new files: path, inode, device
        self._making = dict[int, str]()  # by thread ID: a path that will exist at the thread's next event

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Inside this context, nothing that existed before changes. Temporary names contain the mark of ``folder``, and
        are no longer than Python's: the path of a socket has at most 107 characters."""
        with contextlib.ExitStack() as stack:
            for how, (owner, _, name) in [
                (one, name.rpartition(".")) for one in REDIRECTED for name in REDIRECTED[one].split()
            ]:
                with contextlib.suppress(ImportError, AttributeError):  # missing in this Python or on this system
                    stack.enter_context(replaced(pkgutil.resolve_name(owner), name, partial(self._redirected, how)))
            names: Any = vars(tempfile)["_RandomNameSequence"]
            stack.enter_context(replaced(names, "__next__", self._marked))
            util.get_temp_dir()  # spawned processes inherit this folder as theirs
            sys.addaudithook(self._hear)  # Python cannot remove an audit hook
            self._is_on = True
            stack.callback(vars(self).update, _is_on=False)
            stack.callback(self.remove_new)
            yield

    def _marked(self, name: Function) -> Function:
        """Wrap the generator of temporary names: the mark and two letters, or more letters after many names."""
        made = count()
        return lambda own: self._mark + name(own)[: 2 + next(made) // NAMES_PER_LENGTH]

    def remove_new(self) -> None:
        """Remove new files of this process below the working folder, and new folders that are then empty."""
        self._settle()
        for path in sorted((path for path, *_ in self._made), key=len, reverse=True):
            with contextlib.suppress(OSError):  # the folder holds files of another process
                if path.startswith(self._root) and not self._was_there(path):
                    (os.unlink, os.rmdir)[stat.S_ISDIR(os.lstat(path).st_mode)](path)

    def _hear(self, event: str, given: tuple[Any, ...]) -> None:
        mode = _mode(given[2]) * (not isinstance(given[0], int)) if event == "open" else "w"
        if not self._is_on or mode in ("r", "") or event not in (*CHANGES, *CREATING_EVENTS):
            return
        self._settle()
        pairs = [given[:4:2], given[1:4:2]] if event in OF_TWO else [(given[event == "os.symlink"], given[-1])]
        old, *_, new = [
            _path(*pair) if event in REMOVING_EVENTS else os.path.realpath(_path(*pair)) for pair in pairs
        ] * 2
        for path in [old, new] * (mode != "x") * (event in CHANGES):
            if self._was_there(path) and (event != "open" or os.path.isfile(path)):
                raise self._refused(event, path)
        if event in REMOVING_EVENTS[:3]:
            kept = [(p, new + p[len(old) :] if (p + os.sep).startswith(old + os.sep) else p, m) for p, *m in self._made]
            self._made = {(now, *mark) for path, now, mark in kept if path != new}
        self._settle(new * (event in CREATING_EVENTS))

    def _redirected(self, how: str, original: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            folder, flat = kwargs.pop("dir_fd", None), [*args, *kwargs.values()]
            at = next((at for at, one in enumerate(flat) if isinstance(one, (str, bytes, os.PathLike))), None)
            if at is not None:
                given = [*args[1:2], *(kwargs[way] for way in WAYS if way in kwargs), "r"][0]
                path = flat[at] if folder is None else _path(flat[at], folder)
                flat[at] = self._copy(path, _mode(how or given)) or path
            try:
                return original(*flat[: len(args)], **dict(zip(kwargs, flat[len(args) :], strict=True)))
            finally:
                self._settle()

        def move(src: Any, dst: Any, **kwargs: Any) -> None:
            is_file = stat.S_ISREG(os.stat(src, dir_fd=kwargs.get("src_dir_fd"), follow_symlinks=False).st_mode)
            copy = self._copy(_path(dst, kwargs.get("dst_dir_fd")), "w" * is_file)
            original(src, dst, **kwargs) if copy is None else shutil.move(_path(src, kwargs.get("src_dir_fd")), copy)

        return move if how == "dst" else call

    def _copy(self, path: Any, mode: str) -> str | None:
        self._settle()
        real = os.path.realpath(os.fsdecode(path))
        if real not in self._copies and mode in ("a", "w") and os.path.isfile(real) and self._was_there(real):
            copy = Path(tempfile.mkdtemp(dir=self._folder), os.path.basename(real))
            shutil.copy2(real, copy) if mode == "a" else copy.touch()
            self._copies[real] = str(copy)
        self._settle(real * (mode in "aw"))
        return self._copies.get(real)

    def _was_there(self, path: str) -> bool:
        known = {(one, *os.lstat(one)[1:3]) for one in (path, *map(str, Path(path).parents)) if os.path.lexists(one)}
        is_ours = any(name in path for name in (TEMPORARY, *marks))
        return os.path.lexists(path) and self._made.isdisjoint(known) and not is_ours

    def _settle(self, making: str = "") -> None:
        self._made |= {(at, *os.lstat(at)[1:3]) for at in tuple(self._making.values()) if os.path.lexists(at)}
        self._making[threading.get_ident()] = making * (not os.path.lexists(making))


def _mode(how: Any) -> str:
    if isinstance(how, int):
        how = "w" * bool(how & os.O_TRUNC) + "a" * bool(how & (os.O_WRONLY | os.O_RDWR)) + "x" * (how & NEW == NEW)
    return next((mode for mode in "xwa" if mode in str(how).replace("+", "a")), "r")


def _path(path: Any, folder: Any = None) -> str:
    if isinstance(path, int):
        return f"/proc/self/fd/{path}"
    base, name = f"/proc/self/fd/{folder}", re.sub("^file:(?!.*mode=ro)([^?]*).*", r"\1", os.fsdecode(path))  # SQLite's
    parent, name = os.path.split(os.path.join(base * os.path.isdir(base), name.rstrip(os.sep)))
    return os.path.join(os.path.realpath(parent), name)
