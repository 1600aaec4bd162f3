"""Atoms, trials, and both searches: the guided one from candidates to new suspects, and the blind one by blocks."""

import hashlib
import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampdbg.record.pins import Trial
from ampdbg.search import (
    MOST_GROUPS,
    Atoms,
    AtomTree,
    OutOfTrials,
    Trials,
    atom_tree,
    best_so_far,
    delta_debug,
    guided_search,
)
from tests.search.planted import SMALL, Step, of_any_size, planted, random_names, steps, trees

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


def test_atoms_list_a_parent_before_its_children_with_the_level_of_each_block() -> None:
    assert dict(zip(TREE.atoms, TREE.levels, strict=True)) == LEVELS
    assert tuple(LEVELS) == TREE.atoms


def test_siblings_are_ordered_by_the_first_name_in_each_of_them() -> None:
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
def test_under_returns_the_atoms_of_a_module_an_atom_or_a_container(name: str, atoms: tuple[str, ...]) -> None:
    assert name in TREE
    assert TREE.under(name) == atoms


@pytest.mark.parametrize("name", ["nothing", "head:own", "blocks:own", "blocks.2"])
def test_an_unknown_name_is_not_in_the_tree_and_raises_key_error(name: str) -> None:
    assert name not in TREE
    with pytest.raises(KeyError):
        TREE.under(name)


def test_own_returns_the_atom_of_own_lines_and_parent_returns_none_for_the_root() -> None:
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
def test_compress_replaces_atoms_by_whole_modules_but_not_by_containers(
    atoms: tuple[str, ...], pins: tuple[str, ...]
) -> None:
    assert TREE.compress(atoms) == pins


@pytest.mark.parametrize(
    ("names", "pins"), [([""], ("",)), (["encoder", "decoder"], ("encoder", "decoder")), ([], ())], ids=str
)
def test_all_atoms_compress_to_the_root_unless_the_root_never_ran(names: list[str], pins: tuple[str, ...]) -> None:
    tree = atom_tree(names)
    assert (tree.atoms, tree.compress(tree.atoms)) == (pins, pins)
    assert tree.expand([]) == frozenset()


def test_modules_can_be_nested_deeper_than_the_recursion_limit_of_python() -> None:
    names = [".".join(["m"] * depth) for depth in range(1, 1500)]
    tree = atom_tree(["", *names])
    assert len(tree.atoms) == 1500
    assert tree.compress(tree.under("m.m")) == ("m.m",)


@given(trees(), st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_compressed_pins_expand_to_the_same_atoms_without_overlap(tree: AtomTree, source: random.Random) -> None:
    share = source.random()
    atoms = frozenset(atom for atom in tree.atoms if source.random() < share)
    pins = tree.compress(atoms)
    assert tree.expand(pins) == atoms
    assert tree.compress(pins_atoms := sorted(atoms, reverse=True)) == pins, pins_atoms
    assert sum(len(tree.under(pin)) for pin in pins) == len(atoms), "pins that overlap"


@given(st.integers(0, 1000), st.integers(1, 6))
@settings(max_examples=50)
def test_compress_returns_the_fewest_pins_for_a_set_of_atoms(seed: int, recent: int) -> None:
    source = random.Random(seed)
    names = random_names(6, source, recent)
    tree = atom_tree(names)
    atoms = frozenset(atom for atom in tree.atoms if source.random() < 0.7)
    pinnable = {*names, *tree.atoms}
    fewer = range(len(tree.compress(atoms)))
    assert not any(
        tree.expand(pins) == atoms for count in fewer for pins in itertools.combinations(sorted(pinnable), count)
    )


def test_a_set_is_tried_and_reported_once_even_if_its_pins_are_named_differently() -> None:
    seen: list[Trial] = []
    step = Step(TREE, [["head"]])
    trials = Trials(step, TREE, on_trial=seen.append)
    first = trials.test(["blocks.0.mlp"], "one")
    second = trials.test(["head"], "")
    assert trials.test(["blocks.0.mlp.fc", "blocks.0.mlp:own", "blocks.0.mlp.fc"], "two") is first
    assert trials.made == tuple(seen) == (first, second)
    assert step.ran == [("blocks.0.mlp",), ("head",)]


def test_a_trial_records_its_health_reason_stage_suspects_and_runs() -> None:
    _, trials = planted("head", "embed")
    assert trials.test(["head"], "candidates") == Trial(
        ("head",), healthy=False, why="inf", stage="candidates", suspects=("embed",), runs=1, healthy_runs=0
    )
    assert trials.test(["head", "embed"], "joined") == Trial(
        ("embed", "head"), healthy=True, why="", stage="joined", runs=1, healthy_runs=1, loss=1.0, seconds=0.5
    )


def test_the_best_set_is_the_healthy_set_with_the_fewest_atoms() -> None:
    _, trials = planted("head")
    bests = []
    for pins in (["embed"], ["blocks.0", "head"], ["embed", "head"], ["head", "blocks.1"], ["head"]):
        trials.test(pins, "")
        bests.append(trials.best)
    assert bests == [None, ("blocks.0", "head"), ("embed", "head"), ("embed", "head"), ("head",)]
    trials = Trials(lambda pins: Trial(pins, healthy=True), TREE)
    trials.test([], "")
    assert trials.best == ()


def test_only_known_trials_are_answered_past_the_limit_of_trials() -> None:
    step = Step(TREE, [["head"]])
    trials = Trials(step, TREE, max_trials=1)
    known = trials.test(["head"], "")
    with pytest.raises(OutOfTrials):
        trials.test(["embed"], "")
    assert trials.test(["head"], "") is known
    assert (len(trials.made), len(step.ran)) == (1, 1)


def flaky(answers: str) -> tuple[Trials, Iterator[str]]:
    """Trials with three repeats; each "+" in ``answers`` is a healthy run."""
    left = iter(answers)
    return Trials(lambda pins: Trial(pins, healthy=next(left) == "+", why="nan", seconds=1.0), TREE, repeats=3), left


@pytest.mark.parametrize(("answers", "runs", "healthy_runs"), [("+++", 3, 3), ("++-", 3, 2), ("+-", 2, 1), ("-", 1, 0)])
def test_repeats_end_with_the_first_unhealthy_run(answers: str, runs: int, healthy_runs: int) -> None:
    trials, left = flaky(answers + "+")
    trial = trials.test(["head"], "")
    assert (trial.healthy, trial.runs, trial.healthy_runs) == ("-" not in answers, runs, healthy_runs)
    assert (trial.seconds, list(left), len(trials.made)) == (runs, ["+"], 1)


def test_an_interrupt_propagates_and_keeps_the_finished_trials() -> None:
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


def test_tied_modules_are_pinned_together() -> None:
    step = Step(TREE, [["head"]])
    trials = Trials(step, TREE, together=[("embed", "head", "blocks.1")])
    assert trials.test(["embed"], "").pins == ("embed", "blocks.1", "head")
    assert trials.test(["head"], "") is trials.made[0]
    assert trials.test(["blocks.0.attn"], "").pins == ("blocks.0.attn",)
    assert trials.units(["head", "blocks.0.attn", "embed"]) == (
        frozenset({"embed", "blocks.1", "head"}),
        frozenset({"blocks.0.attn"}),
    )


def test_a_pin_of_a_module_that_never_ran_raises_key_error() -> None:
    _, trials = planted("head")
    with pytest.raises(KeyError):
        trials.test(["tail"], "")


def stages(trials: Trials) -> list[tuple[str, tuple[str, ...], bool]]:
    return [(trial.stage, trial.pins, trial.healthy) for trial in trials.made]


def merged(tree: AtomTree, pins: Sequence[str]) -> int:
    """The number of pins with several atoms; the search also drops each of these pins as a whole."""
    return sum(len(tree.under(pin)) > 1 for pin in pins)


def test_correct_candidates_cost_one_trial_and_one_more_that_drops_each_pin() -> None:
    _, trials = planted("embed", "head")
    found = guided_search(trials, ["embed", "head"])
    assert (found.pins, found.healthy, found.minimal) == (("embed", "head"), True, True)
    assert stages(trials) == [
        ("candidates", ("embed", "head"), True),
        ("with fewer", ("embed",), False),
        ("with fewer", ("head",), False),
    ]
    assert {pin: (trial.pins, trial.healthy, trial.suspects) for pin, trial in found.dropped.items()} == {
        "embed": (("head",), False, ("embed",)),
        "head": (("embed",), False, ("head",)),
    }


def test_the_blind_search_records_the_trial_that_drops_each_pin() -> None:
    found = delta_debug(planted("embed", "head")[1])
    assert {pin: trial.suspects for pin, trial in found.dropped.items()} == {"embed": ("embed",), "head": ("head",)}


def test_a_set_of_40_culprits_among_2000_layers_is_proven_minimal() -> None:
    names = [f"layers.{index}" for index in range(2000)]
    culprits = names[::50]
    _, trials = planted(*culprits, names=["", *names])
    found = guided_search(trials, culprits)
    assert (found.pins, found.minimal) == (tuple(culprits), True)


def test_a_culprit_that_another_culprit_hid_joins_the_set() -> None:
    _, trials = planted("embed", "blocks.0.attn", "head", masking=True)
    assert guided_search(trials, ["embed"]).pins == ("embed", "blocks.0.attn", "head")
    assert stages(trials)[:3] == [
        ("candidates", ("embed",), False),
        ("suspects", ("embed", "blocks.0.attn"), False),
        ("suspects", ("embed", "blocks.0.attn", "head"), True),
    ]


def test_proposals_under_the_current_pins_extend_a_chain_of_hidden_culprits() -> None:
    names = [f"layers.{index}" for index in range(40)]
    asked: list[int] = []

    def propose(pins: Sequence[str]) -> Sequence[str]:
        asked.append(len(pins))
        return [*names[:20], "layers.none"] if len(asked) == 1 else names

    _, trials = planted(*names, names=["", *names], masking=True)
    assert guided_search(trials, names[:1], propose).pins == tuple(names)
    assert asked == [3, 22]
    assert stages(trials)[:5] == [
        ("candidates", tuple(names[:1]), False),
        ("suspects", tuple(names[:2]), False),
        ("suspects", tuple(names[:20]), False),
        ("suspects", tuple(names[:21]), False),
        ("suspects", tuple(names), True),
    ]


def test_the_first_candidate_or_first_module_to_run_is_kept_of_two_sufficient_sets() -> None:
    trials = [Trials(Step(TREE, [["embed"], ["head"]]), TREE) for _ in range(3)]
    assert guided_search(trials[0], ["embed", "head"]).pins == delta_debug(trials[1]).pins == ("embed",)
    assert guided_search(trials[2], ["head", "embed"]).pins == ("head",)


def test_pins_of_all_atoms_of_a_module_are_reported_and_dropped_as_the_module() -> None:
    _, trials = planted("blocks.0.mlp:own", "blocks.0.mlp.fc", "head")
    found = guided_search(trials, ["blocks.0.mlp:own", "blocks.0.mlp.fc", "head"])
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
"""The culprits, the candidates, the found pins, and the number of trials."""


@pytest.mark.parametrize("name", GIVEN)
def test_the_guided_search_finds_a_minimal_set_from_any_candidates(name: str) -> None:
    culprits, candidates, pins, count = GIVEN[name]
    _, trials = planted(*culprits)
    found = guided_search(trials, candidates)
    assert (found.pins, found.healthy, found.minimal) == (pins, True, True)
    assert found.dropped.keys() == {*pins}
    assert len(trials.made) == count


def test_a_suspect_that_is_already_pinned_is_widened_and_narrowed_again() -> None:
    """The step blames a block's own lines, but the culprit is a module in another part of that block."""

    def blames_the_block(pins: tuple[str, ...]) -> Trial:
        healthy = "blocks.0.mlp.fc" in TREE.expand(pins)
        return Trial(pins, healthy, suspects=() if healthy else ("blocks.0:own",))

    trials = Trials(blames_the_block, TREE)
    found = guided_search(trials, ["head"])
    assert (found.pins, found.minimal) == (("blocks.0.mlp.fc",), True)
    assert [stage for stage, _, _ in stages(trials)][:3] == ["candidates", "suspects", "widened"]


def test_candidates_are_widened_up_to_the_root_if_there_are_no_suspects() -> None:
    trials = Trials(lambda pins: Trial(pins, "embed" in TREE.expand(pins), why="loss is far off"), TREE)
    found = guided_search(trials, ["blocks.0.mlp.fc"])
    assert (found.pins, found.minimal) == (("embed",), True)
    widened = [pins for stage, pins, _ in stages(trials) if stage == "widened"]
    assert widened == [("blocks.0.mlp",), ("blocks.0",), ("blocks.0", "blocks.1"), ("",)]


def test_no_set_is_found_if_pinning_the_root_fails_or_nothing_can_be_widened() -> None:
    trials, others = (Trials(lambda pins: Trial(pins, healthy=False, why="nan"), TREE) for _ in range(2))
    found = guided_search(trials, ["head"])
    assert (found.pins, found.healthy, found.minimal) == ((), False, False)
    assert trials.made[-1].pins == ("",)
    assert not guided_search(others, []).healthy
    assert len(others.made) == 1


def test_a_harmful_candidate_is_left_out_of_the_set() -> None:
    """As if pinning one block without the other raised, because their dtypes no longer match."""

    def harmed(pins: tuple[str, ...]) -> Trial:
        pinned = TREE.expand(pins)
        blocks = pinned & {*TREE.under("blocks")}
        return Trial(pins, "head" in pinned and len(blocks) in (0, len(TREE.under("blocks"))))

    found = guided_search(Trials(harmed, TREE), ["head", "blocks.1"])
    assert (found.pins, found.minimal) == (("head",), True)


def test_both_searches_drop_tied_modules_together() -> None:
    together = [("embed", "head")]
    found = guided_search(Trials(Step(TREE, [["head"]]), TREE, together=together), ["head", "embed", "blocks.1"])
    assert (found.pins, found.minimal) == (("embed", "head"), True)
    assert [trial.pins for trial in found.dropped.values()] == [(), ()]
    found = delta_debug(Trials(Step(TREE, [["head", "blocks.1"]]), TREE, together=together))
    assert (found.pins, found.minimal) == (("embed", "blocks.1", "head"), True)
    assert found.dropped["embed"] is found.dropped["head"]


@of_any_size
@given(data=st.data(), source=st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_correct_candidates_are_proven_within_the_bound_on_trials(
    sizes: tuple[int, ...], data: st.DataObject, source: random.Random
) -> None:
    step = data.draw(steps(sizes))
    (culprits,) = step.ways
    trials = Trials(step, step.tree)
    found = guided_search(trials, source.sample(list(culprits), len(culprits)))
    assert (found.pins, found.minimal) == (step.tree.compress(culprits), True)
    # The caller narrows each pin and runs the whole set once more: 2k + 3 in all.
    assert len(trials.made) <= len(culprits) + 1 + merged(step.tree, found.pins)
    assert len(trials.made) + len(found.pins) + 1 <= 2 * len(culprits) + 3


@of_any_size
@given(data=st.data(), count=st.integers(1, 40), last=st.booleans(), source=st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_superfluous_candidates_cost_a_logarithmic_number_of_trials(
    sizes: tuple[int, ...], data: st.DataObject, count: int, last: bool, source: random.Random
) -> None:
    step = data.draw(steps(sizes))
    (culprits,) = step.ways
    false = source.sample(sorted({*step.tree.atoms} - {*culprits}), count)
    candidates = [*culprits, *false]
    if not last:
        source.shuffle(candidates)
    trials = Trials(step, step.tree)
    found = guided_search(trials, candidates)
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
def test_a_chain_of_masked_culprits_costs_two_trials_per_culprit(step: Step) -> None:
    (culprits,) = step.ways
    trials = Trials(step, step.tree)
    found = guided_search(trials, culprits[:1])
    assert (found.pins, found.minimal) == (step.tree.compress(culprits), True)
    assert len(trials.made) <= 2 * len(culprits) + merged(step.tree, found.pins)


@pytest.mark.parametrize("is_guided", [True, False], ids=["guided", "blind"])
@given(step=steps([50]), count=st.integers(0, 20), limit=st.integers(0, 60))
def test_the_best_set_so_far_is_returned_if_trials_run_out(is_guided: bool, step: Step, count: int, limit: int) -> None:
    (culprits,) = step.ways
    candidates = [*culprits, *(atom for atom in step.tree.atoms[:count] if atom not in culprits)]
    limit = limit // 6 if is_guided else limit
    trials = Trials(step, step.tree, max_trials=limit)
    try:
        found = guided_search(trials, candidates) if is_guided else delta_debug(trials)
        assert found.minimal
    except OutOfTrials:
        found = best_so_far(trials)
        assert not found.minimal
    assert found.healthy == (limit > 0) == (trials.best is not None)
    assert found.pins == (trials.best or ())
    assert len(step.ran) <= limit
    assert all(not trial.healthy for trial in found.dropped.values())
    assert is_guided or found.dropped.keys() <= {*found.pins}


@pytest.mark.parametrize("is_guided", [True, False], ids=["guided", "blind"])
def test_the_best_set_so_far_is_available_after_an_interrupt(is_guided: bool) -> None:
    def interrupt(trial: Trial) -> None:
        if len(trial.pins) == 2 if is_guided else trial.stage == "narrowing" and trial.healthy:
            raise KeyboardInterrupt

    trials = Trials(Step(TREE, [["head"]]), TREE, on_trial=interrupt)
    with pytest.raises(KeyboardInterrupt):
        guided_search(trials, ["head", "embed", "blocks.1"]) if is_guided else delta_debug(trials)
    found = best_so_far(trials)
    assert (found.pins, found.healthy, found.minimal) == (trials.made[-1].pins, True, False)
    assert not is_guided or found.pins == ("embed", "head")


@pytest.mark.parametrize("seed", range(20))
def test_repeats_find_the_set_of_a_step_that_fails_three_times_in_ten(seed: int) -> None:
    source = random.Random(seed)

    def flaky(pins: tuple[str, ...]) -> Trial:
        cured = {"head", "embed"} <= TREE.expand(pins)
        return Trial(pins, cured or source.random() >= 0.3)

    trials = Trials(flaky, TREE, repeats=30)
    assert guided_search(trials, ["blocks.1", "head", "embed"]).pins == ("embed", "head")


def test_a_thousand_pins_are_dropped_in_groups_of_which_the_needed_pins_are_one() -> None:
    names = tuple(f"layers.{number}" for number in range(1000))
    step, trials = planted(*names, names=names)
    result = guided_search(trials, names)
    assert (result.pins, result.healthy, result.minimal, result.dropped) == (names, True, False, {})
    assert len(step.ran) == 1 + MOST_GROUPS

    needed = names[::3]
    step, trials = planted(*needed, names=names)
    result = guided_search(trials, names, fails_alone=lambda part: part <= set(needed))
    assert (result.pins, result.healthy, result.minimal) == (needed, True, False)
    assert len(step.ran) <= 2 + math.log2(MOST_GROUPS) * 2 + 1

    _, trials = planted("layers.7", names=names)  # the known needs are wrong
    result = guided_search(trials, names, fails_alone=lambda part: part != {"layers.7"})
    assert (result.pins, result.healthy) == (("layers.7",), True)


def test_each_of_a_few_pins_is_dropped_alone_even_if_known_to_be_needed() -> None:
    _, trials = planted("head", "embed")
    result = guided_search(trials, ["blocks.1", "head", "embed"], fails_alone=lambda part: True)
    assert (result.pins, result.minimal) == (("embed", "head"), True)


def test_the_blind_search_tries_everything_then_nothing_then_blocks() -> None:
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


@pytest.mark.parametrize(("is_healthy", "trials"), [(True, 2), (False, 1)], ids=["healthy", "failing with all pinned"])
def test_a_step_that_no_pin_changes_gets_no_pins_after_at_most_two_trials(is_healthy: bool, trials: int) -> None:
    made = Trials(lambda pins: Trial(pins, healthy=is_healthy), TREE)
    found = delta_debug(made)
    assert (found.pins, found.healthy, found.minimal) == ((), is_healthy, is_healthy)
    assert len(made.made) == trials


def test_an_earlier_healthy_set_is_reduced_if_pinning_everything_fails() -> None:
    trials = Trials(lambda pins: Trial(pins, "head" in pins), TREE)
    trials.test(["head", "embed"], "earlier")
    found = delta_debug(trials)
    assert (found.pins, found.minimal) == (("head",), True)


def test_the_blind_search_pins_the_only_module_and_finds_no_set_without_modules() -> None:
    _, trials = planted("", names=[""])
    assert delta_debug(trials).pins == ("",)
    assert not delta_debug(Trials(lambda pins: Trial(pins, healthy=False), atom_tree([]))).healthy


@of_any_size
@given(data=st.data())
@settings(max_examples=25)
def test_the_blind_search_finds_the_planted_set_within_the_bound(sizes: tuple[int, ...], data: st.DataObject) -> None:
    step = data.draw(steps(sizes))
    (culprits,) = step.ways
    trials = Trials(step, step.tree)
    found = delta_debug(trials)
    assert (found.pins, found.minimal) == (step.tree.compress(culprits), True)
    assert set(found.dropped) == set(found.pins)
    assert len(trials.made) <= 3 * len(culprits) * math.log2(len(step.tree.atoms)) + 10


@given(trees([50]), st.data())
@settings(max_examples=60)
def test_the_blind_search_finds_exactly_one_of_several_sufficient_sets(tree: AtomTree, data: st.DataObject) -> None:
    way = st.lists(st.sampled_from(tree.atoms), min_size=1, max_size=5, unique=True)
    ways = data.draw(st.lists(way, min_size=2, max_size=4))
    found, again = (delta_debug(Trials(Step(tree, ways), tree)) for _ in range(2))
    assert tree.expand(found.pins) in [frozenset(way) for way in ways]
    assert found == again


def unordered(seed: int, share: int, pinned: Atoms) -> bool:
    """A predicate without any order: ``share`` in 256 sets are healthy."""
    digest = hashlib.sha256(repr((seed, sorted(pinned))).encode()).digest()
    return digest[0] < share


@given(trees([12]), st.integers(0, 2**32), st.integers(0, 200))
@settings(max_examples=150)
def test_the_found_set_is_healthy_and_minimal_even_if_pins_can_do_harm(tree: AtomTree, seed: int, share: int) -> None:
    def healthy(pins: Atoms) -> bool:
        return len(pins) == len(tree.atoms) or unordered(seed, share, pins)

    trials = Trials(lambda pins: Trial(pins, healthy(tree.expand(pins))), tree)
    found = delta_debug(trials)
    atoms = tree.expand(found.pins)
    assert found.minimal
    assert healthy(atoms)
    assert not any(healthy(atoms - {atom}) for atom in atoms)
    assert not any(healthy(atoms - tree.expand([pin])) for pin in found.pins)
    count = len(tree.atoms)
    assert len(trials.made) <= 2 + count * (math.log2(count) + 2) + count * (count + 1)
