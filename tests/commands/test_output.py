"""What a stream can show, and that only results reach stdout."""

import io
import os
import signal
import sys
from pathlib import Path

import pytest

from ampdbg.commands import output
from ampdbg.commands.options import check_place
from ampdbg.commands.output import WRITTEN, is_rich_terminal, look_of, results_only, save
from ampdbg.errors import ConfigError
from ampdbg.record.file import read_record, write_record
from ampdbg.record.run import Record
from tests.commands.program import stdout_given_back
from tests.report.records import healthy


class Terminal(io.TextIOWrapper):
    """A stream that calls itself a terminal."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding)

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")


def test_a_terminal_gets_colours_and_its_width() -> None:
    look = look_of(Terminal())
    assert (look.width, look.color, look.unicode) == (100, True, True)


def test_lines_longer_than_140_are_hard_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    assert look_of(Terminal()).width == 140


def test_a_pipe_gets_80_plain_columns() -> None:
    look = look_of(io.StringIO())
    assert (look.width, look.color) == (80, False)


@pytest.mark.parametrize(
    ("variable", "value", "is_rich"),
    [("NO_COLOR", "1", False), ("TERM", "dumb", False), ("TERM", "unknown", False), ("NO_COLOR", "", True)],
)
def test_colour_and_animation_can_be_refused(
    variable: str, value: str, is_rich: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert is_rich_terminal(Terminal()) is is_rich


@pytest.mark.parametrize(("encoding", "carries"), [("utf-8", True), ("ascii", False), ("cp1252", False)])
def test_an_encoding_without_the_charts_characters_gets_ascii(encoding: str, carries: bool) -> None:
    assert look_of(Terminal(encoding)).unicode is carries


def test_what_is_printed_inside_or_later_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with stdout_given_back():
        stdout = sys.stdout
        with results_only() as result:
            sys.stdout.write("noise\n")
            result.write("result")
        with pytest.raises(ValueError, match="inside"), results_only():
            raise ValueError("inside")
        os.write(stdout.fileno(), b"from a descriptor\n")
        stdout.write("from who kept stdout\n")
        stdout.flush()
        sys.stdout.write("from print\n")
    captured = capfd.readouterr()
    assert captured.out == "result"
    assert sorted(captured.err.splitlines()) == ["from a descriptor", "from print", "from who kept stdout", "noise"]


@pytest.mark.parametrize(("interrupts", "is_written"), [(1, True), (2, False)])
def test_an_interrupt_comes_behind_the_record_and_a_second_does_not_wait_for_it(
    interrupts: int, is_written: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "r.json"

    def slowly(record: Record, path: Path) -> None:
        for _ in range(interrupts):
            signal.raise_signal(signal.SIGINT)
        write_record(record, path)

    monkeypatch.setattr(output, "write_record", slowly)
    token = WRITTEN.set(None)
    with pytest.raises(KeyboardInterrupt):
        save(healthy(), path)
    assert (path.exists(), WRITTEN.get()) == (is_written, path if is_written else None)
    assert not is_written or read_record(path) == healthy()
    WRITTEN.reset(token)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    "first", ["Keeps in FP32 under autocast: net.", "The weights are stored in bfloat16, which this cures:"]
)
def test_a_patch_is_written_over_an_earlier_one(tmp_path: Path, first: str) -> None:
    file = tmp_path / "amp.patch"
    file.write_text(f"# {first}\n#   - train.py:3\ndiff --git a/train.py b/train.py\n", encoding="utf-8")
    check_place("--output", file, "diff")
    file.write_text(f"# {first}\nmine\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no patch of that form, and would be overwritten"):
        check_place("--output", file, "diff")
