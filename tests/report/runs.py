"""The runs with golden pages: cases of the zoo and examples, run in this process by ``pytest --update-records``.

One file beside the pages packs their records, so that a page has only sentences that the program prints. If you change
the outcome of a run or the text of a page, refresh both and review the diff of the pages. ``test_outcomes.py`` has the
outcome of each run. If two branches changed the packed file, take either version and refresh it.
"""

import functools
import gzip
import json
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import ampdbg
from ampdbg.errors import AmpdbgError
from ampdbg.escapes import harmless
from ampdbg.observer import Observer
from ampdbg.record.file import LATEST, from_json, read_record, to_json
from ampdbg.record.run import Record
from tests.commands.program import start
from tests.report.records import ENVIRONMENT
from tests.script.scripts import PLAIN

ROOT = Path(__file__).parents[2]
PACKED = Path(__file__).parent / "golden" / "records.json.gz"
"""One JSON object that maps the name of each run to its record."""

STAMP = re.compile(r"\d{8}T\d{6}Z")


def zoo(command: str, name: str, **how: Any) -> Callable[[], Record]:
    """A run of one command on a case of the zoo. After an error it gives the record of the steps before."""

    def run() -> Record:
        from tests.zoo.test_zoo import config_of

        with tempfile.TemporaryDirectory() as folder:
            config = config_of(ROOT / "tests" / "zoo" / "cases" / f"{name}.py", Path(folder))
            try:
                return cast("Record", getattr(ampdbg, command)(config, device="cpu", **how))
            except AmpdbgError as error:
                if not isinstance(error.record, Record):
                    raise
                return error.record

    return run


def example(command: str, name: str, **how: Any) -> Callable[[], Record]:
    """A run of one command on an example."""
    return lambda: getattr(ampdbg, command)(ROOT / "configs" / f"{name}.yaml", device="cpu", **how)


def script(*command: str) -> Callable[[], Record]:
    """``ampdbg run`` of a script whose attention overflows, or a command on the captured step."""

    def run() -> Record:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name).resolve()
            (folder / "train.py").write_text(PLAIN, encoding="utf-8")
            start(folder, "run", "--emulate", "--max-captures=1", "train.py", "400", "6")
            record = read_record(folder / LATEST)
            if command:
                assert record.script is not None
                start(folder, *command, *record.script.captures)
                record = read_record(folder / LATEST)
            return harmless(record, str(folder))

    return run


class Interrupt(Observer):
    """Interrupts after the given step, or after the given number of trials."""

    def __init__(self, step: int | None = None, trials: int | None = None) -> None:
        self._step, self._trials = step, trials

    def step(self, step: Any) -> None:
        if step.step == self._step:
            raise KeyboardInterrupt

    def trial(self, trial: Any) -> None:
        if self._trials is not None:
            self._trials -= 1
            if not self._trials:
                raise KeyboardInterrupt


RUNS: dict[str, Callable[[], Record]] = {
    "scan_healthy": zoo("scan", "residual_add", overrides=("model.args.size=1.0", "precision.loss_scale.init=1024")),
    "scan_calibration": zoo("scan", "calibration"),
    "scan_forward_overflow": zoo("scan", "scores_before_scaling"),
    "scan_gradient_overflow": zoo("scan", "gradient_overflow"),
    "scan_gradient_underflow": zoo("scan", "gradient_underflow"),
    "scan_runaway_scale": zoo("scan", "loss_too_large_for_any_scale"),
    "scan_mask_constant": zoo("scan", "mask_constant"),
    "scan_bad_batch": zoo("scan", "batch_with_nan"),
    "scan_bad_weights": zoo("scan", "weights_from_a_checkpoint"),
    "scan_poisoned_buffer": zoo("scan", "poisoned_batch_norm"),
    "scan_true_nan": zoo("scan", "true_nan_forward"),
    "scan_not_reproduced": zoo("scan", "not_deterministic"),
    "scan_several_losses": zoo("scan", "several_losses"),
    "scan_interrupted": zoo("scan", "calibration", observer=Interrupt(step=2)),
    "ranges_overflow": zoo("ranges", "scores_before_scaling"),
    "ranges_no_scale": zoo("ranges", "no_usable_scale"),
    "ranges_example": example("ranges", "linear_attention"),
    "bisect_found": zoo("bisect", "scores_before_scaling"),
    "bisect_gradients": zoo("bisect", "gradient_overflow"),
    "bisect_example": example("bisect", "house_prices"),
    "bisect_blind": zoo("bisect", "scores_before_scaling", strategy="ddmin"),
    "bisect_out_of_trials": zoo("bisect", "scores_before_scaling", strategy="ddmin", max_trials=1),
    "bisect_interrupted": zoo("bisect", "scores_before_scaling", observer=Interrupt(trials=2)),
    "bisect_nothing_to_pin": zoo("bisect", "calibration"),
    "bisect_fp32_fails": zoo("bisect", "true_nan_forward"),
    "bisect_no_pin_helps": zoo("bisect", "batch_out_of_range"),
    "bisect_not_reproduced": zoo("bisect", "not_deterministic"),
    "suggestion": zoo("suggest_fp32", "scores_before_scaling"),
    "cost": example("cost", "linear_attention", steps=8, memory="256MB"),
    "run": script(),
    "replay": script("replay"),
    "suggestion_capture": script("suggest-fp32"),
}
"""One run for each kind of page, by the name of its golden file."""


@functools.cache
def _packed() -> dict[str, Any]:
    return json.loads(gzip.decompress(PACKED.read_bytes())) if PACKED.exists() else {}


def json_of(name: str) -> str:
    """The packed record of a run, as JSON."""
    return json.dumps(_packed()[name])


@functools.cache
def record_of(name: str) -> Record:
    """The packed record of a run."""
    return from_json(json_of(name))


def keep(name: str) -> None:
    """Repeats a run and packs its record. An unchanged record leaves the file unchanged."""
    assert "PYTEST_XDIST_WORKER" not in os.environ, "all records are one file: --update-records without --numprocesses"
    every = {**_packed(), name: json.loads(to_json(remade(name)))}
    if every != _packed():
        text = json.dumps(every, separators=(",", ":"), sort_keys=True)
        PACKED.write_bytes(gzip.compress(text.encode(), mtime=0))
    _packed.cache_clear()
    record_of.cache_clear()


def remade(name: str) -> Record:
    """The record of a new run."""
    return settled(RUNS[name]())


def settled(record: Record) -> Record:
    """The record with fixed values for the fields that differ between runs or machines."""
    # A diff names files from the common folder of files and config, here the root of the disk.
    text = to_json(harmless(record, str(ROOT), but="\n")).replace(f"{ROOT.as_posix().lstrip('/')}/", "")
    record = from_json(text)
    if record.script is not None:
        captures = tuple(STAMP.sub("20250102T030405Z", capture) for capture in record.script.captures)
        record = replace(record, script=replace(record.script, captures=captures))
    return replace(
        record,
        created="2025-01-02T03:04:05Z",
        elapsed=12.3,
        config_folder="" if record.config_folder.startswith("..") else record.config_folder,
        environment=replace(ENVIRONMENT, notes=record.environment.notes),
        trials=tuple(replace(trial, seconds=0.3) for trial in record.trials),
        handover=replace(record.handover, folder="/home/me") if record.handover is not None else None,
        config={key: record.config[key] for key in ("precision",) if key in record.config},
    )
