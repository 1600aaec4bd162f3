"""How far a search for pins has come: what each module is known to be, and the lines of the tree that say so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from ampdbg.record.pins import Trial
from ampdbg.search.atoms import Atoms, AtomTree, atom_tree

from .trial_text import pins_text

State = Literal["proven", "pinned", "suspected", "cleared", "unknown"]
"""``proven``: the step fails without it. ``pinned``: in FP32 in the present trial. ``suspected``: went wrong in a
trial, or is left in the smallest healthy set. ``cleared``: the step is healthy with it in half."""

QUIET: tuple[State, ...] = ("cleared", "unknown")
"""Not worth a line of their own."""

MIXED = None
"""The state of a container, whose children have different ones."""


@dataclass(frozen=True)
class Row:
    """A line of the tree: a module, or ``modules`` neighbours in the same state; ``depth`` counts levels.

    ``is_branch`` says that the lines below it, which are deeper, lie in it.
    """

    depth: int
    label: str
    state: State | None
    modules: int = 1
    name: str = ""
    is_branch: bool = False


@dataclass(frozen=True)
class SearchTree:
    """The modules that ran, their atoms, and what each node of the tree holds, containers included."""

    atoms: AtomTree
    children: Mapping[str, tuple[str, ...]]


def search_tree(names: Sequence[str]) -> SearchTree:
    """The tree over qualified ``names``, "" for the root; siblings stay in their order."""
    children: dict[str, dict[str, None]] = {}
    for name in names:
        child = name
        while child:
            parent = child.rpartition(".")[0]
            children.setdefault(parent, {})[child] = None
            child = parent
    return SearchTree(atom_tree(names), {parent: tuple(held) for parent, held in children.items()})


def states(tree: SearchTree, trials: Sequence[Trial], current: Iterable[str] = ()) -> dict[str, State]:
    """What ``trials`` say about each atom, while ``current`` is pinned.

    It takes for granted what the search does: that pinning more never makes a healthy step fail.
    """
    best = smallest_healthy(tree, trials)
    failed = [_atoms(tree, trial.pins) for trial in trials if not trial.healthy]
    suspected = best if best is not None else _suspects(tree, trials)
    proven = _proven(best, failed) if best is not None else frozenset()
    pinned = _atoms(tree, current)

    def state(atom: str) -> State:
        if atom in proven:
            return "proven"
        if atom in pinned:
            return "pinned"
        if atom in suspected:
            return "suspected"
        return "unknown" if best is None else "cleared"

    return {atom: state(atom) for atom in tree.atoms.atoms}


def smallest_healthy(tree: SearchTree, trials: Iterable[Trial]) -> Atoms | None:
    """The fewest atoms that made the step healthy, of equal ones the last; None while it took the whole model."""
    best: Atoms | None = None
    for trial in trials:
        atoms = _atoms(tree, trial.pins)
        if trial.healthy and len(atoms) <= len(best if best is not None else tree.atoms.atoms[1:]):
            best = atoms
    return best


def trying(tree: SearchTree, trials: Sequence[Trial], current: Sequence[str]) -> str:
    """What the trial of the pins ``current`` is about: what they leave out of the set known so far, or they alone."""
    best = smallest_healthy(tree, trials)
    atoms = _atoms(tree, current)
    if best is not None and atoms == best:
        return "the set in FP32"
    if best is None or not atoms < best:
        return f"{pins_text(current)} in FP32"
    return f"the set without {pins_text(tree.atoms.compress(best - atoms))}"


def _atoms(tree: SearchTree, pins: Iterable[str]) -> Atoms:
    return tree.atoms.expand(pin for pin in pins if pin in tree.atoms)


def _suspects(tree: SearchTree, trials: Iterable[Trial]) -> Atoms:
    return frozenset().union(*(_atoms(tree, trial.suspects) for trial in trials if not trial.healthy))


def _proven(best: Atoms, failed: Iterable[Atoms]) -> Atoms:
    """What was all that a failed trial lacked of the best set."""
    lacking = (best - atoms for atoms in failed)
    return frozenset(atom for missing in lacking if len(missing) == 1 for atom in missing)


def rows(tree: SearchTree, known: Mapping[str, State], most: int) -> list[Row]:
    """The tree in at most ``most`` lines (at least 2).

    Branches of one state are one line, and so are quiet neighbours. Where that is still too long, only the
    branches are shown in which something is not quiet; where these are too many, what is not quiet is listed.
    """
    every = list(_rows(tree, known))
    branches = [row for row in every if row.state not in QUIET or row.is_branch]
    listed = [replace(row, depth=0, label=row.name) for row in branches if row.state not in (*QUIET, MIXED)]
    if len(every) <= most:
        return every
    return _cut(branches if len(branches) < most else listed, known, most)


def _cut(shown: Sequence[Row], known: Mapping[str, State], most: int) -> list[Row]:
    """The first of the rows, and a line that counts all that have none."""
    kept = shown[: most - 1]
    left = Counter(known.values())
    for row in kept:
        if row.state is not None:
            left[row.state] -= row.modules
    return [*kept, Row(0, f"and {counts_text(left)}", MIXED)] if left.total() else list(kept)


def counts_text(counts: Mapping[State, int]) -> str:
    """``2 proven, 41 cleared``; states that nothing is in are left out."""
    order: tuple[State, ...] = ("proven", "pinned", "suspected", "cleared", "unknown")
    return ", ".join(f"{counts[state]} {state}" for state in order if counts.get(state))


def _rows(tree: SearchTree, known: Mapping[str, State]) -> Iterator[Row]:
    """Depth first, without recursion: modules may be nested deeper than Python's stack."""
    ahead: list[Row | tuple[str, int]] = [("", 0)]
    while ahead:
        item = ahead.pop()
        if isinstance(item, Row):
            yield item
            continue
        name, depth = item
        label, state = name.rpartition(".")[2] or "(model)", _only(tree, known, name)
        if name not in tree.children or state is not None:
            yield Row(depth, label, state, len(tree.atoms.under(name)), name)
        else:
            own = tree.atoms.own(name) if name in tree.atoms else ""
            yield Row(depth, label, known.get(own, MIXED), name=name, is_branch=True)
            ahead.extend(reversed(_folded(tree, known, tree.children[name], depth + 1)))


def _only(tree: SearchTree, known: Mapping[str, State], name: str) -> State | None:
    """The state that all of a branch is in."""
    found = {known[atom] for atom in tree.atoms.under(name)}
    return found.pop() if len(found) == 1 else None


def _folded(
    tree: SearchTree, known: Mapping[str, State], siblings: Sequence[str], depth: int
) -> list[Row | tuple[str, int]]:
    """The siblings to be drawn; those in a row that are all in the same quiet state are one line."""
    folded: list[Row | tuple[str, int]] = []
    for state, group in groupby(siblings, key=lambda name: _only(tree, known, name)):
        names = list(group)
        if state not in QUIET or len(names) == 1:
            folded += [(name, depth) for name in names]
            continue
        first, last = (name.rpartition(".")[2] for name in (names[0], names[-1]))
        label = f"{first}, {last}" if len(names) == 2 else f"{first} to {last}"
        folded.append(Row(depth, label, state, sum(len(tree.atoms.under(name)) for name in names)))
    return folded
