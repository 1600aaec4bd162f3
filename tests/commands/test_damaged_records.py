"""Damaged records: each is shown all the same, or refused with its path and the key that is wrong."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampdbg.record.file import to_json
from tests.commands.program import Here
from tests.fuzz.outcome import CHECKS
from tests.fuzz.records import damaged, kept
from tests.report import bisections


@given(st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=CHECKS)
def test_a_damaged_record_is_shown_or_refused_in_one_line(here: Here, data: st.DataObject) -> None:
    (here.folder / "r.json").write_bytes(data.draw(damaged(kept())))
    result = here("report", "r.json")
    if result.code == 0:
        assert result.stdout
        return
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: r.json: ")
    assert (result.stderr.count("\n"), len(result.stderr) < 400) == (1, True)


READERS = (("report", "r.json"), ("suggest-fp32", "r.json"), ("bisect", "r.json"))


@pytest.mark.parametrize("arguments", READERS, ids=" ".join)
def test_every_command_that_reads_a_record_names_its_path_and_the_key(here: Here, arguments: tuple[str, ...]) -> None:
    data = json.loads(to_json(bisections.found()))
    data["search"]["tried"] = "often"
    (here.folder / "r.json").write_text(json.dumps(data), encoding="utf-8")
    result = here.refused(*arguments)
    assert result.stderr.startswith(
        'error: r.json: a damaged record: search.tried: got "often"; needed: a valid integer'
    )
