"""The guided search: candidates are tried together, what still goes wrong joins them, then each is dropped in turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ampdbg.record.pins import Trial
from ampdbg.search.atoms import Atoms
from ampdbg.search.found import Found, never_losing_the_best
from ampdbg.search.shrinking import certified, drop_superfluous, smallest
from ampdbg.search.trial import Trials


@never_losing_the_best
def guided(trials: Trials, candidates: Sequence[str]) -> Found:
    """The candidates that are needed, with those that only show once they are cured.

    Candidates and suspects are pins, the most likely first: of two that would do, the earlier one is kept. Names of
    what never ran are passed over. Where all candidates are needed it takes one trial and one for each; of many
    superfluous ones a run costs the logarithm of its length. A pin stays as wide as it was given; only what
    this search widened itself it narrows again, down to atoms.

    Where an unhealthy step names no new suspects, those it names, or else all pins, are widened by one level, at last
    to the root. Nothing healthy is found where even that is not, or where there was nothing to widen.
    """
    chosen = _new(trials, candidates, ())
    widened: list[str] = []
    trial = trials.test(chosen, "candidates")
    while not trial.healthy:
        stage, joining = "suspects", _new(trials, trial.suspects, chosen)
        if not joining:
            stage, joining = "widened", _wider(trials, trial, chosen)
            widened += joining
        if not joining:
            return Found((), healthy=False, minimal=False)
        chosen += joining
        trial = trials.test(chosen, stage)
    parts = drop_superfluous(trials, [trials.closed([pin]) for pin in chosen])
    return certified(trials, _narrowed(trials, parts, {trials.closed([pin]) for pin in widened}))


def _new(trials: Trials, names: Iterable[str], chosen: Sequence[str]) -> list[str]:
    """The names, each once, that pin more than what is chosen."""
    covered = trials.closed(chosen)
    return [name for name in dict.fromkeys(names) if name in trials.tree and not trials.closed([name]) <= covered]


def _wider(trials: Trials, trial: Trial, chosen: Sequence[str]) -> list[str]:
    """What holds the suspects, or else the chosen, and pins more than they do."""
    stuck = [name for name in trial.suspects if name in trials.tree] or chosen
    parents = [_parent(trials, name, trials.closed(chosen)) for name in stuck]
    return list(dict.fromkeys(parent for parent in parents if parent is not None))


def _parent(trials: Trials, name: str, covered: Atoms) -> str | None:
    parent = trials.tree.parent(name)
    while parent is not None and trials.closed([parent]) <= covered:
        parent = trials.tree.parent(parent)
    return parent


def _narrowed(trials: Trials, parts: Sequence[Atoms], wide: set[Atoms]) -> list[Atoms]:
    """The parts, with what is needed of each wide one in place of it."""
    narrow = list(parts)
    for part in (part for part in parts if part in wide):
        narrow.remove(part)
        others = frozenset[str]().union(*narrow)
        narrow += smallest(trials, others, trials.units(part - others))
    return narrow
