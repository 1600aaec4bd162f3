"""A script's run as a record: watched to its end, its bad steps traced."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace

from ampdbg.errors import named_error
from ampdbg.observer import UNOBSERVED, Observer
from ampdbg.probes.torch_errors import autocast_error
from ampdbg.probes.trend import TrendSamples
from ampdbg.probes.watch import Watch
from ampdbg.record.log import RunLog
from ampdbg.record.run import Record
from ampdbg.script.captures import Captures, asked_from_code
from ampdbg.script.gpu import emulated_gpu
from ampdbg.script.launch import Script, ScriptEnd, asked_by_a_signal, run_script, told_before_a_signal
from ampdbg.script.lost_steps import LostSteps, is_told
from ampdbg.script.traced_steps import TracedSteps


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
        captures: where its failing steps go; it says too whether a GPU is to be emulated where there is none.
        log: told of each step when it has ended.
        investigates: a step that goes wrong is run again at once.
        ended: called with the record where SIGTERM or SIGHUP ends the script, a moment before the process does.
        observer: told of each step that is run again, before it is.
        trend: one step of so many is sampled; 0 for none.

    Returns:
        What was seen, not yet diagnosed.

    Raises:
        SystemExit: in a child that the script has forked, which is to end as it would, and to say nothing.
    """
    owner, watcher = os.getpid(), Watch(None, ())
    traced = TracedSteps(watcher, captures, observer, investigates=investigates)
    lost = LostSteps(
        watcher, captures, observer, investigates=investigates, is_taped=lambda: traced.is_tracing, found=traced.found
    )
    watcher.lost = lambda is_spoilt: lost.lost(is_spoilt=is_spoilt)
    watcher.log.journal = log
    samples = TrendSamples(watcher, trend)

    def seen(ending: ScriptEnd | None) -> Record:
        return replace(lost.seen(_record(watcher, traced, ending)), trends=samples.seen())

    def step_ended(is_bad: bool) -> None:
        samples.step_ended()
        traced.step_ended(is_bad)
        if watcher.log.is_read:
            log.note((_news(watcher, captures), samples.count // 8), lambda: seen(None), traced.found)

    watcher.ended = step_ended

    def at_end(ending: ScriptEnd) -> None:
        looks.close()
        lost.ended(ending)

    def tell(number: int) -> None:
        record = seen(ScriptEnd(128 + number, signal=number))
        log.end(record)
        ended(record)

    looks = ExitStack()  # those that look closer than the watcher
    looks.callback(samples.end)
    looks.callback(traced.end)
    watcher.guard.failed = looks.close
    with ExitStack() as stack:
        if captures.start.emulate:
            stack.enter_context(emulated_gpu())
        stack.enter_context(told_before_a_signal(tell))
        stack.enter_context(asked_by_a_signal(captures.ask))
        stack.enter_context(asked_from_code(captures.ask))
        with watcher, lost.open_pass, looks:
            ending = run_script(script, at_end)
        if os.getpid() != owner:
            raise SystemExit(ending.code)
        record = seen(ending)
        log.end(record)
        return record


def _news(watcher: Watch, captures: Captures) -> object:
    """What changes with the record of a run, but for its steps; asked after each of them."""
    misuses = tuple((misuse.code, misuse.source) for misuse in watcher.misuses)
    is_lowered = watcher.calls.graphs > 0, bool(watcher.calls.lowered)
    left_out = watcher.log.left_out
    return misuses, len(list(watcher.optimizers)), is_lowered, len(captures.written), captures.why_not, left_out


def run_unwatched(script: Script, *, emulate: bool) -> int:
    """Runs the script, with a GPU that is emulated where that is asked for; returns its exit code."""
    with emulated_gpu() if emulate else nullcontext():
        return run_script(script).code


def _record(watcher: Watch, traced: TracedSteps, ending: ScriptEnd | None) -> Record:
    """The record of the script; of one that goes on, and may be killed, without its end."""
    error = ending.error if ending else None
    interrupted = ending is None or isinstance(error, KeyboardInterrupt)
    by_autocast = autocast_error(error, watcher.log.closed(), watcher.models.named_modules)
    raised = not interrupted and not is_told(watcher, error)
    seen = traced.seen(watcher.record(), ending.code if ending else 0)
    why = f"the script raised {named_error(error)}" if error is not None and raised else ""
    notes = (*seen.unseen.notes, ending.note) if ending is not None and ending.note else seen.unseen.notes
    return replace(
        seen,
        unseen=replace(seen.unseen, notes=notes),
        command="run",
        interrupted=interrupted,
        autocast_error=by_autocast,
        error=why or seen.error,
    )
