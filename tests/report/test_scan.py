"""The page of a scan or script: the overflowing groups, single sentences, and the next command."""

import math
import re
from dataclasses import replace

import pytest

from ampdbg.record.findings import Finding, Source
from ampdbg.record.run import (
    GroupOverflow,
    Investigation,
    ParameterCounts,
    Record,
    Replay,
    ScriptRun,
    TensorCounts,
    Unseen,
)
from ampdbg.report.scan import MAX_GROUPS, group_table, next_command
from ampdbg.report.view import CommandContext, StyledLine
from tests.report.bisections import BISECTIONS
from tests.report.pages import rendered
from tests.report.records import LOST, NAMES, collapse, healthy, healthy_step, overflow, run, skipped_step

# Groups


def said(lines: tuple[StyledLine, ...]) -> str:
    return " ".join(words.text for one in lines for words in one.words)


@pytest.mark.parametrize(
    ("counts", "everywhere", "listed"),
    [
        ((38, 1, 0), "All 38 groups at once in 1 step, first at step 0.", 1),
        ((35, 34), "Nearly all of 38 groups at once in 1 step, first at step 0.", 34),
        ((), "", 0),
    ],
    ids=["every group", "a tenth spared", "no overflow"],
)
def test_steps_that_hit_nearly_every_group_are_counted_and_not_listed(
    counts: tuple[int, ...], everywhere: str, listed: int
) -> None:
    steps = [skipped_step(at, 4.0, overflow(*range(count))) for at, count in enumerate(counts) if count]
    table = group_table(run([*steps, healthy_step(len(counts))]))
    assert said(table.below).endswith(everywhere)
    assert [str(row[0]).partition(" ")[0] for row in table.rows] == list(NAMES[: min(listed, MAX_GROUPS)])
    assert (f"{listed - MAX_GROUPS} more groups" in said(table.below)) == (listed > MAX_GROUPS)
    assert {row[2] for row in table.rows} == {"1"} if listed else table.columns == ()


def test_parameters_without_a_gradient_do_not_count_towards_all_groups() -> None:
    step = skipped_step(0, 4.0, overflow(*range(28)))
    untrained = Unseen(parameters_without_gradient=NAMES[30:])
    assert "at once in 1 step" in said(group_table(run([step], unseen=untrained)).below)
    assert "at once" not in said(group_table(run([step])).below)


def test_all_groups_of_a_small_model_are_listed_even_if_all_overflow() -> None:
    table = group_table(run([skipped_step(0, 4.0, overflow(0, 1))], groups=NAMES[:2]))
    assert (table.below, len(table.rows)) == ((), 2)


def test_the_narrowest_step_is_the_earliest_with_the_fewest_groups() -> None:
    steps = [skipped_step(number, 4.0, overflow(*range(count))) for number, count in enumerate((5, 2, 3, 2))]
    assert said(group_table(run(steps)).above).startswith("Step 1 affects the fewest groups, 2 of 38: ")


def test_a_page_of_two_optimizers_has_iterations_and_numbers_for_each() -> None:
    steps = [skipped_step(0, 65536.0, overflow(0)), *(healthy_step(number) for number in range(1, 12))]
    apart = [
        replace(step, optimizer=step.step % 2, others=(step.step + 1) // 2, loss=3.0 + step.step % 2) for step in steps
    ]
    said = " ".join(rendered(run(apart, findings=(), planned_steps=0)).split())
    assert "1 of 6 steps of optimizer 0 skipped" in said
    assert "6 iterations" in said
    assert "optimizer 0: 1 skipped, loss 3" in said
    assert "optimizer 1: 0 skipped, loss 4" in said
    on_others = [replace(step, loss=step.loss * (1 - step.optimizer)) for step in apart]
    said = " ".join(rendered(run(on_others, findings=(), planned_steps=0)).split())
    assert "optimizer 1: 0 skipped, gradient norm" in said


def test_the_loss_is_labeled_a_sum_if_the_steps_have_different_numbers_of_passes() -> None:
    first, last = healthy_step(0), replace(healthy_step(1), loss=60.0, passes=16)
    assert "loss 4.2 to 60 (summed over 1 backward pass, later over 16) ·" in " ".join(
        rendered(run([first, last])).split()
    )
    assert "passes" not in rendered(run([replace(first, passes=16), last]))


def test_an_optimizer_without_a_scaler_is_not_in_the_chart_of_the_loss_scale() -> None:
    scaled = [replace(skipped_step(0, 8.0, ()), scaler=1), replace(healthy_step(1, 4.0), scaler=1)]
    bare = replace(healthy_step(2, 1.0), optimizer=1)
    text = rendered(run([*scaled, bare]))
    assert "8 ┤" in text
    assert "4 ┤" in text
    assert "1 ┤" not in text


def test_groups_are_sorted_by_first_step_then_frequency_then_position() -> None:
    steps = [skipped_step(at, 4.0, overflow(*hit)) for at, hit in enumerate(((5, 6, 7), (1, 6), (1,)))]
    rows = [(row[0], row[2], row[1]) for row in group_table(run(steps)).rows]
    order = [(6, "0", "2 of 3"), (5, "0", "1 of 3"), (7, "0", "1 of 3"), (1, "1", "2 of 3")]
    assert [(str(name).partition(" ")[0], first, seen) for name, first, seen in rows] == [
        (NAMES[index], first, seen) for index, first, seen in order
    ]


def test_the_counts_of_a_group_are_those_of_its_worst_step() -> None:
    mild = GroupOverflow(0, "net", (ParameterCounts("net.bias", 1, 0, 10),))
    bad = GroupOverflow(0, "net", (ParameterCounts("net.bias", 1, 1, 10), ParameterCounts("net.weight", 40, 50, 100)))
    steps = [skipped_step(0, 4.0, (mild,)), skipped_step(1, 2.0, (bad,)), skipped_step(2, 1.0, (mild,))]
    assert group_table(run(steps)).rows == (("net (worst: net.weight)", "3 of 3", "0", "41", "51", "83.6%"),)


def test_groups_with_the_same_name_have_separate_rows() -> None:
    twins = tuple(replace(group, name="0") for group in overflow(0, 1))
    assert len(group_table(run([skipped_step(0, 4.0, twins)])).rows) == 2


# Sentences

EVERY = overflow(*range(38))
NEARLY_ALL = run([skipped_step(0, 65536.0, overflow(*range(36))), skipped_step(1, 4.0, EVERY)], verdict="inconclusive")
FEWEST = [skipped_step(0, 65536.0, overflow(*range(20))), skipped_step(1, 32768.0, overflow(7, 8))]
ROOT = collapse().findings[0]
FOLLOW_UP = replace(ROOT, code="data-range", message="short", root=0)
BELOW = Source("/home/me/project/model.py", 7, "forward", "x = q @ k")
OF_FILE = replace(healthy(), findings=(replace(ROOT, source=BELOW),))
NOTED = replace(healthy(), environment=replace(healthy().environment, notes=("SDPA is assumed to be fused",)))
SENTENCES = {
    "a record without a step": (
        run([], verdict="inconclusive", interrupted=True, planned_steps=50),
        "! Interrupted after 0 of 50 steps. The run ended before its first step.\n",
    ),
    "nearly all groups at once": (NEARLY_ALL, "Nearly all of 38 groups at once in 2 steps, first at step 0."),
    "all groups at once": (
        replace(NEARLY_ALL, steps=NEARLY_ALL.steps[1:]),
        "All 38 groups at once in 1 step, first at",
    ),
    "the step with the fewest groups": (run(FEWEST), f"Step 1 affects the fewest groups, 2 of 38: {NAMES[7]}"),
    "a follow-up below its root": (
        run([healthy_step(0)], findings=(ROOT, FOLLOW_UP)),
        "\n  └ then data-range at step 10: short\n",
    ),
    "a root that points nowhere": (run([healthy_step(0)], findings=(replace(ROOT, root=7),)), "error unknown"),
    "a note": (NOTED, "Note: SDPA is assumed to be fused"),
    "a file below the folder": (OF_FILE, "  project/model.py:7 in forward"),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_the_page_of_a_scan_contains_the_sentence(name: str) -> None:
    record, sentence = SENTENCES[name]
    assert sentence in rendered(record)


def test_the_page_of_a_healthy_run_has_at_most_8_lines() -> None:
    assert len(rendered(healthy()).splitlines()) <= 8


@pytest.mark.parametrize(("step", "nan", "is_listed"), [(0, 0, False), (0, 1, True), (1, 0, True)])
def test_an_initially_infinite_mask_is_not_listed_as_nonfinite(step: int, nan: int, is_listed: bool) -> None:
    steps = [healthy_step(number) for number in range(3)]
    buffer = TensorCounts("buffer", "attn_mask", 10, nan, 25, (0, 1))
    for mask in (buffer, replace(buffer, kind="parameter", frozen=True)):
        steps[step] = replace(steps[step], nonfinite=(mask,))
        assert ("Non-finite tensors" in rendered(replace(healthy(), steps=tuple(steps)))) is is_listed


def test_a_long_name_is_wrapped_and_not_cut() -> None:
    name = "model." + ".".join(f"layer_{number}" for number in range(20)) + ".weight"
    group = overflow(0, names=(name,))
    text = rendered(run([skipped_step(0, 65536.0, group)], verdict="inconclusive", groups=(name,)))
    table = text[text.index("worst share") :]
    assert name in re.sub(r"\s+|1 of 1.*share", "", table.replace("1 of 1      0    3    0        <0.1%", ""))


def test_a_run_in_fp32_is_not_advised_to_rescan_in_fp32() -> None:
    assert "ampdbg scan" not in rendered(replace(collapse(), config={"precision": {"level": "O0"}}))
    assert "ampdbg scan" in rendered(collapse())


def page_without_loss(command: str, **fields: object) -> str:
    """The page of a script whose last step ended before its loss."""
    found = Finding("forward-overflow", "error", 1, "forward", "it overflows", "pin it", module="net")
    first, last = (replace(healthy_step(number), scaler=1) for number in range(2))
    last = replace(last, loss=math.nan, grad_norm=None)
    record = run([first, last], findings=(found,), script=ScriptRun("train.py"), verdict="precision")
    made = Investigation(1, "loss", LOST, reach="modules")
    return " ".join(rendered(replace(record, command=command, investigations=(made,), **fields)).split())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("command", "error", "headline", "losses"),
    [
        ("run", "the script raised AssertionError", "at step 1, where an error ends the run.", "4.2"),
        ("replay", "", "at step 1. ", "4.2"),
        # The loop computed a loss from the module outputs, and continued.
        ("run", "", "at step 1, where the loss is NaN.", "4.2 to NaN"),
    ],
)
def test_the_loss_of_a_step_that_ended_before_its_loss_is_omitted(
    command: str, error: str, headline: str, losses: str
) -> None:
    text = page_without_loss(command, error=error)
    assert f"The forward pass overflows in net {headline}" in text
    assert f"0 skipped · loss {losses} · loss scale" in text


# The next command

CAPTURES = tuple(f".ampdbg/captures/20261124T235949Z-step-{step}.safetensors" for step in (1, 61, 62))


def typed_next(record: Record, typed: CommandContext) -> str | None:
    command = next_command(record, typed)
    return command.command if command else None


def next_command_with_captures(step: int, replayed: int, *investigations: Investigation) -> str | None:
    """The next command if the first finding is at this step, with these replays."""
    found = Finding("forward-overflow", "error", step, "forward", "it overflows", "pin it")
    found = replace(found, evidence={"replayed_step": replayed})
    script = ScriptRun("train.py", captures=CAPTURES)
    record = run([healthy_step(0), skipped_step(1, 2.0, ())], findings=(found,), script=script, verdict="precision")
    return typed_next(replace(record, command="run", investigations=investigations), CommandContext("train.py"))


@pytest.mark.parametrize(("step", "replayed", "named"), [(60, 61, 61), (0, 1, 1), (60, 60, 61), (62, 62, 62)])
def test_the_next_command_names_the_capture_of_the_first_finding(step: int, replayed: int, named: int) -> None:
    path = f".ampdbg/captures/20261124T235949Z-step-{named}.safetensors"
    assert next_command_with_captures(step, replayed) == f"ampdbg suggest-fp32 {path}"


def test_a_capture_before_the_first_finding_is_not_suggested() -> None:
    assert next_command_with_captures(99, 99, Investigation(99, "loss", LOST)) == "ampdbg explain forward-overflow"


@pytest.mark.parametrize("note", ["", "step 3 was not captured: it would take 3 GB"])
def test_a_fault_without_a_capture_suggests_a_rerun_that_captures_its_step(note: str) -> None:
    found = Finding("gradient-overflow", "error", 1, "backward", "it overflows", "pin it")
    steps = [healthy_step(0), skipped_step(1, 2.0, ()), skipped_step(3, 1.0, ()), healthy_step(4)]
    record = run(steps, findings=(found,), script=ScriptRun("train.py", ("5",)), verdict="precision")
    record = replace(
        record, command="run", unseen=Unseen(notes=(note,)), investigations=(Investigation(1, "end", LOST),)
    )
    again = record.script.again(record.environment, 3) if record.script else ""
    assert "--capture-step 3 train.py 5" in again
    assert typed_next(record, CommandContext("train.py 5")) == ("ampdbg explain gradient-overflow" if note else again)


@pytest.mark.parametrize("is_module", [False, True])
def test_a_healthy_script_has_a_next_command_only_if_no_step_in_half_was_compared_with_fp32(is_module: bool) -> None:
    module = "-m " * is_module
    steps, started = [healthy_step(step) for step in range(60)], ScriptRun("train.py", ("3",), is_module=is_module)
    record = run(steps, script=started, findings=(), verdict="healthy")
    record, script = replace(record, command="run"), CommandContext("train.py 3")
    half = replace(record, environment=replace(record.environment, policy="cuda", emulated=False))
    assert typed_next(half, script) == f"ampdbg run --capture-step 10 {module}train.py 3"
    assert "No fault found: none of 60 steps skipped; no step was compared with FP32." in rendered(half)
    short, one = replace(half, steps=half.steps[:4]), replace(half, steps=half.steps[:1])
    assert typed_next(short, script) == f"ampdbg run --capture-step 3 {module}train.py 3"
    assert typed_next(one, script) is None
    compared = Investigation(10, "end", Replay("float16", 1.0, 2.0, 1.0), Replay("float32", 1.0, 2.0, 1.0))
    half = replace(half, investigations=(compared,))
    assert typed_next(half, script) is None
    assert "Healthy: none of 60 steps skipped." in rendered(half)
    in_fp32 = replace(record, environment=replace(record.environment, policy="none", emulated=False))
    assert typed_next(in_fp32, script) == f"ampdbg run --emulate {module}train.py 3"


def test_a_captured_step_with_nothing_to_pin_has_no_next_command() -> None:
    script = ScriptRun("train.py", captures=CAPTURES)
    nothing = replace(BISECTIONS["nothing_to_pin"](), script=script)
    fails = replace(BISECTIONS["no_set_helps"](), script=script)
    assert "Next:" not in rendered(nothing, config="step.safetensors", record_path="r.json")
    assert "read why each trial failed" in rendered(fails, config="step.safetensors", record_path="r.json")


@pytest.mark.parametrize(
    ("name", "script"),
    [("train.py", ""), ("/home/me/deep/train.py", ""), ("../train.py", " --script '../train.py --lr 1'")],
)
def test_the_replay_command_names_a_script_outside_the_current_folder(name: str, script: str) -> None:
    captured = ScriptRun(name, ("--lr", "1"), captures=("/home/me/.ampdbg/captures/now-step-3.safetensors",))
    record = replace(run([healthy_step(step) for step in range(6)], script=captured), command="run")
    typed = f"ampdbg replay .ampdbg/captures/now-step-3.safetensors{script}"
    assert typed_next(record, CommandContext("train.py", folder="/home/me")) == typed


@pytest.mark.parametrize(
    ("every", "note", "said"),
    [
        (1000, "", "ampdbg could replay none of the steps that a comparison with FP32 takes"),
        (9, "", "a comparison with FP32 takes over 10 healthy steps in a row"),
        (9, "step 10 was not compared with FP32: its replay in half gives inf or NaN", "its replay in half gives inf"),
    ],
)
def test_a_run_of_which_no_step_was_compared_with_fp32_says_why(every: int, note: str, said: str) -> None:
    """``every`` is the number of steps of which the script has repaired the gradients of one."""
    steps = [replace(healthy_step(step), repaired=step % every == every - 1) for step in range(60)]
    record = run(steps, script=ScriptRun("train.py", ()), findings=(), verdict="healthy")
    environment = replace(record.environment, policy="cuda", emulated=False)
    notes = Unseen(notes=(note,) if note else ())
    page = " ".join(rendered(replace(record, command="run", environment=environment, unseen=notes)).split())
    assert said in page
    assert ("takes" in page) is not bool(note)
