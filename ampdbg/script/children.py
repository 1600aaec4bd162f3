"""The processes that a script starts anew, which know nothing of ampdbg: they train as without it."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from ampdbg.quantities import counted

HELPERS = ("multiprocessing.", "concurrent.", "torch.utils.data.")
"""Whose functions run in processes that train nothing: pools, and the workers of data loaders."""

UNSEEN = (
    "{} started by multiprocessing {} not watched{}; to watch each: start them with torchrun --nproc-per-node N "
    "--no-python ampdbg run SCRIPT in place of multiprocessing"
)


class Children:
    """Counts the processes that the script starts while ``counted_in`` is entered, but for those that train nothing."""

    def __init__(self) -> None:
        self._count = 0

    @contextlib.contextmanager
    def counted_in(self) -> Iterator[None]:
        """While this is entered, they are counted. A forked process goes on as this one and is none of them."""
        original = BaseProcess.start

        @functools.wraps(original)
        def start(process: BaseProcess) -> None:
            is_helper = _is_helper(process)  # it forgets its function once it has started
            original(process)
            self._count += _is_new(process) and not is_helper

        BaseProcess.start = start  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            if BaseProcess.start is start:  # else somebody has wrapped it since, and ours only counts
                BaseProcess.start = original  # type: ignore[method-assign]

    def note(self, *, emulates: bool) -> str:
        """What was not seen, in a sentence; "" where there was none."""
        if not self._count:
            return ""
        verb = "was" if self._count == 1 else "were"
        return UNSEEN.format(counted(self._count, "process"), verb, " and had no emulated GPU" * emulates)


def _is_new(process: Any) -> bool:
    method = getattr(process, "_start_method", None) or multiprocessing.get_start_method(allow_none=True)
    return method not in ("fork", None)


def _is_helper(process: Any) -> bool:
    return f"{getattr(getattr(process, '_target', None), '__module__', '')}.".startswith(HELPERS)
