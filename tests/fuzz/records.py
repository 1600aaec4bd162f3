"""Damaged records: real ones with changed values, keys or characters."""

import copy
import functools
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

import ampdbg
from ampdbg.record.file import to_json
from tests.commands.suggestions import proven
from tests.fuzz.configs import VALID, changed, edited
from tests.report import bisections
from tests.report.runs import json_of

SCANS = ("scan_runaway_scale", "scan_bad_batch", "scan_poisoned_buffer", "scan_several_losses", "scan_mask_constant")
RUNS = (*SCANS, "run", "replay", "cost", "suggestion_capture")

VALUES: st.SearchStrategy[Any] = st.sampled_from(
    [
        *(None, True, -1, 0, 3, 10**6, 2**62, 2**64, 10**30, 1e308, -1.5, "", "x", "nan", "inf", "-inf", "é" * 300),
        *("\x1b[31m", "\u202e", "[red]", "\u2028", [], {}, [[]], {"a": 1}, [1, "x", None], {"": []}),
        *("scan", "bisect", "ampdbg.record", 1, "o" * 10_000, {"target": "w.py:Net"}, "w.py:Batches", "/", ".."),
    ]
)

COMMANDS = (
    *([("report", "r.json"), ("report", "r.json", "--format", "json")] * 3),
    *(("report", "r.json", "--format", form) for form in ("markdown", "sarif", "html")),
    *(("compare", "r.json", "r.json", "--format", form) for form in ("text", "json", "markdown", "sarif")),
    ("suggest-fp32", "r.json", "--no-verify"),
    *(("suggest-fp32", "r.json", "--no-verify", "--format", form) for form in ("module", "yaml", "json")),
    *((verb, "r.json", "--quiet") for verb in ("bisect", "scan", "ranges")),
)
"""Every command that reads a record."""


@functools.cache
def kept() -> tuple[Any, ...]:
    """Real records as plain data."""
    texts = [to_json(record) for record in (bisections.found(), proven())]
    texts += map(json_of, RUNS)
    return tuple(map(json.loads, texts))


@functools.cache
def whole(folder: Path) -> tuple[Any, ...]:
    """The kept records, and records of the workload in the working folder, which can be rerun."""
    (folder / "c.yaml").write_text(json.dumps(VALID[1]), encoding="utf-8")
    own = [getattr(ampdbg, verb)(folder / "c.yaml") for verb in ("scan", "ranges", "bisect")]
    return (*(json.loads(to_json(record)) for record in (*own, *own)), *kept())


@st.composite
def damaged(draw: st.DrawFn, records: tuple[Any, ...]) -> bytes:
    """The content of a record file."""
    data = copy.deepcopy(draw(st.sampled_from(records)))
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        changed(draw, data, VALUES)
    text = json.dumps(data)
    if draw(st.integers(0, 9)) == 0:
        text = text[: draw(st.integers(0, len(text)))]
    if draw(st.integers(0, 5)) == 0:
        text = edited(draw, text)
    return text.encode("utf-8", "surrogatepass")
