"""The search by order of execution: the shortest run of modules from the start that must be pinned."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ampdbg.search.found import Found, dropped_so_far, never_losing_the_best
from ampdbg.search.shrinking import certified
from ampdbg.search.trial import Trials


@never_losing_the_best
def first_overflowing(trials: Trials, order: Sequence[str]) -> Found:
    """Binary search for the shortest healthy prefix of ``order``, as Polygraphy's ``debug precision`` does.

    The prefix's last module is :attr:`Found.decisive`. Where that one alone is enough it is the set. Else the
    set is the whole prefix, not minimal, and ``note`` says so.

    Args:
        trials: the experiments.
        order: the modules in order of execution. One with children stands for its own lines, since its children
            have places of their own.
    """
    names = list(dict.fromkeys(trials.tree.own(name) for name in order if name in trials.tree))
    everything = trials.test(names, "everything")
    if not everything.healthy:
        return Found((), healthy=False, minimal=False, note=f"unhealthy with everything pinned: {everything.why}")
    if trials.test((), "nothing").healthy:
        return Found((), healthy=True, minimal=True)
    low, high = 0, len(names)
    while high - low > 1:
        middle = (low + high) // 2
        healthy = trials.test(names[:middle], "prefix").healthy
        low, high = (low, middle) if healthy else (middle, high)
    return _told(trials, names[:high])


def _told(trials: Trials, prefix: Sequence[str]) -> Found:
    last = prefix[-1]
    if trials.test([last], "alone").healthy:
        return dataclasses.replace(certified(trials, [trials.closed([last])]), decisive=last)
    pins = trials.tree.compress(trials.closed(prefix))
    note = f"{last} alone is not enough: some of the {len(prefix) - 1} before it must be pinned too"
    dropped = dropped_so_far(trials, pins)
    return Found(pins, healthy=True, minimal=False, dropped=dropped, decisive=last, note=note)
