"""Planted failures for searches: trees of modules, and steps that are healthy exactly if the culprits are pinned."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st

from ampdbg.record.pins import Trial
from ampdbg.search import AtomTree, Trials, atom_tree

SMALL = ("", "embed", "blocks.0", "blocks.0.attn", "blocks.0.mlp", "blocks.0.mlp.fc", "blocks.1", "head")
"""A model whose container ``blocks`` never runs; its second block is a leaf."""

of_any_size = pytest.mark.parametrize("sizes", [(50, 500), pytest.param((2000,), marks=pytest.mark.slow)], ids=str)
"""The number of modules in the trees of a property."""


@dataclass
class Step:
    """A failing step: a trial is healthy if its pins include all culprits of one of the ``ways``.

    ``suspects`` are the unpinned culprits of the first way; with ``masking`` only the first of them.
    """

    tree: AtomTree
    ways: Sequence[Sequence[str]]
    masking: bool = False
    ran: list[tuple[str, ...]] = field(default_factory=list)

    def __call__(self, pins: tuple[str, ...]) -> Trial:
        self.ran.append(pins)
        pinned = self.tree.expand(pins)
        if any(pinned >= self.tree.expand(way) for way in self.ways):
            return Trial(pins, healthy=True, loss=1.0, seconds=0.5)
        missing = tuple(name for name in self.ways[0] if not pinned >= self.tree.expand([name]))
        return Trial(pins, healthy=False, why="inf", suspects=missing[:1] if self.masking else missing)


def planted(*culprits: str, names: Sequence[str] = SMALL, masking: bool = False) -> tuple[Step, Trials]:
    """A step with these culprits, and trials of it."""
    step = Step(atom_tree(names), [culprits], masking)
    return step, Trials(step, step.tree)


def random_names(count: int, source: random.Random, recent: int) -> list[str]:
    """``count`` names of modules that ran; the parent of each is among the last ``recent`` nodes (1 makes a chain).

    One node in ten is a container, which never runs and is not named.
    """
    nodes = [""]
    names = [""]
    while len(names) < count:
        parent = source.choice(nodes[-recent:])
        nodes.append(f"{parent}.m{len(nodes)}".lstrip("."))
        if source.random() < 0.9:
            names.append(nodes[-1])
    return names


@st.composite
def trees(draw: st.DrawFn, sizes: Iterable[int] = (50, 500)) -> AtomTree:
    """Trees of these sizes: chains, bushes and everything between."""
    count = draw(st.sampled_from(list(sizes)))
    recent = draw(st.sampled_from([1, 2, 8, 64, 10_000]))
    return atom_tree(random_names(count, random.Random(draw(st.integers(0, 2**32))), recent))


@st.composite
def steps(draw: st.DrawFn, sizes: Iterable[int] = (50, 500), masking: bool = False) -> Step:
    """Steps with 1 to 8 culprits, which are atoms in any order."""
    tree = draw(trees(sizes))
    places = st.integers(0, len(tree.atoms) - 1)
    culprits = draw(st.lists(places, min_size=1, max_size=8, unique=True))
    return Step(tree, [[tree.atoms[place] for place in culprits]], masking)
