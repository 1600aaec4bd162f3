"""The one-line reason why a trial fails: the op's value if that is beyond the format, otherwise another cause."""

import math
from dataclasses import replace

import pytest

from ampdbg.pinning.experiment import health_of
from ampdbg.record.findings import Source
from ampdbg.record.run import Investigation, Producer, Replay

DIV = Producer(
    phase="forward",
    module="norm",
    call=1,
    op="aten.div.Tensor",
    source=Source("/home/me/model.py", 33, "forward", "return x / (x.abs() + 1e-8)"),
    dtype="float16",
    input_largest=1.0,
    output_largest=0.0,
    inf=3,
    nan=0,
    size=8,
    fp32_largest=1.0,
    finite_in_fp32=True,
)
PLACE = "loss NaN: div in norm (model.py:33)"
WHY = {
    "beyond the format": (replace(DIV, fp32_largest=7e4), f"{PLACE} reaches 70,000"),
    "next to its limit": (replace(DIV, fp32_largest=6.5e4), f"{PLACE} reaches 65,000"),
    "a zero divisor": (replace(DIV, divides_by_zero=True), f"{PLACE} divides by a value that FP16 rounds to zero"),
    "the logarithm of zero": (
        replace(DIV, op="aten.log.default", divides_by_zero=True),
        "loss NaN: log in norm (model.py:33) takes the logarithm of a value that FP16 rounds to zero",
    ),
    "FP32's own op, which half comes into": (
        replace(DIV, dtype="float32", fp32_largest=8255.0, divides_by_zero=True),
        f"{PLACE} divides by a value that FP16 rounds to zero",
    ),
    "nothing that explains it": (replace(DIV, fp32_largest=8255.0), PLACE),
    "a value that is not known": (replace(DIV, fp32_largest=None), PLACE),
}


def test_the_reason_names_the_module_outputs_if_the_step_ended_before_its_loss() -> None:
    def why(low: float) -> str:
        replays = (Replay("float16", 1.0, low, 1.0), Replay("float32", 1.0, 2.0, 1.0))
        return health_of(Investigation(3, "loss", *replays, reach="modules"), is_silent=False).why

    assert why(math.nan) == "the sum of its module outputs is NaN"
    assert why(math.inf) == "the sum of its module outputs is inf"
    assert why(3.0) == "finite, but the sum of its module outputs is 3, and 2 in FP32"


@pytest.mark.parametrize("name", WHY)
def test_the_reason_of_a_failed_trial_names_the_op_and_its_cause(name: str) -> None:
    producer, why = WHY[name]
    low = Replay("float16", 1.0, math.nan, math.nan, producers=(producer,))
    fp32 = Replay("float32", 1.0, 2.0, 1.0)
    assert health_of(Investigation(3, "loss", low, fp32), is_silent=False).why == why
