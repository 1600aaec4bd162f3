"""A NaN in one sample of one batch."""

from tests.zoo.case import Case, OneLayer, Pair, pairs

CASE = Case(
    code="data-nonfinite",
    verdict="other",
    step=2,
    phase="data",
    says=("sample 5", "[0]"),
    twin=("data.args.value=1.0",),
)
Model = OneLayer


def batches(value: float = float("nan")) -> list[Pair]:
    made = pairs(6)
    made[2][0][5, 1] = value
    return made
