"""A loss scale that is tried larger after every step, so that every other one is skipped."""

from tests.zoo.case import Case, OneLayerTimes50

CASE = Case(
    code="scale-oscillation",
    verdict="other",
    phase="backward",
    severity="warning",
    steps=30,
    config={"precision": {"loss_scale": {"init": 4096.0, "growth_interval": 1}}},
    twin=("precision.loss_scale.growth_interval=2000",),
    says=("grows after every taken step (growth_interval=1)", "of 30 steps"),
)
Model = OneLayerTimes50
