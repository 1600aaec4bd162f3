"""Tests of how often a watch waits for a GPU; most of them treat every number as one on a GPU."""

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from ampdbg.probes import gradients, tensors
from ampdbg.probes.steps import FIRST_NORMS, NORM_EVERY, STEPS_AT_ENDS
from ampdbg.probes.watch import Watch, watch

WEIGHT = 2.0


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the numbers that each transfer from the device brings."""
    found = list[int]()
    own = tensors.to_host

    def counting(scalars: Any) -> list[float]:
        waiting = sum(isinstance(scalar, torch.Tensor) for scalar in scalars)
        found.extend([waiting] * bool(waiting))
        return own(scalars)

    for module in (tensors, gradients):
        monkeypatch.setattr(module, "is_at_hand", lambda tensor: False)
    for module in (tensors, gradients):
        monkeypatch.setattr(module, "to_host", counting)
    return found


class Loop:
    """A loop over one weight, with a scaler or without."""

    def __init__(self, scaled: bool, fused: bool = False) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.model.weight, WEIGHT)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, fused=fused)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
        self.unscales, self.clips, self.repairs, self.writes = False, False, False, False

    def step(self, gain: float = 1.0, beside: float = 0.0) -> None:
        self.optimizer.zero_grad()
        output = self.model(torch.ones(1, 1))
        # The loss stays finite: only its gradient is infinite.
        loss = (output * gain if math.isfinite(gain) or not self.repairs else (output - output.detach()).sqrt()).sum()
        loss = loss + beside
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        gradient: Any = self.model.weight.grad
        if self.repairs:
            gradient.nan_to_num_(0.0, 0.0, 0.0)
        if self.writes:
            gradient.mul_(1.0)
        if self.scaler is None:
            self.optimizer.step()
            return
        if self.unscales:
            self.scaler.unscale_(self.optimizer)
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_healthy_step_is_waited_for_at_most_once(reads: list[int], scaled: bool, fused: bool) -> None:
    loop = Loop(scaled, fused)
    with watch(loop.model, loop.optimizer) as watching:
        reads.clear()  # drop the reads of the model
        for number in range(40):
            loop.step()
            assert len(reads) <= number + 1
        assert watching.log.is_read is not scaled  # a loss scale is read in bulk
    assert [step.loss for step in watching.steps] == [WEIGHT] * 40


@pytest.mark.parametrize("scaled", [False, True])
def test_repaired_gradients_are_known_before_the_step_without_a_further_wait(reads: list[int], scaled: bool) -> None:
    loop, told = Loop(scaled), list[Any]()
    loop.repairs = True
    gains = [1.0] * 20 + [math.inf, 1.0]
    with watch(loop.model, loop.optimizer) as watching:
        watching.withheld = lambda optimizer: told.append(watching.log.closed())
        reads.clear()
        for number, gain in enumerate(gains):
            loop.step(gain)
            assert len(reads) <= number + 1
    assert told == [20]
    assert [step.repaired for step in watching.steps] == [gain == math.inf for gain in gains]


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_withheld_step_whose_gradients_the_loop_has_written_is_not_repaired(
    is_late: bool, fused: bool, request: pytest.FixtureRequest
) -> None:
    if is_late:
        request.getfixturevalue("reads")
    loop = Loop(scaled=True, fused=fused)
    loop.writes = True
    healthy = [1.0] * (STEPS_AT_ENDS + 2)  # after the first steps few norms are measured
    *_, bad, last = recorded(loop, *healthy, math.inf, 1.0).steps
    assert [(step.skipped, step.repaired) for step in (bad, last)] == [(True, False), (False, False)]


@pytest.mark.parametrize("scaled", [False, True])
def test_a_lost_loss_is_known_in_its_own_step(reads: list[int], scaled: bool) -> None:
    loop, told = Loop(scaled), list[Any]()
    with watch(loop.model, loop.optimizer) as watching:
        watching.ended = told.append
        watching.lost = lambda is_spoilt: told.append(f"lost {loop.model.weight.item()}")
        for gain in (1.0, math.nan):
            loop.step(gain)
            told.append("|")
    assert told == [False, "|", f"lost {WEIGHT}", True, "|"]


@pytest.mark.parametrize("fused", [False, True])
def test_a_lost_loss_with_finite_gradients_is_known_early_if_the_scaler_waits(reads: list[int], fused: bool) -> None:
    loop, told = Loop(scaled=True, fused=fused), list[torch.optim.Optimizer | None]()
    with watch(loop.model, loop.optimizer) as watching:
        watching.lost = told.append
        for beside in (0.0, math.nan, 0.0):
            loop.step(beside=beside)
    assert told == [loop.optimizer] * (not fused)
    assert [math.isnan(step.loss) for step in watching.steps] == [False, True, False]


def recorded(loop: Loop, *gains: float) -> Watch:
    with watch(loop.model, loop.optimizer) as watching:
        for gain in gains:
            loop.step(gain)
    return watching


@pytest.mark.parametrize("change", [None, "unscales", "clips"])
@pytest.mark.parametrize("fused", [False, True])
def test_the_parameter_of_a_skipped_step_is_named(reads: list[int], change: str | None, fused: bool) -> None:
    loop = Loop(scaled=True, fused=fused and change is None)
    if change is not None:
        loop.unscales = True
        setattr(loop, change, True)
    healthy = [1.0] * (FIRST_NORMS + 2)  # after the first steps the scaler is trusted
    *_, last = recorded(loop, *healthy, math.inf).steps
    assert (last.skipped, last.grad_norm) == (True, math.inf)
    [group] = last.groups
    [parameter] = group.parameters
    assert (parameter.name, parameter.inf + parameter.nan) == ("weight", 1)


def test_few_of_many_healthy_steps_have_a_gradient_norm(reads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(scaled=True)
    with watch(loop.model, loop.optimizer) as watching:
        own: Callable[..., bool] = watching.log.wants_norm
        monkeypatch.setattr(watching.log, "wants_norm", lambda seldom: own(seldom=True))
        for _ in range(FIRST_NORMS + 2 * NORM_EVERY):
            loop.step()
        loop.step(math.inf)
        for _ in range(2 * NORM_EVERY):
            loop.step()
    known = [step.step for step in watching.steps if step.grad_norm is not None]
    skip = FIRST_NORMS + 2 * NORM_EVERY  # the norms after a skip tell whether gradients are finite again
    assert known == [*range(FIRST_NORMS + 1), FIRST_NORMS + NORM_EVERY, *range(skip, skip + NORM_EVERY + 1), skip + 16]


def test_a_mark_of_a_cpu_tensor_is_passed() -> None:
    assert tensors.Mark(torch.ones(())).is_passed
    assert tensors.read_aside([torch.ones(()), 2.0]) == [1.0, 2.0]


def test_nothing_is_read_while_a_cuda_graph_is_captured(reads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(scaled=False)
    with watch(loop.model, loop.optimizer) as watching:
        loop.step()
        reads.clear()
        with monkeypatch.context() as captured:
            captured.setattr(torch.cuda, "is_initialized", lambda: True)
            captured.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            loop.step()
            assert reads == []
        loop.step()
    assert [step.loss for step in watching.steps] == [WEIGHT] * 2


STEPS = 24

LOOKS = 4
"""The 2nd, 4th, 8th and 16th backward pass are read to see whether they start at 1: else the loop scales by itself."""


def waits(watched: bool, scaled: bool, fused: bool) -> int:
    """How often the healthy steps wait for the GPU."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    x = torch.randn(4, 8, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16 if scaled else torch.bfloat16):
            loss = model(x).float().square().mean()
        if scaled:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()

    watcher: AbstractContextManager[object] = watch(model, optimizer) if watched else nullcontext()
    with watcher:
        step()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(STEPS):
                    step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(one.message) for one in caught)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_watched_step_on_a_gpu_waits_at_most_once_more_than_a_bare_one(scaled: bool, fused: bool) -> None:
    bare = waits(False, scaled, fused)
    assert bare == (STEPS if scaled and not fused else 0)  # the control: waits are counted
    assert bare <= waits(True, scaled, fused) <= bare + STEPS + LOOKS
