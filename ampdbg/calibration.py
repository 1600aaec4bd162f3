"""What is normal of a dynamic loss scale while it settles (DIAGNOSES: fact 6); no torch."""

from __future__ import annotations

SETTLING_STEPS = 20
"""Within so many steps of the start (or a tenth of the run, if longer) a new low is settling."""

SKIPS_IN_A_ROW = 5
"""So many skipped steps in a row are no calibration: healthy models settle within four halvings of 65536."""


def settling_steps(steps: int) -> int:
    """How many steps at the start of a run of ``steps`` may lower the loss scale without saying anything."""
    return max(SETTLING_STEPS, steps // 10)
