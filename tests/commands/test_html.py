"""``--html FILE``: every command that makes a record also writes a page, even if the run fails."""

from pathlib import Path
from typing import Any

import pytest

from ampdbg import api
from ampdbg.commands.app import COMMANDS
from ampdbg.errors import UserCodeError
from ampdbg.given import CommandInput
from ampdbg.record.run import Record
from tests.commands.program import Here, start
from tests.report.records import collapse, healthy

MAKE_A_RECORD = ("scan", "ranges", "bisect", "cost", "suggest-fp32", "run", "replay")

PAGE = "<!doctype html>\n<!-- A report of ampdbg "


@pytest.fixture(autouse=True)
def _config(here: Here) -> None:
    here.stub("c.yaml")


@pytest.fixture
def _healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every command return a healthy record at once."""

    def made(given: CommandInput, **options: Any) -> Record:
        options["observer"].start(1)
        return healthy()

    for name in ("scan", "ranges", "bisect", "cost", "suggest_fp32"):
        monkeypatch.setattr(api, name, made)


@pytest.mark.usefixtures("_healthy")
@pytest.mark.parametrize("command", ["scan", "ranges", "bisect", "cost", "suggest-fp32"])
def test_the_html_option_writes_a_page_and_leaves_the_output_unchanged(command: str, here: Here) -> None:
    typed = (command, "c.yaml", "--quiet", "--record", "r.json")
    alone, result = here(*typed), here(*typed, "--html", "out/page.html")
    assert result == alone
    text = Path("out/page.html").read_text(encoding="utf-8")
    assert text.startswith(PAGE)
    assert "c.yaml" in text


def test_only_commands_that_make_a_record_have_the_html_option(here: Here) -> None:
    for name in COMMANDS:
        assert ("--html" in here(name, "--help").stdout) == (name in MAKE_A_RECORD), name


@pytest.mark.usefixtures("_healthy")
def test_the_html_option_overwrites_an_earlier_page_and_no_other_file(here: Here) -> None:
    assert here("scan", "c.yaml", "--html", "page.html").code == 0
    assert here("scan", "c.yaml", "--html", "page.html").code == 0
    for name in ("c.yaml", "net.py"):
        before = Path(name).read_bytes()
        result = here.refused("scan", "c.yaml", "--html", name)
        assert result.stderr.startswith(f"error: --html {name} ")
        assert Path(name).read_bytes() == before
    result = here("scan", "c.yaml", "--record", "new", "--html", "new")
    assert result.stderr == "error: --html new is the file of the record, and would be overwritten; name another file\n"


def test_an_error_in_user_code_still_writes_the_page_of_the_earlier_steps(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(given: CommandInput, **options: Any) -> Record:
        error = UserCodeError("step 3 raised ValueError")
        error.record = collapse()
        raise error

    monkeypatch.setattr(api, "scan", fails)
    assert here("scan", "c.yaml", "--html", "page.html").code == 2
    assert Path("page.html").read_text(encoding="utf-8").startswith(PAGE)


def test_run_with_the_html_option_writes_the_page_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')\n", encoding="utf-8")
    result = start(tmp_path, "run", "--html", "page.html", "train.py")
    assert result.stdout == "trained\n"
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith(PAGE)
