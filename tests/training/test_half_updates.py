"""Updates of half parameters against float32's: exact, and without a trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ampdbg.config.schema import Config
from ampdbg.record.run import HalfUpdates
from ampdbg.replay.run import Run, prepared
from ampdbg.training.half_updates import ComparedUpdates
from ampdbg.training.loop import train
from tests.written import written

WORKLOAD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8).half()
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 1).half()

    def forward(self, x):
        return self.head(self.norm(self.body(x.half()).float()).half()).float().square().mean()

class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0**-10]).half())

    def forward(self, x):
        return (self.weight * x.half()).float().sum()

class Picky(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(-0.01)
                assert parameter.dtype is torch.float16, "made for half weights alone"

class Masters(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})
        every = [each for group in self.param_groups for each in group["params"]]
        self.masters = {each: each.detach().float().clone() for each in every}

    @torch.no_grad()
    def step(self, closure=None):
        for parameter, master in self.masters.items():
            master -= 0.01 * parameter.grad.float()
            parameter.copy_(master)

def data():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(16, 4, generator=generator) for _ in range(5)]

def ones():
    return [torch.ones(2)]
"""


def config(folder: Path, model: str, data: str, optimizer: str, level: str = "O0", **arguments: Any) -> Config:
    precision, train = {"level": level}, {"steps": 4}
    return written(
        folder, WORKLOAD, model=model, data=data, optimizer=(optimizer, arguments), precision=precision, train=train
    )


def tensors_of(run: Run) -> Iterator[tuple[int, torch.Tensor]]:
    """All that a comparison could change, with what it is."""
    for parameter in run.workload.model.parameters():
        yield id(parameter), parameter
        if parameter.grad is not None:
            yield id(parameter.grad), parameter.grad
    for optimizer in run.workload.optimizers:
        for state in optimizer.state.values():
            yield from ((id(item), item) for item in state.values() if isinstance(item, torch.Tensor))


def trained(path: Config, compared: bool) -> tuple[list[torch.Tensor], HalfUpdates | None]:
    """What three updates leave; the comparison changes no bit, and no tensor becomes another."""
    with prepared(path) as run:
        updates, batches = ComparedUpdates(run), run.workload.batches()
        for step in range(3):
            for optimizer in run.workload.optimizers:
                optimizer.zero_grad()
            sum(run.workload.losses(next(batches)).values(), torch.zeros(())).backward()
            if compared:
                updates.before_update()
            for optimizer in run.workload.optimizers:
                optimizer.step()
            before = [key for key, _ in tensors_of(run)]
            if compared:
                updates.after_update(step)
            assert [key for key, _ in tensors_of(run)] == before
        return [tensor.detach().clone() for _, tensor in tensors_of(run)], updates.seen


@pytest.mark.parametrize(
    ("optimizer", "arguments"),
    [
        ("torch.optim:SGD", {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
        ("torch.optim:Adam", {"lr": 0.001, "eps": 1e-3, "amsgrad": True}),
        ("torch.optim:AdamW", {"lr": 0.001, "eps": 1e-3, "foreach": True}),
        ("torch.optim:Rprop", {"lr": 0.001}),
    ],
)
def test_a_comparison_leaves_no_trace(tmp_path: Path, optimizer: str, arguments: dict[str, Any]) -> None:
    path = config(tmp_path, "Net", "data", optimizer, **arguments)
    (plain, unseen), (compared, seen) = trained(path, compared=False), trained(path, compared=True)
    assert all(torch.equal(one, other) for one, other in zip(plain, compared, strict=True))
    assert {tensor.dtype for tensor in compared} >= {torch.float16, torch.float32}
    assert unseen is None
    assert seen is not None
    assert (seen.steps, seen.spoilt) == (3, ())


def test_what_is_lost_is_exact(tmp_path: Path) -> None:
    # Both weights should fall by 2**-13: too little for the one at 1, where half has steps of 2**-11 downwards.
    _, seen = trained(config(tmp_path, "Weight", "ones", "torch.optim:SGD", lr=2.0**-13), compared=True)
    assert seen == HalfUpdates(steps=3, lost_energy=0.5)
    _, seen = trained(config(tmp_path, "Weight", "ones", "torch.optim:SGD", lr=2.0**-30), compared=True)
    assert seen == HalfUpdates(steps=3, lost_energy=1.0, lost=("weight",))


def test_an_eps_of_zero_spoils_weights_and_ends_the_comparison(tmp_path: Path) -> None:
    _, seen = trained(config(tmp_path, "Net", "data", "torch.optim:Adam", eps=1e-8), compared=True)
    assert seen is not None
    assert (seen.steps, seen.spoilt_step, seen.vanishing_eps) == (1, 0, 1e-8)
    assert {"body.weight", "head.bias"} & set(seen.spoilt)
    assert not {"norm.weight", "norm.bias"} & set(seen.spoilt)


@pytest.mark.parametrize("optimizer", ["Picky", "Masters"])
def test_an_optimizer_of_the_users_own_is_not_compared(tmp_path: Path, optimizer: str) -> None:
    path = config(tmp_path, "Weight", "ones", optimizer)
    (plain, _), (compared, seen) = trained(path, compared=False), trained(path, compared=True)
    assert all(torch.equal(one, other) for one, other in zip(plain, compared, strict=True))
    assert seen is None


def test_the_record_has_it_and_only_of_runs_with_half_weights_and_no_scaler(tmp_path: Path) -> None:
    half = train(config(tmp_path, "Net", "data", "torch.optim:SGD", lr=0.01))
    assert half.half_updates is not None
    assert (half.half_updates.steps, len(half.steps)) == (4, 4)
    assert half.misuses == ()
    refused = train(config(tmp_path, "Net", "data", "torch.optim:SGD", level="O1", lr=0.01))
    assert refused.autocast_error is not None
    assert (refused.autocast_error.code, refused.half_updates) == ("misuse-half-parameters", None)
