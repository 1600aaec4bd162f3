"""The two ways to search: guided by candidates, and blind, by delta debugging over the tree of modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Concatenate, ParamSpec

from ampdbg.record.pins import Trial
from ampdbg.search.atoms import Atoms
from ampdbg.search.reduction import NOTHING, Result, best_so_far, certified, drop_superfluous, grouped, smallest
from ampdbg.search.trials import OutOfTrials, Trials

Rest = ParamSpec("Rest")


def _keeping_the_best(
    search: Callable[Concatenate[Trials, Rest], Result],
) -> Callable[Concatenate[Trials, Rest], Result]:
    """Makes a search that runs out of trials return the best set so far."""

    @functools.wraps(search)
    def kept(trials: Trials, /, *args: Rest.args, **kwargs: Rest.kwargs) -> Result:
        try:
            return search(trials, *args, **kwargs)
        except OutOfTrials:
            return best_so_far(trials)

    return kept


@_keeping_the_best
def delta_debug(trials: Trials) -> Result:
    """A 1-minimal set of atoms, found from the answers healthy and unhealthy alone, block before child.

    For k needed ones of n atoms it takes at most 3·k·log₂(n) + 10 trials. Of several such sets it finds the one
    whose atoms come first. Where not even everything pinned is healthy, the best set so far is made smaller, or
    there is nothing to find.
    """
    everything = trials.test(trials.tree.atoms, "everything")
    start = trials.tree.atoms if everything.healthy else trials.best
    if start is None:
        return Result((), healthy=False, minimal=False)
    trials.test((), "nothing")
    return certified(trials, smallest(trials, NOTHING, trials.units(trials.closed(start))))


@_keeping_the_best
def guided(trials: Trials, candidates: Sequence[str]) -> Result:
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
            return Result((), healthy=False, minimal=False)
        chosen += joining
        trial = trials.test(chosen, stage)
    parts = drop_superfluous(trials, grouped(trials, [trials.closed([pin]) for pin in chosen]))
    return certified(trials, _narrowed(trials, parts, {trials.closed([pin]) for pin in widened}))


def _new(trials: Trials, names: Iterable[str], chosen: Sequence[str]) -> list[str]:
    """The names, each once, that pin more than what is chosen."""
    covered = trials.closed(chosen)
    return [name for name in dict.fromkeys(names) if name in trials.tree and not trials.closed([name]) <= covered]


def _wider(trials: Trials, trial: Trial, chosen: Sequence[str]) -> list[str]:
    """What contains the suspects, or else the chosen, and pins more than they do."""
    stuck = [name for name in trial.suspects if name in trials.tree] or chosen
    covered = trials.closed(chosen)
    parents = [_parent(trials, name, covered) for name in stuck]
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
        others = NOTHING.union(*narrow)
        narrow += smallest(trials, others, trials.units(part - others))
    return narrow
