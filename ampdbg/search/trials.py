"""Experiments with pins: each set is tried once, every answer is kept, and none is tried beyond the limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ampdbg.record.pins import Trial
from ampdbg.search.atoms import Atoms, AtomTree

Try = Callable[[tuple[str, ...]], Trial]
"""Runs one experiment with the pins of these names, once."""


def trial_of(stage: str, runs: Sequence[Trial]) -> Trial:
    """The trial of these runs with the same pins: healthy when all are, else what the first that is not showed."""
    return replace(
        next((run for run in runs if not run.healthy), runs[-1]),
        stage=stage,
        runs=len(runs),
        healthy_runs=sum(run.healthy for run in runs),
        seconds=sum(run.seconds for run in runs),
    )


class OutOfTrials(Exception):  # noqa: N818 - not an error: a search ends at the limit that it was given
    """A set is to be tried that no trial is left for."""


class Trials:
    """The experiments of a search: which were made, which set is the best so far, and how to make another.

    Tied modules move together: a set that holds an atom of one group of ``together`` holds all of the group's.

    Args:
        try_: runs one experiment; what it raises, a KeyboardInterrupt say, goes through, and what was made stays.
        tree: what can be pinned.
        max_trials: how many experiments may be run; None is no limit.
        repeats: how often a set is run before it is called healthy; the first unhealthy run ends its trial.
        on_trial: called with every trial once, as it ends.
        together: groups of pins' names, of which no two have an atom in common.

    Attributes:
        best: the pins of the healthy set of the fewest atoms so far; None before there is one.
    """

    def __init__(
        self,
        try_: Try,
        tree: AtomTree,
        *,
        max_trials: int | None = None,
        repeats: int = 1,
        on_trial: Callable[[Trial], None] = lambda trial: None,
        together: Iterable[Sequence[str]] = (),
    ) -> None:
        self.tree = tree
        self.best: tuple[str, ...] | None = None
        self._try = try_
        self._max_trials = max_trials
        self._repeats = repeats
        self._on_trial = on_trial
        self._made: dict[Atoms, Trial] = {}
        self._units = {atom: unit for unit in map(tree.expand, together) if len(unit) > 1 for atom in unit}

    @property
    def made(self) -> tuple[Trial, ...]:
        """The trials, in order."""
        return tuple(self._made.values())

    def test(self, pins: Iterable[str], stage: str) -> Trial:
        """What happens with these pins: found out by experiment, unless this set of atoms has been tried before.

        ``stage`` says what for, and stands in the trial.

        Raises:
            OutOfTrials: it has not been tried, and ``max_trials`` were run.
            KeyError: nothing of a pin's name ran.
        """
        atoms = self.closed(pins)
        if atoms not in self._made:
            if self._max_trials is not None and len(self._made) >= self._max_trials:
                raise OutOfTrials
            pins = self.tree.compress(atoms)
            self._keep(atoms, trial_of(stage, self._run(pins)))
        return self._made[atoms]

    def known(self, pins: Iterable[str]) -> Trial | None:
        """The trial of these pins, where it has been made already."""
        return self._made.get(self.closed(pins))

    def closed(self, pins: Iterable[str]) -> Atoms:
        """The atoms of the pins, and of all that is tied to them."""
        atoms = self.tree.expand(pins)
        return atoms.union(*(self._units[atom] for atom in self._units.keys() & atoms))

    def units(self, atoms: Iterable[str]) -> tuple[Atoms, ...]:
        """What can be pinned on its own of these, in tree order: single atoms, and tied ones as one."""
        ordered = sorted(atoms, key=self.tree.place)
        return tuple(dict.fromkeys(self._units.get(atom, frozenset((atom,))) for atom in ordered))

    def _run(self, pins: tuple[str, ...]) -> list[Trial]:
        runs = [self._try(pins)]
        while runs[-1].healthy and len(runs) < self._repeats:
            runs.append(self._try(pins))
        return runs

    def _keep(self, atoms: Atoms, trial: Trial) -> None:
        self._made[atoms] = trial
        if trial.healthy and (self.best is None or len(atoms) < len(self.tree.expand(self.best))):
            self.best = trial.pins
        self._on_trial(trial)
