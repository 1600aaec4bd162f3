"""``ampdbg compare``: what got worse between two records, and the exit code for a gate in CI."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import cmarkgfm
import pytest

from ampdbg.record.file import from_json, write_record
from ampdbg.report.formats import FORMATS
from tests.commands.program import Here, environment, start
from tests.costs.perceptron import NET, written
from tests.report.records import collapse, healthy
from tests.report.test_sarif import mistakes
from tests.test_escapes import HOSTILE, record_of

PLAIN = NET.replace("return self.second(torch.relu(self.first(x)))", "h = self.first(x)\n        return self.second(h)")
ENERGY = "h = 300.0 * self.first(x)\n        h = h * h"
"""Exceeds 65,504, the largest FP16 number."""


def commit(folder: Path, code: str, name: str) -> None:
    (folder / "net.py").write_text(code, encoding="utf-8")
    who = ("-c", "user.name=me", "-c", "user.email=me@example.com")
    subprocess.run(["git", "add", "net.py"], cwd=folder, check=True)
    subprocess.run(["git", *who, "commit", "-qm", name], cwd=folder, check=True)


@pytest.fixture
def repository(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Two records of each command, or of one: before and after a commit that adds an overflow."""
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    written(tmp_path)
    for name, code in (("then", PLAIN), ("now", PLAIN.replace("h = self.first(x)", ENERGY))):
        commit(tmp_path, code, name)
        for verb in getattr(request, "param", ("scan", "ranges")):
            start(tmp_path, verb, "c.yaml", "--quiet", "--record", f"{verb}-{name}.json")
    return tmp_path


@pytest.mark.slow
def test_compare_reports_an_added_overflow_as_worse_and_the_reverse_as_better(repository: Path) -> None:
    worse = start(repository, "compare", "ranges-then.json", "ranges-now.json")
    assert (worse.code, worse.stderr) == (1, "")
    headline = " ".join(worse.stdout.partition("\n\n")[0].split())
    assert headline.startswith("✗ Worse: forward-overflow")
    assert "more places would overflow; second lost " in headline
    assert re.search(r"✗  \(root\) · mul · net.py:12 +0 +1\n", worse.stdout)
    assert re.search(r"✗  second +1[0-9]\.\d +-?\d\.\d\n", worse.stdout)
    assert "✗  the whole model" in worse.stdout

    better = start(repository, "compare", "ranges-now.json", "ranges-then.json")
    assert better.code == 0
    assert better.stdout.startswith("✓ Better: ")
    assert "✗" not in better.stdout


@pytest.mark.slow
def test_a_new_finding_of_scan_is_named_in_text_markdown_and_sarif(repository: Path) -> None:
    given = ("compare", "scan-then.json", "scan-now.json")
    text = start(repository, *given)
    assert text.code == 1
    assert text.stdout.startswith("✗ Worse: forward-overflow appeared.\n")
    assert "  net.py:12 in forward\n    h = h * h\n" in text.stdout

    markdown = start(repository, *given, "--format", "markdown")
    assert markdown.code == 1
    assert "<h3>✗ Worse: forward-overflow appeared.</h3>" in cmarkgfm.github_flavored_markdown_to_html(markdown.stdout)

    sarif = json.loads(start(repository, *given, "--format", "sarif").stdout)
    assert mistakes(sarif) == []
    (result,) = sarif["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("net.py", 12)
    back = json.loads(start(repository, "compare", *given[:0:-1], "--format", "sarif").stdout)
    assert back["runs"][0]["results"] == []


@pytest.mark.slow
def test_a_commit_that_moves_lines_and_renames_a_variable_is_not_worse(repository: Path) -> None:
    moved = PLAIN.replace("import torch\n", "import torch\n\n# A comment.\n").replace("h = self", "hidden = self")
    commit(repository, moved.replace("second(h)", "second(hidden)"), "moved")
    start(repository, "ranges", "c.yaml", "--quiet", "--record", "moved.json")
    result = start(repository, "compare", "ranges-then.json", "moved.json")
    assert result.code == 0
    assert result.stdout.startswith("✓ Not worse, within 1 bit.\n")


@pytest.mark.parametrize("repository", [("ranges",)], ids=["ranges"], indirect=True)
def test_compare_json_is_one_strict_json_object(repository: Path) -> None:
    result = start(repository, "compare", "ranges-then.json", "ranges-now.json", "--format", "json")
    data = json.loads(result.stdout, parse_constant=pytest.fail)
    assert result.code == 1
    assert (data["format"], data["version"], data["worse"], data["within"]) == ("ampdbg.comparison", 1, True, 1.0)
    assert "forward-overflow" in [finding["code"] for finding in data["appeared"]]
    assert {"phase": "forward", "module": "", "op": "aten.mul.Tensor", "then": 0, "now": 1} in data["overflows"]
    assert {one["module"] for one in data["headroom_bits"]} == {"first", "second"}
    assert data["loss_scales"][0]["module"] == ""


def test_compare_notes_that_scan_records_hold_no_headroom_or_loss_scales(here: Here) -> None:
    write_record(healthy(), Path("a.json"))
    write_record(collapse(), Path("b.json"))
    result = here("compare", "a.json", "b.json", "-v")
    assert result.code == 1
    assert "Note: records of ampdbg ranges also hold headroom and the loss scales that work." in result.stdout
    assert "verdict" in result.stdout


def test_records_of_two_commands_missing_files_and_invalid_bits_are_refused(here: Here) -> None:
    write_record(healthy(), Path("a.json"))
    write_record(replace(healthy(), command="bisect"), Path("b.json"))
    result = here.refused("compare", "a.json", "b.json")
    assert result.stderr == (
        "error: a.json comes from ampdbg scan and b.json from ampdbg bisect; "
        "compare takes two records of the same command\n"
    )
    assert here("compare", "a.json", "absent.json").stderr.startswith("error: absent.json: cannot be read: ")
    for bits in ("nan", "-1", "few"):
        assert here("compare", "a.json", "a.json", "--within", bits).code == 2


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("form", FORMATS)
def test_text_follows_the_encoding_of_stdout_and_other_formats_are_utf_8(
    form: str, encoding: str, tmp_path: Path
) -> None:
    write_record(healthy(), tmp_path / "a.json")
    write_record(record_of("tête 名"), tmp_path / "b.json")
    for verb in (("report", "b.json"), *([("compare", "a.json", "b.json")] if form != "html" else [])):
        command = [sys.executable, "-m", "ampdbg", *verb, "--format", form]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment(PYTHONIOENCODING=encoding), capture_output=True, check=False
        )
        assert (done.returncode, done.stderr) == (int(verb[0] == "compare"), b"")
        said = done.stdout.decode(encoding if form == "text" else "utf-8")
        if form == "json" and verb[0] == "report":
            assert from_json(said) == record_of("tête 名")
        if form == "text":
            assert ("tête" if encoding != "ascii" else r"t\xeate") in said


@pytest.mark.parametrize("form", ["text", "json", "markdown", "sarif"])
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_compare_escapes_hostile_names_in_every_format(form: str, text: str, here: Here) -> None:
    write_record(healthy(), Path("a.json"))
    write_record(record_of(text), Path("b.json"))
    result = here("compare", "a.json", "b.json", "--format", form)
    assert result.code == 1
    assert all(line.isprintable() for line in result.stdout.splitlines())
    assert not any(line.startswith("✓ Healthy") for line in result.stdout.split("\n"))
