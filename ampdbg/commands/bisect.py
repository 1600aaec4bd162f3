"""``ampdbg bisect``: finds the smallest set of modules that must run in FP32, by experiment."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ampdbg.errors import EXIT_FOUND
from ampdbg.observer import UNOBSERVED, Observer
from ampdbg.record.file import to_json
from ampdbg.record.pins import Strategy
from ampdbg.record.run import Record

from . import options, progress
from .config_sources import config_given, told_of_watched_loop
from .options import FailOn, Searching, as_overrides, as_typed
from .record_files import tell_unsaved, try_to_save
from .scan import diagnosed
from .scan import exit_code as exit_code_of_findings
from .terminal import Look, look_of, results_only, shown_as, write_result


def bisect(
    config: str | Path | None = None,
    *,
    module: str | Path | None = None,
    steps: int | None = None,
    device: str | None = None,
    policy: str | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    strategy: Strategy = "guided",
    max_trials: int | None = None,
    observer: Observer = UNOBSERVED,
) -> Record:
    """Finds the smallest set of modules that makes the failing step healthy; returns the diagnosed record.

    Trains as ``ampdbg.scan`` does until a step fails, and runs that step again with sets of modules in FP32. The
    record has the set in ``pins``, every experiment in ``trials``, and how it ended in ``search``. An interrupt
    ends it early, with the best set so far and ``interrupted`` set. No record is written.

    Args:
        config: the YAML config, or a record, whose config is run again from where it was made; the record of a
            watched loop, which has none, is only told where no pin helps.
        module: instead of a config, a Python file with ``build_model()``, or one ``nn.Module`` class that takes no
            arguments, and ``build_data()``; ``loss`` and ``training_step`` are used where it defines them.
        steps: replaces ``train.steps``; ``device``, ``policy`` and ``seed`` replace their keys likewise.
        device: where to run.
        policy: whose autocast op lists apply.
        seed: the random seed.
        overrides: any keys, as ``"dotted.key=YAML value"``.
        strategy: ``guided`` by what overflows in a wider format, ``ddmin`` blind over the module tree.
        max_trials: no more experiments than that.
        observer: sees the run and the search as they go on.

    Raises:
        ConfigError: the config is missing or holds mistakes, or both or none of ``config`` and ``module`` are given.
        RecordError: the record cannot be read.
        WorkloadError: a target cannot be found or used.
        UserCodeError: the workload's own code raised; ``record`` of the error has the steps before it, diagnosed.
    """
    told = told_of_watched_loop(Path(config), "bisect", strategy) if config is not None and module is None else None
    if told is not None:
        return told
    checked = config_given(
        Path(config) if config is not None else None,
        Path(module) if module is not None else None,
        as_overrides(steps, device, policy, seed, overrides),
    )
    observer.start(checked.train.steps)
    # Only now: importing torch takes seconds, and a mistake in the config must not.
    from ampdbg.pinning.bisection import bisect_run

    with diagnosed("bisect"):
        return bisect_run(
            checked,
            strategy=strategy,
            max_trials=max_trials,
            observer=observer,
        )


def command(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="The YAML config of the run, or a record.", show_default=False),
    ] = None,
    module: Annotated[
        Path | None, typer.Option("--module", metavar="FILE", help="A Python file with build_model and build_data.")
    ] = None,
    strategy: options.SearchingChoice = Searching.guided,
    max_trials: options.MaxTrials = None,
    steps: options.Steps = None,
    device: options.Device = None,
    policy: options.PolicyChoice = None,
    seed: options.Seed = None,
    settings: options.Settings = None,
    record: options.RecordFile = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """Find the fewest modules that need FP32.

    Trains CONFIG, or the model of --module FILE, until a step fails, and runs that step again with sets of
    modules in FP32.
    """
    look = look_of(sys.stdout)
    with results_only() as result:
        with progress.shown(quiet, max_trials) as observer:
            seen = bisect(
                config,
                module=module,
                steps=steps,
                device=device,
                policy=policy.value if policy else None,
                seed=seed,
                overrides=settings or (),
                strategy=strategy.value,
                max_trials=max_trials,
                observer=observer,
            )
        written, failure = try_to_save(seen, record)
        given = shlex.quote(str(config)) if config is not None else f"--module {shlex.quote(str(module))}"
        typed = as_typed(given, steps, device, policy, seed, settings or ())
        write_result(to_json(seen) if json else _report(seen, look, typed, written), result)
    tell_unsaved(failure, record)
    return exit_code(seen)


def exit_code(record: Record) -> int:
    """130 when interrupted, 0 when nothing is wrong, else 1: there is a set to pin, or a fault that no pin cures."""
    code = exit_code_of_findings(record, FailOn.warning)
    if record.interrupted or record.search is None or record.search.outcome == "nothing-to-pin":
        return code
    return EXIT_FOUND


def _report(seen: Record, look: Look, typed: str, written: Path | None) -> str:
    from ampdbg.report.bisection import render_bisection

    return render_bisection(
        seen,
        **shown_as(look, typed, written),
    )
