"""What is normal of a dynamic loss scale while it settles (DIAGNOSES: fact 6), and of its overflows; no torch."""

from __future__ import annotations

SETTLING_STEPS = 20
"""Within so many steps of the start (or a tenth of the run, if longer) a new low is settling."""

SKIPS_IN_A_ROW = 5
"""So many skipped steps in a row are no calibration: healthy models settle within four halvings of 65536."""


def settling_steps(steps: int) -> int:
    """How many steps at the start of a run of ``steps`` may lower the loss scale without saying anything."""
    return max(SETTLING_STEPS, steps // 10)


FEW_GROUPS = 4
"""A model of so few parameter groups is always told group by group."""


def is_everywhere(hit: int, reachable: int, total: int) -> bool:
    """Whether a step whose gradients overflow in ``hit`` groups hits (almost) all: then it says nothing about where.

    Args:
        hit: how many groups have a non-finite gradient.
        reachable: how many can: a group without a gradient never does.
        total: how many there are.
    """
    return total > FEW_GROUPS and hit >= reachable - total // 10
