"""The table of a replayed step: the names of its rows."""

from dataclasses import replace

from ampdbg.record.run import Investigation, Replay
from ampdbg.report.scan import healthy_step_table
from tests.diagnosis.test_diagnose import FP32, record_of, steps_of


def test_fp32_and_fp32_on_rounded_weights_are_rows_with_different_names() -> None:
    low = Replay("float16", 8.0, 1.0, 1.0, gradient_distance=0.3)
    made = Investigation(0, "end", low, FP32, floor=replace(FP32, rounded=True, gradient_distance=0.2))
    record = replace(record_of(steps_of(".")), command="replay", investigations=(made,))
    table = healthy_step_table(record)
    assert [row[0] for row in table.rows] == ["FP16, loss scale 8", "FP32", "FP32 on rounded weights"]
