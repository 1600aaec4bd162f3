"""Whatever ampdbg is given, it ends with a result or one message, nothing is lost and nothing is left behind; and what
it says of a random model holds beside a plain FP32 loop.

A small share of the attacks here; ``make fuzz`` makes all of them.
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
def test_a_config(here: Here, content: bytes, changes: list[str], verb: str) -> None:
    (here.folder / "w.py").write_text(configs.WORKLOAD, encoding="utf-8")
    (here.folder / "c.yaml").write_bytes(content)
    with attack(here.folder) as ended:
        ended.result = here(verb, "c.yaml", "--quiet", *(f"--set={change}" for change in changes))


@given(st.data())
@rounds(24)
def test_a_record(here: Here, data: st.DataObject) -> None:
    (here.folder / "w.py").write_text(configs.WORKLOAD, encoding="utf-8")
    (here.folder / "r.json").write_bytes(data.draw(records.damaged(records.whole(here.folder))))
    with attack(here.folder) as ended:
        ended.result = here(*data.draw(st.sampled_from(records.COMMANDS)))


@given(workloads.workloads, st.sampled_from(workloads.COMMANDS))
@rounds(240)
def test_a_workload(tmp_path: Path, files: dict[str, str], arguments: tuple[str, ...]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    with attack(tmp_path) as ended:
        ended.result = start(tmp_path, arguments[0], "config.yaml", "--quiet", *arguments[1:])


@given(st.integers(0, 2**31))
@example(65519)  # overflows at step 3 with the weights that it began with, which skipped steps have left
@example(6298165)  # what overflows leaves 12 of its 16 parameters without a gradient, all of them small
@rounds(12, quick=2)
def test_a_model(tmp_path: Path, seed: int) -> None:
    record = models.scanned(tmp_path, seed)
    plain = models.Plain.of(seed, [step.step for step in record.steps if step.skipped])
    assert models.faults(record, plain) == [], (record.findings, plain)


@pytest.mark.skipif(sys.platform != "linux", reason="it looks for processes in /proc")
@given(signals.RUNS, signals.MOMENTS, signals.NUMBERS)
@rounds(400)
def test_a_signal(tmp_path_factory: pytest.TempPathFactory, run: Run, moment: float, number: Signals) -> None:
    assert signals.faults(tmp_path_factory.mktemp("signal"), run, moment, number) == []
