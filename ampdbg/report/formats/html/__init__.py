"""A record as one HTML page that opens offline: the report of the terminal, with charts.

The page contains ``page.html``, ``page.css`` and the scripts of this folder. Its content-security policy lets it load
and run nothing else. Data is compressed; a large record has less detail, and the page says so.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ampdbg import __version__
from ampdbg.escapes import harmless
from ampdbg.quantities import counted
from ampdbg.record.findings import Finding
from ampdbg.record.run import Record
from ampdbg.report import suggestion, view
from ampdbg.report.formats import page_of
from ampdbg.report.formats.text import SIGNS, blocks, exponent_bar
from ampdbg.report.pins import TRIAL_COLUMNS, trial_table

from .drawn import MOST_FINDINGS, MOST_ROWS, TextTable, clipped, line_at, listings, module_tree, range_map, timeline

if TYPE_CHECKING:
    from jinja2 import Environment

MOST_LINES = 8_000
"""The most lines of a patch."""

SCRIPTS = ("page.js", "timeline.js", "range_map.js", "sites.js", "modules.js", "source.js")
"""The scripts in the order of the page."""


def write(record: Record, typed: view.CommandContext, look: view.Look) -> str:
    """Return the record as a page; a large one in less detail."""
    names, page = TextTable(), page_of(record, replace(typed, verbose=True))
    sites, levels = range_map(record, names)
    findings = harmless(record.findings[:MOST_FINDINGS], typed.folder)
    data: dict[str, Any] = {
        "sites": sites,
        "modules": module_tree(record, names),
        "files": listings(record, names, typed.folder),
        "timeline": timeline(record),
        "findings": [_at_line(at, one, record, names) for at, one in enumerate(findings)],
    }
    tree, steps = data["modules"], data["timeline"] or {"shown": 0, "ran": 0}
    left_out = {  # for each part: the shown number, and the total
        "sites": (len(sites["line"]), len(record.sites)),
        "modules": (len(tree["name"]), tree["every"]),
        "steps": (steps["shown"], steps["ran"]),
        "findings": (len(findings), len(record.findings)),
    }
    data["names"] = [clipped(text) for text in harmless(tuple(names), typed.folder)]
    style, script = _file("page.css"), "".join(map(_file, SCRIPTS))
    text: str = (
        _templates()
        .get_template("page.html")
        .render(
            page=replace(page, footer=page.footer[:MOST_ROWS]),
            command=harmless(record.command),
            version=__version__,
            style=style,
            script=script,
            style_hash=_hash(style),
            script_hash=_hash(script),
            data=_packed(json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()),
            levels=_packed(levels),
            findings=tuple(_roots(findings)),
            sections=tuple(_sections(record, typed, page)),
            patch=_patch(record),
            ran=harmless(record.environment),
            created=harmless(record.created),
            device=harmless(view.device(record.environment)),
            record_path=harmless(typed.record_path),
            config=_config(record, typed),
            drawn=data,
            shown=left_out,
        )
    )
    return text


def _at_line(at: int, finding: Finding, record: Record, names: TextTable) -> dict[str, Any]:
    """Return a finding for the script; its file has the record's name for it, which is also in the list of files."""
    said = {name: clipped(getattr(finding, name)) for name in ("code", "severity", "module", "message")}
    file, line = line_at(record.findings[at].source, names)
    return {"file": file, "line": line, "step": finding.step} | said


Root = tuple[int, Finding, list[tuple[int, Finding]]]
"""The record index of a finding without a root, the finding, and its effects, each with its index."""


def _roots(findings: Sequence[Finding]) -> Iterator[Root]:
    places = {id(finding): at for at, finding in enumerate(findings)}
    for finding, effects in view.with_effects(findings):
        yield places[id(finding)], finding, [(places[id(one)], one) for one in effects]


def _sections(record: Record, typed: view.CommandContext, page: view.Page) -> Iterator[view.Section]:
    """Yield the terminal's sections that the page does not draw itself, with more of the trials."""
    for section in page.sections:
        match section:
            case view.Table(columns=columns, rows=rows, below=below) if columns != TRIAL_COLUMNS:
                yield replace(section, rows=rows[:MOST_ROWS], below=(*below, *view.more(len(rows) - MOST_ROWS)))
            case view.Paragraph(lines=lines):
                yield replace(section, lines=(*lines[:MOST_ROWS], *view.more(len(lines) - MOST_ROWS, "line")))
            case view.Snippet(lines=lines) if len(lines) > MOST_LINES:
                yield replace(section, lines=(*lines[:MOST_LINES], "…"))
            case view.Snippet() | view.Prose():
                yield section
    if record.trials:
        yield harmless(trial_table(record, MOST_ROWS), typed.folder)


NOT_EXACT = "This page shows some of its characters as escapes; to apply it, print it with ampdbg suggest-fp32."
NOT_WHOLE = "It is too long for this page; print it with ampdbg suggest-fp32."


def _patch(record: Record) -> dict[str, Any] | None:
    """Return the patch as it is shown; ``why_not_copied`` is empty if that is the patch, byte for byte."""
    content = suggestion.content(record)
    if content is None or record.handover is None:
        return None
    shown = harmless(content.decode("utf-8", "replace"), but="\n\t")
    folder = record.handover.folder if record.handover.form == "diff" else ""
    lines = shown.removesuffix("\n").split("\n")
    cut = [clipped(line) for line in lines[:MOST_LINES]]
    why_not = NOT_EXACT if shown.encode() != content else NOT_WHOLE if cut != lines else ""
    return {"lines": cut, "folder": harmless(folder), "why_not_copied": why_not}


def _config(record: Record, typed: view.CommandContext) -> list[str]:
    import yaml

    plain = json.loads(json.dumps(record.config, default=str))
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True) if plain else ""
    lines = harmless(text, typed.folder, but="\n").splitlines()
    return lines[:MOST_ROWS] + (["…"] if len(lines) > MOST_ROWS else [])


def _templates() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    templates = Environment(
        loader=FunctionLoader(_file),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=lambda value: clipped(value) if type(value) is str else value,
    )
    filters: dict[str, Callable[..., Any]] = {"bar": exponent_bar, "blocks": blocks}
    templates.filters |= filters | {"kind": lambda value: type(value).__name__}
    templates.globals |= {"counted": counted, "signs": SIGNS, "conjunction": view.conjunction, "places": view.places}
    return templates


@functools.cache
def _file(name: str) -> str:
    return files(__name__).joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _packed(data: bytes) -> str:
    """Return compressed data: the same bytes for the same data."""
    return base64.b64encode(gzip.compress(data, mtime=0)).decode()
