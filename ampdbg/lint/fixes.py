"""Apply fixes to a text, in rounds of fixes that do not overlap, until none is left."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from ampdbg.lint.rule import RuleHit
from ampdbg.source.document import Document
from ampdbg.source.edits import Fix, applied
from ampdbg.syntax_tree import UNPARSABLE, syntax_tree

MOST_ROUNDS = 10


def fixed(text: str, hits_of: Callable[[Document], Sequence[RuleHit]]) -> str:
    """Return the text with every fix applied that leaves it parsable.

    Args:
        text: Python source.
        hits_of: returns the hits to fix in a document. Each round calls it again, as one fix may allow another.
    """
    for _ in range(MOST_ROUNDS):
        document = Document(text)
        fixes = _together(hits_of(document))
        if not fixes:
            return text
        try:
            after = applied(document, fixes)
            syntax_tree(after)
        except UNPARSABLE:
            return text
        text = after
    return text


def edits_f_string(document: Document, hit: RuleHit) -> bool:
    """True if the fix of a hit would change an f-string, in which Pythons before 3.12 misplace nodes.

    They also reject some text in it. An edit that only moves a line changes no string.
    """
    edits = hit.fix.edits if hit.fix is not None else ()
    spans = list(map(document.span, document.find(ast.JoinedStr)))
    changed = (edit.start for edit in edits if (document.text[edit.start : edit.end] + edit.new).strip())
    is_within = any(isinstance(one, ast.JoinedStr) for one in document.around(hit.node))
    return is_within or any(span.start < at < span.end for at in changed for span in spans)


def _together(hits: Sequence[RuleHit]) -> list[Fix]:
    """Return fixes without overlapping edits; of two that overlap, the first."""
    chosen: list[Fix] = []
    for fix in dict.fromkeys(hit.fix for hit in hits if hit.fix is not None):
        if not any(_overlap(fix, other) for other in chosen):
            chosen.append(fix)
    return chosen


def _overlap(one: Fix, other: Fix) -> bool:
    return any(
        edit != its and edit.start < max(its.end, its.start + 1) and its.start < max(edit.end, edit.start + 1)
        for edit in one.edits
        for its in other.edits
    )
