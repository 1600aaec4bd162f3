"""Tests that names and texts of the user are shown on every output and never interpreted."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampdbg.config.yaml_document import read_yaml
from ampdbg.escapes import harmless, printable
from ampdbg.record.findings import Finding, Source
from ampdbg.record.pins import Handover, Pin
from ampdbg.record.run import Environment, Record, Step, TensorCounts, Unseen
from ampdbg.report.formats import FORMATS, written
from ampdbg.report.pins import pins_yaml
from ampdbg.report.suggestion import content
from ampdbg.report.view import CommandContext, Look
from tests.report.bisections import FOUND, TRIALS
from tests.report.records import ENVIRONMENT, overflow, run, skipped_step

HOSTILE = {
    "a terminal command": "net\x1b[2J\x1b]0;owned\x07",
    "a C1 command": "net\x9b31m",
    "a right-to-left mark": "net\u202etxt.py",
    "an invisible separator": "net\u200b\u2028x",
    "a line of its own": "net\n✓ Healthy: nothing is wrong.",
    "a carriage return": "net\rHealthy",
    "half a character": "net\ud800",
    "markup": "[bold red]net[/bold red] [link=http://x]y[/link] :smile:",
}


def record_of(text: str) -> Record:
    """A record with the text in every field that a user can fill."""
    source = Source(f"/home/me/{text}.py", 4, text, f"x = {text}")
    finding = Finding(
        code="forward-overflow",
        severity="error",
        step=0,
        phase="forward",
        module=text,
        op="aten.bmm.default",
        parameter=text,
        source=source,
        message=f"bmm in {text}",
        remedy=text,
    )
    step = replace(
        skipped_step(0, 4.0, overflow(0, names=(text,))), nonfinite=(TensorCounts("buffer", text, 1, 0, 4, (0,)),)
    )
    environment: Environment = replace(ENVIRONMENT, device_name=text, notes=(text,))
    steps: tuple[Step, ...] = (step,)
    return replace(
        run(steps, verdict="precision", findings=(finding,), groups=(text,), error=text),
        environment=environment,
        unseen=Unseen(notes=(text,)),
    )


def searched(text: str) -> Record:
    """The record of a search over modules of that name."""
    pin = Pin(text, reason=0, without=f"loss NaN: {text}", class_name=text)
    trials = tuple(replace(trial, pins=(text,), why=text if trial.why else "") for trial in TRIALS)
    search = replace(FOUND, message=text, classes={text: (1, 2)})
    return replace(record_of(text), command="bisect", error="", pins=(pin,), trials=trials, search=search)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("make", [record_of, searched])
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_no_format_prints_control_characters_or_lines_from_a_name(format_: str, make: object, text: str) -> None:
    record = make(text)  # type: ignore[operator]
    drawn = written(record, CommandContext(text, text, "/home/me"), Look(80, color=False, unicode=True), format_)
    assert all(line.isprintable() for line in drawn.splitlines())
    assert not any(line.startswith("✓ Healthy") for line in drawn.split("\n"))
    drawn.encode("utf-8")


def test_an_escape_is_shown_as_python_writes_it() -> None:
    assert printable("a\x1b[0m\u202e\ud800 é 名 \t") == "a\\x1b[0m\\u202e\\ud800 é 名 \\t"
    assert printable("one\ntwo", but="\n") == "one\ntwo"


def test_markup_in_a_name_is_shown_as_text() -> None:
    text = written(
        record_of("[bold]net[/bold] :smile:"), CommandContext(), Look(200, color=False, unicode=True), "text"
    )
    assert "bmm in [bold]net[/bold] :smile:" in text


def test_files_in_the_folder_are_named_relative_to_the_folder() -> None:
    text = "/home/me/model.py:4 and /home/me2/x.py, /mnt/home/me/y.py; /home/me/ alone"
    assert harmless(text, "/home/me") == "model.py:4 and /home/me2/x.py, /mnt/home/me/y.py; /home/me/ alone"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "/venv/lib/python3.12/site-packages/transformers/models/opt/modeling_opt.py:244 in forward",
            "transformers/models/opt/modeling_opt.py:244 in forward",
        ),
        ("at /usr/lib/python3/dist-packages/timm/a.py", "at timm/a.py"),
        (r"C:\Python\Lib\site-packages\timm\a.py", r"timm\a.py"),
        ("/home/me/venv/lib/site-packages/timm/a.py", "timm/a.py"),
        ("/home/my self/lib/site-packages/timm/a.py", "/home/my self/lib/site-packages/timm/a.py"),
        ("/home/you/site-packages-of-mine/a.py", "/home/you/site-packages-of-mine/a.py"),
        ("the folder /lib/site-packages/ alone", "the folder /lib/site-packages/ alone"),
    ],
)
def test_files_of_installed_packages_are_named_by_their_package(text: str, shown: str) -> None:
    assert harmless(text, "/home/me") == shown
    assert harmless(text) == text  # a command to copy keeps its paths


def test_a_harmless_record_is_returned_unchanged() -> None:
    record = record_of("net")
    assert harmless(record) is record


@given(st.lists(st.text(min_size=1), min_size=1, unique=True))
def test_names_written_to_yaml_are_read_back_unchanged(names: list[str]) -> None:
    lines = pins_yaml(names, {})
    assert "\n".join(lines).isprintable() or all(line.isprintable() for line in lines)
    if not any("\ud800" <= char <= "\udfff" for name in names for char in name):
        assert read_yaml("\n".join(lines)).data == {"precision": {"pins": names}}


def test_names_in_the_comments_of_a_yaml_patch_stay_comments() -> None:
    record = replace(searched("net\x1b[2J\x07\u2028x: 1\n- y"), handover=Handover("yaml", ("net",)))
    text = (content(record) or b"").decode()
    assert all(line.isprintable() for line in text.splitlines())
    assert read_yaml(text).data == {"precision": {"pins": ["net"]}}
