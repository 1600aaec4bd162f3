"""The codes of findings: which there are, and what each means, is decided by, is fixed by and looks like (no torch).

A code is a place in ``FAMILIES`` and a Markdown file of its name in ``ampdbg/record/explanations/``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from ampdbg.errors import AmpdbgError

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "Forward pass": (
        "forward-overflow",
        "silent-overflow",
        "buffer-poisoned",
        "eps-underflow",
        "mask-constant",
        "precision-loss",
    ),
    "Gradients and loss scale": (
        "gradient-overflow",
        "gradient-underflow",
        "no-usable-scale",
        "scale-calibration",
        "scale-collapse",
        "scale-runaway",
        "optimizer-underflow",
    ),
    "Data and weights": (
        "data-nonfinite",
        "data-range",
        "weights-nonfinite",
    ),
    "Other causes": (
        "infinite-loss",
        "true-nan",
        "divergence",
        "hardware",
        "unknown",
    ),
    "Misuse: calls in the wrong order": (
        "misuse-clip-scaled",
        "misuse-unscale-twice",
        "misuse-accumulate",
        "misuse-bare-step",
        "misuse-unused-optimizer",
        "misuse-no-update",
        "misuse-many-updates",
        "misuse-stale-gradients",
        "misuse-scheduler-on-skip",
        "misuse-gradient-penalty",
    ),
    "Misuse: autocast and scaler set up wrongly": (
        "misuse-no-scaler",
        "misuse-scaler-bfloat16",
        "misuse-half-parameters",
        "misuse-custom-function",
        "misuse-backward-in-autocast",
        "misuse-bce",
    ),
}
"""Every code, by family, in the order in which they are listed."""

CODES = tuple(code for codes in FAMILIES.values() for code in codes)

SECTIONS: Mapping[str, str] = {
    "meaning": "What it means",
    "decision": "How it is decided",
    "remedy": "What fixes it",
    "alike": "What looks alike",
    "case": "A known case",
}
"""The sections of an explanation: field of :class:`Explanation`, and heading in its file."""

MOST_SUGGESTED = 4
"""More codes than this that hold what was typed are a family, and the list says more."""


@dataclass(frozen=True)
class Explanation:
    """What there is to know about one code; the sections are Markdown: paragraphs, lists with ``-``, fenced code."""

    code: str
    family: str
    title: str
    meaning: str
    decision: str
    remedy: str
    alike: str
    case: str


def explanation(code: str) -> Explanation:
    """Reads what there is to know about ``code``; raises AmpdbgError, which suggests codes near it."""
    for family, codes in FAMILIES.items():
        if code in codes:
            return _parsed(code, family, _text(code))
    raise AmpdbgError(f"{code!r} is not a code; {_suggestion(code)}")


def explanations() -> tuple[Explanation, ...]:
    """All of them, in the order of ``FAMILIES``."""
    return tuple(_parsed(code, family, _text(code)) for family, codes in FAMILIES.items() for code in codes)


def _text(code: str) -> str:
    from importlib import resources  # 5 ms that `ampdbg --help` need not wait for

    return (resources.files("ampdbg") / "record" / "explanations" / f"{code}.md").read_text(encoding="utf-8")


def _parsed(code: str, family: str, text: str) -> Explanation:
    title, *parts = text.removeprefix("# ").split("\n## ")
    bodies = {heading: body.strip() for heading, _, body in (part.partition("\n") for part in parts)}
    return Explanation(code, family, title.strip(), **{field: bodies[heading] for field, heading in SECTIONS.items()})


def _suggestion(given: str) -> str:
    wanted = given.strip().lower().replace("_", "-").replace(" ", "-")
    holding = [code for code in CODES if len(wanted) > 2 and wanted in code]
    near = holding or difflib.get_close_matches(wanted, CODES, n=1, cutoff=0.5)
    if near and len(near) <= MOST_SUGGESTED:
        return f"did you mean {' or '.join(near)}? All codes: ampdbg explain"
    return "all codes: ampdbg explain"
