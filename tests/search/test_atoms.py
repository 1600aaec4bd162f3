"""Atoms: a leaf is one, a parent's own lines are one, and all of a subtree's are its module."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampdbg.search.strategies import AtomTree, atom_tree
from tests.search.planted import SMALL, random_names, trees

TREE = atom_tree(SMALL)
LEVELS = {
    ":own": 0,
    "embed": 1,
    "blocks.0:own": 1,
    "blocks.0.attn": 3,
    "blocks.0.mlp:own": 3,
    "blocks.0.mlp.fc": 4,
    "blocks.1": 2,
    "head": 1,
}


def test_the_parents_own_atom_comes_before_its_childrens_and_levels_say_how_large_a_block_begins_there() -> None:
    assert dict(zip(TREE.atoms, TREE.levels, strict=True)) == LEVELS
    assert tuple(LEVELS) == TREE.atoms


def test_siblings_are_in_the_order_in_which_anything_in_them_was_named() -> None:
    assert atom_tree(["a.x", "b", "a.y", "a", ""]).atoms == (":own", "a:own", "a.x", "a.y", "b")


UNDER = {
    "head": ("head",),
    "blocks.0.mlp": ("blocks.0.mlp:own", "blocks.0.mlp.fc"),
    "blocks.0.mlp:own": ("blocks.0.mlp:own",),
    "blocks": TREE.atoms[2:7],
    "": TREE.atoms,
    ":own": (":own",),
}


@pytest.mark.parametrize(("name", "atoms"), UNDER.items())
def test_what_is_under_a_module_an_atom_or_a_container(name: str, atoms: tuple[str, ...]) -> None:
    assert name in TREE
    assert TREE.under(name) == atoms


@pytest.mark.parametrize("name", ["nothing", "head:own", "blocks:own", "blocks.2"])
def test_nothing_else_is_known(name: str) -> None:
    assert name not in TREE
    with pytest.raises(KeyError):
        TREE.under(name)


def test_a_module_with_children_has_lines_of_its_own_and_a_parent_unless_it_is_the_root() -> None:
    own = {"": ":own", "blocks.0": "blocks.0:own", "head": "head", "blocks.0:own": "blocks.0:own", "blocks": "blocks"}
    assert {name: TREE.own(name) for name in own} == own
    names = ("blocks.0.mlp:own", "blocks.0.mlp", "blocks.0", "head", ":own", "")
    assert [TREE.parent(name) for name in names] == ["blocks.0.mlp", "blocks.0", "blocks", "", "", None]


COMPRESSED = {
    ("blocks.0.mlp.fc", "head", "blocks.0.mlp:own"): ("blocks.0.mlp", "head"),
    TREE.atoms: ("",),
    TREE.atoms[1:]: ("embed", "blocks.0", "blocks.1", "head"),
    (): (),
}


@pytest.mark.parametrize(("atoms", "pins"), COMPRESSED.items())
def test_a_whole_module_stands_for_its_atoms_and_a_container_for_none(
    atoms: tuple[str, ...], pins: tuple[str, ...]
) -> None:
    assert TREE.compress(atoms) == pins


@pytest.mark.parametrize(
    ("names", "pins"), [([""], ("",)), (["encoder", "decoder"], ("encoder", "decoder")), ([], ())], ids=str
)
def test_all_of_a_model_is_its_root_unless_that_never_ran(names: list[str], pins: tuple[str, ...]) -> None:
    tree = atom_tree(names)
    assert (tree.atoms, tree.compress(tree.atoms)) == (pins, pins)
    assert tree.expand([]) == frozenset()


def test_modules_may_be_nested_deeper_than_pythons_stack() -> None:
    names = [".".join(["m"] * depth) for depth in range(1, 1500)]
    tree = atom_tree(["", *names])
    assert len(tree.atoms) == 1500
    assert tree.compress(tree.under("m.m")) == ("m.m",)


@given(trees(), st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_pins_expand_to_the_atoms_that_they_were_made_of(tree: AtomTree, source: random.Random) -> None:
    share = source.random()
    atoms = frozenset(atom for atom in tree.atoms if source.random() < share)
    pins = tree.compress(atoms)
    assert tree.expand(pins) == atoms
    assert tree.compress(pins_atoms := sorted(atoms, reverse=True)) == pins, pins_atoms
    assert sum(len(tree.under(pin)) for pin in pins) == len(atoms), "pins that overlap"


@given(st.integers(0, 1000), st.integers(1, 6))
@settings(max_examples=50)
def test_no_fewer_pins_would_do(seed: int, recent: int) -> None:
    source = random.Random(seed)
    names = random_names(6, source, recent)
    tree = atom_tree(names)
    atoms = frozenset(atom for atom in tree.atoms if source.random() < 0.7)
    pinnable = {*names, *tree.atoms}
    fewer = range(len(tree.compress(atoms)))
    assert not any(
        tree.expand(pins) == atoms for count in fewer for pins in itertools.combinations(sorted(pinnable), count)
    )
