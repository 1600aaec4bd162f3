"""``ampdbg ranges``: how close every op and gradient of one step is to FP16's limits, and which loss scales work."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ampdbg.observer import UNOBSERVED, Observer
from ampdbg.record.file import to_json
from ampdbg.record.run import Record

from . import options, progress
from .config_sources import config_of_yaml
from .options import FailOn, as_overrides, as_typed
from .record_files import tell_unsaved, try_to_save
from .scan import exit_code
from .terminal import Look, look_of, results_only, shown_as, write_result


class Order(str, Enum):
    """How the sites are listed."""

    tightest = "tightest"
    execution = "execution"


def ranges(
    config: str | Path,
    *,
    steps: int = 1,
    device: str | None = None,
    policy: str | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    observer: Observer = UNOBSERVED,
) -> Record:
    """Measures the ranges of step number ``steps`` (the first is 1) and returns the diagnosed record; writes no file.

    The steps before it are trained as configured. The step itself runs in bfloat16, so that no overflow
    hides another one; the weights stay as they were. The other arguments are those of ``ampdbg.scan``.

    Raises:
        ConfigError: the config is missing or holds mistakes.
        WorkloadError: a target cannot be found or used.
        UserCodeError: the workload's own code raised.
    """
    checked = config_of_yaml(Path(config), as_overrides(steps, device, policy, seed, overrides))
    observer.start(checked.train.steps)
    # Only now: importing torch takes seconds, and a mistake in the config must not.
    from ampdbg.diagnosis.ranges import diagnose_ranges
    from ampdbg.training.ranges import profile_ranges

    return diagnose_ranges(profile_ranges(checked, observer=observer))


def command(
    config: options.ConfigFile,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Measure the N-th step, trained up to it.")
    ] = 1,
    order: Annotated[Order, typer.Option("--order", help="How the sites are listed.")] = Order.tightest,
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="How many sites and modules to list.")] = 10,
    device: options.Device = None,
    policy: options.PolicyChoice = None,
    seed: options.Seed = None,
    settings: options.Settings = None,
    record: options.RecordFile = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """Show how close one step is to FP16's limits.

    Lists the tightest ops and gradients of CONFIG's first step, and the loss scales that would work.
    """
    look = look_of(sys.stdout)
    # The first step, the default, is no reason for a scan of one step.
    typed = as_typed(shlex.quote(str(config)), steps if steps > 1 else None, device, policy, seed, settings or ())
    with results_only() as result:
        with progress.shown(quiet) as observer:
            seen = ranges(
                config,
                steps=steps,
                device=device,
                policy=policy.value if policy else None,
                seed=seed,
                overrides=settings or (),
                observer=observer,
            )
        written, failure = try_to_save(seen, record)
        write_result(to_json(seen) if json else _report(seen, look, typed, written, order, top), result)
    tell_unsaved(failure, record)
    return exit_code(seen, FailOn.warning)


def _report(seen: Record, look: Look, typed: str, written: Path | None, order: Order, top: int) -> str:
    from ampdbg.report.ranges import render_ranges

    return render_ranges(
        seen,
        **shown_as(look, typed, written),
        order=order.value,
        top=top,
    )
