"""A trace of a step as it trains: what several processes do together is run once, and no process is blamed for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampdbg.probes.op_trace import placed
from ampdbg.probes.step_trace import StepTrace


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
