"""A trace of a step as it trains: what several processes do together is run once, and no process is blamed for it."""

import pytest
import torch
from torch import nn

from ampdbg.probes.op_trace import placed
from ampdbg.probes.step_trace import StepTrace
from ampdbg.record.run import Replay
from ampdbg.replay.comparison import producers_in_place


@pytest.mark.parametrize(("namespace", "is_own"), [("c10d_functional", False), ("ampdbg_tests", True)])
def test_an_op_that_may_wait_for_others_is_run_once(namespace: str, is_own: bool) -> None:
    ran: list[int] = []

    def received(x: torch.Tensor) -> torch.Tensor:
        ran.append(len(ran))
        return torch.full_like(x, torch.nan)

    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("received(Tensor x) -> Tensor")
    library.impl("received", received, "CPU")
    model = nn.Linear(2, 2)
    with placed(model, StepTrace) as trace:
        made = getattr(torch.ops, namespace).received(model(torch.ones(2, 2)).detach())
        made = made * 2.0 + 1.0
    assert len(ran) == 1
    assert trace.alone == {}
    assert [seen.op for seen in trace.ops if seen.produces] == [f"{namespace}.received.default"] * is_own
    assert trace.is_bad_itself("forward") is is_own
    assert torch.isnan(made).all()


@pytest.mark.parametrize("divides", [True, False])
def test_an_overflow_by_which_is_divided_comes_before_one_that_makes_the_nan_behind_it(divides: bool) -> None:
    with placed(nn.Linear(2, 2), StepTrace) as trace:
        wide = torch.full((4,), 300.0, dtype=torch.half)
        variance = wide * wide
        normed = wide / variance if divides else wide * torch.tanh(variance)  # zeros, or the same as in FP32
        scores = (normed + 20.0).exp()
        (scores - scores).sum()
    record = producers_in_place(Replay("float16", 1.0, float("nan"), 0.0), trace)
    assert [one.op for one in record.producers] == ["aten.mul.Tensor", "aten.exp.default"][:: 1 if divides else -1]
    assert [one.fp32_largest for one in record.producers if one.op == "aten.mul.Tensor"] == [90000.0]


@pytest.mark.parametrize("masked", [4, 2])
def test_rows_masked_throughout_that_the_loss_leaves_out_are_what_gradients_begin_with(masked: int) -> None:
    model = nn.Linear(4, 4)
    mask = torch.zeros(2, 4)
    mask[1, :masked] = float("-inf")
    with placed(model, StepTrace) as trace:
        meant = (1.0 - mask.isinf().float()).log()  # infinite too, and no gradient takes it up
        loss = (model(torch.ones(2, 4)) + mask).softmax(-1).nan_to_num(0.0).sum() + meant.exp().sum()
        loss.backward()
    made = producers_in_place(Replay("float16", 1.0, float(loss), float("nan")), trace).producers
    softmax, log = ("aten._softmax.default", True, False), ("aten.log.default", False, False)
    found = [(one.op, one.reaches_gradients, one.finite_in_fp32) for one in made if one.phase == "forward"]
    assert found == ([softmax, log] if masked == 4 else [log])


def test_a_trace_that_fails_itself_is_no_concern_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(tensor: torch.Tensor) -> None:
        raise RuntimeError("no memory")

    with placed(nn.Linear(2, 2), StepTrace) as trace:
        before = torch.ones(2) * 2.0
        monkeypatch.setattr(trace.known, "of", fails)
        behind = before + 1.0
        assert "no memory" in trace.failure
        with pytest.raises(RuntimeError, match="size"):  # the step's own
            torch.ones(2) + torch.ones(3)
    assert behind.tolist() == [3.0, 3.0]


def test_an_error_of_an_op_is_the_steps_own_and_the_trace_goes_on() -> None:
    with placed(nn.Linear(2, 2), StepTrace) as trace:
        with pytest.raises(RuntimeError, match="size"):
            torch.ones(2) + torch.ones(3)
        torch.ones(2) * 2.0
    assert not trace.failure
    assert trace.ops[-1].op == "aten.mul.Tensor"


def test_a_zero_of_forward_mode_ad_has_no_memory_to_look_at() -> None:
    with placed(nn.Linear(2, 2), StepTrace) as trace:
        zeros = torch._efficientzerotensor((2, 3))
        (torch.ones(2, 3) + zeros) * 2.0
    assert not trace.failure
    assert trace.ops[-1].output.largest == 2.0
