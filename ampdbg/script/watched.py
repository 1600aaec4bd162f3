"""A script's run as a record: started, watched to its end, and told of also where a signal ends it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from ampdbg.errors import first_line
from ampdbg.probes.torch_errors import autocast_error
from ampdbg.probes.watch import Watch
from ampdbg.record.run import Record, ScriptRun
from ampdbg.script.gpu import emulated_gpu
from ampdbg.script.in_place import TracedSteps
from ampdbg.script.launch import Script, ScriptEnd, run_script, told_before_sigterm


def watch_script(script: Script, *, emulate: bool, ended: Callable[[Record], None]) -> Record:
    """Runs the script and watches every optimizer and scaler that it makes.

    Args:
        script: what to run.
        emulate: on a machine without a GPU, it finds one, emulated.
        ended: called with the record where SIGTERM ends the script, a moment before the process does.

    Returns:
        What was seen, not yet diagnosed.

    Raises:
        SystemExit: in a child that the script has forked, which is to end as it would, and to say nothing.
    """
    owner, watcher = os.getpid(), Watch(None, ())
    traced = TracedSteps(watcher)
    watcher.ended = traced.step_ended
    with ExitStack() as stack:
        if emulate:
            stack.enter_context(emulated_gpu())
        stack.enter_context(told_before_sigterm(lambda: ended(_record(script, watcher, traced, ScriptEnd(143)))))
        stack.enter_context(watcher)
        stack.callback(traced.end)
        ending = run_script(script)
        if os.getpid() != owner:
            raise SystemExit(ending.code)
        if ending.error is not None:
            watcher.calls.failed(ending.error)
        traced.end()
        watcher.stop()
        return _record(script, watcher, traced, ending)


def _record(script: Script, watcher: Watch, traced: TracedSteps, ending: ScriptEnd) -> Record:
    error, interrupted = ending.error, isinstance(ending.error, KeyboardInterrupt)
    by_autocast = autocast_error(error, watcher.log.closed(), watcher.models.named_modules())
    raised = error is not None and not interrupted and by_autocast is None and not watcher.calls.explains(error)
    return replace(
        watcher.record(),
        command="run",
        script=ScriptRun(script.name, script.arguments, script.is_module, ending.code),
        investigations=tuple(traced.found),
        interrupted=interrupted,
        autocast_error=by_autocast,
        error=f"the script raised {type(error).__name__}: {first_line(error)}" if error is not None and raised else "",
    )
