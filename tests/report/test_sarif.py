"""SARIF logs for code scanning, validated against the standard's schema."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft4Validator

from ampdbg.record.codes import CODES
from ampdbg.record.findings import Finding, Source
from ampdbg.record.run import Record, ScriptRun
from ampdbg.report.formats import written
from ampdbg.report.formats.sarif import Alert, alerts, log, to_json
from ampdbg.report.view import CommandContext, Look
from tests.report.records import healthy, run
from tests.report.runs import RUNS, record_of
from tests.test_escapes import HOSTILE
from tests.test_escapes import record_of as hostile_record

SCHEMA = json.loads(gzip.decompress((Path(__file__).parent / "sarif" / "sarif-schema-2.1.0.json.gz").read_bytes()))
LOOK = Look(80, color=False, unicode=True)


def mistakes(document: object) -> list[str]:
    """The violations of the schema in the document."""
    return [f"{error.json_path}: {error.message}" for error in Draft4Validator(SCHEMA).iter_errors(document)]


def written_log(record: Record, folder: str = "/home/me") -> Any:
    text = written(record, CommandContext("config.yaml", "r.json", folder), LOOK, "sarif")
    assert text.isascii()
    return json.loads(text)


def found(record: Record, folder: str = "/home/me") -> list[dict[str, Any]]:
    (only,) = written_log(record, folder)["runs"]
    results: list[dict[str, Any]] = only["results"]
    return results


LINE = Source("/home/me/src/my model.py", 49, "attend", "    y = q @ k")
SAYS, REMEDY = "bmm in blocks.0.attn reaches 183,300 in FP32", "run this op in FP32"
OVERFLOW = Finding("forward-overflow", "error", 3, "forward", SAYS, REMEDY, "blocks.0.attn", source=LINE)


@pytest.mark.parametrize("name", RUNS)
def test_every_golden_record_makes_a_valid_log(name: str) -> None:
    assert mistakes(written_log(record_of(name))) == []


def test_a_log_with_every_code_and_an_unknown_code_is_valid() -> None:
    every = [Alert(code, "warning", "m", "a.py", 1, 2, "x", "net") for code in (*CODES, "from-the-future")]
    document = log(every, "/home/me")
    assert mistakes(document) == []
    rules = document["runs"][0]["tool"]["driver"]["rules"]
    assert {rule["id"] for rule in rules if "help" in rule} == set(CODES)
    assert all(rules[result["ruleIndex"]]["id"] == result["ruleId"] for result in document["runs"][0]["results"])


def test_the_schema_rejects_an_unknown_level() -> None:
    document = log([Alert("true-nan", "error", "m", "a.py", 1)], "")
    document["runs"][0]["results"][0]["level"] = "fatal"
    assert len(mistakes(document)) == 1


def test_a_healthy_run_has_no_results() -> None:
    assert found(healthy()) == []


def test_an_alert_has_the_message_module_and_line_of_its_finding() -> None:
    (result,) = found(run([], findings=(OVERFLOW,)))
    assert (result["ruleId"], result["level"]) == ("forward-overflow", "error")
    assert result["message"]["text"] == f"{SAYS} (step 3, forward)\nRemedy: {REMEDY}"
    (location,) = result["locations"]
    assert location.pop("logicalLocations") == [{"fullyQualifiedName": "blocks.0.attn", "kind": "module"}]
    place = location.pop("physicalLocation")
    assert place.pop("artifactLocation") == {"uri": "src/my%20model.py", "uriBaseId": "SRCROOT"}
    assert place.pop("region") == {"startLine": 49, "snippet": {"text": "y = q @ k"}}
    assert (location, place) == ({}, {})


@pytest.mark.parametrize(
    ("path", "folder", "uri"),
    [
        ("src/a.py", "/home/me", "src/a.py"),
        ("../you/a.py", "/home/me", "file:///home/you/a.py"),
        ("/opt/lib/a b.py", "/home/me", "file:///opt/lib/a%20b.py"),
        ("/home/me/c:d/é.py", "/home/me", "c%3Ad/%C3%A9.py"),
        ("a.py", "", "a.py"),
    ],
)
def test_the_uri_of_a_file_is_relative_to_the_folder_if_the_file_is_inside(path: str, folder: str, uri: str) -> None:
    document = log([Alert("true-nan", "error", "m", path, 1)], folder)
    assert mistakes(document) == []
    place = document["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]
    assert place["uri"] == uri
    assert ("uriBaseId" in place) == (bool(folder) and not uri.startswith("file:"))


def test_the_message_of_a_finding_includes_its_effects() -> None:
    effect = Finding("scale-collapse", "error", 3, "backward", "the loss scale keeps falling", root=0)
    (result,) = found(run([], findings=(OVERFLOW, effect)))
    assert result["message"]["text"].endswith("\nThen scale-collapse at step 3: the loss scale keeps falling")


def test_a_finding_without_a_line_is_placed_at_the_model_file_or_the_script() -> None:
    bare = replace(OVERFLOW, source=None)
    (of_config,) = alerts(run([], findings=(bare,), config_folder="configs"))
    assert (of_config.path, of_config.line) == ("configs/model.py", 1)
    (of_script,) = alerts(run([], findings=(bare,), script=ScriptRun("train.py")))
    assert of_script.path == "train.py"
    of_package = run([], findings=(bare,), config={"model": {"target": "torchvision.models:resnet18"}})
    assert "physicalLocation" not in found(of_package)[0]["locations"][0]


def test_placeholders_and_links_in_a_message_are_escaped() -> None:
    (result,) = log([Alert("true-nan", "error", "x {0} [see](http://x) {a}")], "")["runs"][0]["results"]
    assert result["message"]["text"] == "x {{0}} [see] (http://x) {{a}}"


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_user_texts_in_a_log_are_printable(text: str) -> None:
    document = written_log(hostile_record(text))
    assert mistakes(document) == []
    for string in strings(document):
        assert string.replace("\n", "").isprintable()


def strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in strings(item)]
    return [value] if isinstance(value, str) else []


def test_a_log_is_ascii_text() -> None:
    assert json.loads(to_json({"a": "é\u202e"})) == {"a": "é\u202e"}
    assert to_json({"a": "é\u202e"}).isascii()
