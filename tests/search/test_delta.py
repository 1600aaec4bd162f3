"""The blind search: the planted set from healthy and unhealthy alone, block before child."""

from __future__ import annotations

import hashlib
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampdbg.record.pins import Trial
from ampdbg.search.strategies import Atoms, AtomTree, Trials, atom_tree, best_so_far, delta_debug
from tests.search.planted import SMALL, Step, of_any_size, planted, steps, trees

TREE = atom_tree(SMALL)


def test_everything_is_tried_first_then_nothing_then_blocks() -> None:
    names = ["", *(f"blocks.{block}{part}" for block in range(8) for part in ("", ".attn", ".mlp"))]
    _, trials = planted("blocks.5.mlp", names=names)
    found = delta_debug(trials)
    assert (found.pins, found.healthy, found.minimal) == (("blocks.5.mlp",), True, True)
    assert [(trial.stage, trial.pins) for trial in trials.made][:4] == [
        ("everything", ("",)),
        ("nothing", ()),
        ("narrowing", (":own", "blocks.0", "blocks.1", "blocks.2", "blocks.3")),
        ("narrowing", (":own", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "blocks.4", "blocks.5")),
    ]


def test_it_tells_what_dropping_each_pin_does() -> None:
    _, trials = planted("embed", "head")
    found = delta_debug(trials)
    assert {pin: trial.suspects for pin, trial in found.dropped.items()} == {"embed": ("embed",), "head": ("head",)}


@pytest.mark.parametrize(("is_healthy", "trials"), [(True, 2), (False, 1)], ids=["healthy", "failing with all pinned"])
def test_a_step_that_no_pin_changes_needs_few_trials_and_no_pins(is_healthy: bool, trials: int) -> None:
    made = Trials(lambda pins: Trial(pins, healthy=is_healthy), TREE)
    found = delta_debug(made)
    assert (found.pins, found.healthy, found.minimal) == ((), is_healthy, is_healthy)
    assert len(made.made) == trials


def test_where_everything_pinned_fails_an_earlier_healthy_set_is_made_smaller() -> None:
    trials = Trials(lambda pins: Trial(pins, "head" in pins), TREE)
    trials.test(["head", "embed"], "earlier")
    found = delta_debug(trials)
    assert (found.pins, found.minimal) == (("head",), True)


def test_of_two_sets_that_would_do_the_first_to_run_is_found() -> None:
    trials = Trials(Step(TREE, [["head"], ["embed"]]), TREE)
    assert delta_debug(trials).pins == ("embed",)


def test_a_model_of_one_module_is_found_and_where_nothing_ran_nothing_is() -> None:
    _, trials = planted("", names=[""])
    assert delta_debug(trials).pins == ("",)
    assert not delta_debug(Trials(lambda pins: Trial(pins, healthy=False), atom_tree([]))).healthy


def test_tied_modules_are_one() -> None:
    trials = Trials(Step(TREE, [["head", "blocks.1"]]), TREE, together=[("embed", "head")])
    found = delta_debug(trials)
    assert (found.pins, found.minimal) == (("embed", "blocks.1", "head"), True)
    assert found.dropped["embed"] is found.dropped["head"]


@of_any_size
@given(data=st.data())
@settings(max_examples=25)
def test_the_planted_set_is_found_within_the_bound(sizes: tuple[int, ...], data: st.DataObject) -> None:
    step = data.draw(steps(sizes))
    (culprits,) = step.ways
    trials = Trials(step, step.tree)
    found = delta_debug(trials)
    assert (found.pins, found.minimal) == (step.tree.compress(culprits), True)
    assert set(found.dropped) == set(found.pins)
    assert len(trials.made) <= 3 * len(culprits) * math.log2(len(step.tree.atoms)) + 10


@given(trees([50]), st.data())
@settings(max_examples=60)
def test_of_several_ways_to_cure_it_finds_one_and_nothing_besides(tree: AtomTree, data: st.DataObject) -> None:
    way = st.lists(st.sampled_from(tree.atoms), min_size=1, max_size=5, unique=True)
    ways = data.draw(st.lists(way, min_size=2, max_size=4))
    found, again = (delta_debug(Trials(Step(tree, ways), tree)) for _ in range(2))
    assert tree.expand(found.pins) in [frozenset(way) for way in ways]
    assert found == again


def whimsical(seed: int, share: int, pinned: Atoms) -> bool:
    """A predicate without any order: so many of 256 sets are healthy."""
    digest = hashlib.sha256(repr((seed, sorted(pinned))).encode()).digest()
    return digest[0] < share


@given(trees([12]), st.integers(0, 2**32), st.integers(0, 200))
@settings(max_examples=150)
def test_where_pins_can_harm_the_set_is_still_healthy_and_minimal(tree: AtomTree, seed: int, share: int) -> None:
    def healthy(pins: Atoms) -> bool:
        return len(pins) == len(tree.atoms) or whimsical(seed, share, pins)

    trials = Trials(lambda pins: Trial(pins, healthy(tree.expand(pins))), tree)
    found = delta_debug(trials)
    atoms = tree.expand(found.pins)
    assert found.minimal
    assert healthy(atoms)
    assert not any(healthy(atoms - {atom}) for atom in atoms)
    assert not any(healthy(atoms - tree.expand([pin])) for pin in found.pins)
    count = len(tree.atoms)
    assert len(trials.made) <= 2 + count * (math.log2(count) + 2) + count * (count + 1)


def test_after_an_interrupt_the_best_set_so_far_is_still_there() -> None:
    def interrupt(trial: Trial) -> None:
        if trial.stage == "narrowing" and trial.healthy:
            raise KeyboardInterrupt

    trials = Trials(Step(TREE, [["blocks.0.attn"]]), TREE, on_trial=interrupt)
    with pytest.raises(KeyboardInterrupt):
        delta_debug(trials)
    found = best_so_far(trials)
    assert (found.pins, found.healthy, found.minimal) == (trials.made[-1].pins, True, False)
