"""Which call of a step is which of the captured ones, and what is said of a step that makes others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampdbg.replay.played_step import Made, PlayedStep, TapedCall
from ampdbg.replay.random_state import RandomState
from ampdbg.script.captured_calls import CapturedCall, Difference, Match, data_calls

MODEL = nn.Linear(2, 2)
Calls = Sequence[tuple[Callable[..., Any], tuple[int, ...]]]

CAPTURED = (
    CapturedCall("the model", (), [], True, True, False, 0),
    CapturedCall("torch.Tensor.to", (), [], True, True, False, 0),
    CapturedCall("torch.nn.functional.mse_loss", (0, 1), [], True, True, False, 0),
)
"""``F.mse_loss(model(x), target.to(half))``."""

AS_CAPTURED: Calls = [(MODEL, ()), (torch.Tensor.to, ()), (F.mse_loss, (0, 1))]
WITHOUT_CAST: Calls = [(MODEL, ()), (F.mse_loss, (0,))]
CAST_TO_FP32: Calls = [(MODEL, ()), (torch.Tensor.float, (0,)), (F.mse_loss, (1,))]


def match_of(
    calls: Calls,
    is_patched: bool = False,
    lowers: bool = True,
    captured: Sequence[CapturedCall] = CAPTURED,
    hands_on: Collection[int] = (),
) -> Match:
    state = RandomState.now()
    taped = [TapedCall(function, None, lowers, True, state, frozenset(reads)) for function, reads in calls]
    taped = [replace(call, hands_on=number in hands_on) for number, call in enumerate(taped)]
    given: dict[int, tuple[Any, Any]] = {
        number: (tuple(Made(read, "") for read in call.reads), {}) for number, call in enumerate(taped)
    }
    played = PlayedStep(taped, {0: (Made(len(taped) - 1, ""),)}, "cpu", (given,))
    return Match(captured, [range(len(captured))], played, is_patched=is_patched)


def test_a_step_of_the_same_calls_is_told_by_each_of_them() -> None:
    match = match_of(AS_CAPTURED)
    assert match.why_not(MODEL) is None
    assert (match.own, match.casts, match.left) == ({0: 0, 1: 1, 2: 2}, {}, set())
    assert match.cast_before(2) is None


@pytest.mark.parametrize(
    ("calls", "alike", "reason"),
    [
        ([(F.relu, ()), *AS_CAPTURED[1:]], 0, "call 1 is of torch.nn.functional.relu, and was of the model"),
        ([*AS_CAPTURED[:2], (F.l1_loss, (0, 1))], 2, "call 3 is of torch.nn.functional.l1_loss, and was of "),
        (
            [*AS_CAPTURED[:2], (F.mse_loss, (1,))],
            2,
            "call 3, of torch.nn.functional.mse_loss, takes what other calls gave",
        ),
        (AS_CAPTURED[:2], 2, "it makes 2 calls, and made 3"),
        ([*AS_CAPTURED, (F.relu, (2,))], 4, "it makes 4 calls, and made 3"),
    ],
)
def test_a_step_of_other_calls_says_which_is_the_first(calls: Calls, alike: int, reason: str) -> None:
    different = match_of(calls).why_not(MODEL)
    assert isinstance(different, Difference)
    assert (different.alike, different.reason[: len(reason)]) == (alike, reason)


def test_a_patched_step_may_leave_out_the_cast_of_a_target_and_no_other_step_may() -> None:
    match = match_of(WITHOUT_CAST, is_patched=True)
    assert match.why_not(MODEL) is None
    assert (match.own, match.left) == ({0: 0, 1: 2}, {1})
    assert match.cast_before(2) is CAPTURED[1]
    assert match.cast_before(0) is None
    assert match_of(WITHOUT_CAST).why_not(MODEL) is not None


def test_a_patched_step_may_cast_to_fp32_what_the_captured_one_did_not() -> None:
    match = match_of(CAST_TO_FP32, is_patched=True)
    assert match.why_not(MODEL) is None
    assert (match.own, match.casts, match.left) == ({0: 0, 2: 2}, {1: 0}, {1})
    assert match_of(CAST_TO_FP32).why_not(MODEL) is not None


def test_a_patch_begins_behind_the_model() -> None:
    different = match_of(AS_CAPTURED, is_patched=True, lowers=False).why_not(MODEL)
    assert different == Difference(3, "autocast is on in one of them, and off in the other")
    assert match_of(AS_CAPTURED, lowers=False).why_not(MODEL) is None


def test_a_patched_step_may_compute_of_its_data_what_the_captured_one_has_as_data() -> None:
    calls: Calls = [(torch.Tensor.mul, ()), (torch.Tensor.add, (0,)), (MODEL, (1,)), (torch.Tensor.to, ())]
    calls = [*calls, (F.mse_loss, (2, 3))]
    match = match_of(calls, is_patched=True)
    assert match.why_not(MODEL) is None
    assert (match.own, match.spare, match.left) == ({2: 0, 3: 1, 4: 2}, {0, 1}, set())
    different = match_of(calls).why_not(MODEL)
    assert different == Difference(0, "call 1 is of torch.Tensor.mul, and was of the model")


def test_what_computes_with_weights_computes_of_no_data() -> None:
    own, other = {"live": "ampdbg.replay.played_step.Own"}, {"live": "ampdbg.replay.played_step.Made"}
    calls: list[tuple[str, tuple[int, ...], Any]]
    calls = [("torch.Tensor.mul", (), [own, own]), ("torch.Tensor.mul", (), [2]), ("the model", (), [])]
    calls += [("torch.Tensor.add", (1,), [{"list": [other]}]), ("torch.Tensor.add", (1, 2), [other, other])]
    calls += [("torch.nn.modules.loss.MSELoss", (), [])]
    assert data_calls([CapturedCall(*call, True, True, False, 0) for call in calls]) == {1, 3}


def test_a_cast_that_has_nothing_to_do_hands_on_what_it_was_given() -> None:
    """``out = model(x); mse_loss(out, out.to(half))``: a patch makes FP32 of ``out``, or does so no more."""
    captured = [CAPTURED[0], replace(CAPTURED[1], reads=(0,)), CAPTURED[2]]
    calls: Calls = [(MODEL, ()), (torch.Tensor.to, (0,)), (F.mse_loss, (1,))]
    different = match_of(calls, captured=captured).why_not(MODEL)
    assert different == Difference(2, "call 3, of torch.nn.functional.mse_loss, takes what other calls gave")
    assert match_of(calls, captured=captured, hands_on={1}).why_not(MODEL) is None
    captured = [CAPTURED[0], replace(captured[1], hands_on=True), replace(CAPTURED[2], reads=(1,))]
    calls = [*calls[:2], (F.mse_loss, (0, 1))]
    assert match_of(calls, captured=captured).why_not(MODEL) is None
