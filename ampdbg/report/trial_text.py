"""One trial of a search in a few words: what was in FP32, and how it came out."""

from __future__ import annotations

from collections.abc import Sequence

from ampdbg.record.pins import Trial

from . import quantities

SHOWN_PINS = 3


def pins_text(pins: Sequence[str], most: int = SHOWN_PINS) -> str:
    """``blocks.2.attn and head``; above ``most`` names the rest is counted."""
    if not pins:
        return "nothing"
    return quantities.listed(tuple(name or "the whole model" for name in pins), most)


def result_text(trial: Trial) -> str:
    """``healthy``, ``fails: the loss is NaN``, or of how many runs it was healthy where it ran several times."""
    if trial.healthy:
        return f"healthy, {trial.runs} of {trial.runs} runs" if trial.runs > 1 else "healthy"
    failed = f"fails, {trial.runs - trial.healthy_runs} of {trial.runs} runs" if trial.runs > 1 else "fails"
    return f"{failed}: {trial.why}" if trial.why else failed
