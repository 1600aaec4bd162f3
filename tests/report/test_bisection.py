"""The page of a search for pins: the sentence of each outcome, the next command, trials, and lines to paste."""

import math
import typing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampdbg.config.yaml_document import read_yaml
from ampdbg.quantities import number
from ampdbg.record.pins import Outcome, Pin, PinSite, RootModel
from ampdbg.record.run import Investigation, Record, ScriptRun
from ampdbg.report.bisection import ENDINGS
from ampdbg.report.pins import pin_lines, pins_yaml
from tests.report.bisections import ATTENTION, BISECTIONS, BLOCK, FOUND, OVERFLOW, found, searched, trial
from tests.report.pages import rendered
from tests.report.records import LOST, healthy_step, interrupted, skipped_step


def plain(record: Record, width: int = 80, config: str = "config.yaml") -> str:
    return rendered(record, width=width, config=config, record_path=".ampdbg/b.json")


def squeezed(text: str) -> str:
    return " ".join(text.split())


def test_in_a_script_each_model_is_pinned_by_its_own_module_names() -> None:
    net = RootModel("blocks", "blocks", "the model of class Blocks that the script makes")
    of_script = replace(found(), script=ScriptRun("train.py"))
    assert 'ampdbg.pin_fp32(model, ["blocks.2.attn", "blocks.3:own"])' in plain(of_script)
    for root, call in (
        (net, 'ampdbg.pin_fp32(..., ["2.attn", "3:own"])  # ...: the model of class Blocks that the script makes'),
        (replace(net, is_global=True), 'ampdbg.pin_fp32(blocks, ["2.attn", "3:own"])'),
    ):
        text = plain(replace(of_script, search=replace(FOUND, roots=(root,))), width=120)
        assert f"\nIn the script\n  {call}\n" in text
        assert "blocks is the model of class Blocks that the script makes." in squeezed(text)


def test_every_outcome_has_a_sentence_and_a_sample_record() -> None:
    assert set(ENDINGS) == set(typing.get_args(Outcome))
    assert {BISECTIONS[name]().search.outcome for name in BISECTIONS} == set(ENDINGS)  # type: ignore[union-attr]
    assert all(rendered(make(), unicode=False).isascii() for make in BISECTIONS.values())


ONE = "✗ 1 of 48 modules needs FP32"
INTERRUPTED = replace(interrupted(), command="bisect")
SENTENCES = {
    "one module": ((ATTENTION,), {"further": 0}, f"{ONE}. With it pinned, the failing step is healthy."),
    "own lines": (
        (BLOCK,),
        {"further": 1, "further_healthy": 1},
        f"{ONE}, in its own lines only. With it pinned, the failing step and 1 of 1 further batch are healthy.",
    ),
    "no further batch": (
        (ATTENTION,),
        {"further_healthy": 0},
        f"{ONE}. With it pinned, the failing step is healthy, but none of 3 further batches.",
    ),
    "none": ((), {}, "✗ Step 3 fails intermittently and did not fail in any trial, so no module can be blamed."),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_the_headline_of_a_search_is_the_exact_sentence(name: str) -> None:
    chosen, fields, sentence = SENTENCES[name]
    record = searched(replace(FOUND, **fields), pins=chosen)  # type: ignore[arg-type]
    assert plain(record, width=200).splitlines()[0] == sentence


def test_no_step_failed_is_claimed_only_if_a_step_was_taken() -> None:
    nothing = BISECTIONS["nothing_to_pin"]()
    assert plain(nothing).startswith("? Nothing to pin yet: 12 of 12 steps were skipped")
    taken = replace(nothing, steps=(*nothing.steps[:2], healthy_step(2)), verdict="healthy")
    assert plain(taken).startswith("✓ Nothing to pin: no step failed; 2 of 3 steps were skipped")


def test_only_a_failed_second_replay_weakens_the_headline() -> None:
    assert "need FP32" in plain(found(), width=200).splitlines()[0]
    assert "but not in a second replay" in plain(BISECTIONS["not_again"](), width=200).splitlines()[0]


OUTSIDE = BISECTIONS["not_in_a_module"]()
STOPPED = BISECTIONS["interrupted"]()
GIVEN = "config.yaml --set train.seed=4 --steps 50"
NEXT = {
    "the options of this search": (
        BISECTIONS["out_of_trials_without_a_set"](),
        "--module model.py",
        "bisect --module model.py --strategy ddmin",
    ),
    "the steps that were given": (STOPPED, GIVEN, f"bisect {GIVEN}"),
    "more steps": (BISECTIONS["nothing_to_pin"](), GIVEN, "bisect config.yaml --set train.seed=4 --steps 120"),
    "an interrupted suggestion": (replace(STOPPED, command="suggest-fp32"), "config.yaml", "suggest-fp32 config.yaml"),
    "interrupted before the search": (INTERRUPTED, "--module model.py", "bisect --module model.py --steps 500"),
    "lines outside of the modules": (OUTSIDE, "config.yaml", "suggest-fp32 .ampdbg/b.json"),
    "of which none is pinned": (replace(OUTSIDE, pins=()), "config.yaml", "report .ampdbg/b.json --format json"),
}


@pytest.mark.parametrize("name", NEXT)
def test_the_next_command_matches_the_end_of_the_search(name: str) -> None:
    record, config, command = NEXT[name]
    assert plain(record, 200, config).splitlines()[-1] == f"  ampdbg {command}"


def test_pins_outside_of_modules_suggest_a_patch_if_no_set_helps() -> None:
    assert OUTSIDE.search is not None
    record = replace(OUTSIDE, search=replace(OUTSIDE.search, outcome="no-set-helps"))
    assert plain(record).endswith("  ampdbg suggest-fp32 .ampdbg/b.json\n")
    assert plain(replace(record, pins=())).endswith("  ampdbg report .ampdbg/b.json --format json\n")


def test_a_search_that_never_began_is_reported_like_a_scan() -> None:
    assert plain(INTERRUPTED).startswith("! Interrupted after 12 of 50 steps.")


def test_without_a_record_file_the_next_command_uses_the_config() -> None:
    text = rendered(found(), config="config.yaml --steps 5", record_path="")
    assert text.splitlines()[-1].strip() == "ampdbg suggest-fp32 config.yaml --steps 5"
    assert "Next:" not in rendered(found(), config="--module model.py", record_path="")


@pytest.mark.parametrize("width", [40, 50, 69])
def test_a_narrow_terminal_omits_the_costs_and_breaks_no_word(width: int) -> None:
    text = plain(found(), width=width)
    assert "FLOPs  activations" not in text
    assert "bmm · model.py:41\n" in text
    assert "blocks.2.attn bmm" in text
    assert "4  blocks.2.attn  " in text
    assert "  31 more\n" in plain(BISECTIONS["every_instance"](), width=width)
    assert "FLOPs  activations" in plain(found(), width=70)


def test_the_table_of_a_step_without_a_loss_compares_module_outputs() -> None:
    steps = (healthy_step(0), replace(skipped_step(3, 65536.0, ()), loss=math.nan))
    record = replace(found(), steps=steps, investigations=(Investigation(3, "loss", LOST, reach="modules"),))
    table = squeezed(plain(record).split("The failing step\n")[1].split("\n\n")[0])
    assert table == "the sum of its module outputs in FP32 2.31 with the set 2.31"
    assert "as it ran NaN in FP32 2.31" in squeezed(plain(replace(record, investigations=())))


def test_a_value_beyond_fp16_is_compared_with_the_limit_it_breaks() -> None:
    def shown(value: float) -> str:
        pin = replace(ATTENTION, sites=(replace(ATTENTION.sites[0], value=value),))
        record = searched(FOUND, pins=(pin,))
        assert (f"{number(value)} in FP32" in str(pin_lines(record))) == (f"{number(value)} in FP32" in plain(record))
        return plain(record)

    assert "-70,000 in FP32, above FP16's" in shown(-7e4)
    assert "1e-9 in FP32, below FP16's" in shown(1e-9)
    assert "65,000 in FP32\n" in shown(6.5e4)
    assert "12 in FP32" not in shown(12.0)


def test_a_pin_without_a_failing_op_is_not_blamed_for_the_finding() -> None:
    text = plain(searched(FOUND, pins=(Pin("head", reason=0, without="loss NaN"),)))
    assert "no op of its own fails" in text
    assert "without it: loss NaN" in text
    assert OVERFLOW.code not in text


def test_a_trial_of_a_large_set_is_named_by_the_pins_it_omits() -> None:
    names = tuple(f"blocks.{number}" for number in range(5))
    tried = (trial(names, "candidates"), trial((*names[:3], names[4]), "with fewer", "loss NaN"))
    text = plain(searched(FOUND, pins=tuple(map(Pin, names)), trials=tried))
    assert "candidates  the set                   healthy" in text
    assert "with fewer  the set without blocks.3  fails: loss NaN" in text


PARTS = st.text("AZaz09_eEno", min_size=1, max_size=8)
NAMES = st.builds("{}{}".format, st.lists(PARTS, min_size=1, max_size=4).map(".".join), st.sampled_from(["", ":own"]))
NAMES |= st.sampled_from([":own", "*", "blocks.*:own", "1", "1.5", "on", "null", "é"])


@given(st.lists(NAMES, unique=True), st.lists(NAMES, unique=True))
def test_the_yaml_lines_to_paste_contain_old_and_new_pins(already: list[str], names: list[str]) -> None:
    lines = pins_yaml(names, {"precision": {"pins": already}})
    every = list(dict.fromkeys([*already, *names]))
    assert read_yaml("\n".join(lines)).data == {"precision": {"pins": every or None}}


def test_unmeasured_costs_of_a_pin_are_dashes() -> None:
    pin = Pin("head", sites=(PinSite("backward", "head.proj", "aten.mm.default", None, None),), cost=None)
    row = next(line for line in plain(searched(FOUND, pins=(pin, ATTENTION))).splitlines() if "head  " in line)
    assert row.split()[-2:] == ["-", "-"]
    assert "backward · head.proj · mm" in row


def test_a_step_that_no_pin_cures_is_said_to_be_finite_only_as_a_whole() -> None:
    page = " ".join(plain(BISECTIONS["no_set_helps"]()).split())
    assert "though all of it in FP32 is finite. Pins do not reach all of the step; with every module pinned," in page
