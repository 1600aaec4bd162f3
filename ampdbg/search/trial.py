"""Experiments with pins: each set is tried once, every answer is kept, and none is tried beyond the limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ampdbg.record.pins import Trial
from ampdbg.search.atoms import Atoms, AtomTree


@dataclass(frozen=True)
class Seen:
    """What one experiment showed.

    ``suspects`` are the pins' names of what went wrong, the first to run first; ``why`` says what that was.
    ``healthy_runs`` of ``runs`` were healthy; None means all of a healthy one and none of another.
    ``seconds`` is the time it took.
    """

    healthy: bool
    why: str = ""
    suspects: tuple[str, ...] = ()
    runs: int = 1
    healthy_runs: int | None = None
    loss: float | None = None
    seconds: float = 0.0


Try = Callable[[tuple[str, ...]], Seen]
"""Runs one experiment with the pins of these names."""


class OutOfTrials(Exception):  # noqa: N818 - not an error: the end of a search that was told where to end
    """A set is to be tried that no trial is left for."""


class Trials:
    """The experiments of a search: which were made, which set is the best so far, and how to make another.

    Tied modules move together: a set that holds an atom of one group of ``together`` holds all of the group's.

    Args:
        try_: runs one experiment; what it raises, a KeyboardInterrupt say, goes through, and what was made stays.
        tree: what can be pinned.
        max_trials: how many experiments may be run; None is no limit.
        repeats: how often a set is run before it is called healthy; the first unhealthy run ends its trial.
        on_trial: told of every trial once, as it ends.
        together: groups of pins' names.

    Attributes:
        made: the trials, in order.
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
        together: Sequence[frozenset[str]] = (),
    ) -> None:
        self.tree = tree
        self.made: tuple[Trial, ...] = ()
        self.best: tuple[str, ...] | None = None
        self._try = try_
        self._max_trials = max_trials
        self._repeats = repeats
        self._on_trial = on_trial
        self._answers: dict[Atoms, Trial] = {}
        self._units = _units(tree, together)

    def test(self, pins: Iterable[str], stage: str) -> Trial:
        """What happens with these pins: found out by experiment, unless this set of atoms has been tried before.

        ``stage`` says what for, and stands in the trial.

        Raises:
            OutOfTrials: it has not been tried, and ``max_trials`` were run.
            KeyError: nothing of a pin's name ran.
        """
        atoms = self.closed(pins)
        if atoms not in self._answers:
            if self._max_trials is not None and len(self.made) >= self._max_trials:
                raise OutOfTrials
            pins = self.tree.compress(atoms)
            self._keep(atoms, pins, self._run(pins), stage)
        return self._answers[atoms]

    def known(self, pins: Iterable[str]) -> Trial | None:
        """The trial of these pins, where it has been made already."""
        return self._answers.get(self.closed(pins))

    def closed(self, pins: Iterable[str]) -> Atoms:
        """The atoms of the pins, and of all that is tied to them."""
        atoms = self.tree.expand(pins)
        return atoms.union(*(self._units[atom] for atom in atoms if atom in self._units))

    def units(self, atoms: Iterable[str]) -> tuple[Atoms, ...]:
        """What can be pinned on its own of these, in tree order: single atoms, and tied ones as one."""
        ordered = sorted(atoms, key=self.tree.place)
        return tuple(dict.fromkeys(self._units.get(atom, frozenset((atom,))) for atom in ordered))

    def _run(self, pins: tuple[str, ...]) -> Seen:
        runs = [self._try(pins)]
        while runs[-1].healthy and len(runs) < self._repeats:
            runs.append(self._try(pins))
        return dataclasses.replace(
            runs[-1],
            runs=sum(seen.runs for seen in runs),
            healthy_runs=sum(map(_healthy_runs, runs)),
            seconds=sum(seen.seconds for seen in runs),
        )

    def _keep(self, atoms: Atoms, pins: tuple[str, ...], seen: Seen, stage: str) -> None:
        trial = Trial(
            pins=pins,
            healthy=seen.healthy,
            why=seen.why,
            stage=stage,
            suspects=seen.suspects,
            runs=seen.runs,
            healthy_runs=_healthy_runs(seen),
            loss=seen.loss,
            seconds=seen.seconds,
        )
        self._answers[atoms] = trial
        self.made = (*self.made, trial)
        if seen.healthy and (self.best is None or len(atoms) < len(self.tree.expand(self.best))):
            self.best = pins
        self._on_trial(trial)


def _healthy_runs(seen: Seen) -> int:
    if seen.healthy_runs is None:
        return seen.runs if seen.healthy else 0
    return seen.healthy_runs


def _units(tree: AtomTree, together: Iterable[Iterable[str]]) -> dict[str, Atoms]:
    """The tied atoms, each with all that moves with it; groups that share an atom are one."""
    units: dict[str, Atoms] = {}
    for group in together:
        atoms = tree.expand(name for name in group if name in tree)
        unit = atoms.union(*(units[atom] for atom in atoms if atom in units))
        units.update(dict.fromkeys(unit, unit))
    return units
