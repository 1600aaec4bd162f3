"""Search for a minimal set of pins: the tree of atoms, trials that run once each, and two strategies.

It knows only names, neither torch nor modules. An atom is the smallest unit to pin: a leaf module, a parent's own
lines, or a line of a script. A set of pins is healthy if the training step succeeds with these pins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

from ampdbg.record.pins import OWN, Trial, is_line

Atoms = frozenset[str]
"""Atoms by name: a leaf module's name, ``NAME:own`` for a parent's own lines, or a line of a script."""


@dataclass(frozen=True)
class AtomTree:
    """The executed modules as atoms in tree order: depth first, a parent's own lines before its children's.

    The atoms of a subtree are adjacent. For each atom, ``levels`` has the depth of the largest subtree that begins with
    it (0 is the root). ``modules`` has the largest pinnable module that begins with it, and the end index of its atoms.
    """

    atoms: tuple[str, ...]
    levels: tuple[int, ...]
    modules: tuple[tuple[str, int], ...]
    _spans: Mapping[str, tuple[int, int]]

    def __contains__(self, name: object) -> bool:
        """True if :meth:`under` accepts the name."""
        return name in self._spans

    def under(self, name: str) -> tuple[str, ...]:
        """Return the atoms of a module, an atom, or a container that never ran itself, such as a ModuleList.

        Raises:
            KeyError: nothing with that name ran.
        """
        start, end = self._spans[name]
        return self.atoms[start:end]

    def own(self, name: str) -> str:
        """Return the atom of the module's own lines: the name itself if it is a leaf or already an atom."""
        return name + OWN if name + OWN in self._spans else name

    def has_run(self, name: str) -> bool:
        """True if the name is an atom. A holder of several root models is not: it has no own lines to pin."""
        return name in self._spans and self.under(name) == (name,)

    def parent(self, name: str) -> str | None:
        """Return the module or container one level above this atom, module or container; None above the root.

        The parent of ``NAME:own`` is ``NAME``. A root that never ran is a container too.
        """
        if name.endswith(OWN) and name.removesuffix(OWN) in self._spans:
            return name.removesuffix(OWN)
        if is_line(name):
            return None
        return name.rpartition(".")[0] if name else None

    def expand(self, pins: Iterable[str]) -> Atoms:
        """Return the atoms of all the pins.

        Raises:
            KeyError: nothing with a pin's name ran.
        """
        return frozenset(atom for pin in pins for atom in self.under(pin))

    def compress(self, atoms: Iterable[str]) -> tuple[str, ...]:
        """Return the fewest pins for these atoms, in tree order: a whole module if all of its atoms are included."""
        within = set(atoms)
        pins: list[str] = []
        end = 0
        for place in sorted(map(self.place, within)):
            if place < end:
                continue
            module, end = self.modules[place]
            if not within.issuperset(self.atoms[place:end]):
                module, end = self.atoms[place], place + 1
            pins.append(module)
        return tuple(pins)

    def place(self, atom: str) -> int:
        """Return the index in ``atoms`` of the atom, or of a module's first atom."""
        return self._spans[atom][0]


def atom_tree(names: Sequence[str]) -> AtomTree:
    """Build the tree of the modules that ran, from their qualified names ("" for the root).

    The order of execution or registration orders siblings. Lines of a script follow all modules and belong to none.
    Containers that never ran may be omitted: they are never pinned, because nothing runs in them.
    """
    if not names:
        return AtomTree((), (), (), {"": (0, 0)})
    lines, names = [name for name in names if is_line(name)], [name for name in names if not is_line(name)]
    children = _children(names)
    nodes = _depth_first(children)
    ran = frozenset(names)
    atoms: list[str] = []
    spans: dict[str, tuple[int, int]] = {}
    starts: dict[str, int] = {}
    for name in nodes:
        starts[name] = len(atoms)
        if name in ran:
            atom = name + OWN if name in children else name
            spans[atom] = (len(atoms), len(atoms) + 1)
            atoms.append(atom)
    levels = [0] * len(atoms)
    modules = [("", 0)] * len(atoms)
    for name in reversed(nodes):  # children come first, so the outermost module overwrites the others
        last = children[name][-1] if name in children else None
        spans[name] = spans[name] if last is None else (starts[name], spans[last][1])
        levels[starts[name]] = name.count(".") + 1 if name else 0
        if name in ran:
            modules[starts[name]] = (name, spans[name][1])
    for line in lines:
        spans[line] = len(atoms), len(atoms) + 1
        atoms, levels, modules = [*atoms, line], [*levels, 0], [*modules, (line, len(atoms) + 1)]
    return AtomTree(tuple(atoms), tuple(levels), tuple(modules), spans)


def _children(names: Iterable[str]) -> dict[str, list[str]]:
    """Map each node, containers included, to its children in order of first appearance."""
    children: dict[str, list[str]] = {}
    seen = {""}
    for name in names:
        node = name
        while node not in seen:
            seen.add(node)
            parent = node.rpartition(".")[0]
            children.setdefault(parent, []).append(node)
            node = parent
    return children


def _depth_first(children: Mapping[str, Sequence[str]]) -> list[str]:
    nodes: list[str] = []
    ahead = [""]  # not recursive: modules may nest deeper than Python's recursion limit
    while ahead:
        nodes.append(ahead.pop())
        ahead.extend(reversed(children.get(nodes[-1], ())))
    return nodes


Try = Callable[[tuple[str, ...]], Trial]
"""Runs one experiment with the named pins."""


def trial_of(stage: str, runs: Sequence[Trial]) -> Trial:
    """Combine runs with the same pins into a trial: healthy if all are, otherwise the first unhealthy run's result."""
    return replace(
        next((run for run in runs if not run.healthy), runs[-1]),
        stage=stage,
        runs=len(runs),
        healthy_runs=sum(run.healthy for run in runs),
        seconds=sum(run.seconds for run in runs),
    )


class OutOfTrials(Exception):  # noqa: N818 - not an error: the search has reached its limit
    """A new set needs a trial, but the limit of trials is reached."""


@dataclass
class Trials:
    """The experiments of a search: the finished trials, the best set so far, and the means to run more.

    Args:
        try_: runs one experiment. Its exceptions propagate, such as a KeyboardInterrupt; finished trials stay.
        tree: the atoms and modules to pin.
        max_trials: the most experiments to run; None for no limit.
        repeats: how many healthy runs a healthy set needs. The first unhealthy run ends its trial.
        on_trial: called once with every trial as it ends.
        together: groups of tied pins, without a common atom. A set with one atom of a group contains all of them.

    Attributes:
        best: the pins of the healthy set with the fewest atoms so far, or None.
    """

    try_: Try
    tree: AtomTree
    _: KW_ONLY
    max_trials: int | None = None
    repeats: int = 1
    on_trial: Callable[[Trial], None] = lambda trial: None
    together: Iterable[Sequence[str]] = ()
    best: tuple[str, ...] | None = field(default=None, init=False)
    _made: dict[Atoms, Trial] = field(default_factory=dict, init=False)

    @functools.cached_property
    def _units(self) -> dict[str, Atoms]:
        """Maps each tied atom to its group."""
        return {atom: unit for unit in map(self.tree.expand, self.together) if len(unit) > 1 for atom in unit}

    @property
    def made(self) -> tuple[Trial, ...]:
        return tuple(self._made.values())

    def test(self, pins: Iterable[str], stage: str) -> Trial:
        """Return the trial of these pins, with its purpose as ``stage``. A set of atoms is tried once.

        Raises:
            OutOfTrials: the set has not been tried, and ``max_trials`` experiments have run.
            KeyError: nothing with a pin's name ran.
        """
        atoms = self.closed(pins)
        if atoms not in self._made:
            if self.max_trials is not None and len(self._made) >= self.max_trials:
                raise OutOfTrials
            pins = self.tree.compress(atoms)
            runs = [self.try_(pins)]
            while runs[-1].healthy and len(runs) < self.repeats:
                runs.append(self.try_(pins))
            trial = self._made[atoms] = trial_of(stage, runs)
            if trial.healthy and (self.best is None or len(atoms) < len(self.tree.expand(self.best))):
                self.best = trial.pins
            self.on_trial(trial)
        return self._made[atoms]

    def known(self, pins: Iterable[str]) -> Trial | None:
        """Return the trial of these pins if it has already run."""
        return self._made.get(self.closed(pins))

    def closed(self, pins: Iterable[str]) -> Atoms:
        """Return the atoms of the pins and all atoms tied to them."""
        atoms = self.tree.expand(pins)
        return atoms.union(*(self._units[atom] for atom in self._units.keys() & atoms))

    def units(self, atoms: Iterable[str]) -> tuple[Atoms, ...]:
        """Return the independent units among these atoms, in tree order: single atoms, and groups of tied atoms."""
        ordered = sorted(atoms, key=self.tree.place)
        return tuple(dict.fromkeys(self._units.get(atom, frozenset((atom,))) for atom in ordered))


NOTHING: Atoms = frozenset()

MOST_ATOM_RUNS = 100_000
"""A trial runs every atom, so dropping each of k pins alone costs k·n atom runs for n atoms. This many take about a
minute on two cores. Beyond that, pins are dropped in groups, and the search time stays linear in n."""

MOST_GROUPS = 10
"""The number of such groups. If every drop fails, each group costs a trial that shows only that it is needed."""


@dataclass(frozen=True)
class Result:
    """The final set of a search.

    ``pins`` are the fewest names for the set, in tree order. They are empty if the step is healthy without pins or
    never healthy. ``minimal`` means 1-minimal: dropping any one pin, or any one part of the set, was tried and is
    unhealthy. ``dropped`` maps each pin that was dropped alone to that trial, which also drops all tied atoms.
    """

    pins: tuple[str, ...]
    healthy: bool
    minimal: bool
    dropped: Mapping[str, Trial] = field(default_factory=dict)


def best_so_far(trials: Trials) -> Result:
    """Return the smallest healthy set tried so far, for a search that ended early."""
    pins = trials.best or ()
    known = {pin: trials.known(_without(trials, pins, pin)) for pin in pins}
    dropped = {pin: trial for pin, trial in known.items() if trial is not None}
    return Result(pins, trials.best is not None, minimal=False, dropped=dropped)


def grouped(trials: Trials, parts: Sequence[Atoms], fails_alone: Callable[[Atoms], bool]) -> list[Atoms]:
    """Return the parts, or groups of neighboring parts if dropping each part alone takes too long.

    Parts that are known to fail alone form the first group: its trial shows as much as trials of smaller groups.
    """
    if len(parts) <= max_single_drops(trials.tree):
        return list(parts)
    failing = [part for part in parts if fails_alone(part)]
    others = [part for part in parts if part not in set(failing)]
    size = max(1, -(-len(others) // MOST_GROUPS))
    neighbours = (others[start : start + size] for start in range(0, len(others), size))
    return [NOTHING.union(*group) for group in (failing, *neighbours) if group]


def max_single_drops(tree: AtomTree) -> int:
    """Return how many parts may be dropped one by one."""
    return max(1, MOST_ATOM_RUNS // max(1, len(tree.atoms)))


def drop_superfluous(trials: Trials, parts: Sequence[Atoms]) -> list[Atoms]:
    """Drop the superfluous parts of a healthy set, starting from the last, and return the needed parts.

    A needed part costs one trial, and a run of superfluous parts about twice the logarithm of its length. A part
    covered by the rest costs none.
    """
    kept = list(parts)
    undecided = len(kept)

    def is_healthy_without(count: int) -> bool:
        rest = kept[: undecided - count] + kept[undecided:]
        return trials.test(NOTHING.union(*rest), "with fewer").healthy

    while undecided > 0:
        superfluous = _most(is_healthy_without, undecided)
        del kept[undecided - superfluous : undecided]
        undecided -= superfluous + 1  # the part before them is needed
    return kept


def _most(works: Callable[[int], bool], limit: int) -> int:
    """Return the largest count up to ``limit`` that works, by doubling and then bisecting. Smaller counts must work."""
    good, bad = 0, limit + 1
    while good < limit and bad > limit:
        count = min(max(1, 2 * good), limit)
        good, bad = (count, bad) if works(count) else (good, count)
    while bad - good > 1:
        count = (good + bad) // 2
        good, bad = (count, bad) if works(count) else (good, count)
    return good


def needed_units(trials: Trials, base: Atoms, units: Sequence[Atoms]) -> list[Atoms]:
    """Return the units that are needed in addition to ``base``. With all units, ``base`` must be healthy.

    Find the end of the shortest healthy prefix of the units, keep its last unit, and continue before it. Each
    needed unit costs one trial, and one more per halving. Halvings split between the largest blocks near the middle.

    For any predicate, each step has an unhealthy prefix and a longer healthy one. The final set is therefore always
    healthy. If pins never harm, it is also 1-minimal.
    """
    levels = [trials.tree.levels[min(map(trials.tree.place, unit))] for unit in units]
    needed: list[Atoms] = []
    rest = list(units)
    while not trials.test(base.union(*needed), "narrowing").healthy:
        low, high = 0, len(rest)
        while high - low > 1:
            middle = _boundary(levels, low, high)
            healthy = trials.test(base.union(*needed, *rest[:middle]), "narrowing").healthy
            low, high = (low, middle) if healthy else (middle, high)
        needed.append(rest[low])
        del rest[low:]
    return needed


def _boundary(levels: Sequence[int], low: int, high: int) -> int:
    """Return the split between ``low`` and ``high``: in the middle third, before the largest block, most central."""
    third = -((low - high) // 3)
    return min(range(low + third, high - third + 1), key=lambda place: (levels[place], abs(2 * place - low - high)))


def prove_minimal(trials: Trials, parts: Sequence[Atoms]) -> Result:
    """Drop each part of a healthy set alone, then each pin, until every such trial is unhealthy.

    Earlier trials are reused. A healthy trial, possible only if pins can harm, shrinks the set and restarts the
    round. Thus there are never more rounds than parts and pins. If there are too many pins to drop each one alone,
    the set is not proven minimal.
    """
    parts = [part for part in parts if part]
    while (smaller := next(_healthy_drops(trials, parts), None)) is not None:
        parts = [part & smaller for part in parts if part & smaller]
    pins = trials.tree.compress(NOTHING.union(*parts))
    if len(pins) > max_single_drops(trials.tree):
        return Result(pins, healthy=True, minimal=False)
    dropped = {pin: trials.test(_without(trials, pins, pin), "with fewer") for pin in pins}
    return Result(pins, healthy=True, minimal=True, dropped=dropped)


def _healthy_drops(trials: Trials, parts: Sequence[Atoms]) -> Iterator[Atoms]:
    atoms = NOTHING.union(*parts)
    pins = trials.tree.compress(atoms)
    alone = pins if len(pins) <= max_single_drops(trials.tree) else ()
    for rest in (*(atoms - part for part in reversed(parts)), *(_without(trials, pins, pin) for pin in alone)):
        if trials.test(rest, "with fewer").healthy:
            yield rest


def _without(trials: Trials, pins: tuple[str, ...], pin: str) -> Atoms:
    """Return the atoms of ``pins`` without the atoms of ``pin`` and all atoms tied to it."""
    return trials.closed(pins) - trials.closed([pin])


def delta_debug(trials: Trials) -> Result:
    """Find a 1-minimal set of atoms from healthy and unhealthy trials alone, trying blocks before their children.

    For k needed atoms out of n it takes at most 3·k·log₂(n) + 10 trials. Of several such sets it finds the one
    with the earliest atoms. If pinning everything is unhealthy, it reduces the best set so far, if there is one.

    Raises:
        OutOfTrials: the limit of trials was reached; :func:`best_so_far` returns the set found until then.
    """
    everything = trials.test(trials.tree.atoms, "everything")
    start = trials.tree.atoms if everything.healthy else trials.best
    if start is None:
        return Result((), healthy=False, minimal=False)
    trials.test((), "nothing")
    return prove_minimal(trials, needed_units(trials, NOTHING, trials.units(trials.closed(start))))


Proposal = Callable[[Sequence[str]], Sequence[str]]
"""Returns the names of further failures with these pins in force."""


def guided_search(
    trials: Trials,
    candidates: Sequence[str],
    propose: Proposal = lambda pins: (),
    fails_alone: Callable[[Atoms], bool] = lambda part: False,
) -> Result:
    """Return the needed candidates, and the needed suspects that appear only once the candidates are pinned.

    Candidates and suspects are pins, the most likely first. Of two sufficient pins, the earlier one is kept. Names
    that never ran are ignored. If all candidates are needed, it takes one trial plus one per candidate. A run of
    superfluous candidates costs the logarithm of its length. Pins keep the width at which they were given. Only pins
    that this search widened itself are narrowed again, down to atoms.

    Suspects may appear one after another, as in a chain of layers that each hide the next. ``propose`` is therefore
    called at the second round of new suspects, then at the fourth, the eighth and so on. ``fails_alone`` accepts
    atoms without which the step is known to be unhealthy, regardless of other pins. If there are very many candidates,
    such atoms are dropped only as one group.

    If an unhealthy step names no new suspects, its known suspects are widened by one level. Without suspects, all
    pins are. Widening ends at the root. The result is unhealthy if even that fails, or if nothing can be widened.

    Raises:
        OutOfTrials: the limit of trials was reached; :func:`best_so_far` returns the set found until then.
    """
    chosen = _new(trials, candidates, ())
    widened: list[str] = []
    trial = trials.test(chosen, "candidates")
    joined, asked_at = 0, 2
    while not trial.healthy:
        stage, joining = "suspects", _new(trials, trial.suspects, chosen)
        joined += bool(joining)
        if joining and joined == asked_at:
            asked_at *= 2
            joining += _new(trials, propose([*chosen, *joining]), [*chosen, *joining])
        if not joining:
            stage, joining = "widened", _wider(trials, trial, chosen)
            widened += joining
        if not joining:
            return Result((), healthy=False, minimal=False)
        chosen += joining
        trial = trials.test(chosen, stage)
    parts = drop_superfluous(trials, grouped(trials, [trials.closed([pin]) for pin in chosen], fails_alone))
    return prove_minimal(trials, _narrowed(trials, parts, {trials.closed([pin]) for pin in widened}))


def _new(trials: Trials, names: Iterable[str], chosen: Sequence[str]) -> list[str]:
    """Return the distinct names that pin more than the chosen pins."""
    covered = trials.closed(chosen)
    return [name for name in dict.fromkeys(names) if name in trials.tree and not trials.closed([name]) <= covered]


def _wider(trials: Trials, trial: Trial, chosen: Sequence[str]) -> list[str]:
    """Return the parents of the suspects, or of the chosen pins, that pin more. A line adds all other lines."""
    stuck = [name for name in trial.suspects if name in trials.tree] or chosen
    covered = trials.closed(chosen)
    parents = [_parent(trials, name, covered) for name in stuck]
    lines = [name for name in trials.tree.atoms if is_line(name)] if any(map(is_line, stuck)) else []
    return _new(trials, [*(parent for parent in parents if parent is not None), *lines], chosen)


def _parent(trials: Trials, name: str, covered: Atoms) -> str | None:
    parent = trials.tree.parent(name)
    while parent is not None and trials.closed([parent]) <= covered:
        parent = trials.tree.parent(parent)
    return parent


def _narrowed(trials: Trials, parts: Sequence[Atoms], wide: set[Atoms]) -> list[Atoms]:
    """Return the parts, with each wide one replaced by its needed units."""
    narrow = list(parts)
    for part in (part for part in parts if part in wide):
        narrow.remove(part)
        others = NOTHING.union(*narrow)
        narrow += needed_units(trials, others, trials.units(part - others))
    return narrow
