"""Searches for a minimal set of pins: the tree of what can be pinned, trials that are made once, and two strategies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

from ampdbg.record.pins import OWN, Trial, is_line

Atoms = frozenset[str]
"""A set of atoms: of a leaf module's name, or of ``NAME:own``, a parent's own lines."""


@dataclass(frozen=True)
class AtomTree:
    """The modules that ran, as atoms in tree order: depth first, a parent's own lines before its children's.

    All atoms of a subtree stand next to each other, and together they are its module. ``levels`` has one number
    an atom: how deep in the tree the largest subtree is that begins with it (0 is the root). ``modules`` likewise
    has the largest module that begins with it and may be pinned, and where that module's atoms end.
    """

    atoms: tuple[str, ...]
    levels: tuple[int, ...]
    modules: tuple[tuple[str, int], ...]
    _spans: Mapping[str, tuple[int, int]]

    def __contains__(self, name: object) -> bool:
        """:meth:`under` knows the name."""
        return name in self._spans

    def under(self, name: str) -> tuple[str, ...]:
        """The atoms of a module, of an atom, or of a container that never ran itself, such as a ModuleList.

        Raises:
            KeyError: nothing of that name ran.
        """
        start, end = self._spans[name]
        return self.atoms[start:end]

    def own(self, name: str) -> str:
        """The atom that stands for the module's own lines: its name where it is a leaf or an atom already."""
        return name + OWN if name + OWN in self._spans else name

    def has_run(self, name: str) -> bool:
        """It is an atom. A holder of several root models is none: it has no own lines to pin."""
        return name in self._spans and self.under(name) == (name,)

    def parent(self, name: str) -> str | None:
        """What holds this atom, module or container, one level up; None above the root.

        Above ``NAME:own`` is ``NAME``. A root that never ran is a container too.
        """
        if name.endswith(OWN) and name.removesuffix(OWN) in self._spans:
            return name.removesuffix(OWN)
        if is_line(name):
            return None
        return name.rpartition(".")[0] if name else None

    def expand(self, pins: Iterable[str]) -> Atoms:
        """The atoms of all the pins.

        Raises:
            KeyError: nothing of a pin's name ran.
        """
        return frozenset(atom for pin in pins for atom in self.under(pin))

    def compress(self, atoms: Iterable[str]) -> tuple[str, ...]:
        """The fewest pins that are these atoms, in tree order: a whole module wherever all of its atoms are in."""
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
        """Where the atom, or a module's first one, stands in ``atoms``."""
        return self._spans[atom][0]


def atom_tree(names: Sequence[str]) -> AtomTree:
    """The tree of the modules that ran.

    Args:
        names: their qualified names, "" for the root, in order of execution or registration; that becomes the order
            of siblings. Lines of a script stand behind all modules, and in none.
            Containers that never ran need not be named, and are never a pin: nothing would run in them.
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
    for name in reversed(nodes):  # a node comes after all that it holds, so that the outermost has the last word
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
    """What each node holds, containers included, in the order of the first name in it."""
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
    ahead = [""]  # not recursive: modules may be nested deeper than Python's stack
    while ahead:
        nodes.append(ahead.pop())
        ahead.extend(reversed(children.get(nodes[-1], ())))
    return nodes


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


@dataclass
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
        """What each tied atom moves with."""
        return {atom: unit for unit in map(self.tree.expand, self.together) if len(unit) > 1 for atom in unit}

    @property
    def made(self) -> tuple[Trial, ...]:
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
            if self.max_trials is not None and len(self._made) >= self.max_trials:
                raise OutOfTrials
            pins = self.tree.compress(atoms)
            trial = self._made[atoms] = trial_of(stage, self._run(pins))
            if trial.healthy and (self.best is None or len(atoms) < len(self.tree.expand(self.best))):
                self.best = trial.pins
            self.on_trial(trial)
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
        runs = [self.try_(pins)]
        while runs[-1].healthy and len(runs) < self.repeats:
            runs.append(self.try_(pins))
        return runs


NOTHING: Atoms = frozenset()

MOST_ATOM_RUNS = 100_000
"""A trial runs every atom. A proof that drops each of k pins of n atoms alone runs k·n: beyond this many, about a
minute on two cores, pins are dropped in groups, so that the time of a search stays linear in n."""

GROUPS = 10
"""So many: where everything fails, each of them costs a trial, and shows only that it is needed."""


@dataclass(frozen=True)
class Result:
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


def best_so_far(trials: Trials) -> Result:
    """The smallest healthy set that was tried, where a search ended early."""
    pins = trials.best or ()
    known = {pin: trials.known(_without(trials, pins, pin)) for pin in pins}
    dropped = {pin: trial for pin, trial in known.items() if trial is not None}
    return Result(pins, trials.best is not None, minimal=False, dropped=dropped)


def grouped(trials: Trials, parts: Sequence[Atoms], fails_alone: Callable[[Atoms], bool]) -> list[Atoms]:
    """The parts, where dropping each alone takes too long in groups of neighbours.

    Those that are known to fail alone are the first group, whose one trial shows as much as one of each tenth of them.
    """
    if len(parts) <= most_dropped(trials.tree):
        return list(parts)
    failing = [part for part in parts if fails_alone(part)]
    others = [part for part in parts if part not in set(failing)]
    size = max(1, -(-len(others) // GROUPS))
    neighbours = (others[start : start + size] for start in range(0, len(others), size))
    return [NOTHING.union(*group) for group in (failing, *neighbours) if group]


def most_dropped(tree: AtomTree) -> int:
    """How many parts may be dropped each alone."""
    return max(1, MOST_ATOM_RUNS // max(1, len(tree.atoms)))


def drop_superfluous(trials: Trials, parts: Sequence[Atoms]) -> list[Atoms]:
    """The parts of a healthy set that are needed when they are dropped in turn, the last one first.

    A needed part costs one trial, a run of superfluous ones about twice the logarithm of its length. A part that
    lies within the others goes at no cost.
    """
    kept = list(parts)
    undecided = len(kept)

    def is_healthy_without(count: int) -> bool:
        rest = kept[: undecided - count] + kept[undecided:]
        return trials.test(NOTHING.union(*rest), "with fewer").healthy

    while undecided > 0:
        superfluous = _most(is_healthy_without, undecided)
        del kept[undecided - superfluous : undecided]
        undecided -= superfluous + 1  # the one before them is needed
    return kept


def _most(works: Callable[[int], bool], limit: int) -> int:
    """The largest count up to ``limit`` that works where all below it do: 1, 2, 4, 8 …, then by halves."""
    good, bad = 0, limit + 1
    while good < limit and bad > limit:
        count = min(max(1, 2 * good), limit)
        good, bad = (count, bad) if works(count) else (good, count)
    while bad - good > 1:
        count = (good + bad) // 2
        good, bad = (count, bad) if works(count) else (good, count)
    return good


def smallest(trials: Trials, base: Atoms, units: Sequence[Atoms]) -> list[Atoms]:
    """Those of the units that are needed beside ``base``; with all of them it must be healthy.

    Finds where the shortest healthy prefix of the units ends, keeps its last unit, and continues before it: for
    each needed unit one trial, and one for each halving. Splits between the largest blocks near the middle.

    Whatever the predicate is like, each step has an unhealthy prefix and a longer healthy one, so that this always
    ends with a healthy set. Where pins never harm, the set is also 1-minimal.
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
    """Where to split ``low`` to ``high``: in the middle third, before the largest block, as central as can be."""
    third = -((low - high) // 3)
    return min(range(low + third, high - third + 1), key=lambda place: (levels[place], abs(2 * place - low - high)))


def certified(trials: Trials, parts: Sequence[Atoms]) -> Result:
    """Drops each part of a healthy set alone, then each pin, until every such trial is unhealthy.

    Trials made before are not made again. A healthy one, which there is only where pins can harm, makes the set
    smaller and begins the round again, so that there are never more rounds than parts and pins. Where the pins are
    too many to be dropped each alone, the set is not proven to be minimal.
    """
    parts = [part for part in parts if part]
    while (smaller := next(_healthy_drops(trials, parts), None)) is not None:
        parts = [part & smaller for part in parts if part & smaller]
    pins = trials.tree.compress(NOTHING.union(*parts))
    if len(pins) > most_dropped(trials.tree):
        return Result(pins, healthy=True, minimal=False)
    dropped = {pin: trials.test(_without(trials, pins, pin), "with fewer") for pin in pins}
    return Result(pins, healthy=True, minimal=True, dropped=dropped)


def _healthy_drops(trials: Trials, parts: Sequence[Atoms]) -> Iterator[Atoms]:
    atoms = NOTHING.union(*parts)
    pins = trials.tree.compress(atoms)
    alone = pins if len(pins) <= most_dropped(trials.tree) else ()
    for rest in (*(atoms - part for part in reversed(parts)), *(_without(trials, pins, pin) for pin in alone)):
        if trials.test(rest, "with fewer").healthy:
            yield rest


def _without(trials: Trials, pins: tuple[str, ...], pin: str) -> Atoms:
    """The atoms of ``pins`` without those of ``pin`` and of all that is tied to it."""
    return trials.closed(pins) - trials.closed([pin])


def delta_debug(trials: Trials) -> Result:
    """A 1-minimal set of atoms, found from the answers healthy and unhealthy alone, block before child.

    For k needed ones of n atoms it takes at most 3·k·log₂(n) + 10 trials. Of several such sets it finds the one
    whose atoms come first. Where not even everything pinned is healthy, the best set so far is made smaller, or
    there is nothing to find.

    Raises:
        OutOfTrials: the limit of the trials was reached; :func:`best_so_far` has what was found.
    """
    everything = trials.test(trials.tree.atoms, "everything")
    start = trials.tree.atoms if everything.healthy else trials.best
    if start is None:
        return Result((), healthy=False, minimal=False)
    trials.test((), "nothing")
    return certified(trials, smallest(trials, NOTHING, trials.units(trials.closed(start))))


Proposal = Callable[[Sequence[str]], Sequence[str]]
"""Names what else would go wrong with these pins in force."""


def guided(
    trials: Trials,
    candidates: Sequence[str],
    propose: Proposal = lambda pins: (),
    fails_alone: Callable[[Atoms], bool] = lambda part: False,
) -> Result:
    """The candidates that are needed, with those that only show once they are cured.

    Candidates and suspects are pins, the most likely first: of two that would do, the earlier one is kept. Names of
    what never ran are passed over. Where all candidates are needed it takes one trial and one for each; of many
    superfluous ones a run costs the logarithm of its length. A pin stays as wide as it was given; only what
    this search widened itself it narrows again, down to atoms.

    Where suspects show one after another, as in a chain of layers that each hide the next, ``propose`` is asked from
    the second on, after twice as many each time. ``fails_alone`` names atoms that the step is known to be unhealthy
    without, whatever else is pinned; of very many candidates those are not dropped apart from each other.

    Where an unhealthy step names no new suspects, those it names, or else all pins, are widened by one level, at last
    to the root. Nothing healthy is found where even that is not, or where there was nothing to widen.

    Raises:
        OutOfTrials: the limit of the trials was reached; :func:`best_so_far` has what was found.
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
    return certified(trials, _narrowed(trials, parts, {trials.closed([pin]) for pin in widened}))


def _new(trials: Trials, names: Iterable[str], chosen: Sequence[str]) -> list[str]:
    """The names, each once, that pin more than what is chosen."""
    covered = trials.closed(chosen)
    return [name for name in dict.fromkeys(names) if name in trials.tree and not trials.closed([name]) <= covered]


def _wider(trials: Trials, trial: Trial, chosen: Sequence[str]) -> list[str]:
    """What contains the suspects, or else the chosen, and pins more than they do; of a line all other lines."""
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
    """The parts, with what is needed of each wide one in place of it."""
    narrow = list(parts)
    for part in (part for part in parts if part in wide):
        narrow.remove(part)
        others = NOTHING.union(*narrow)
        narrow += smallest(trials, others, trials.units(part - others))
    return narrow
