"""``ampdbg scan`` around the training: exit codes, output files and error messages."""

import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ampdbg import api
from ampdbg.commands import output
from ampdbg.commands.output import save
from ampdbg.errors import ConfigError, RecordError, UserCodeError
from ampdbg.given import CommandInput
from ampdbg.record import file as record_file
from ampdbg.record.file import from_json, read_record, write_record
from ampdbg.record.findings import Finding
from ampdbg.record.run import Record, ScriptRun
from tests.commands.program import Here
from tests.report.records import calibration, collapse, healthy, interrupted


@pytest.fixture(autouse=True)
def _config(here: Here) -> None:
    here.stub("c.yaml", "my c.yaml")


Returns = Callable[[Record | BaseException], dict[str, Any]]


@pytest.fixture
def returns(monkeypatch: pytest.MonkeyPatch) -> Returns:
    """``returns(record)`` makes the training return or raise ``record``; the returned dict holds the scan's options."""

    def put(record: Record | BaseException) -> dict[str, Any]:
        called: dict[str, Any] = {}

        def scan(given: CommandInput, **options: Any) -> Record:
            called.update(options, given=given)
            if isinstance(record, BaseException):
                raise record
            options["observer"].start(len(record.steps))
            sys.stdout.write("printed by the user's code\n")
            for step in record.steps:
                options["observer"].step(step)
            return record

        monkeypatch.setattr(api, "scan", scan)
        return called

    return put


def with_severity(severity: Any) -> Record:
    finding = Finding("unknown", severity, 0, "backward", "something")
    return replace(healthy(), findings=(finding,), verdict="inconclusive")


@pytest.mark.parametrize(
    ("record", "options", "code"),
    [
        (healthy(), (), 0),
        (calibration(), (), 0),
        (collapse(), (), 1),
        (collapse(), ("--fail-on", "error"), 1),
        (collapse(), ("--fail-on", "never"), 0),
        (with_severity("warning"), (), 1),
        (with_severity("warning"), ("--fail-on", "error"), 0),
        (with_severity("info"), (), 0),
        (interrupted(), (), 130),
        (replace(collapse(), interrupted=True), ("--fail-on", "never"), 130),
    ],
)
def test_severity_fail_on_and_interrupts_decide_the_exit_code(
    record: Record, options: tuple[str, ...], code: int, here: Here, returns: Returns
) -> None:
    returns(record)
    assert here("scan", "c.yaml", *options).code == code
    assert read_record(Path(".ampdbg/latest.json")) == record


def test_progress_without_a_terminal_is_one_line_per_tenth_of_the_run(here: Here, returns: Returns) -> None:
    returns(collapse())
    lines = here("scan", "c.yaml").stderr.splitlines()
    assert lines[0] == "loading model and data"
    told = [line for line in lines if line.startswith("step ")]
    assert len(told) == 11
    assert told[-1].startswith("step 50/50  loss ")
    assert told[-1].endswith("scale 2^-4  skipped 20")


def test_quiet_prints_only_the_report_and_the_users_own_output(here: Here, returns: Returns) -> None:
    returns(healthy())
    result = here("scan", "c.yaml", "--quiet")
    assert result.stdout.startswith("✓ Healthy")
    assert result.stderr == "printed by the user's code\n"


def test_json_puts_the_record_on_stdout(here: Here, returns: Returns) -> None:
    returns(collapse())
    result = here("scan", "c.yaml", "--json")
    assert json.loads(result.stdout, parse_constant=pytest.fail)["steps"][10]["grad_norm"] == "inf"
    assert from_json(result.stdout) == collapse()
    assert result.code == 1


def test_stdout_holds_only_the_report_and_the_record_file_is_named_by_time(here: Here, returns: Returns) -> None:
    returns(healthy())
    result = here("scan", "c.yaml")
    assert result.stdout.startswith("✓ Healthy")
    assert result.stdout.endswith("ampdbg scan c.yaml --steps 500\n")
    assert "printed by the user's code\n" in result.stderr
    name = ".ampdbg/20250102T030405Z-scan.json"
    assert f"Record: {name}\n" in result.stdout
    assert read_record(Path(name)) == read_record(Path(".ampdbg/latest.json")) == healthy()
    assert Path(".ampdbg/.gitignore").read_text(encoding="utf-8").splitlines()[-1] == "*"


def test_two_runs_in_the_same_second_keep_both_records(here: Here, returns: Returns) -> None:
    returns(healthy())
    here("scan", "c.yaml")
    returns(collapse())
    here("scan", "c.yaml")
    assert read_record(Path(".ampdbg/20250102T030405Z-scan.json")) == healthy()
    assert read_record(Path(".ampdbg/20250102T030405Z-scan-2.json")) == collapse()
    assert read_record(Path(".ampdbg/latest.json")) == collapse()


def test_concurrent_runs_write_separate_records(here: Here) -> None:
    def saved(_: int) -> Path | None:
        return save(healthy(), None).path

    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(saved, range(16)))
    assert len(set(paths)) == 16
    assert all(path is not None and read_record(path) == healthy() for path in paths)


def test_add_record_leaves_no_file_if_the_write_fails(here: Here) -> None:
    def full(record: Record, path: Path) -> None:
        raise RecordError(f"{path}: cannot be written: No space left on device")

    here.monkeypatch.setattr(record_file, "write_record", full)
    with pytest.raises(RecordError, match="No space left"):
        record_file.add_record(healthy())
    assert list(Path(".ampdbg").iterdir()) == []


def test_the_record_option_writes_only_the_named_file(here: Here, returns: Returns) -> None:
    returns(healthy())
    result = here("scan", "c.yaml", "--record", "runs/a.json")
    assert "Record: runs/a.json\n" in result.stdout
    assert read_record(Path("runs/a.json")) == healthy()
    assert not Path(".ampdbg").exists()


def test_an_unwritable_record_folder_gives_one_warning_and_keeps_the_report(here: Here, returns: Returns) -> None:
    returns(collapse())
    Path(".ampdbg").touch()
    result = here("scan", "c.yaml", "--quiet")
    assert result.code == 1
    assert result.stdout.startswith("✗ The backward pass of step 10 is not finite")
    assert "Record:" not in result.stdout
    (message,) = (line for line in result.stderr.splitlines() if "printed by" not in line)
    assert message.startswith("warning: no record was written: .ampdbg")
    assert message.endswith("choose another place with --record FILE")


@pytest.mark.parametrize("option", ["--record", "--html"])
def test_an_unwritable_record_or_html_file_is_an_error_after_the_report(
    option: str, here: Here, returns: Returns
) -> None:
    returns(healthy())
    Path("file").touch()
    result = here("scan", "c.yaml", option, "file/r.json")
    assert result.code == 2
    assert result.stdout.startswith("✓ Healthy")
    assert "error: file/r.json: cannot be written: " in result.stderr


def test_the_record_option_overwrites_an_empty_file_or_a_record_and_no_other_file(here: Here, returns: Returns) -> None:
    called = returns(healthy())
    config = Path("c.yaml").read_text(encoding="utf-8")
    Path("other.json").write_text("{}", encoding="utf-8")
    Path("holder.json").write_text('{"mine": 1, "was": {"format": "ampdbg.record"}}', encoding="utf-8")
    Path("deep.json").write_text("[" * 100_000, encoding="utf-8")
    for name in ("c.yaml", "other.json", "holder.json", "deep.json"):
        result = here("scan", "c.yaml", "--record", name)
        assert (result.code, result.stdout, called) == (2, "", {})
        assert f"{name} holds no record, and would be overwritten; name another file" in result.stderr
    assert Path("c.yaml").read_text(encoding="utf-8") == config
    Path("empty.json").touch()
    assert here("scan", "c.yaml", "--record", "empty.json").code == 0
    assert here("scan", "c.yaml", "--record", "empty.json").code == 0


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")
@pytest.mark.parametrize("option", ["--record", "--html"])
def test_circular_symlinks_are_refused_before_the_run(here: Here, returns: Returns, option: str) -> None:
    called = returns(healthy())
    Path("one").symlink_to("two")
    Path("two").symlink_to("one")
    result = here("scan", "c.yaml", option, "one")
    assert (result.code, result.stdout, called) == (2, "", {})
    assert result.stderr == f"error: {option} one is a link that leads to itself; allowed: a file, or /dev/stdout\n"


def test_the_warning_for_an_unwritable_latest_json_names_the_record(here: Here, returns: Returns) -> None:
    returns(healthy())
    Path(".ampdbg/latest.json").mkdir(parents=True)
    result = here("scan", "c.yaml", "--quiet")
    assert result.code == 0
    name = ".ampdbg/20250102T030405Z-scan.json"
    assert f"Record: {name}\n" in result.stdout
    assert "warning: .ampdbg/latest.json: cannot be written: " in result.stderr
    assert f"; the record of this run is {name}" in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")
def test_latest_json_replaces_a_symlink_and_not_its_target(here: Here, returns: Returns) -> None:
    returns(healthy())
    Path("precious.txt").write_text("mine", encoding="utf-8")
    latest, marker = Path(".ampdbg/latest.json"), Path(".ampdbg/.gitignore")
    latest.parent.mkdir()
    marker.symlink_to("../made.txt")
    latest.symlink_to("../precious.txt")
    result = here("scan", "c.yaml", "--quiet")
    assert (result.code, "warning" in result.stderr) == (0, False)
    assert Path("precious.txt").read_text(encoding="utf-8") == "mine"
    assert (latest.is_symlink(), read_record(latest)) == (False, healthy())
    assert (marker.is_symlink(), Path("made.txt").exists()) == (True, False)


def test_command_line_options_reach_the_config_of_the_scan(here: Here, returns: Returns) -> None:
    called = returns(healthy())
    here(
        *("scan", "c.yaml", "--steps", "5", "--device", "cuda:1", "--policy", "native", "--seed", "3"),
        *("--set", "train.steps=9", "--set", "model.args.c=[x, y=z]"),
    )
    config = called["given"].config
    assert (config.train.steps, config.train.device, config.train.seed) == (5, "cuda:1", 3)
    assert (config.precision.policy, config.model.args) == ("native", {"c": ["x", "y=z"]})


def test_the_next_command_carries_the_options_that_change_the_run(here: Here, returns: Returns) -> None:
    returns(healthy())
    given = ("my c.yaml", "--set", "model.args.c=[x, y=z]", "--device", "cpu", "--policy", "native", "--seed", "3")
    result = here("scan", *given, "--steps", "50", "--replays", "1", "--quiet")
    assert result.stdout.splitlines()[-1].strip() == f"ampdbg scan {shlex.join(given)} --steps 500"
    returns(replace(with_severity("error"), verdict="precision"))
    result = here("scan", "c.yaml", "--seed", "3", "--steps", "50")
    assert result.stdout.splitlines()[-1].strip() == "ampdbg bisect c.yaml --steps 50 --seed 3"


def test_a_python_file_as_config_is_refused_with_the_config_to_write(here: Here) -> None:
    Path("my model.py").touch()
    for command in ("scan", "ranges", "bisect", "suggest-fp32"):
        assert here.refused(command, "my model.py").stderr == TWO_LINES


TWO_LINES = """\
error: my model.py: a Python file, not a config; try: ampdbg bisect --module 'my model.py', or write a config, such as \
config.yaml, with two lines:
  model: {target: "my model.py:build_model"}
  data: {target: "my model.py:build_data"}
"""


CAPTURE = "a capture, which is one step of a script"
NO_CONFIG = f"error: 'my step.safetensors': it is {CAPTURE}, and ampdbg COMMAND runs a config; to replay the step: "
SCRIPT = "it is the record of a script"
AGAIN = "to rerun the script: ampdbg run --emulate train.py --lr 1\n"
REPLAY = "ampdbg replay 'my step.safetensors'\n"
OF_A_SCRIPT = {
    "scan cost": ("my step.safetensors", NO_CONFIG, REPLAY),
    "report compare": (
        "my step.safetensors",
        "error: my step.safetensors: a capture, not a record; to replay it: ",
        REPLAY,
    ),
    "cost scan": (
        "kept.json",
        f"error: kept.json: {SCRIPT}, and ampdbg COMMAND runs a config",
        "to show it: ampdbg report kept.json\n",
    ),
    "bisect suggest-fp32 ": (
        "failed.json",
        "error: failed.json: the record of a script without a captured step",
        "to rerun the script, and capture a step: ampdbg run --emulate --capture-step 7 train.py --lr 1\n",
    ),
    "scan cost ranges bisect suggest-fp32 replay": (
        "lost.json",
        "error: lost.json: the record of a script without a captured step",
        AGAIN,
    ),
}


@pytest.mark.parametrize(
    ("command", "name", "begins", "ends"),
    [(command, *row) for commands, row in OF_A_SCRIPT.items() for command in commands.split()],
)
def test_captures_and_script_records_are_refused_with_the_command_to_use(
    command: str, name: str, begins: str, ends: str, here: Here
) -> None:
    Path("my step.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    lost = replace(healthy(), command="run", script=ScriptRun("train.py", ("--lr", "1")), config={})
    write_record(lost, Path("lost.json"))
    write_record(
        replace(lost, steps=(replace(lost.steps[0], step=7, skipped=True, found_inf=True),)), Path("failed.json")
    )
    write_record(replace(lost, script=ScriptRun("train.py", captures=("my step.safetensors",))), Path("kept.json"))
    result = here.refused(command, name, *([name] if command == "compare" else []))
    assert result.stderr.startswith(begins.replace("COMMAND", command))
    assert result.stderr.endswith(ends)
    assert result.stderr.count("\n") == 1


TRACE = 'Traceback (most recent call last):\n  File "m.py"\nKeyError: 1\n'
OURS = "error: ampdbg itself failed with ZeroDivisionError: division by zero"
RAISED: dict[str, tuple[BaseException, str]] = {
    "a mistake in the config": (
        ConfigError("c.yaml:3: train.steps: given -1"),
        "error: c.yaml:3: train.steps: given -1\n",
    ),
    "the user's error": (UserCodeError("the forward raised", TRACE), f"{TRACE}error: the forward raised\n"),
    "a bug of ours": (
        ZeroDivisionError("division by zero"),
        f"{OURS}; rerun with --debug to see where, and please report it\n",
    ),
}


@pytest.mark.parametrize("name", RAISED)
def test_an_error_is_one_message_after_the_users_traceback(name: str, here: Here, returns: Returns) -> None:
    error, said = RAISED[name]
    returns(error)
    result = here("scan", "c.yaml")
    assert (result.code, result.stdout, result.stderr) == (2, "", said)


def test_debug_shows_the_traceback_of_an_internal_error(here: Here, returns: Returns) -> None:
    returns(ZeroDivisionError("division by zero"))
    lines = here("scan", "c.yaml", "--debug").stderr.splitlines()
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", OURS)


def test_an_interrupt_before_the_first_step_says_that_nothing_was_recorded(here: Here, returns: Returns) -> None:
    returns(KeyboardInterrupt())
    result = here("scan", "c.yaml")
    assert (result.code, result.stdout) == (130, "")
    assert result.stderr == "interrupted: nothing was recorded\n"
    assert not Path(".ampdbg").exists()


def test_an_interrupt_after_saving_names_the_record(
    here: Here, returns: Returns, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object) -> str:
        raise KeyboardInterrupt

    returns(healthy())
    monkeypatch.setattr(output, "written", ended)
    result = here("scan", "c.yaml", "--quiet")
    assert (result.code, result.stdout) == (130, "")
    (path,) = (path for path in Path(".ampdbg").glob("*.json") if path.name != "latest.json")
    assert result.stderr.splitlines()[-1] == f"interrupted: the findings so far: ampdbg report {path}"
    assert read_record(path).command == "scan"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("option", [(), ("--quiet",)])
@pytest.mark.parametrize("fails", [False, True])
def test_a_signal_swallowed_by_an_import_exits_with_130_even_if_an_error_follows(
    here: Here, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, option: tuple[str, ...], fails: bool
) -> None:
    def scan(given: CommandInput, **options: Any) -> Record:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(number)
        if fails:
            raise ImportError("cannot load module more than once per process")
        options["observer"].step(healthy().steps[0])
        return healthy()

    monkeypatch.setattr(api, "scan", scan)
    result = here("scan", "c.yaml", *option)
    assert (result.code, result.stdout) == (130, "")
    assert result.stderr.endswith("interrupted: nothing was recorded\n")
    assert "error: " not in result.stderr
