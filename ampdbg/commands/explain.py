"""``ampdbg explain``: what a code means, how it is decided, what fixes it; without a code, the list of all."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from ampdbg.errors import EXIT_HEALTHY
from ampdbg.record.explanation import explanation, explanations

from . import options
from .terminal import look_of, write_result


def command(
    code: Annotated[
        str | None, typer.Argument(metavar="CODE", help="A finding's code; without it, all codes are listed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    debug: options.Debug = False,
) -> int:
    """Explain a finding: meaning, decision, remedy."""
    text = _as_json(code) if as_json else _as_text(code)
    write_result(text, sys.stdout)
    return EXIT_HEALTHY


def _as_json(code: str | None) -> str:
    seen = [asdict(entry) for entry in explanations()] if code is None else asdict(explanation(code))
    return json.dumps(seen, indent=2) + "\n"


def _as_text(code: str | None) -> str:
    entries = explanations() if code is None else (explanation(code),)
    from ampdbg.report.explanation_text import render_explanation, render_listing

    look = look_of(sys.stdout)
    if code is None:
        return render_listing(entries, width=look.width, color=look.color, unicode=look.unicode)
    return render_explanation(entries[0], width=look.width, color=look.color, unicode=look.unicode)
