"""The record of a script's run: watch it to its end and investigate its bad steps."""

from __future__ import annotations

import multiprocessing
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any

from ampdbg.errors import named_error
from ampdbg.observer import UNOBSERVED, Observer
from ampdbg.probes.seams import replaced
from ampdbg.probes.torch_errors import autocast_error
from ampdbg.probes.trend import TrendSamples
from ampdbg.probes.watch import Watch
from ampdbg.quantities import counted
from ampdbg.record.findings import Source
from ampdbg.record.log import RunLog
from ampdbg.record.run import Misuse, Record
from ampdbg.script.capture import Captures, asked_from_code
from ampdbg.script.failing_steps import FailingSteps, explains_itself
from ampdbg.script.gpu import emulated_gpu
from ampdbg.script.launch import Script, ScriptEnd, run_script, signals_noted

HELPERS = ("multiprocessing.", "concurrent.", "torch.utils.data.")
"""Modules with functions for processes that do not train: pools, and workers of data loaders."""

UNSEEN = (
    "{} started by multiprocessing {} not watched{}; to watch each, replace multiprocessing: torchrun "
    "--nproc-per-node N --no-python ampdbg run SCRIPT"
)


class NewProcesses:
    """Counts the processes that the script spawns, except those that do not train.

    They run without ampdbg. Forked processes continue as the script.
    """

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
            function = getattr(process, "_target", None)  # read first: a started process drops its function
            original(process)
            method = getattr(process, "_start_method", None) or multiprocessing.get_start_method(allow_none=True)
            is_helper = f"{getattr(function, '__module__', '')}.".startswith(HELPERS)
            self._count += method not in ("fork", None) and not is_helper

        return start


class Session:
    """All observers of a script. They are active while the session is entered.

    Args:
        captures: writes the failing steps.
        log: receives each step when it ends.
        observer: notified before each replay of a step.
        investigates: replay bad steps at once.
        trend: sample one step in this many; 0 for none.
    """

    def __init__(
        self,
        captures: Captures,
        log: RunLog,
        observer: Observer = UNOBSERVED,
        *,
        investigates: bool = True,
        trend: int = 0,
    ) -> None:
        self.watcher = watcher = Watch(None, ())
        self._captures = captures
        self._log = log
        self._failing = FailingSteps(watcher, captures, observer, investigates=investigates)
        self._samples = TrendSamples(watcher, trend)
        self._looks = ExitStack()
        self._entered = ExitStack()
        self._processes = NewProcesses()
        watcher.log.journal = log
        watcher.ended = self._step_ended
        watcher.guard.failed = self._looks.close

    def __enter__(self) -> Session:
        """Start watching."""
        self._entered.enter_context(self._processes.counted_in())
        self._entered.enter_context(self.watcher)
        self._entered.enter_context(self._failing.recorder)
        self._entered.enter_context(self._looks)  # observers that see more detail than the watcher
        self._looks.callback(self._samples.end)
        self._failing.recorder.looking = self._samples.looking
        return self

    def __exit__(self, *raised: Any) -> None:
        """Restore torch and the models."""
        self._entered.__exit__(*raised)

    def script_ended(self, ending: ScriptEnd) -> None:
        """Handle the end of the script while its objects are still alive."""
        self._looks.close()
        self._failing.ended(ending)

    def seen(self, ending: ScriptEnd | None) -> Record:
        """Return the record so far, not yet diagnosed. Without an ``ending``, the script is still running and may be
        killed."""
        watcher, failing, samples = self.watcher, self._failing, self._samples
        error = ending.error if ending else None
        interrupted = ending is None or isinstance(error, KeyboardInterrupt)
        record = failing.seen(watcher.record(), ending.code if ending else 0)
        is_unexplained = not interrupted and not explains_itself(watcher, error)
        why = f"the script raised {named_error(error)}" if error is not None and is_unexplained else ""
        ended = ending.note if ending else ""
        processes = self._processes.note(emulates=self._captures.start.emulate)
        notes = (*record.unseen.notes, *filter(None, (ended, processes)), *samples.notes())
        return replace(
            record,
            unseen=replace(record.unseen, notes=notes),
            misuses=(*record.misuses, *(self._lost_upcasts(record) if ending else ())),
            trends=samples.seen(),
            command="run",
            interrupted=interrupted,
            autocast_error=autocast_error(error, watcher.log.closed(), watcher.models.named_modules),
            error=record.error if failing.why_ended else why or record.error,
        )

    def _lost_upcasts(self, record: Record) -> Iterator[Misuse]:
        """Yield the casts in the script that do not change the half weights that its optimizers update."""
        start = self._captures.start
        if not start.is_module and record.half_weights:
            # Imported here, because these imports take a tenth of a second and few scripts need them.
            from ampdbg.lint.engine import LintedFile, lint_file
            from ampdbg.lint.rules.lost_upcast import CODE
            from ampdbg.lint.settings import Settings

            path = os.path.join(start.folder, start.name)
            for found in lint_file(LintedFile(path), Settings(select=(CODE,))).findings:
                yield Misuse(found.code, 0, source=Source(start.name, found.line, "", found.text))

    def _step_ended(self, is_bad: bool) -> None:
        self._samples.step_ended()
        self._failing.step_ended(is_bad)
        if self.watcher.log.is_read:
            news = (_news(self.watcher, self._captures), self._samples.count // 8)
            self._log.note(news, lambda: self.seen(None), self._failing.found)


def watch_script(
    script: Script,
    captures: Captures,
    log: RunLog,
    *,
    investigates: bool = True,
    ended: Callable[[Record], None],
    observer: Observer = UNOBSERVED,
    trend: int = 0,
) -> Record:
    """Run the script and watch every optimizer and scaler that it creates.

    Args:
        script: the script to run.
        captures: also says whether to emulate a GPU where there is none.
        ended: called with the record right before SIGTERM or SIGHUP ends the process.

    The remaining arguments are as in :class:`Session`.

    Returns:
        The record, not yet diagnosed.

    Raises:
        SystemExit: in a forked child of the script, which must end as the script would and print nothing.
    """
    owner = os.getpid()
    session = Session(captures, log, observer, investigates=investigates, trend=trend)

    def over(ending: ScriptEnd) -> Record:
        record = session.seen(ending)
        log.end(record)
        return record

    with ExitStack() as stack:
        if captures.start.emulate:
            stack.enter_context(emulated_gpu())
        stack.enter_context(
            signals_noted(lambda number: ended(over(ScriptEnd(128 + number, signal=number))), captures.ask)
        )
        stack.enter_context(asked_from_code(captures.ask))
        # Both modify the warning filters once, which makes past warnings show again. Do it before the script starts.
        log.get_ready()
        platform.platform()
        with session:
            ending = run_script(script, session.script_ended)
        if os.getpid() != owner:
            raise SystemExit(ending.code)
        return over(ending)


def _news(watcher: Watch, captures: Captures) -> object:
    """Return a value that changes whenever the record changes in more than its steps. Called after each step."""
    is_lowered = watcher.calls.graphs > 0, bool(watcher.calls.lowered)
    left_out = watcher.log.left_out
    counts = len(watcher.misuses), len(watcher.optimizers), len(captures.written)
    return counts, is_lowered, captures.why_not, left_out


def run_unwatched(script: Script, *, emulate: bool) -> int:
    """Run the script, with an emulated GPU if requested, and return its exit code."""
    with emulated_gpu() if emulate else nullcontext():
        return run_script(script).code
