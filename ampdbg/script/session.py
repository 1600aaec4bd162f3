"""A script's run as a record: watched to its end, its bad steps traced."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

from ampdbg.errors import named_error
from ampdbg.observer import UNOBSERVED, Observer
from ampdbg.probes.torch_errors import autocast_error
from ampdbg.probes.trend import TrendSamples
from ampdbg.probes.watch import Watch
from ampdbg.record.findings import Source
from ampdbg.record.log import RunLog
from ampdbg.record.run import Misuse, Record
from ampdbg.script.capture import Captures, asked_from_code
from ampdbg.script.children import NewProcesses
from ampdbg.script.failing_steps import FailingSteps, explains_itself
from ampdbg.script.gpu import emulated_gpu
from ampdbg.script.launch import Script, ScriptEnd, run_script, signals_noted


class Session:
    """All that watches a script, while this is entered.

    Args:
        captures: where its failing steps go.
        log: told of each step when it has ended.
        observer: told of each step that is run again, before it is.
        investigates: a step that goes wrong is run again at once.
        trend: one step of so many is sampled; 0 for none.
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
        """Watches from now on."""
        self._entered.enter_context(self._processes.counted_in())
        self._entered.enter_context(self.watcher)
        self._entered.enter_context(self._failing.recorder)
        self._entered.enter_context(self._looks)  # those that look closer than the watcher
        self._looks.callback(self._samples.end)
        self._failing.recorder.looking = self._samples.looking
        return self

    def __exit__(self, *raised: Any) -> None:
        """Leaves torch and the models as they were."""
        self._entered.__exit__(*raised)

    def script_ended(self, ending: ScriptEnd) -> None:
        """To be called when the script has ended, while what it holds is still alive."""
        self._looks.close()
        self._failing.ended(ending)

    def seen(self, ending: ScriptEnd | None) -> Record:
        """The record of what was seen by now, not yet diagnosed; of a script that goes on, and may be killed, without
        its end."""
        record = _record(self.watcher, self._failing, ending)
        note = self._processes.note(emulates=self._captures.start.emulate)
        notes = (*record.unseen.notes, *[note] * bool(note), *self._samples.notes())
        unseen = replace(record.unseen, notes=notes)
        misuses = (*record.misuses, *(self._lost_upcasts(record) if ending is not None else ()))
        return replace(record, unseen=unseen, misuses=misuses, trends=self._samples.seen())

    def _lost_upcasts(self, record: Record) -> Iterator[Misuse]:
        """The casts in the script that leave the half weights which its optimizers have stepped as they are."""
        start = self._captures.start
        if not start.is_module and record.half_weights:
            # Here, as they take a tenth of a second, and hardly any script needs them.
            from ampdbg.lint.engine import lint_file
            from ampdbg.lint.rules.lost_upcast import CODE
            from ampdbg.lint.settings import Settings
            from ampdbg.lint.sources import SourcePath

            path = os.path.join(start.folder, start.name)
            for found in lint_file(SourcePath(path, ""), Settings(select=(CODE,))).findings:
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
    """Runs the script and watches every optimizer and scaler that it makes.

    Args:
        script: what to run.
        captures: says too whether a GPU is to be emulated where there is none.
        ended: called with the record where SIGTERM or SIGHUP ends the script, a moment before the process does.

    The other arguments are those of :class:`Session`.

    Returns:
        What was seen, not yet diagnosed.

    Raises:
        SystemExit: in a child that the script has forked, which is to end as it would, and to say nothing.
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
        # Both touch the filters of warnings, if only once: behind that what has warned already is shown again.
        log.get_ready()
        platform.platform()
        with session:
            ending = run_script(script, session.script_ended)
        if os.getpid() != owner:
            raise SystemExit(ending.code)
        return over(ending)


def _news(watcher: Watch, captures: Captures) -> object:
    """What changes with the record of a run, but for its steps; asked after each of them."""
    is_lowered = watcher.calls.graphs > 0, bool(watcher.calls.lowered)
    left_out = watcher.log.left_out
    counts = len(watcher.misuses), len(watcher.optimizers), len(captures.written)
    return counts, is_lowered, captures.why_not, left_out


def run_unwatched(script: Script, *, emulate: bool) -> int:
    """Runs the script, with a GPU that is emulated where that is asked for; returns its exit code."""
    with emulated_gpu() if emulate else nullcontext():
        return run_script(script).code


def _record(watcher: Watch, failing: FailingSteps, ending: ScriptEnd | None) -> Record:
    """The record of the script; of one that goes on, and may be killed, without its end."""
    error = ending.error if ending else None
    interrupted = ending is None or isinstance(error, KeyboardInterrupt)
    by_autocast = autocast_error(error, watcher.log.closed(), watcher.models.named_modules)
    raised = not interrupted and not explains_itself(watcher, error)
    seen = failing.seen(watcher.record(), ending.code if ending else 0)
    why = f"the script raised {named_error(error)}" if error is not None and raised else ""
    notes = (*seen.unseen.notes, ending.note) if ending is not None and ending.note else seen.unseen.notes
    return replace(
        seen,
        unseen=replace(seen.unseen, notes=notes),
        command="run",
        interrupted=interrupted,
        autocast_error=by_autocast,
        error=seen.error if failing.why_ended else why or seen.error,
    )
