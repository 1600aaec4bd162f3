"""The guided search: candidates together, what shows next joins, and each is dropped in turn."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampdbg.record.pins import Trial
from ampdbg.search.strategies import GROUPS, AtomTree, OutOfTrials, Trials, atom_tree, best_so_far, delta_debug, guided
from tests.search.planted import SMALL, Step, of_any_size, planted, steps

TREE = atom_tree(SMALL)


def stages(trials: Trials) -> list[tuple[str, tuple[str, ...], bool]]:
    return [(trial.stage, trial.pins, trial.healthy) for trial in trials.made]


def merged(tree: AtomTree, pins: Sequence[str]) -> int:
    """How many pins stand for several atoms; each is dropped as a whole too."""
    return sum(len(tree.under(pin)) > 1 for pin in pins)


def test_right_candidates_cost_one_trial_and_one_each() -> None:
    _, trials = planted("embed", "head")
    found = guided(trials, ["embed", "head"])
    assert (found.pins, found.healthy, found.minimal) == (("embed", "head"), True, True)
    assert stages(trials) == [
        ("candidates", ("embed", "head"), True),
        ("with fewer", ("embed",), False),
        ("with fewer", ("head",), False),
    ]


def test_it_tells_what_dropping_each_pin_does() -> None:
    _, trials = planted("embed", "head")
    found = guided(trials, ["embed", "head"])
    assert {pin: (trial.pins, trial.healthy, trial.suspects) for pin, trial in found.dropped.items()} == {
        "embed": (("head",), False, ("embed",)),
        "head": (("embed",), False, ("head",)),
    }


def test_of_few_culprits_in_a_large_model_each_is_dropped() -> None:
    names = [f"layers.{index}" for index in range(2000)]
    culprits = names[::50]
    _, trials = planted(*culprits, names=["", *names])
    found = guided(trials, culprits)
    assert (found.pins, found.minimal) == (tuple(culprits), True)


def test_a_culprit_that_shows_when_another_is_cured_joins() -> None:
    _, trials = planted("embed", "blocks.0.attn", "head", masking=True)
    assert guided(trials, ["embed"]).pins == ("embed", "blocks.0.attn", "head")
    assert stages(trials)[:3] == [
        ("candidates", ("embed",), False),
        ("suspects", ("embed", "blocks.0.attn"), False),
        ("suspects", ("embed", "blocks.0.attn", "head"), True),
    ]


def test_where_each_culprit_hides_the_next_they_are_proposed_with_the_pins_in_force() -> None:
    names = [f"layers.{index}" for index in range(40)]
    asked: list[int] = []

    def propose(pins: Sequence[str]) -> Sequence[str]:
        asked.append(len(pins))
        return [*names[:20], "layers.none"] if len(asked) == 1 else names

    _, trials = planted(*names, names=["", *names], masking=True)
    assert guided(trials, names[:1], propose).pins == tuple(names)
    assert asked == [3, 22]
    assert stages(trials)[:5] == [
        ("candidates", tuple(names[:1]), False),
        ("suspects", tuple(names[:2]), False),
        ("suspects", tuple(names[:20]), False),
        ("suspects", tuple(names[:21]), False),
        ("suspects", tuple(names), True),
    ]


def test_of_two_sets_that_would_do_the_earlier_candidate_is_kept() -> None:
    for candidates in (["embed", "head"], ["head", "embed"]):
        trials = Trials(Step(TREE, [["embed"], ["head"]]), TREE)
        assert guided(trials, candidates).pins == (candidates[0],)


def test_all_parts_of_a_module_are_told_as_the_module_and_dropped_as_one_too() -> None:
    _, trials = planted("blocks.0.mlp:own", "blocks.0.mlp.fc", "head")
    found = guided(trials, ["blocks.0.mlp:own", "blocks.0.mlp.fc", "head"])
    assert found.pins == ("blocks.0.mlp", "head")
    assert found.dropped["blocks.0.mlp"].pins == ("head",)
    assert len(trials.made) == 1 + 3 + 1


GIVEN: dict[str, tuple[tuple[str, ...], Sequence[str], tuple[str, ...], int]] = {
    "none, and the suspects of the bare step are tried": (("embed", "head"), [], ("embed", "head"), 4),
    "some that never ran": (("head",), ["tail", "head", "head", "blocks.1.fc"], ("head",), 2),
    "each twice": (("embed", "head"), ["embed", "head", "embed", "head"], ("embed", "head"), 3),
    "one within another": (("blocks.0.mlp.fc",), ["blocks.0.mlp", "blocks.0.mlp.fc"], ("blocks.0.mlp",), 2),
    "a wide one, which stays so": (("blocks.0.mlp.fc",), ["blocks.0"], ("blocks.0",), 2),
    "none, of a healthy step": ((), [], (), 1),
    "one, of a healthy step": ((), ["head"], (), 2),
    "all, of a healthy step": ((), TREE.atoms, (), 5),
}
"""The culprits, the candidates, the pins that are found, and the trials they cost."""


@pytest.mark.parametrize("name", GIVEN)
def test_candidates_are_joined_and_dropped(name: str) -> None:
    culprits, candidates, pins, count = GIVEN[name]
    _, trials = planted(*culprits)
    found = guided(trials, candidates)
    assert (found.pins, found.healthy, found.minimal) == (pins, True, True)
    assert found.dropped.keys() == {*pins}
    assert len(trials.made) == count


def test_where_no_suspect_is_new_the_stuck_one_is_widened_and_narrowed_again() -> None:
    """The step names a block's own lines; what must be pinned is a module inside another part of that block."""

    def blames_the_block(pins: tuple[str, ...]) -> Trial:
        healthy = "blocks.0.mlp.fc" in TREE.expand(pins)
        return Trial(pins, healthy, suspects=() if healthy else ("blocks.0:own",))

    trials = Trials(blames_the_block, TREE)
    found = guided(trials, ["head"])
    assert (found.pins, found.minimal) == (("blocks.0.mlp.fc",), True)
    assert [stage for stage, _, _ in stages(trials)][:3] == ["candidates", "suspects", "widened"]


def test_where_nothing_is_suspected_all_candidates_are_widened_at_last_to_the_root() -> None:
    trials = Trials(lambda pins: Trial(pins, "embed" in TREE.expand(pins), why="loss is far off"), TREE)
    found = guided(trials, ["blocks.0.mlp.fc"])
    assert (found.pins, found.minimal) == (("embed",), True)
    widened = [pins for stage, pins, _ in stages(trials) if stage == "widened"]
    assert widened == [("blocks.0.mlp",), ("blocks.0",), ("blocks.0", "blocks.1"), ("",)]


def test_where_even_the_root_does_not_help_nothing_is_found() -> None:
    trials = Trials(lambda pins: Trial(pins, healthy=False, why="nan"), TREE)
    found = guided(trials, ["head"])
    assert (found.pins, found.healthy, found.minimal) == ((), False, False)
    assert trials.made[-1].pins == ("",)


def test_without_candidates_and_suspects_there_is_nothing_to_widen() -> None:
    trials = Trials(lambda pins: Trial(pins, healthy=False, why="nan"), TREE)
    assert not guided(trials, []).healthy
    assert len(trials.made) == 1


def test_a_candidate_that_does_harm_is_not_in_the_set() -> None:
    """Pinning one block without the other raises, say, for their dtypes no longer meet."""

    def harmed(pins: tuple[str, ...]) -> Trial:
        pinned = TREE.expand(pins)
        blocks = pinned & {*TREE.under("blocks")}
        return Trial(pins, "head" in pinned and len(blocks) in (0, len(TREE.under("blocks"))))

    found = guided(Trials(harmed, TREE), ["head", "blocks.1"])
    assert (found.pins, found.minimal) == (("head",), True)


def test_tied_candidates_are_dropped_as_one() -> None:
    step = Step(TREE, [["head"]])
    trials = Trials(step, TREE, together=[("embed", "head")])
    found = guided(trials, ["head", "embed", "blocks.1"])
    assert (found.pins, found.minimal) == (("embed", "head"), True)
    assert [trial.pins for trial in found.dropped.values()] == [(), ()]


@of_any_size
@given(data=st.data(), source=st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_right_candidates_are_proven_within_the_bound(
    sizes: tuple[int, ...], data: st.DataObject, source: random.Random
) -> None:
    step = data.draw(steps(sizes))
    (culprits,) = step.ways
    trials = Trials(step, step.tree)
    found = guided(trials, source.sample(list(culprits), len(culprits)))
    assert (found.pins, found.minimal) == (step.tree.compress(culprits), True)
    # The caller narrows each pin and runs the whole set once more: 2k + 3 in all.
    assert len(trials.made) <= len(culprits) + 1 + merged(step.tree, found.pins)
    assert len(trials.made) + len(found.pins) + 1 <= 2 * len(culprits) + 3


@of_any_size
@given(data=st.data(), count=st.integers(1, 40), last=st.booleans(), source=st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_superfluous_candidates_cost_their_logarithm(
    sizes: tuple[int, ...], data: st.DataObject, count: int, last: bool, source: random.Random
) -> None:
    step = data.draw(steps(sizes))
    (culprits,) = step.ways
    false = source.sample(sorted({*step.tree.atoms} - {*culprits}), count)
    candidates = [*culprits, *false]
    if not last:
        source.shuffle(candidates)
    trials = Trials(step, step.tree)
    found = guided(trials, candidates)
    assert (found.pins, found.minimal) == (step.tree.compress(culprits), True)
    needed = len(culprits)
    proof = 1 + needed + merged(step.tree, found.pins)
    if last:
        assert len(trials.made) <= proof + 2 * math.log2(1 + count) + 1
    else:
        runs = needed + 1
        assert len(trials.made) <= proof + runs * (2 * math.log2(1 + count / runs) + 2)


@pytest.mark.slow
@given(steps(masking=True))
@settings(max_examples=60)
def test_a_chain_of_masked_culprits_costs_two_trials_each(step: Step) -> None:
    (culprits,) = step.ways
    trials = Trials(step, step.tree)
    found = guided(trials, culprits[:1])
    assert (found.pins, found.minimal) == (step.tree.compress(culprits), True)
    assert len(trials.made) <= 2 * len(culprits) + merged(step.tree, found.pins)


@pytest.mark.parametrize("is_guided", [True, False], ids=["guided", "blind"])
@given(step=steps([50]), count=st.integers(0, 20), limit=st.integers(0, 60))
def test_out_of_trials_the_best_set_so_far_is_returned(is_guided: bool, step: Step, count: int, limit: int) -> None:
    (culprits,) = step.ways
    candidates = [*culprits, *(atom for atom in step.tree.atoms[:count] if atom not in culprits)]
    limit = limit // 6 if is_guided else limit
    trials = Trials(step, step.tree, max_trials=limit)
    try:
        found = guided(trials, candidates) if is_guided else delta_debug(trials)
        assert found.minimal
    except OutOfTrials:
        found = best_so_far(trials)
        assert not found.minimal
    assert found.healthy == (limit > 0) == (trials.best is not None)
    assert found.pins == (trials.best or ())
    assert len(step.ran) <= limit
    assert all(not trial.healthy for trial in found.dropped.values())
    assert is_guided or found.dropped.keys() <= {*found.pins}


def test_after_an_interrupt_the_best_set_so_far_is_still_there() -> None:
    def interrupt(trial: Trial) -> None:
        if len(trial.pins) == 2:
            raise KeyboardInterrupt

    trials = Trials(Step(TREE, [["head"]]), TREE, on_trial=interrupt)
    with pytest.raises(KeyboardInterrupt):
        guided(trials, ["head", "embed", "blocks.1"])
    found = best_so_far(trials)
    assert (found.pins, found.healthy, found.minimal) == (("embed", "head"), True, False)


@pytest.mark.parametrize("seed", range(20))
def test_a_step_that_fails_three_times_in_ten_is_cured_with_repeats(seed: int) -> None:
    source = random.Random(seed)

    def flaky(pins: tuple[str, ...]) -> Trial:
        cured = {"head", "embed"} <= TREE.expand(pins)
        return Trial(pins, cured or source.random() >= 0.3)

    trials = Trials(flaky, TREE, repeats=30)
    assert guided(trials, ["blocks.1", "head", "embed"]).pins == ("embed", "head")


def test_where_each_pin_alone_takes_too_long_groups_are_dropped() -> None:
    names = [f"layers.{number}" for number in range(1000)]
    step, trials = planted(*names, names=names)
    result = guided(trials, names)
    assert (result.pins, result.healthy, result.minimal, result.dropped) == (tuple(names), True, False, {})
    assert len(step.ran) == 1 + GROUPS


def test_of_many_pins_those_that_are_known_to_be_needed_are_one_group_and_the_others_are_dropped() -> None:
    names = [f"layers.{number}" for number in range(1000)]
    needed = names[::3]
    step, trials = planted(*needed, names=names)
    result = guided(trials, names, fails_alone=lambda part: part <= set(needed))
    assert (result.pins, result.healthy, result.minimal) == (tuple(needed), True, False)
    assert len(step.ran) <= 2 + math.log2(GROUPS) * 2 + 1


def test_what_is_known_to_be_needed_and_is_not_goes_as_a_group() -> None:
    names = [f"layers.{number}" for number in range(1000)]
    _, trials = planted("layers.7", names=names)
    result = guided(trials, names, fails_alone=lambda part: part != {"layers.7"})
    assert (result.pins, result.healthy) == (("layers.7",), True)


def test_of_few_pins_those_that_are_known_to_be_needed_are_dropped_alone_all_the_same() -> None:
    _, trials = planted("head", "embed")
    result = guided(trials, ["blocks.1", "head", "embed"], fails_alone=lambda part: True)
    assert (result.pins, result.minimal) == (("embed", "head"), True)
