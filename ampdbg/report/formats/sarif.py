"""Findings as SARIF 2.1.0, which GitHub's code scanning and editors read: one alert at one line each."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ampdbg import __version__
from ampdbg.escapes import harmless
from ampdbg.record.codes import CODES
from ampdbg.record.findings import CodeLine, Severity
from ampdbg.record.run import Record
from ampdbg.report.explanation import explanation
from ampdbg.report.view import CommandContext, Look, with_effects

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"

LEVELS: Mapping[Severity, str] = {"error": "error", "warning": "warning", "info": "note"}
"""SARIF's name for each severity."""

ROOT = "SRCROOT"
"""SARIF's name for the folder that paths are relative to."""


@dataclass(frozen=True)
class Alert:
    """One finding at one place.

    ``path`` is as it was given, relative to the working folder or absolute; "" if no file is to blame. ``line`` and
    ``column`` count from 1; 0 is unknown. ``module`` is the qualified name of the model's module.
    """

    code: str
    level: Severity
    message: str
    path: str = ""
    line: int = 0
    column: int = 0
    text: str = ""
    module: str = ""


def write(record: Record, typed: CommandContext, look: Look) -> str:
    """Return the findings of the record without a root; the message of each also has its effects."""
    return to_json(log(list(alerts(record)), typed.folder))


def to_json(log: Mapping[str, Any]) -> str:
    """Return a log as ASCII text, in which commands to a terminal are escaped."""
    return json.dumps(log, indent=1, allow_nan=False) + "\n"


def log(found: Sequence[Alert], folder: str) -> dict[str, Any]:
    """Return the alerts as one SARIF log; files below ``folder`` are named relative to it, for code scanning."""
    codes = sorted({alert.code for alert in found})
    driver = {"name": "ampdbg", "version": __version__, "rules": [_rule(code) for code in codes]}
    run: dict[str, Any] = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(alert, codes.index(alert.code), folder) for alert in found],
    }
    if folder:
        run["originalUriBaseIds"] = {ROOT: {"uri": _file_uri(folder).rstrip("/") + "/"}}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def alerts(record: Record) -> Iterator[Alert]:
    """Yield the findings without a root. A finding without a line of code is put on line 1 of what was run."""
    for finding, effects in with_effects(record.findings):
        at = finding.source or CodeLine(_what_ran(record), 1, function="", text="")
        lines = [f"{finding.message} ({finding.at_step}, {finding.phase})"]
        lines += [f"Remedy: {finding.remedy}"] * bool(finding.remedy)
        lines += [f"Then {effect.code} at {effect.at_step}: {effect.message}" for effect in effects]
        said, text = "\n".join(lines), at.text.strip()
        yield Alert(finding.code, finding.severity, said, at.file, at.line, text=text, module=finding.module)


def _what_ran(record: Record) -> str:
    """Return the script, or the config's file that builds the model, as named from where the run was started."""
    if record.script is not None:
        return "" if record.script.is_module else record.script.name
    model = record.config.get("model")
    target = model.get("target") if isinstance(model, Mapping) else None
    file = str(target or "").rpartition(":")[0]
    return os.path.join(record.config_folder, file) if file.endswith(".py") else ""


def _result(alert: Alert, rule: int, folder: str) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": alert.code,
        "ruleIndex": rule,
        "level": LEVELS[alert.level],
        "message": {"text": _text(alert.message)},
    }
    column = {"startColumn": alert.column} if alert.column > 0 else {}
    snippet = {"snippet": {"text": harmless(alert.text)}} if alert.text else {}
    region = {"region": {"startLine": alert.line, **column, **snippet}} if alert.line > 0 else {}
    where: dict[str, Any] = {}
    if alert.path:
        where["physicalLocation"] = {"artifactLocation": _artifact(alert.path, folder), **region}
    if alert.module:
        where["logicalLocations"] = [{"fullyQualifiedName": harmless(alert.module), "kind": "module"}]
    return result | ({"locations": [where]} if where else {})


def _artifact(path: str, folder: str) -> dict[str, str]:
    """Return a relative reference below the folder, elsewhere the whole address of the file."""
    full = os.path.normpath(os.path.join(folder, path)) if folder else path
    if folder and Path(full).is_relative_to(folder):
        return {"uri": _quoted(Path(full).relative_to(folder).as_posix()), "uriBaseId": ROOT}
    return {"uri": _file_uri(full) if os.path.isabs(full) else _quoted(Path(full).as_posix())}


def _file_uri(path: str) -> str:
    """Return the same as :meth:`pathlib.Path.as_uri`, also for a path with lone surrogates."""
    posix = Path(path).as_posix()
    return f"file://{'' if posix.startswith('/') else '/'}{_quoted(posix, but='/:')}"


def _quoted(path: str, but: str = "/") -> str:
    """Return a quoted reference; in a relative one, an unquoted colon would end a scheme."""
    return quote(path.encode("utf-8", "surrogatepass"), safe=but)


def _text(message: str) -> str:
    """Return a message without a placeholder or a link for its readers (SARIF 2.1.0, sections 3.11.5 and 3.11.6)."""
    shown = harmless(message, but="\n").replace("{", "{{").replace("}", "}}")
    return shown.replace("](", "] (")


def _rule(code: str) -> dict[str, Any]:
    """Return the rule of a code; only its name if another version has added the code."""
    if code not in CODES:
        return {"id": code}
    entry = explanation(code)
    said = {"What it means": entry.meaning, "What fixes it": entry.remedy, "What looks alike": entry.alike}
    markdown = "\n\n".join(f"## {title}\n\n{text}" for title, text in said.items())
    return {
        "id": code,
        "shortDescription": {"text": _text(entry.title)},
        "fullDescription": {"text": _text(" ".join(entry.meaning.split("\n\n")[0].split()))},
        "help": {"text": _text(f"{entry.meaning}\n\n{entry.remedy}"), "markdown": markdown},
        "defaultConfiguration": {"level": LEVELS[CODES[code].severity]},
        "properties": {"tags": ["precision", "pytorch"]},
    }
