"""What to type after a script that was watched: about the step that the first finding is of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampdbg.record.findings import Finding
from ampdbg.record.run import ScriptRun
from ampdbg.report.scan import next_command
from ampdbg.report.view import Typed
from tests.report.records import healthy_step, run, skipped_step

CAPTURES = tuple(f".ampdbg/captures/20261124T235949Z-step-{step}.safetensors" for step in (1, 61, 62))


@pytest.mark.parametrize(
    ("step", "replayed", "named"), [(60, 61, 61), (0, 1, 1), (60, 60, 61), (62, 62, 62), (99, 99, 1)]
)
def test_the_capture_that_is_named_is_that_of_the_first_finding(step: int, replayed: int, named: int) -> None:
    found = Finding("forward-overflow", "error", step, "forward", "it overflows", "pin it")
    found = replace(found, evidence={"replayed_step": replayed})
    script = ScriptRun("train.py", captures=CAPTURES)
    record = run([healthy_step(0), skipped_step(1, 2.0, ())], findings=(found,), script=script, verdict="precision")
    command = next_command(replace(record, command="run"), Typed("train.py"))
    assert command is not None
    assert command.command == f"ampdbg suggest-fp32 .ampdbg/captures/20261124T235949Z-step-{named}.safetensors"
