"""What a search came to: the set of pins, and what dropping each of them does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec

from ampdbg.record.pins import Trial
from ampdbg.search.trial import OutOfTrials, Trials


@dataclass(frozen=True)
class Found:
    """The set that a search ended with.

    ``pins`` are the fewest names for it, in tree order; none where the step is healthy without, or never was.
    ``minimal`` says that it is 1-minimal: dropping any one pin, and any one of the parts that it was put together
    from, was tried and is unhealthy. ``dropped`` has the trial of each pin that was dropped alone, with all that is
    tied to it.
    """

    pins: tuple[str, ...]
    healthy: bool
    minimal: bool
    dropped: Mapping[str, Trial] = field(default_factory=dict)
    out_of_trials: bool = False


def without(trials: Trials, pins: tuple[str, ...], pin: str) -> frozenset[str]:
    """The atoms of ``pins`` without those of ``pin`` and of all that is tied to it."""
    return trials.closed(pins) - trials.closed([pin])


def dropped_so_far(trials: Trials, pins: tuple[str, ...]) -> Mapping[str, Trial]:
    """What dropping each pin did, of those that were dropped already."""
    tried = ((pin, trials.known(without(trials, pins, pin))) for pin in pins)
    return {pin: trial for pin, trial in tried if trial is not None}


def best_so_far(trials: Trials, *, out_of_trials: bool = False) -> Found:
    """The smallest healthy set that was tried, where a search ended early: at its last trial, or by Ctrl-C."""
    pins = trials.best or ()
    dropped = dropped_so_far(trials, pins)
    return Found(pins, trials.best is not None, minimal=False, dropped=dropped, out_of_trials=out_of_trials)


Rest = ParamSpec("Rest")


def never_losing_the_best(
    search: Callable[Concatenate[Trials, Rest], Found],
) -> Callable[Concatenate[Trials, Rest], Found]:
    """Makes a search that runs out of trials return the best set so far."""

    @functools.wraps(search)
    def kept(trials: Trials, /, *args: Rest.args, **kwargs: Rest.kwargs) -> Found:
        try:
            return search(trials, *args, **kwargs)
        except OutOfTrials:
            return best_so_far(trials, out_of_trials=True)

    return kept
