"""The proof of a patch as text: each thing that was run, whether it came out as it must, and what was seen."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ampdbg.record.pins import Proof

from .layout import indented, title

PASSED, FAILED = "green", "bold red"


def proof_text(proof: Proof) -> Iterator[RenderableType]:
    """Its steps as a table."""
    rows = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    rows.add_column("", no_wrap=True)
    rows.add_column("what", overflow="fold", ratio=2)
    rows.add_column("seen", overflow="fold", ratio=3)
    for step in proof.steps:
        rows.add_row(Text("✓" if step.passed else "✗", style=PASSED if step.passed else FAILED), step.name, step.detail)
    yield title("The proof")
    yield indented(rows)
