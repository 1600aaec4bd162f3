"""Tests of loops with a loss scale of their own: which passes are one step, and which steps the loop withheld."""

import math
from collections.abc import Collection

import pytest
import torch
from torch import nn

from ampdbg.probes.loss_graph import is_lowered
from ampdbg.probes.watch import watch
from ampdbg.record.run import Step
from tests.siblings import slow_except

STEPS = 12


class OwnScale:
    """Training with a loss scale of the loop's own.

    Args:
        way: "weights" are stepped themselves. Float32 copies of half weights are "kept" with their gradients after a
            withheld step, or "cleared", or each micro-batch is "added" to them. If those of half weights are "left",
            no later step is finite.
        zeroes: Gradients become zero, not None.
    """

    def __init__(self, way: str, *, zeroes: bool) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(torch.float16)
        self.way, self.zeroes, self.scale = way, zeroes, 1024.0
        self.weights = list(self.net.parameters())
        self.copies = [nn.Parameter(weight.detach().float()) for weight in self.weights]
        self.copies = self.weights if way == "weights" else self.copies
        self.optimizer = torch.optim.SGD(self.copies, lr=1e-3)

    def clear(self, parameters: list[nn.Parameter]) -> None:
        for one in parameters:
            one.grad = torch.zeros_like(one) if self.zeroes and one.grad is not None else None

    def backward(self, gain: float) -> float:
        """Add the gradients of one micro-batch; return its loss."""
        loss = (self.net(torch.randn(4, 8).half()).float() - 1.0).square().mean() * gain
        (loss * self.scale).backward()
        if self.way == "added":
            for copy, weight in zip(self.copies, self.weights, strict=True):
                assert weight.grad is not None
                copy.grad = weight.grad.float() + (0.0 if copy.grad is None else copy.grad)
            self.clear(self.weights)
        return loss.item()

    def step(self, lowers: float) -> None:
        """Step, or divide the scale by ``lowers`` if gradients are not finite."""
        if self.way in ("kept", "cleared", "left"):
            for copy, weight in zip(self.copies, self.weights, strict=True):
                copy.grad = None if weight.grad is None else weight.grad.float()
        gradients = [copy.grad for copy in self.copies if copy.grad is not None]
        if all(gradient.isfinite().all() for gradient in gradients):
            torch._foreach_div_(gradients, self.scale)
            self.optimizer.step()
            with torch.no_grad():
                for copy, weight in zip(self.copies, self.weights, strict=True):
                    weight.copy_(copy)
        else:
            self.scale /= lowers
        if self.way in ("cleared", "added", "left"):
            self.clear(self.copies)


def trained(
    way: str, micro: int, bad: Collection[int], *, zeroes: bool = False, lowers: float = 2.0, gain: float = 1e6
) -> tuple[tuple[Step, ...], list[float]]:
    """Return the watched steps, and the loss sum of each. The first of ``micro`` micro-batches of the steps ``bad``
    overflows by its ``gain``, and these steps are withheld. If that is infinite, the loop has no loss scale."""
    loop, sums = OwnScale(way, zeroes=zeroes), list[float]()
    loop.scale = 1.0 if gain == math.inf else loop.scale
    with watch(loop.net, loop.optimizer) as watched:
        for step in range(STEPS):
            loop.clear(loop.weights if way != "left" else [])
            sums.append(sum(loop.backward(gain if step in bad and not part else 1.0) for part in range(micro)))
            loop.step(lowers)
    return watched.steps, sums


WAYS = ("weights", "kept", "cleared", "added")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("micro", slow_except([1, 6], [1, 2, 4, 6]))
@pytest.mark.parametrize("zeroes", slow_except([True], [False, True]))
@pytest.mark.parametrize("bad", [(), (0, 1, 2), (8,), (0, 5, 6, 11)])
def test_each_step_that_a_loop_withholds_is_one_step_of_its_micro_batches(
    way: str, micro: int, zeroes: bool, bad: tuple[int, ...]
) -> None:
    steps, sums = trained(way, micro, bad, zeroes=zeroes)
    assert [step.step for step in steps if step.skipped] == [*bad]
    assert [step.passes for step in steps] == [micro] * STEPS
    assert [step.loss for step in steps] == pytest.approx(sums, rel=1e-3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("micro", [1, 3])
def test_steps_that_a_loop_withholds_at_a_constant_scale_are_counted(way: str, micro: int) -> None:
    steps, sums = trained(way, micro, (8, 9), lowers=1.0)
    assert [step.step for step in steps if step.skipped] == [8, 9]
    assert [step.loss for step in steps] == pytest.approx(sums, rel=1e-3)


def test_copies_are_followed_beside_another_model_with_gradients() -> None:
    other = nn.Linear(3, 3)
    other(torch.ones(1, 3)).sum().backward()
    steps, sums = trained("cleared", 3, (8, 9), lowers=1.0)
    assert [step.step for step in steps if step.skipped] == [8, 9]
    assert [step.loss for step in steps] == pytest.approx(sums, rel=1e-3)
    assert other.weight.grad is not None


@pytest.mark.parametrize("way", ["kept", "cleared", "added"])
@pytest.mark.parametrize("micro", [1, 3])
def test_steps_that_a_loop_withholds_after_an_infinite_loss_are_counted(way: str, micro: int) -> None:
    steps, _ = trained(way, micro, (8, 9), lowers=1.0, gain=math.inf)
    assert [(step.skipped, step.passes) for step in steps] == [(at in (8, 9), micro) for at in range(STEPS)]


@pytest.mark.parametrize("micro", [1, 2])
def test_steps_are_counted_by_the_falling_scale_if_a_loop_never_clears_what_overflowed(micro: int) -> None:
    steps, sums = trained("left", micro, (0,))
    assert [(step.skipped, step.passes) for step in steps] == [(True, micro)] * STEPS
    assert [step.loss for step in steps] == pytest.approx(sums, rel=1e-3)


@pytest.mark.parametrize("now", [512.0, 256.0, 2**9 * (1 + 1e-12)])
def test_a_loss_scale_is_lowered_by_a_power_of_two(now: float) -> None:
    assert is_lowered(1024.0, now)
    assert not is_lowered(now, 1024.0)


@pytest.mark.parametrize(
    "weights", [(1024.0, 1024.0), (100.0, 30.0), (1.0, 1.0), (math.inf, math.inf), (1.0, math.nan)]
)
def test_two_weights_of_losses_are_no_lowered_scale(weights: tuple[float, float]) -> None:
    assert not is_lowered(*weights)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("bad", [(), (0, 1), (5,)])
def test_steps_that_a_loop_withholds_from_two_networks_are_counted_for_each(micro: int, bad: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    judge, maker = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizers, scale = [torch.optim.SGD(net.parameters(), lr=1e-3) for net in (judge, maker)], 1024.0
    with watch(nn.ModuleList([judge, maker]), optimizers) as watched:
        for step in range(8):
            for optimizer, weights in zip(optimizers, map(list, (judge.parameters(), maker.parameters())), strict=True):
                optimizer.zero_grad()
                for _ in range(micro):
                    made = maker(torch.randn(4, 8)).half().float()
                    loss = judge(made).half().float().square().mean()
                    (loss * (1e37 if step in bad else 1.0) * scale).backward(inputs=weights)
                if all(one.grad is not None and one.grad.isfinite().all() for one in weights):
                    torch._foreach_div_([one.grad for one in weights if one.grad is not None], scale)
                    optimizer.step()
            scale /= 2.0 if step in bad else 1.0
    steps = watched.steps
    assert [step.passes for step in steps] == [micro] * 16
    assert sum(step.skipped for step in steps) == 2 * len(bad)
