"""The search by order of execution: the shortest healthy prefix, and whether its last module alone is enough."""

from __future__ import annotations

import math

from hypothesis import given, settings

from ampdbg.search.atoms import atom_tree
from ampdbg.search.prefix import first_overflowing
from ampdbg.search.trial import Seen, Trials
from tests.search.planted import SMALL, Step, planted, steps

TREE = atom_tree(SMALL)


def test_one_culprit_is_the_decisive_module_and_the_set() -> None:
    _, trials = planted("blocks.0.mlp.fc")
    found = first_overflowing(trials, SMALL)
    assert (found.pins, found.decisive, found.minimal, found.note) == (
        ("blocks.0.mlp.fc",),
        "blocks.0.mlp.fc",
        True,
        "",
    )
    assert {pin: trial.pins for pin, trial in found.dropped.items()} == {"blocks.0.mlp.fc": ()}


def test_where_the_last_alone_is_not_enough_it_says_so() -> None:
    _, trials = planted("embed", "blocks.0.attn")
    found = first_overflowing(trials, SMALL)
    assert (found.pins, found.healthy, found.minimal) == (
        (":own", "embed", "blocks.0:own", "blocks.0.attn"),
        True,
        False,
    )
    assert found.decisive == "blocks.0.attn"
    assert found.note == "blocks.0.attn alone is not enough: some of the 3 before it must be pinned too"
    assert found.dropped["blocks.0.attn"].suspects == ("blocks.0.attn",)


def test_the_order_is_that_of_execution_not_of_the_tree() -> None:
    _, trials = planted("embed", "head")
    found = first_overflowing(trials, ["head", "blocks.1", "embed", "", "blocks.0", "never ran"])
    assert (found.decisive, found.pins) == ("embed", ("embed", "blocks.1", "head"))


def test_a_parent_in_the_order_stands_for_its_own_lines() -> None:
    _, trials = planted(":own")
    assert first_overflowing(trials, SMALL).pins == (":own",)


def test_a_healthy_step_has_no_such_module() -> None:
    _, trials = planted()
    found = first_overflowing(trials, SMALL)
    assert (found.pins, found.healthy, found.minimal, found.decisive) == ((), True, True, "")


def test_where_everything_pinned_fails_one_trial_says_so() -> None:
    trials = Trials(lambda pins: Seen(healthy=False, why="nan"), TREE)
    found = first_overflowing(trials, SMALL)
    assert (found.healthy, found.note) == (False, "unhealthy with everything pinned: nan")
    assert len(trials.made) == 1


def test_out_of_trials_the_best_prefix_so_far_is_returned() -> None:
    trials = Trials(Step(TREE, [["embed"]]), TREE, max_trials=3)
    found = first_overflowing(trials, SMALL)
    assert (found.healthy, found.minimal, found.out_of_trials) == (True, False, True)
    assert found.pins == (":own", "embed", "blocks.0:own", "blocks.0.attn")


@given(steps())
@settings(max_examples=20)
def test_the_last_culprit_to_run_is_found_by_halves(step: Step) -> None:
    (culprits,) = step.ways
    trials = Trials(step, step.tree)
    found = first_overflowing(trials, step.tree.atoms)
    assert found.decisive == max(culprits, key=step.tree.place)
    assert found.healthy
    assert found.minimal == (len(culprits) == 1)
    assert len(trials.made) <= math.ceil(math.log2(len(step.tree.atoms))) + 3
