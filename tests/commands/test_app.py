"""The program as a whole: fast answers, exit codes, and messages for usage errors."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from ampdbg import __version__
from ampdbg.commands.app import COMMANDS
from ampdbg.record.file import write_record
from tests.commands.program import Here, environment, imported_by, start
from tests.report.records import healthy

HEAVY = {"torch", "pydantic", "numpy", "yaml", "rich"}


def test_the_interrupt_handler_is_set_before_any_large_import(tmp_path: Path) -> None:
    code = (
        "import _signal, os, sys\n"
        "large = {'re', 'typing', 'contextlib', 'inspect'}\n"
        "def signal(*_):\n"
        "    print(sorted(it for it in sys.modules if 'ampdbg' in it or it in large), flush=True); os._exit(0)\n"
        "_signal.signal = signal\n"
        "from ampdbg.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "['ampdbg', 'ampdbg.__main__']\n"


def test_help_imports_no_heavy_package_and_no_command(tmp_path: Path) -> None:
    imported = imported_by(start(tmp_path, "--help", flags=("-X", "importtime")))
    assert {it for it in imported if it.startswith("ampdbg.commands")} == {
        f"ampdbg.commands{module}" for module in ("", ".app", ".streams")
    }
    assert not imported & {*HEAVY, "ampdbg.record"}


def test_help_lists_every_command_with_its_full_description(here: Here) -> None:
    out = here("--help").stdout
    assert all(f"  {name}" in out for name in COMMANDS)
    assert "..." not in out.partition("Commands:")[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(name: str, here: Here) -> None:
    result = here(name, "-h")
    assert (result.code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"Usage: ampdbg {name} [OPTIONS]")
    assert f"\n  {COMMANDS[name]}\n" in result.stdout


@pytest.mark.parametrize("name", ["scan", "ranges", "bisect", "suggest-fp32", "cost"])
def test_every_workload_command_lists_each_shared_option_once(name: str, here: Here) -> None:
    out = here(name, "--help").stdout
    shared = ("--steps", "--device", "--policy", "--seed", "--set", "--record", "--json", "--quiet", "--debug")
    assert [option for option in shared if out.count(f"\n  {option} ") + out.count(f"\n  {option}\n") != 1] == []


def test_version_prints_the_package_version(here: Here) -> None:
    assert here("--version").stdout == f"ampdbg {__version__}\n"


EITHER = "give either a config or a module file: CONFIG, or --module FILE.py\n"
MAKE_ONE = "make one with: ampdbg run SCRIPT, or ampdbg scan CONFIG"
NO_RECORD = f"error: no record given, and none here (.ampdbg/latest.json); {MAKE_ONE}\n"
NO_CODE = "error: 'forward-overlow' is not a code; did you mean forward-overflow? All codes: ampdbg explain\n"
NO_RULE = "error: --select: 'forward-overflow' is no code of a rule"
WRONG = {
    "no config": (("scan",), "Missing argument 'CONFIG'"),
    "two configs": (("scan", "a.yaml", "b.yaml"), "b.yaml"),
    "an unknown option": (("scan", "a.yaml", "--stepz", "5"), "--steps"),
    "words for steps": (("scan", "a.yaml", "--steps", "five"), "'--steps': "),
    "no steps": (("scan", "a.yaml", "--steps", "0"), "'--steps': "),
    "an unknown policy": (("scan", "a.yaml", "--policy", "cpu"), "'cpu' is not one of 'cuda', 'native'"),
    "an unknown threshold": (("scan", "a.yaml", "--fail-on", "info"), "'error', 'warning', 'never'"),
    "a folder for the record": (("scan", "a.yaml", "--record", "."), "--record"),
    "an unknown format": (("report", "--format", "pdf"), "got 'pdf'; allowed: html, json, markdown, sarif, text"),
    "an option that turns the text": (
        ("scan", "a.yaml", "--\u202ename\x1b[2J"),
        r"No such option: --\u202ename\x1b[2J",
    ),
    "an unknown command": (("scam", "a.yaml"), "Did you mean 'scan'"),
    "an unknown device": (("scan", "c.yaml", "--device", "gpu"), "--set train.device=gpu: "),
    "a setting without a value": (("scan", "c.yaml", "--set", "train.steps"), "write it as dotted.key=value"),
    "a setting without a key": (("scan", "c.yaml", "--set", "=5"), "write it as dotted.key=value"),
    "no steps of ranges": (("ranges", "c.yaml", "--steps", "0"), "--steps"),
    "no rows of ranges": (("ranges", "c.yaml", "--top", "0"), "--top"),
    "an unknown order": (("ranges", "c.yaml", "--order", "loudest"), "--order"),
    "an unknown strategy": (("bisect", "c.yaml", "--strategy", "random"), "'guided', 'ddmin'"),
    "no trials": (("bisect", "c.yaml", "--max-trials", "0"), "--max-trials"),
    "nothing to run": (("bisect",), f"error: got nothing to run; {EITHER}"),
    "two things to run": (
        ("bisect", "c.yaml", "--module", "net.py"),
        f"error: got both c.yaml and --module net.py; {EITHER}",
    ),
    "an absent record": (("bisect", "r.json"), "error: r.json: cannot be read: No such file or directory\n"),
    "a diff that is none": (
        ("suggest-fp32", "c.yaml", "--apply", "--format", "yaml"),
        "error: got --apply with --format yaml; --apply goes with --format diff\n",
    ),
    "a record to compare with none": (("compare", "a.json"), "Missing argument"),
    "an argument of doctor": (("doctor", "now"), "now"),
    "two ways to fix": (("lint", "--fix", "--diff", "."), "error: got --fix and --diff; "),
    "a code without a rule": (("lint", ".", "--select", "forward-overflow"), f"{NO_RULE}; allowed: misuse, "),
    "nothing to lint": (("lint", "nowhere"), "error: nowhere: there is no such file or folder\n"),
    "no record to report": (("report",), NO_RECORD),
    "no record to search from": (("suggest-fp32",), NO_RECORD),
    "an unknown code": (("explain", "forward-overlow"), NO_CODE),
    "an unknown code as JSON": (("explain", "forward-overlow", "--json"), NO_CODE),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_usage_error_exits_with_2_and_explains_the_mistake(name: str, here: Here) -> None:
    here.stub("c.yaml")
    arguments, message = WRONG[name]
    result = here.refused(*arguments)
    assert message in result.stderr
    assert result.stderr.startswith(message) or not message.startswith("error: ")
    assert result.stderr == message or not message.endswith("\n")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("asked", "message"),
    [("os.getcwd", "the working folder is gone"), ("tempfile.gettempdir", "No folder; set TMPDIR to a folder")],
)
def test_scan_is_refused_without_a_working_folder_or_a_temporary_folder(asked: str, message: str, here: Here) -> None:
    def raising() -> str:
        raise FileNotFoundError(errno.ENOENT, "No folder")

    Path("c.yaml").touch()
    with here.monkeypatch.context() as patched:
        patched.setattr(asked, raising)
        result = here.refused("scan", "c.yaml")
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1


def test_a_config_in_an_inaccessible_folder_is_refused(here: Here) -> None:
    here.monkeypatch.setattr("os.access", lambda path, mode: False)
    result = here.refused("scan", "c.yaml")
    assert result.stderr == f"error: c.yaml: got 'c.yaml', but the folder {here.folder} may not be entered\n"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("scan broken.yaml --quiet", 2, "\nerror: "),
        pytest.param("scam", 2, "No such command", marks=pytest.mark.slow),  # typer's own answer, as to --help
        ("bisect", 2, "error: got nothing to run"),
        ("report r.json", 0, "✓ Healthy"),
    ],
)
def test_usage_errors_and_reports_do_not_import_torch(arguments: str, code: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("model: {target: 3}\n", encoding="utf-8")
    write_record(healthy(), tmp_path / "r.json")
    result = start(tmp_path, *arguments.split(), flags=("-X", "importtime"))
    assert result.code == code
    assert said in (result.stderr if code else result.stdout)
    assert "torch" not in imported_by(result)


@pytest.mark.parametrize(
    "words",
    ["scan", "ranges", "bisect", "suggest-fp32", "cost", "replay", "report", "lint", "run", "init", "compare a"],
)
def test_a_file_name_that_is_too_long_is_not_an_internal_error(words: str, here: Here) -> None:
    result = here.refused(*words.split(), "n" * 300)
    assert "ampdbg itself failed" not in result.stderr
    assert result.stderr.startswith("error: ")
