"""Trials: each set is tried once, the best is kept, tied modules move together, and the limit holds."""

from collections.abc import Iterator

import pytest

from ampdbg.record.pins import Trial
from ampdbg.search.strategies import OutOfTrials, Trials, atom_tree
from tests.search.planted import SMALL, Step, planted

TREE = atom_tree(SMALL)


def test_a_set_is_tried_once_however_it_is_named_and_passed_on_once_as_it_ends() -> None:
    seen: list[Trial] = []
    step = Step(TREE, [["head"]])
    trials = Trials(step, TREE, on_trial=seen.append)
    first = trials.test(["blocks.0.mlp"], "one")
    second = trials.test(["head"], "")
    assert trials.test(["blocks.0.mlp.fc", "blocks.0.mlp:own", "blocks.0.mlp.fc"], "two") is first
    assert trials.made == tuple(seen) == (first, second)
    assert step.ran == [("blocks.0.mlp",), ("head",)]


def test_a_trial_says_what_was_seen() -> None:
    _, trials = planted("head", "embed")
    assert trials.test(["head"], "candidates") == Trial(
        ("head",), healthy=False, why="inf", stage="candidates", suspects=("embed",), runs=1, healthy_runs=0
    )
    assert trials.test(["head", "embed"], "joined") == Trial(
        ("embed", "head"), healthy=True, why="", stage="joined", runs=1, healthy_runs=1, loss=1.0, seconds=0.5
    )


def test_the_best_is_the_healthy_set_of_the_fewest_atoms() -> None:
    _, trials = planted("head")
    bests = []
    for pins in (["embed"], ["blocks.0", "head"], ["embed", "head"], ["head", "blocks.1"], ["head"]):
        trials.test(pins, "")
        bests.append(trials.best)
    assert bests == [None, ("blocks.0", "head"), ("embed", "head"), ("embed", "head"), ("head",)]
    trials = Trials(lambda pins: Trial(pins, healthy=True), TREE)
    trials.test([], "")
    assert trials.best == ()


def test_beyond_the_limit_only_what_is_known_is_answered() -> None:
    step = Step(TREE, [["head"]])
    trials = Trials(step, TREE, max_trials=1)
    known = trials.test(["head"], "")
    with pytest.raises(OutOfTrials):
        trials.test(["embed"], "")
    assert trials.test(["head"], "") is known
    assert (len(trials.made), len(step.ran)) == (1, 1)


def flaky(answers: str) -> tuple[Trials, Iterator[str]]:
    """Trials of three repeats whose runs are healthy where there is a "+"."""
    left = iter(answers)
    return Trials(lambda pins: Trial(pins, healthy=next(left) == "+", why="nan", seconds=1.0), TREE, repeats=3), left


@pytest.mark.parametrize(("answers", "runs", "healthy_runs"), [("+++", 3, 3), ("++-", 3, 2), ("+-", 2, 1), ("-", 1, 0)])
def test_repeats_end_with_the_first_unhealthy_run(answers: str, runs: int, healthy_runs: int) -> None:
    trials, left = flaky(answers + "+")
    trial = trials.test(["head"], "")
    assert (trial.healthy, trial.runs, trial.healthy_runs) == ("-" not in answers, runs, healthy_runs)
    assert (trial.seconds, list(left), len(trials.made)) == (runs, ["+"], 1)


def test_an_interrupt_goes_through_and_what_was_made_stays() -> None:
    def interrupted(pins: tuple[str, ...]) -> Trial:
        if pins == ("embed",):
            raise KeyboardInterrupt
        return Trial(pins, healthy=True)

    trials = Trials(interrupted, TREE)
    trials.test(["head"], "")
    with pytest.raises(KeyboardInterrupt):
        trials.test(["embed"], "")
    assert (trials.best, trials.made) == (("head",), (trials.known(["head"]),))
    assert trials.known(["embed"]) is None


def test_tied_modules_move_together() -> None:
    step = Step(TREE, [["head"]])
    trials = Trials(step, TREE, together=[("embed", "head", "blocks.1")])
    assert trials.test(["embed"], "").pins == ("embed", "blocks.1", "head")
    assert trials.test(["head"], "") is trials.made[0]
    assert trials.test(["blocks.0.attn"], "").pins == ("blocks.0.attn",)
    assert trials.units(["head", "blocks.0.attn", "embed"]) == (
        frozenset({"embed", "blocks.1", "head"}),
        frozenset({"blocks.0.attn"}),
    )


def test_pins_of_what_never_ran_are_refused() -> None:
    _, trials = planted("head")
    with pytest.raises(KeyError):
        trials.test(["tail"], "")
