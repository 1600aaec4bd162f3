"""Where inf and NaN go: those of the forward pass that a loss leaves out, and a backward pass takes up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampdbg.probes.op_trace import placed
from ampdbg.probes.producer_trace import ProducerTrace

INF = float("inf")
SIGNS = torch.tensor([[1.0, -1.0, 2.0, -2.0], [3.0, 1.0, 1.0, -3.0]])
PADDED = torch.tensor([[0.0, 0.0, 0.0, -INF], [-INF, -INF, -INF, -INF]])
CAUSAL = torch.tensor([[0.0, 0.0, 0.0, -INF], [0.0, 0.0, -INF, -INF]])

Function = Callable[[torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """Its values are those of ``SIGNS``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(SIGNS.clone())


def in_gradients(function: Function) -> tuple[list[tuple[str, str]], bool]:
    """The ops that NaN gradients begin with, each with its pass, and whether the gradients are finite."""
    model = Model()
    with placed(model, ProducerTrace) as trace:
        loss = function(model.weight * 1.0).sum()
        loss.backward()
    assert bool(torch.isfinite(loss))
    assert model.weight.grad is not None
    found = [trace.ops[index] for index in sorted(trace.bad.in_gradients)]
    return [(seen.op, seen.place.phase) for seen in found], bool(torch.isfinite(model.weight.grad).all())


def zeros(x: torch.Tensor) -> torch.Tensor:
    return x - x.detach()


def entropy(x: torch.Tensor) -> torch.Tensor:
    share = zeros(x)
    return torch.where(share > 0, share * share.log(), share)


def in_place(x: torch.Tensor) -> torch.Tensor:
    roots = x.sqrt()
    return roots.clone().masked_fill_(x < 0, 0.0)


FAULTS: dict[str, tuple[Function, list[tuple[str, str]]]] = {
    "a root of negative numbers": (
        lambda x: torch.where(x > 0, x.sqrt(), 0.0),
        [("aten.sqrt.default", "forward")],
    ),
    "a logarithm of negative numbers": (
        lambda x: torch.where(x > 0, (x * 1.0 - 1.0).log1p().square(), 0.0),
        [("aten.log1p.default", "forward")],
    ),
    "the inverse root of zero": (
        lambda x: torch.where(x > 9, zeros(x).rsqrt(), x),
        [("aten.rsqrt.default", "forward")],
    ),
    "a division by zero": (
        lambda x: torch.where(x > 9, 1.0 / zeros(x), x),
        [("aten.reciprocal.default", "forward")],
    ),
    "an entropy": (entropy, [("aten.log.default", "forward"), ("aten.div.Tensor", "backward")]),
    "a mask that is filled in": (in_place, [("aten.sqrt.default", "forward")]),
    "rows that are masked throughout": (
        lambda x: (x + PADDED).softmax(-1).nan_to_num(0.0),
        [("aten._softmax.default", "forward")],
    ),
    "their logarithm": (
        lambda x: F.log_softmax(x + PADDED, -1).nan_to_num(0.0, 0.0, 0.0),
        [("aten._log_softmax.default", "forward")],
    ),
    "masked by the logarithm of a mask": (
        lambda x: (x + PADDED.exp().log()).softmax(-1).nan_to_num(0.0),
        [("aten.log.default", "forward"), ("aten._softmax.default", "forward")],
    ),
    "the spread of one number": (
        lambda x: x[:, :1].std(dim=1).nan_to_num(0.0),
        [("aten.std.correction", "forward")],
    ),
    "a sum of exponentials that are none": (
        lambda x: torch.where(PADDED.isinf().all(-1), x.sum(-1), (x + PADDED).logsumexp(-1)),
        [("aten.sub.Tensor", "backward")],
    ),
    "a root of zero": (lambda x: zeros(x).sqrt(), [("aten.div.Tensor", "backward")]),
}
"""The loss of each is finite, and its gradients are not."""


@pytest.mark.parametrize("name", FAULTS)
def test_gradients_are_traced_to_what_the_loss_leaves_out(name: str) -> None:
    function, expected = FAULTS[name]
    assert in_gradients(function) == (expected, False)


HARMLESS: dict[str, Function] = {
    "a causal mask": lambda x: (x + CAUSAL).softmax(-1),
    "a mask of -inf that is filled in": lambda x: x.masked_fill(x < 0, -INF).softmax(-1),
    "the logarithm of a mask": lambda x: (x + CAUSAL.exp().log()).softmax(-1),
    "a safe where": lambda x: torch.where(x > 0, torch.where(x > 0, x, 1.0).sqrt(), 0.0),
    "a branch that no gradient comes to": lambda x: torch.where(x > 0, x.detach().sqrt(), x),
    "rows that are left out before": lambda x: (x + PADDED)[:1].softmax(-1),
    "a NaN that is only read": lambda x: x * x.sqrt().isfinite(),
    "an infinity that saturates": lambda x: (x / torch.zeros(())).detach().tanh() * x,
    "an exponential of -inf": lambda x: (x + CAUSAL).exp(),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_no_harm_to_the_gradients_is_behind_none_and_not_blamed_for_what_stands_beside_it(name: str) -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        return HARMLESS[name](x).sum() + torch.where(x > 0, x.sqrt(), 0.0).sum()

    assert in_gradients(HARMLESS[name]) == ([], True)
    assert in_gradients(both) == ([("aten.sqrt.default", "forward")], False)


def test_what_a_closed_gate_makes_zeros_of_is_behind_no_gradient() -> None:
    def gated(x: torch.Tensor) -> torch.Tensor:
        closed = (x - 10.0).relu()
        return closed.sqrt().sum() + torch.where(x > 0, x.sqrt(), 0.0).sum()

    assert in_gradients(gated) == ([("aten.sqrt.default", "forward")], False)


def test_a_gradient_that_is_added_to_another_is_looked_at_too() -> None:
    model = Model()
    with placed(model, ProducerTrace) as trace:
        (model.weight * 1.0).sum().backward()
        torch.where(model.weight > 0, model.weight.sqrt(), 0.0).sum().backward()
    assert [trace.ops[index].op for index in trace.bad.in_gradients] == ["aten.sqrt.default"]


def test_what_stands_where_a_nan_was_is_not_taken_for_it() -> None:
    model = Model()
    with placed(model, ProducerTrace) as trace:
        kept = model.weight * torch.zeros(2, 4).log().exp()
        model.weight.detach().sqrt()
        (kept * 1.0).sum().backward()
    assert trace.bad.in_gradients == set()
