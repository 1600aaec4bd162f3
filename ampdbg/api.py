"""The commands as functions: each takes a config and returns a diagnosed Record, and prints no report.

Each takes the path of a YAML config, or of a record to rerun in the folder of its run. The keywords ``steps``,
``device``, ``policy`` and ``seed`` replace keys of the config. ``overrides`` replaces any key ("dotted.key=YAML
value"). ``observer`` is called as the run proceeds.

All commands raise:
    ConfigError: the config is missing or holds mistakes.
    RecordError: the record cannot be read.
    WorkloadError: a target cannot be found or used.
    UserCodeError: the workload's own code raised; ``record`` of the error has the steps before it, diagnosed.

torch is imported only after the config has been checked. The import takes seconds, and a mistake should show at once.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ampdbg.errors import AmpdbgError, PatchError
from ampdbg.given import Changes, CommandInput, RunSettings, read_given
from ampdbg.observer import UNOBSERVED, Observer
from ampdbg.quantities import byte_count
from ampdbg.record.file import latest_record, of_rank, read_record
from ampdbg.record.listings import with_listings
from ampdbg.record.log import RunLog, is_log, read_log
from ampdbg.record.pins import EVERYTHING, Form, Strategy
from ampdbg.record.run import Record, ScriptRun

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ampdbg.proof.suggestion import Suggestion
    from ampdbg.script.launch import Start

CaptureCommand = Literal["replay", "ranges", "bisect", "suggest-fp32"]

_one_run = threading.RLock()


def scan(
    config: str | Path | CommandInput, *, replays: int = 2, observer: Observer = UNOBSERVED, **changes: Unpack[Changes]
) -> Record:
    """Train the workload, watch every step and explain the failure.

    It replays at most ``replays`` failing steps of each kind. An interrupt ends the run early: the record holds
    the steps before it, with ``interrupted`` set.
    """
    checked = _given(config, changes).config_for("scan")
    observer.start(checked.train.steps)
    from ampdbg.diagnosis.diagnose import diagnose
    from ampdbg.training.loop import train

    with _diagnosed("scan", diagnose):
        return with_listings(diagnose(train(checked, observer=observer, replays=replays)))


def run(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    is_module: bool = False,
    emulate: bool = False,
    settings: RunSettings | None = None,
    ended: Callable[[Record], None] = lambda record: None,
    observer: Observer = UNOBSERVED,
    ends_process: bool = False,
) -> Record:
    """Run an unchanged training script and watch every optimizer and loss scaler that it makes.

    The script ends as it would without ampdbg. The record's ``script`` has its exit code, and what it raises is shown
    as Python shows it.

    Args:
        script: a Python file, or with ``is_module`` the dotted name of a module.
        arguments: the arguments of the script.
        is_module: run ``script`` as ``python -m`` does.
        emulate: on a machine without a GPU, the script finds an emulated one with CUDA's FP16.
        settings: what to keep beside the record: captures of failing steps, and the log, from which :func:`read` makes
            a record even if the run was killed. None keeps nothing.
        ended: called with the record if SIGTERM or SIGHUP ends the script, a moment before the process ends.
        observer: its ``replay`` is called once for each replayed step, while the script waits.
        ends_process: the process ends with the script, and waits for the script's threads first, as Python does at
            exit.

    Raises:
        ScriptError: no script or module has this name.
        SystemExit: in a child that the script has forked, which ends as it would.
    """
    from ampdbg.script.launch import Script

    given = Script(str(script), tuple(arguments), is_module, ends_process)
    given.check()
    from ampdbg.diagnosis.diagnose import diagnose
    from ampdbg.script.capture import Captures
    from ampdbg.script.launch import start_of
    from ampdbg.script.session import watch_script

    def shown(record: Record) -> Record:
        return with_listings(diagnose(record))

    asked = settings or RunSettings(most=0)
    start = start_of(given, emulate=emulate)
    kept = Captures(asked.folder, start, most=asked.most, largest=asked.largest, wanted=asked.wanted)
    return shown(
        watch_script(
            given,
            kept,
            RunLog(asked.log, of_rank("run", kept.start.rank), observer.warned, is_kept=settings is not None),
            investigates=asked.investigates,
            ended=lambda record: ended(shown(record)),
            observer=observer,
            trend=asked.trend,
        )
    )


def capture() -> bool:
    """Capture the next whole step of a script that ``ampdbg run`` has started.

    Returns True if the step will be captured. Without ``ampdbg run`` it does nothing.
    """
    captures = sys.modules.get("ampdbg.script.capture")  # nothing can capture before this module is imported
    return captures is not None and bool(captures.ask_for_capture())


def read(path: str | Path) -> Record:
    """Return the record in a file or in a log, diagnosed as at the end of its run.

    Raises:
        RecordError: the file is neither a record nor a log, or is damaged.
    """
    file = Path(path)
    if not is_log(file):
        return read_record(file)
    from ampdbg.diagnosis.diagnose import diagnose

    return with_listings(diagnose(read_log(file)))


def run_unwatched(script: str | Path, arguments: Sequence[str] = (), *, is_module: bool = False, emulate: bool) -> int:
    """Run a script as :func:`run` does, but only emulate, for comparison with a watched run. Return its exit code.

    The process must end right after it.
    """
    from ampdbg.script.launch import Script

    given = Script(str(script), tuple(arguments), is_module, ends_process=True)
    given.check()
    from ampdbg.script.session import run_unwatched as run_it

    return run_it(given, emulate=emulate)


def replay(capture: str | Path | CommandInput, *, script: str = "", observer: Observer = UNOBSERVED) -> Record:
    """Replay a captured step in its own script, and explain what fails and how often.

    The script restarts in a separate process, which ends in the middle of its second step or a later one.

    Args:
        capture: a file that :func:`run` has written.
        script: a command line to start instead of the captured one.

    Raises:
        CaptureError: the capture or its script cannot be used.
    """
    given = capture if isinstance(capture, CommandInput) else read_given(capture, None, script)
    return with_listings(_with_capture(given, observer, "replay").record)


def _with_capture(given: CommandInput, observer: Observer, command: CaptureCommand, **options: Any) -> Suggestion:
    from ampdbg.proof.processes import fresh_process

    assert given.capture is not None
    with fresh_process() as process:  # it imports torch while this process does
        from ampdbg.proof.captures import CaptureJob, done_with

        return done_with(CaptureJob(command, given.capture, given.script, **options), process, observer)


def ranges(config: str | Path | CommandInput, *, observer: Observer = UNOBSERVED, **changes: Unpack[Changes]) -> Record:
    """Measure the ranges of one step, by default the first; ``steps`` selects another, counted from 1.

    The steps before it train as configured. The step itself runs in bfloat16, so that one overflow does not hide
    another; the weights do not change.
    """
    given = _given(config, changes)
    if given.capture is not None:
        return with_listings(_with_capture(given, observer, "ranges").record)
    checked = given.config
    train = checked.train.model_copy(update={"steps": given.changes.get("steps") or 1})
    checked = checked.model_copy(update={"train": train})
    observer.start(train.steps)
    from ampdbg.diagnosis.ranges import diagnose_ranges
    from ampdbg.training.loop import profile_ranges

    with _diagnosed("ranges", diagnose_ranges):
        return with_listings(diagnose_ranges(profile_ranges(checked, observer=observer)))


def bisect(
    config: str | Path | CommandInput | None = None,
    *,
    module: str | Path | None = None,
    strategy: Strategy = "guided",
    max_trials: int | None = None,
    observer: Observer = UNOBSERVED,
    **changes: Unpack[Changes],
) -> Record:
    """Find the smallest set of modules that makes the failing step healthy.

    Trains as :func:`scan` does until a step fails, and replays that step with sets of modules in FP32. The
    record has the set in ``pins``, every trial in ``trials``, and the outcome in ``search``. An interrupt
    ends it early, with the best set so far and ``interrupted`` set.

    Args:
        config: a config, a record, or the capture of a script's failing step.
        module: instead of a config, a Python file with ``build_model()``, or one ``nn.Module`` class that takes no
            arguments, and ``build_data()``; ``loss`` and ``training_step`` are used where it defines them.
        strategy: ``guided_search`` starts from what overflows, ``ddmin`` searches the module tree without that.
        max_trials: the most trials to run.
    """
    given = _given(config, changes, module)
    if given.capture is not None:
        return with_listings(_with_capture(given, observer, "bisect", strategy=strategy, max_trials=max_trials).record)
    checked = given.config
    observer.start(checked.train.steps)
    from ampdbg.diagnosis.diagnose import diagnose
    from ampdbg.pinning.bisection import bisect_run

    with _diagnosed("bisect", diagnose):
        return with_listings(bisect_run(checked, strategy=strategy, max_trials=max_trials, observer=observer))


def cost(
    config: str | Path | CommandInput,
    *,
    memory: int | str | None = None,
    observer: Observer = UNOBSERVED,
    **changes: Unpack[Changes],
) -> Record:
    """Train at each level of precision in turn, and compare how they train and what a step costs.

    The record holds the comparison in ``costs``. The levels are FP32, O1, O1 with pins, O2, O3, and autocast in
    bfloat16. The pins come from the config and a given record.

    Args:
        config: a config or a record.
        memory: find the largest batch that fits into it at each level, by doubling: bytes, or text such as "16GiB".
    """
    given = _given(config, changes)
    checked = given.config_for("cost")
    budget = byte_count(memory) if isinstance(memory, str) else memory
    observer.start(checked.train.steps)
    from ampdbg.costs.levels import compare

    pins = tuple(name or EVERYTHING for name in given.record.pin_names) if given.record else ()
    return compare(checked, pins, budget, observer)


def suggest_fp32(
    config: str | Path | CommandInput | None = None,
    *,
    form: Form = "diff",
    verify: bool = True,
    apply: bool = False,
    force: bool = False,
    strategy: Strategy = "guided",
    max_trials: int | None = None,
    observer: Observer = UNOBSERVED,
    **changes: Unpack[Changes],
) -> Record:
    """Find the code that must run in FP32, write the patch, and prove it.

    The record has the set in ``pins``, the patch in ``handover`` and its proof in ``verification``.

    Args:
        config: as in :func:`bisect`; without it the latest record of this folder.
        form: the form of the suggestion: a diff, a Python file of pins, lines of a config, or JSON.
        verify: prove the suggestion first.
        apply: write the files, if there is a patch.
        force: write them even if git sees uncommitted changes in them.
        strategy: as in :func:`bisect`, and ``max_trials`` too.

    Raises:
        PatchError: the files cannot be written; none was. ``record`` of the error is the record.
    """
    taken = latest_record() if config is None else config
    given = taken if isinstance(taken, CommandInput) else read_given(taken, takes_weights=True, **changes)
    searching: dict[str, Any] = {"form": form, "verify": verify, "strategy": strategy, "max_trials": max_trials}
    if given.capture is not None:
        found = _with_capture(given, observer, "suggest-fp32", **searching)
    elif given.record is not None and given.record.script is not None:
        from ampdbg.proof.suggestion import Suggestion

        found = Suggestion(replace(given.record, command="suggest-fp32"))
    else:
        observer.start(given.config.train.steps)
        from ampdbg.diagnosis.diagnose import diagnose
        from ampdbg.proof.suggestion import suggest

        with _diagnosed("suggest-fp32", diagnose):
            found = suggest(given.config, known=given.record, observer=observer, **searching)
    if found.record.script is not None and found.record.search is None and found.record.verdict == "precision":
        from ampdbg.proof.half_weights import suggest_for_half_weights

        start = _start(given, found.record.script, emulate=found.record.environment.emulated)
        found = suggest_for_half_weights(found.record, start, form, verify=verify, observer=observer)
    record = with_listings(found.record)  # reads the source lines before the patch changes them
    if apply:
        from ampdbg.patch.file_edits import write_edits

        try:
            write_edits(found.edits, force=force)
        except PatchError as error:
            error.record = record
            raise
    return record


def _start(given: CommandInput, script: ScriptRun, *, emulate: bool) -> Start:
    from ampdbg.script.capture import Capture, start_in_this_folder
    from ampdbg.script.launch import Start

    if given.capture is not None:
        return Capture(given.capture, given.script).start
    known = Start(script.name, script.arguments, script.is_module, emulate=emulate, processes=script.processes)
    return start_in_this_folder(Path(given.name), given.script, known)


def _given(
    config: str | Path | CommandInput | None, changes: Changes, module: str | Path | None = None
) -> CommandInput:
    return config if isinstance(config, CommandInput) else read_given(config, module, **changes)


@contextlib.contextmanager
def _diagnosed(command: str, diagnose: Callable[[Record], Record]) -> Iterator[None]:
    """Attach to an error the diagnosed record of the steps before it, as a record of ``command``.

    Only one run at a time, because every run patches torch's own functions. Afterwards no user module stays imported.
    """
    from ampdbg.workload.targets import forget_user_modules

    with _one_run:
        try:
            yield
        except AmpdbgError as error:
            if isinstance(error.record, Record):
                error.record = with_listings(replace(diagnose(error.record), command=command))
            raise
        finally:
            forget_user_modules()
