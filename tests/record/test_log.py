"""The log of a run: its lines give the record, it stays small, and its errors never reach the run."""

import errno
import functools
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given

from ampdbg.errors import RecordError
from ampdbg.probes.open_step import OpenStep
from ampdbg.probes.steps import MOST_INFORMATIVE, MOST_STEPS, STEPS_AT_ENDS, StepLog
from ampdbg.record.log import FIRST_KEPT, MOST_KEPT, RunLog, is_log, kept, read_log
from ampdbg.record.run import Environment, Investigation, Misuse, Record, Replay, Step
from tests.strategies import steps as any_steps

ENVIRONMENT = Environment("0", "3", "2", "linux", "cpu", "", "cuda", emulated=True)
UNFINISHED = Record("run", "2026-01-02T03:04:05+00:00", ENVIRONMENT, {}, "inconclusive", interrupted=True)


def step(number: int, **facts: Any) -> Step:
    return replace(Step(number, 0.1 + number, 65536.0, found_inf=False, skipped=False, grad_norm=1.5), **facts)


def investigation(number: int) -> Investigation:
    return Investigation(number, "loss", Replay("float16", 2.0, float("nan"), float("inf")))


def failing(text: str) -> None:
    raise AssertionError(text)


def log_of(path: Path, warn: Callable[[str], None] = failing) -> RunLog:
    return RunLog(path, "run", warn)


def test_the_log_reads_back_as_the_record_during_and_after_the_run(tmp_path: Path) -> None:
    path, found = tmp_path / "deep" / "run.jsonl", [investigation(1)]
    log, steps = log_of(path), [step(0), step(1, loss=float("nan"), skipped=True, grad_norm=float("inf")), step(2)]
    for one in steps:
        log.step(one)
        log.note("news", lambda: UNFINISHED, found[: one.step])
    assert is_log(path)
    assert repr(read_log(path)) == repr(replace(UNFINISHED, steps=tuple(steps), investigations=tuple(found)))
    ended = replace(UNFINISHED, steps=(*steps[:2], replace(steps[2], loss=9.0)), interrupted=False, elapsed=3.0)
    log.end(replace(ended, investigations=tuple(found)))
    assert repr(read_log(path)) == repr(replace(ended, investigations=tuple(found)))


@given(made=any_steps)
@example(made=replace(step(0), losses={"one": math.inf}))
@example(made=replace(step(0), optimizer=1))
def test_a_step_is_read_back_unchanged(made: Step, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "one.jsonl"
    log = log_of(path)
    log.step(made)
    log.end(replace(UNFINISHED, steps=(made,)))
    assert repr(read_log(path).steps) == repr((made,))


def test_the_record_is_written_again_only_if_the_news_changes(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    log, misused = log_of(path), replace(UNFINISHED, misuses=(Misuse("misuse-no-update", 1),))
    for number, (news, record) in enumerate([(0, UNFINISHED), (0, misused), (1, misused), (1, UNFINISHED)]):
        log.step(step(number))
        log.note(news, functools.partial(replace, record), ())
    kinds = [next(iter(json.loads(line))) for line in path.read_text().splitlines()]
    assert kinds == ["format", "step", "record", "step", "step", "record", "step"]
    assert read_log(path).misuses == misused.misuses


def test_each_step_is_written_at_once_as_a_line_below_160_bytes(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    log = log_of(path)
    for number in range(5):
        log.step(step(999_990 + number, loss=0.12345678901234567, grad_norm=1.2345678901234567, scaler=1))
        lines = path.read_bytes().splitlines()
        assert len(lines) == 2 + number
        assert len(lines[-1]) < 160


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_truncated_last_line_is_ignored(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "run.jsonl"
    log = log_of(path)
    log.step(step(0))
    log.note(0, lambda: UNFINISHED, ())
    log.step(step(1))
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_log(path).steps == (step(0),)


# --- a long run ---


FEW = (0, 5003, 7600)


def run_of(path: Path, count: int, *, is_bad: Callable[[int], bool] = FEW.__contains__) -> tuple[Record, int]:
    """The record of a run of ``count`` steps, skipped where ``is_bad``, and the peak bytes of its log."""
    log = log_of(path)
    steps = StepLog(torch.nn.Linear(1, 1), None)
    steps.journal = log
    most = 0
    losses = torch.linspace(2.0, 1.0, 1000).unbind()
    for number in range(count):
        skipped = is_bad(number)
        steps.add_losses({"loss": losses[number % 1000]}, 1.0)
        steps.close(OpenStep(scale=torch.tensor(65536.0), skipped=skipped))
        log.note(steps.left_out, lambda: replace(UNFINISHED, left_out=steps.left_out), ())
        if number % 499 == 0:
            most = max(most, path.stat().st_size)
    return replace(UNFINISHED, steps=steps.steps, left_out=steps.left_out), max(most, path.stat().st_size)


def test_the_log_of_a_long_run_stays_below_2_mb_and_has_every_recorded_step(tmp_path: Path) -> None:
    record, most = run_of(tmp_path / "run.jsonl", 8_000)
    assert most < 2_000_000
    found = {one.step: one for one in read_log(tmp_path / "run.jsonl").steps}
    assert {one.step: found[one.step] for one in record.steps} == {one.step: one for one in record.steps}
    assert len(found) <= 2 * MOST_STEPS


BAD = {"every step": lambda number: True, "three of four": lambda number: number % 4 > 0}


@pytest.mark.slow
@pytest.mark.parametrize("is_bad", BAD.values(), ids=BAD)
def test_the_log_of_a_failing_run_stays_below_2_mb_and_counts_the_omitted_steps(
    tmp_path: Path, is_bad: Callable[[int], bool]
) -> None:
    count = 2 * MOST_INFORMATIVE + 1000
    record, most = run_of(tmp_path / "run.jsonl", count, is_bad=is_bad)
    assert most < 2_000_000
    assert record.left_out.unhealthy > 1000
    read = read_log(tmp_path / "run.jsonl")
    found = {one.step: one for one in read.steps}
    assert {one.step: found[one.step] for one in record.steps} == {one.step: one for one in record.steps}
    assert len(found) <= 4 * MOST_INFORMATIVE  # each with a healthy step on either side
    assert read.left_out == record.left_out
    assert record.steps_skipped == record.left_out.unhealthy + sum(one.found_inf for one in record.steps)
    assert record.steps_skipped == sum(map(is_bad, range(count)))
    kept_steps = {one.step for one in record.steps}
    assert kept_steps >= {*range(STEPS_AT_ENDS), *range(count - STEPS_AT_ENDS, count)}


@pytest.mark.slow
@pytest.mark.parametrize(("is_bad", "most"), [(FEW.__contains__, 2_000_000), (BAD["every step"], 3_000_000)])
def test_the_log_of_a_million_steps_stays_below_3_mb(tmp_path: Path, is_bad: Callable[[int], bool], most: int) -> None:
    record, largest = run_of(tmp_path / "run.jsonl", 1_000_000, is_bad=is_bad)
    assert largest < most
    assert record.steps_skipped == sum(map(is_bad, range(1_000_000)))


def test_only_the_first_and_the_last_of_many_investigations_are_kept() -> None:
    made = [investigation(number) for number in range(40)]
    assert kept(made[:MOST_KEPT]) == tuple(made[:MOST_KEPT])
    assert kept(made) == (*made[:FIRST_KEPT], *made[-(MOST_KEPT - FIRST_KEPT) :])
    one_by_one: tuple[Investigation, ...] = ()
    for one in made:
        one_by_one = kept([*one_by_one, one])
    assert one_by_one == kept(made)


# --- failures of the log itself ---


def test_a_forked_child_does_not_write_to_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    log = log_of(path)
    log.step(step(0))
    before, parent = path.read_bytes(), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    log.step(step(1))
    log.thinned([step(1)])
    log.note(1, lambda: UNFINISHED, [investigation(1)])
    log.end(replace(UNFINISHED, steps=(step(1),)))
    assert path.read_bytes() == before


@pytest.mark.parametrize("place", ["file/run.jsonl", "folder"])
def test_an_unwritable_log_gives_one_warning(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    said: list[str] = []
    log = log_of(tmp_path / place, said.append)
    for number in range(3):
        log.step(step(number))
        log.note(number, lambda: UNFINISHED, ())
    log.end(replace(UNFINISHED, steps=(step(2),)))
    (warning,) = said
    assert warning.startswith(f"cannot write the log any more: {tmp_path / place}: ")
    assert warning.endswith("; the run continues")


@pytest.mark.parametrize("text", ["import csv\n", '"ampdbg.log"\n', '{"format": "ampdbg.record"}'])
def test_the_log_does_not_overwrite_a_user_file(tmp_path: Path, text: str) -> None:
    path, said = tmp_path / "run.jsonl", list[str]()
    path.write_text(text)
    log = log_of(path, said.append)
    log.step(step(0))
    log.end(replace(UNFINISHED, steps=(step(0),)))
    told = "it holds no log, and would be overwritten; --log FILE names another file"
    assert said == [f"cannot write the log any more: {path}: {told}; the run continues"]
    assert path.read_text() == text


@pytest.mark.skipif(os.name == "nt", reason="Windows has no named pipes in folders")
def test_a_pipe_as_log_gives_a_warning_without_blocking(tmp_path: Path) -> None:
    path, said = tmp_path / "run.jsonl", list[str]()
    os.mkfifo(path)
    log_of(path, said.append).step(step(0))
    assert said == [
        f"cannot write the log any more: {path}: it is a pipe; --log FILE names another file; the run continues"
    ]


@pytest.mark.parametrize("there", ["", '{"format": "ampdbg.log", "version": 9}\nx'])
def test_the_log_overwrites_an_empty_file_and_an_earlier_log(tmp_path: Path, there: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(there)
    log = log_of(path)
    log.step(step(0))
    log.end(replace(UNFINISHED, steps=(step(0),)))
    assert read_log(path).steps == (step(0),)


def test_a_full_disk_gives_one_warning_and_keeps_earlier_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    log = log_of(tmp_path / "run.jsonl", said.append)
    log.step(step(0))
    log.note(0, lambda: UNFINISHED, ())
    write = os.write

    def full(file: int, line: bytes) -> int:
        if len(line) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, line[: len(line) - 10])

    monkeypatch.setattr(os, "write", full)
    for number in range(1, 4):
        log.step(step(number))
    monkeypatch.undo()
    log.end(replace(UNFINISHED, steps=(step(3),)))
    assert said == [
        f"cannot write the log any more: {tmp_path / 'run.jsonl'}: No space left on device; the run continues"
    ]
    assert read_log(tmp_path / "run.jsonl").steps == (step(0),)


# --- damaged logs and other files ---


HEAD = '{"format": "ampdbg.log", "version": 1}'
STEP = '{"step":{"step":0,"loss":1,"scale":1,"found_inf":false,"skipped":false}}'
RECORD = json.dumps({"record": {"command": "run", "created": "2026", "environment": vars(ENVIRONMENT), "config": {}}})
RECORD = RECORD.replace('"config": {}', '"config": {}, "verdict": "inconclusive"')


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([HEAD], "a log that ends before its first step"),
        ([HEAD.replace("1}", "7}"), STEP], "a log of version 7; this ampdbg reads versions 1 and 2"),
        ([HEAD, "nonsense", RECORD], "a damaged log: line 2: expected ident"),
        ([HEAD, "[]", RECORD], "a damaged log: line 2: got []; needed: a mapping"),
        ([HEAD, "{}", RECORD], "a damaged log: line 2: got {}; needed: one of step, investigation, record"),
        ([HEAD, '{"steps":{}}', RECORD], "needed: one of step, investigation, record"),
        ([HEAD, '{"step":3}', RECORD], "needed: one of step, investigation, record"),
        ([HEAD, '{"step":{"step":"x"}}', RECORD], 'a damaged log: steps[0].step: got "x"; needed: a valid'),
        ([HEAD, '{"step":{"step":1e999}}', RECORD], "a damaged log: steps[0].step: got Infinity"),
        ([HEAD, '{"step":{"step":-1}}', RECORD], "a damaged log: steps[0].step: got -1"),
        ([HEAD, STEP.replace(":1,", ':"low",'), RECORD], 'a damaged log: steps[0].loss: got "low"'),
        ([HEAD, STEP, '{"record":{"command":"run"}}'], "a damaged log: created: missing"),
        ([HEAD, STEP, '{"investigation":{}}', RECORD], "a damaged log: investigations[0].step: missing"),
        ([HEAD, "[" * 100_000, RECORD], "a damaged log: line 2"),
    ],
)
def test_a_damaged_log_is_refused_in_one_message(tmp_path: Path, lines: list[str], expected: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    assert is_log(path)
    with pytest.raises(RecordError) as raised:
        read_log(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)


def test_is_log_is_false_for_other_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{"format": "ampdbg.record"}')
    assert not is_log(tmp_path / "r.json")
    (tmp_path / "train.py").write_text('log = "ampdbg.log"')
    assert not is_log(tmp_path / "train.py")
    assert not is_log(tmp_path)
    assert not is_log(tmp_path / "none")
