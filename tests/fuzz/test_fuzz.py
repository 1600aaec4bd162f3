"""On any input ampdbg ends with a result or one message, loses nothing and leaves no trace. The scan of a random model
agrees with a plain FP32 loop.

The suite runs a small share of the attacks, ``make fuzz`` all of them.
"""

import sys
from pathlib import Path
from signal import Signals

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.commands.program import Here, start
from tests.fuzz import configs, models, records, signals, workloads
from tests.fuzz.outcome import attack, rounds

Run = tuple[str, int, str]


@given(configs.broken_configs(), configs.settings_given, st.sampled_from(["scan", "scan", "ranges", "bisect"]))
@rounds(6)
def test_a_broken_config_gives_a_result_or_one_error(here: Here, content: bytes, changes: list[str], verb: str) -> None:
    (here.folder / "w.py").write_text(configs.WORKLOAD, encoding="utf-8")
    (here.folder / "c.yaml").write_bytes(content)
    with attack(here.folder) as ended:
        ended.result = here(verb, "c.yaml", "--quiet", *(f"--set={change}" for change in changes))


@given(st.data())
@rounds(24)
def test_a_damaged_record_gives_a_result_or_one_error(here: Here, data: st.DataObject) -> None:
    (here.folder / "w.py").write_text(configs.WORKLOAD, encoding="utf-8")
    (here.folder / "r.json").write_bytes(data.draw(records.damaged(records.whole(here.folder))))
    with attack(here.folder) as ended:
        ended.result = here(*data.draw(st.sampled_from(records.COMMANDS)))


@given(workloads.workloads, st.sampled_from(workloads.COMMANDS))
@rounds(240)
def test_a_raising_or_odd_workload_gives_a_result_or_one_error(
    tmp_path: Path, files: dict[str, str], arguments: tuple[str, ...]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    with attack(tmp_path) as ended:
        ended.result = start(tmp_path, arguments[0], "config.yaml", "--quiet", *arguments[1:])


@given(st.integers(0, 2**31))
@example(65519)  # overflows at step 3 with its initial weights, as all earlier steps were skipped
@example(6298165)  # its overflow leaves 12 of its 16 parameters, with small gradients, without any
@rounds(12, quick=2)
def test_the_scan_of_a_random_model_agrees_with_a_plain_fp32_loop(tmp_path: Path, seed: int) -> None:
    record = models.scanned(tmp_path, seed)
    plain = models.Plain.of(seed, [step.step for step in record.steps if step.skipped])
    assert models.faults(record, plain) == [], (record.findings, plain)


@pytest.mark.skipif(sys.platform != "linux", reason="it looks for processes in /proc")
@given(signals.RUNS, signals.MOMENTS, signals.NUMBERS)
@rounds(400)
def test_a_run_that_gets_a_signal_loses_no_record_and_leaves_no_process(
    tmp_path_factory: pytest.TempPathFactory, run: Run, moment: float, number: Signals
) -> None:
    assert signals.faults(tmp_path_factory.mktemp("signal"), run, moment, number) == []
