"""The blind search: delta debugging over the tree of modules, block before child, for what no suspect names."""

from __future__ import annotations

from ampdbg.search.found import Found, never_losing_the_best
from ampdbg.search.shrinking import NOTHING, certified, smallest
from ampdbg.search.trial import Trials


@never_losing_the_best
def delta_debug(trials: Trials) -> Found:
    """A 1-minimal set of atoms, found from the answers healthy and unhealthy alone.

    For k needed ones of n atoms it takes at most 3·k·log₂(n) + 10 trials. Of several such sets it finds the one
    whose atoms come first. Where not even everything pinned is healthy, the best set so far is made smaller, or
    there is nothing to find.
    """
    everything = trials.test(trials.tree.atoms, "everything")
    start = trials.tree.atoms if everything.healthy else trials.best
    if start is None:
        return Found((), healthy=False, minimal=False)
    trials.test((), "nothing")
    return certified(trials, smallest(trials, NOTHING, trials.units(trials.closed(start))))
