"""Damaged records: each is shown all the same, or refused with its path and the key that is wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ampdbg.record.file import to_json
from tests.commands.program import Here
from tests.commands.suggestions import proven
from tests.report import bisections
from tests.report.runs import RECORDS

RUNS = ("scan_runaway_scale", "scan_bad_batch", "scan_poisoned_buffer", "scan_several_losses", "scan_mask_constant")
WHOLE = [
    *(json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8")) for name in RUNS),
    *(json.loads(to_json(record)) for record in (bisections.found(), proven())),
]
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    3,
    10**6,
    2**62,
    10**30,
    1e308,
    -1.5,
    "",
    "x",
    "nan",
    "-inf",
    "é" * 300,
    [],
    {},
    [[]],
    {"a": 1},
)
KeyPath = tuple[str | int, ...]


def paths(value: object, path: KeyPath = ()) -> Iterator[KeyPath]:
    """The path of everything in JSON data."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from paths(item, (*path, key))


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A record with one value that is another or gone, or cut short."""
    data = copy.deepcopy(draw(st.sampled_from(WHOLE)))
    *above, last = draw(st.sampled_from(list(paths(data))))
    holder: Any = data
    for key in above:
        holder = holder[key]
    if draw(st.integers(0, 6)):
        holder[last] = draw(st.sampled_from(VALUES))
    else:
        del holder[last]
    text = json.dumps(data)
    return text if draw(st.integers(0, 20)) else text[: draw(st.integers(0, len(text)))]


@given(damaged())
@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_damaged_record_is_shown_or_refused_in_one_line(here: Here, text: str) -> None:
    (here.folder / "r.json").write_text(text, encoding="utf-8")
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
    result = here(*arguments)
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr.startswith(
        'error: r.json: a damaged record: search.tried: got "often"; needed: a valid integer'
    )
