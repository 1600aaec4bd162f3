"""Processes that a script starts: spawned processes run without ampdbg, forked processes continue as the script."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.process import BaseProcess
from typing import Any

from ampdbg.probes.seams import replaced
from ampdbg.quantities import counted

HELPERS = ("multiprocessing.", "concurrent.", "torch.utils.data.")
"""Modules with functions for processes that do not train: pools, and workers of data loaders."""

UNSEEN = (
    "{} started by multiprocessing {} not watched{}; to watch each, replace multiprocessing: torchrun "
    "--nproc-per-node N --no-python ampdbg run SCRIPT"
)


class NewProcesses:
    """Counts the processes that the script spawns, except those that do not train."""

    def __init__(self) -> None:
        self._count = 0

    def counted_in(self) -> AbstractContextManager[None]:
        """Return a context in which spawned processes are counted."""
        return replaced(BaseProcess, "start", self._counting)

    def note(self, *, emulates: bool) -> str:
        """Return a sentence on the unwatched processes, or "" if there were none."""
        if not self._count:
            return ""
        verb = "was" if self._count == 1 else "were"
        return UNSEEN.format(counted(self._count, "process"), verb, " and had no emulated GPU" * emulates)

    def _counting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def start(process: Any) -> None:
            is_helper = _is_helper(process)  # checked first: a started process drops its function
            original(process)
            self._count += _is_new(process) and not is_helper

        return start


def _is_new(process: Any) -> bool:
    method = getattr(process, "_start_method", None) or multiprocessing.get_start_method(allow_none=True)
    return method not in ("fork", None)


def _is_helper(process: Any) -> bool:
    return f"{getattr(getattr(process, '_target', None), '__module__', '')}.".startswith(HELPERS)
