"""The skipped steps of a run: which of them are normal while the loss scale settles (DIAGNOSES: fact 6).

Skips are normal at the start and right after the scale has grown. A skip at a scale that has worked before is another
matter: each such one is a new low.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ampdbg.record.run import Step

SETTLING_STEPS = 20
"""Within so many steps of the start (or a tenth of the run, if longer) a new low is settling."""

SKIPS_IN_A_ROW = 5
"""So many skipped steps in a row are no calibration: healthy models settle within four halvings of 65536."""

FEW_GROUPS = 4
"""A model of so few parameter groups is always told group by group."""


@dataclass(frozen=True)
class Skips:
    """The skipped steps of a run, sorted by what explains them."""

    settling: tuple[Step, ...]
    after_growth: tuple[Step, ...]
    new_lows: tuple[Step, ...]
    last_in_a_row: int

    @property
    def all(self) -> tuple[Step, ...]:
        """Every skipped step, in order."""
        return tuple(sorted((*self.settling, *self.after_growth, *self.new_lows), key=lambda step: step.step))


def sort_skips(steps: Sequence[Step]) -> Skips:
    """Sorts the skipped steps into settling, after growth, and new lows."""
    settled_at = settling_steps(len(steps))
    settling, after_growth, new_lows = [], [], []
    worked = math.inf
    for index, step in enumerate(steps):
        if not step.skipped:
            worked = min(worked, step.scale)
        elif index > 0 and step.scale > steps[index - 1].scale:
            after_growth.append(step)
        elif step.step < settled_at:
            settling.append(step)
        else:
            new_lows.append(step)
    return Skips(tuple(settling), tuple(after_growth), tuple(new_lows), skips_at_the_end(steps))


def settling_steps(steps: int) -> int:
    """How many steps at the start of a run of ``steps`` may lower the loss scale without saying anything."""
    return max(SETTLING_STEPS, steps // 10)


def skips_at_the_end(steps: Sequence[Step]) -> int:
    """How many skipped steps in a row end the run."""
    count = 0
    for step in reversed(steps):
        if not step.skipped:
            break
        count += 1
    return count


def is_everywhere(hit: int, reachable: int, total: int) -> bool:
    """Whether a step whose gradients overflow in ``hit`` groups hits (almost) all: then it says nothing about where.

    Args:
        hit: how many groups have a non-finite gradient.
        reachable: how many can: a group without a gradient never does.
        total: how many there are.
    """
    return total > FEW_GROUPS and hit >= reachable - total // 10
