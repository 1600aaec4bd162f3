"""Tests of when a replay agrees with FP32: within a quarter, or within the change that rounded weights cause."""

import pytest

from ampdbg.agreement import agrees
from ampdbg.record.run import Replay


def replay(distance: float | None, loss: float = 1.0) -> Replay:
    return Replay("float16", 1.0, loss, 1.0, gradient_distance=distance)


@pytest.mark.parametrize(
    ("distance", "noise", "is_near"),
    [
        (0.25, None, True),
        (0.26, None, False),
        (0.39, 0.1, True),
        (0.41, 0.1, False),
        (3.9, 0.98, True),
        (4.0, 0.98, False),
    ],
)
def test_gradients_agree_within_a_quarter_or_four_times_the_noise(
    distance: float, noise: float | None, is_near: bool
) -> None:
    floor = None if noise is None else replay(noise)
    assert agrees(replay(distance), replay(None), floor) is is_near


@pytest.mark.parametrize(
    ("low", "fp32", "is_near"), [(-2.4e-4, 1.7e-8, True), (6e-4, 1.7e-8, False), (1.06e-2, 1.0e-2, False)]
)
def test_losses_near_zero_agree_within_the_rounding_of_values_near_one(low: float, fp32: float, is_near: bool) -> None:
    assert agrees(replay(None, low), replay(None, fp32), None) is is_near


@pytest.mark.parametrize(("loss", "is_near"), [(1.01, True), (1.2, False)])
def test_the_loss_decides_agreement_if_the_gradient_noise_exceeds_the_norm(loss: float, is_near: bool) -> None:
    assert agrees(replay(370.0, loss), replay(None), replay(15.0)) is is_near
