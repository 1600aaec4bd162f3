"""What to type after a script that was watched: about the step that the first finding is of."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ampdbg.record.findings import Finding
from ampdbg.record.run import Investigation, ScriptRun, Unseen
from ampdbg.report.scan import next_command
from ampdbg.report.view import Typed
from tests.report.bisections import BISECTIONS
from tests.report.pages import rendered
from tests.report.records import healthy_step, run, skipped_step

CAPTURES = tuple(f".ampdbg/captures/20261124T235949Z-step-{step}.safetensors" for step in (1, 61, 62))


def typed_next(step: int, replayed: int, *investigations: Investigation) -> str:
    """What to type next where the first finding is of this step, which these replays show."""
    found = Finding("forward-overflow", "error", step, "forward", "it overflows", "pin it")
    found = replace(found, evidence={"replayed_step": replayed})
    script = ScriptRun("train.py", captures=CAPTURES)
    record = run([healthy_step(0), skipped_step(1, 2.0, ())], findings=(found,), script=script, verdict="precision")
    command = next_command(replace(record, command="run", investigations=investigations), Typed("train.py"))
    assert command is not None
    return command.command


@pytest.mark.parametrize(("step", "replayed", "named"), [(60, 61, 61), (0, 1, 1), (60, 60, 61), (62, 62, 62)])
def test_the_capture_that_is_named_is_that_of_the_first_finding(step: int, replayed: int, named: int) -> None:
    path = f".ampdbg/captures/20261124T235949Z-step-{named}.safetensors"
    assert typed_next(step, replayed) == f"ampdbg suggest-fp32 {path}"


def said_of(command: str, **fields: object) -> str:
    """The page of a script's last step, which ended before its loss."""
    found = Finding("forward-overflow", "error", 1, "forward", "it overflows", "pin it", module="net")
    last = replace(healthy_step(1), loss=math.nan, grad_norm=None)
    record = run([healthy_step(0), last], findings=(found,), script=ScriptRun("train.py"), verdict="precision")
    made = Investigation(1, "loss", (), has_loss=False)
    return " ".join(rendered(replace(record, command=command, investigations=(made,), **fields)).split())  # type: ignore[arg-type]


def test_of_a_step_that_ended_before_its_loss_no_loss_is_told() -> None:
    ended = said_of("run", error="the script raised AssertionError")
    assert "The forward pass overflows in net at step 1, where an error ends the run." in ended
    assert "0 skipped · loss 4.2 · loss scale" in ended
    replayed = said_of("replay")
    assert "The forward pass overflows in net at step 1. " in replayed
    assert "0 skipped · loss 4.2 · loss scale" in replayed
    goes_on = said_of("run")  # the loop has made one of what the modules gave, and gone on
    assert "The forward pass overflows in net at step 1, where the loss is NaN." in goes_on
    assert "0 skipped · loss 4.2 to NaN · loss scale" in goes_on


def test_a_capture_of_an_earlier_step_is_of_another_fault() -> None:
    assert typed_next(99, 99, Investigation(99, "loss", ())) == "ampdbg explain forward-overflow"


@pytest.mark.parametrize(
    ("emulated", "is_module", "typed"),
    [
        (True, False, "ampdbg run --emulate --capture-step 50 train.py 3"),
        (False, False, "ampdbg run --capture-step 50 train.py 3"),
        (False, True, "ampdbg run --capture-step 50 -m train.py 3"),
    ],
)
def test_a_healthy_script_gets_a_closer_look(emulated: bool, is_module: bool, typed: str) -> None:
    record = run([healthy_step(step) for step in range(60)], script=ScriptRun("train.py", is_module=is_module))
    environment = replace(record.environment, policy="cuda", emulated=emulated)
    record = replace(record, command="run", environment=environment)
    command = next_command(record, Typed("train.py 3"))
    assert command is not None
    assert command.command == typed
    assert next_command(replace(record, steps=record.steps[:40]), Typed("train.py 3")) is None
    tried = replace(record, unseen=Unseen(notes=("step 50 was not captured: it cannot be run again",)))
    assert next_command(tried, Typed("train.py 3")) is None
    in_fp32 = next_command(replace(record, environment=replace(environment, policy="none")), Typed("train.py 3"))
    emulate = f"ampdbg run --emulate {'-m ' * is_module}train.py 3"
    assert (in_fp32 and in_fp32.command) == (None if emulated else emulate)


def test_a_captured_step_with_nothing_to_pin_leaves_nothing_to_type() -> None:
    script = ScriptRun("train.py", captures=CAPTURES)
    nothing = replace(BISECTIONS["nothing_to_pin"](), script=script)
    fails = replace(BISECTIONS["no_set_helps"](), script=script)
    assert "Next:" not in rendered(nothing, config="step.safetensors", record_path="r.json")
    assert "read why each trial failed" in rendered(fails, config="step.safetensors", record_path="r.json")


@pytest.mark.parametrize(
    ("name", "script"),
    [("train.py", ""), ("/home/me/deep/train.py", ""), ("../train.py", " --script '../train.py --lr 1'")],
)
def test_a_capture_of_a_script_elsewhere_is_typed_with_it(name: str, script: str) -> None:
    captured = ScriptRun(name, ("--lr", "1"), captures=("/home/me/.ampdbg/captures/now-step-3.safetensors",))
    record = replace(run([healthy_step(step) for step in range(6)], script=captured), command="run")
    command = next_command(record, Typed("train.py", folder="/home/me"))
    assert command is not None
    assert command.command == f"ampdbg replay .ampdbg/captures/now-step-3.safetensors{script}"
