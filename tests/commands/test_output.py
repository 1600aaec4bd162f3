"""The display that a stream supports, results alone on stdout, and safe writes of output files."""

import io
import os
import signal
import sys
from pathlib import Path

import pytest

from ampdbg.commands import output
from ampdbg.commands.options import check_place
from ampdbg.commands.output import WRITTEN, look_of, save
from ampdbg.commands.streams import is_rich_terminal, results_only
from ampdbg.errors import ConfigError
from ampdbg.record.file import read_record, write_record
from ampdbg.record.run import Record
from tests.commands.program import stdout_given_back
from tests.report.records import healthy


class Terminal(io.TextIOWrapper):
    """A stream whose ``isatty`` returns True."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding)

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")


def test_a_terminal_gets_colours_unicode_and_its_own_width() -> None:
    look = look_of(Terminal())
    assert (look.width, look.color, look.unicode) == (100, True, True)


def test_the_width_is_at_most_140_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    assert look_of(Terminal()).width == 140


def test_a_pipe_gets_80_columns_without_colour() -> None:
    look = look_of(io.StringIO())
    assert (look.width, look.color) == (80, False)


@pytest.mark.parametrize(
    ("variable", "value", "is_rich"),
    [("NO_COLOR", "1", False), ("TERM", "dumb", False), ("TERM", "unknown", False), ("NO_COLOR", "", True)],
)
def test_no_color_and_dumb_terminals_turn_off_colour_and_animation(
    variable: str, value: str, is_rich: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert is_rich_terminal(Terminal()) is is_rich


@pytest.mark.parametrize(("encoding", "carries"), [("utf-8", True), ("ascii", False), ("cp1252", False)])
def test_an_encoding_without_chart_characters_gets_ascii(encoding: str, carries: bool) -> None:
    assert look_of(Terminal(encoding)).unicode is carries


def test_output_printed_during_or_after_results_only_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
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
def test_the_first_interrupt_waits_for_the_record_and_the_second_does_not(
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
def test_output_may_overwrite_an_earlier_patch_but_not_another_file(tmp_path: Path, first: str) -> None:
    file = tmp_path / "amp.patch"
    file.write_text(f"# {first}\n#   - train.py:3\ndiff --git a/train.py b/train.py\n", encoding="utf-8")
    check_place("--output", file, "diff")
    file.write_text(f"# {first}\nmine\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no patch of that form, and would be overwritten"):
        check_place("--output", file, "diff")
