"""``ampdbg report``: the latest or a given record, in any format, to stdout or a file; damaged records."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampdbg.record.file import from_json, to_json, write_record
from ampdbg.record.run import ScriptRun
from ampdbg.report.formats import FORMATS
from tests.commands.program import Here
from tests.fuzz.outcome import CHECKS
from tests.fuzz.records import damaged, kept
from tests.report.bisections import found
from tests.report.records import collapse, healthy, healthy_step


def test_report_without_a_path_shows_the_latest_record(here: Here) -> None:
    write_record(healthy(), Path(".ampdbg/latest.json"))
    result = here("report")
    assert (result.code, result.stderr) == (0, "")
    assert result.stdout.startswith("✓ Healthy: none of 50 steps skipped.")
    assert "Record: .ampdbg/latest.json" in result.stdout


def test_report_of_a_failed_run_exits_with_0(here: Here) -> None:
    write_record(collapse(), Path("r.json"))
    assert here("report", "r.json").code == 0


def test_the_next_command_names_the_record_or_the_script_of_the_run(here: Here) -> None:
    write_record(healthy(), Path("a record.json"))
    shown = here("report", "a record.json").stdout
    assert "\n  ampdbg scan 'a record.json' --steps 500\n" in shown
    assert "Record: 'a record.json'" in shown
    steps = tuple(healthy_step(number) for number in range(60))
    script = replace(healthy(), command="run", steps=steps, script=ScriptRun("my train.py", ("--lr", "0.1")))
    in_fp32 = replace(script.environment, policy="none", emulated=False)
    write_record(replace(script, environment=in_fp32), Path("r.json"))
    assert "\n  ampdbg run --emulate 'my train.py' --lr 0.1\n" in here("report", "r.json").stdout
    write_record(replace(healthy(), config={}), Path("watched.json"))  # a watched loop has no config
    assert "ampdbg scan CONFIG --steps 500" in here("report", "watched.json").stdout


def test_format_json_prints_the_record(here: Here) -> None:
    write_record(collapse(), Path("r.json"))
    assert from_json(here("report", "r.json", "--format", "json").stdout) == collapse()


@pytest.mark.parametrize("form", FORMATS)
def test_output_writes_the_file_and_prints_nothing(form: str, here: Here) -> None:
    write_record(collapse(), Path("r.json"))
    printed = here("report", "r.json", "--format", form).stdout
    result = here("report", "r.json", "--format", form, "--output", "out/report")
    assert result.stdout == result.stderr == ""
    assert Path("out/report").read_text(encoding="utf-8") == printed


def test_output_overwrites_only_an_earlier_output(here: Here) -> None:
    for name in ("r.json", "other.json", ".ampdbg/latest.json"):
        write_record(collapse(), Path(name))
    Path("notes.txt").write_text("mine", encoding="utf-8")
    Path("link").symlink_to("r.json")
    for form, refused in {
        "text": ("r.json", "other.json", "link", "notes.txt", ".ampdbg/latest.json"),
        "json": ("r.json", "link", "notes.txt", ".ampdbg/latest.json"),
        "markdown": ("r.json", "other.json", "link", "notes.txt", ".ampdbg/latest.json"),
        "sarif": ("r.json", "other.json", "link", "notes.txt", ".ampdbg/latest.json"),
    }.items():
        for name in refused:
            before = Path(name).read_bytes()
            result = here("report", "r.json", "--format", form, "--output", name)
            assert (result.code, result.stdout, Path(name).read_bytes()) == (2, "", before)
            assert f"--output {name} " in result.stderr
            assert "would be overwritten; name another file" in result.stderr
        for _ in range(2):
            assert here("report", "r.json", "--format", form, "--output", f"page.{form}").code == 0


@pytest.mark.skipif(os.name == "nt", reason="Windows has no named pipes in folders")
def test_a_pipe_is_refused_as_input_and_as_output(here: Here) -> None:
    write_record(healthy(), Path("r.json"))
    os.mkfifo("pipe")
    for arguments, message in {
        ("report", "pipe"): "pipe: cannot be read: a pipe that nobody writes to; needed: a file",
        ("report", "r.json", "--output", "pipe"): "--output pipe is a pipe; allowed: a file, or /dev/stdout",
        ("scan", "r.json", "--record", "pipe"): "--record pipe is a pipe; allowed: a file, or /dev/stdout",
    }.items():
        result = here(*arguments)
        assert (result.code, result.stdout, result.stderr) == (2, "", f"error: {message}\n")


def test_an_output_file_that_cannot_be_written_is_named(here: Here) -> None:
    write_record(healthy(), Path("r.json"))
    Path("file").touch()
    result = here("report", "r.json", "--output", "file/report")
    assert result.code == 2
    assert result.stderr.startswith("error: file/report: cannot be written: ")


def test_debug_shows_a_traceback_before_the_error(here: Here) -> None:
    result = here("report", "absent.json", "--debug")
    assert result.stderr.startswith("Traceback")
    assert result.stderr.endswith("error: absent.json: cannot be read: No such file or directory\n")


@given(st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=CHECKS)
def test_a_damaged_record_is_shown_or_refused_in_one_line(here: Here, data: st.DataObject) -> None:
    (here.folder / "r.json").write_bytes(data.draw(damaged(kept())))
    result = here("report", "r.json")
    if result.code == 0:
        assert result.stdout
        return
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: r.json: ")
    assert (result.stderr.count("\n"), len(result.stderr) < 400) == (1, True)


@pytest.mark.parametrize("command", ["report", "suggest-fp32", "bisect"])
def test_every_command_names_the_path_and_the_key_of_a_damaged_record(here: Here, command: str) -> None:
    data = json.loads(to_json(found()))
    data["search"]["tried"] = "often"
    (here.folder / "r.json").write_text(json.dumps(data), encoding="utf-8")
    result = here.refused(command, "r.json")
    assert result.stderr.startswith(
        'error: r.json: a damaged record: search.tried: got "often"; needed: a valid integer'
    )
