"""What is known of each module in the middle of a search, and the lines that show it."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from ampdbg.record.pins import Trial
from ampdbg.report.search_tree import QUIET, SearchTree, rows, search_tree, states, trying

SMALL = ("", "embed", "block", "block.attn", "block.attn.qkv", "block.mlp", "head")
UNPINNED = Trial((), healthy=False, why="loss NaN", suspects=("block.attn:own",))
TOGETHER = Trial(("block.attn:own", "head"), healthy=True, why="")


def known(*trials: Trial, current: tuple[str, ...] = (), names: tuple[str, ...] = SMALL) -> dict[str, str]:
    """What the trials say, without the modules that nothing is known of."""
    every = states(search_tree(names), trials, current)
    return {atom: state for atom, state in every.items() if state != "unknown"}


def test_before_any_trial_nothing_is_known() -> None:
    assert known() == {}


def test_what_went_wrong_is_suspected() -> None:
    assert known(UNPINNED) == {"block.attn:own": "suspected"}


def test_what_the_present_trial_pins_is_pinned() -> None:
    assert known(UNPINNED, current=("head", "block")) == dict.fromkeys(
        ("block:own", "block.attn:own", "block.attn.qkv", "block.mlp", "head"), "pinned"
    )


def test_a_healthy_trial_clears_all_that_it_left_in_half() -> None:
    found = known(UNPINNED, TOGETHER)
    assert [atom for atom, state in found.items() if state != "cleared"] == ["block.attn:own", "head"]
    assert found["head"] == "suspected"


def test_what_a_failed_trial_alone_lacked_is_proven() -> None:
    found = known(TOGETHER, Trial(("head",), healthy=False, why="loss NaN"), current=("head",))
    assert (found["block.attn:own"], found["head"]) == ("proven", "pinned")


def test_a_whole_block_is_not_proven_before_it_was_taken_apart() -> None:
    found = known(UNPINNED, Trial(("block",), healthy=True, why=""))
    assert found["block.mlp"] == "suspected"


def test_the_whole_model_in_fp32_clears_nothing() -> None:
    assert known(Trial(("",), healthy=True, why="")) == {}


def test_names_that_did_not_run_are_passed_over() -> None:
    assert known(Trial(("gone",), healthy=False, why="", suspects=("lost",)), current=("away",)) == {}


def test_a_trial_is_told_by_what_it_leaves_out_of_the_set() -> None:
    tree = search_tree(SMALL)
    assert trying(tree, [UNPINNED], ("head",)) == "head in FP32"
    assert trying(tree, [UNPINNED, TOGETHER], ("head",)) == "the set without block.attn:own"
    assert trying(tree, [TOGETHER], ("embed",)) == "embed in FP32"


def lines(tree: SearchTree, table: Mapping[str, str], most: int = 100) -> list[str]:
    drawn = rows(tree, table, most)  # type: ignore[arg-type]
    return [f"{'  ' * row.depth}{row.label} {row.state or ''} {row.modules}".rstrip() for row in drawn]


def test_branches_of_one_state_and_quiet_neighbours_share_a_line() -> None:
    tree = search_tree(SMALL)
    assert lines(tree, states(tree, [])) == ["(model) unknown 7"]
    assert lines(tree, states(tree, [TOGETHER])) == [
        "(model) cleared 1",
        "  embed cleared 1",
        "  block cleared 1",
        "    attn suspected 1",
        "      qkv cleared 1",
        "    mlp cleared 1",
        "  head suspected 1",
    ]


LARGE = ("", *(f"layers.{number}{part}" for number in range(250) for part in ("", ".attn", ".attn.q", ".mlp")))


def test_of_a_thousand_modules_the_branches_of_interest_are_shown() -> None:
    tree = search_tree(LARGE)
    table = states(tree, [Trial(("layers.7.attn.q", "layers.90.mlp"), healthy=True, why="")])
    assert lines(tree, table, 20) == [
        "(model) cleared 1",
        "  layers  1",
        "    0 to 6 cleared 28",
        "    7 cleared 1",
        "      attn cleared 1",
        "        q suspected 1",
        "      mlp cleared 1",
        "    8 to 89 cleared 328",
        "    90 cleared 1",
        "      attn cleared 2",
        "      mlp suspected 1",
        "    91 to 249 cleared 636",
    ]
    assert lines(tree, table, 9) == [
        "(model) cleared 1",
        "  layers  1",
        "    7 cleared 1",
        "      attn cleared 1",
        "        q suspected 1",
        "    90 cleared 1",
        "      mlp suspected 1",
        "and 995 cleared  1",
    ]


def test_where_too_many_are_of_interest_they_are_listed_and_the_rest_is_counted() -> None:
    tree = search_tree(LARGE)
    found = Trial(tuple(f"layers.{number}.mlp" for number in range(9)), healthy=True, why="")
    assert lines(tree, states(tree, [found]), 4) == [
        "layers.0.mlp suspected 1",
        "layers.1.mlp suspected 1",
        "layers.2.mlp suspected 1",
        "and 6 suspected, 992 cleared  1",
    ]


PINS = st.lists(st.sampled_from(search_tree(LARGE).atoms.atoms), max_size=6).map(tuple)
TRIALS = st.lists(st.builds(Trial, pins=PINS, healthy=st.booleans(), why=st.just("")), max_size=6)


@given(TRIALS, st.integers(2, 30))
def test_every_tree_fits_and_counts_each_module_once(trials: list[Trial], most: int) -> None:
    tree = search_tree(LARGE)
    table = states(tree, trials)
    drawn = rows(tree, table, most)
    assert len(drawn) <= most
    told = sum(row.modules for row in drawn if row.state is not None)
    rest = drawn[-1].label.removeprefix("and ").split() if drawn[-1].label.startswith("and ") else []
    assert told + sum(int(word) for word in rest if word.isdigit()) == len(table)


def test_a_chain_deeper_than_pythons_stack_is_drawn() -> None:
    deep = ".".join("x" for _ in range(3000))
    tree = search_tree(("", deep))
    drawn = rows(tree, states(tree, [Trial((deep,), healthy=True, why="")]), 5)
    assert any(row.state not in QUIET for row in drawn)
