"""``ampdbg explain``: the meaning, the decision and the remedy of a code; without a code, the list of all codes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import Annotated

import typer

from ampdbg.errors import EXIT_HEALTHY
from ampdbg.record.codes import CODES
from ampdbg.report.explanation import explanation, explanation_page, explanations, listing_page
from ampdbg.report.view import Look

from . import options
from .output import look_of
from .streams import write_result

TEXT_WIDTH = 80
"""The width of prose on any terminal: longer lines are hard to read."""


def _codes(begun: str) -> list[str]:
    """Return the codes that complete what was typed in the shell."""
    return [code for code in CODES if code.startswith(begun)]


def command(
    code: Annotated[
        str | None,
        typer.Argument(
            metavar="CODE", autocompletion=_codes, help="A finding's code; without it, all codes are listed."
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> int:
    """Explain a finding: meaning, decision, remedy."""
    entries = explanations() if code is None else (explanation(code),)
    data = list(map(asdict, entries)) if code is None else asdict(entries[0])
    write_result(json.dumps(data, indent=2) + "\n" if as_json else as_text(code, look_of(sys.stdout)), sys.stdout)
    return EXIT_HEALTHY


def as_text(code: str | None, look: Look) -> str:
    """Return the explanation of a code, or the list of all codes."""
    from ampdbg.report.formats.text import draw

    if code is None:
        return draw(listing_page(explanations()), look)
    return draw(explanation_page(explanation(code)), replace(look, width=min(look.width, TEXT_WIDTH)))
