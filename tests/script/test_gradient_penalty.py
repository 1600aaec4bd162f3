"""Gradient penalties: the input needs gradients, and the loss is made of them, so that it goes backward twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.script.test_run import run

PENALTY = """
import torch
from torch import nn

torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1)).cuda()
nn.init.zeros_(critic[2].weight)
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda")
for _ in range(8):
    x = torch.randn(8, 2, device="cuda").requires_grad_(True)
    with torch.autocast("cuda", dtype=torch.float16):
        y = critic(x)
    g = GRADIENT
    loss = ((torch.sqrt((g ** 2).sum(1) + SAFE) - 1) ** 2).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
"""A last layer of zeros has no gradient, and the root of zero no finite one, in any precision."""

GRADIENTS = {
    "twice": "torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]",
    "once": "y - y.detach()",
}


def penalty(gradient: str, safe: float) -> str:
    return PENALTY.replace("GRADIENT", GRADIENTS[gradient]).replace("SAFE", str(safe))


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_nan_of_the_mathematics_is_one_where_the_input_needs_gradients(tmp_path: Path, gradient: str) -> None:
    _, record = run(tmp_path, penalty(gradient, 0.0))
    found = record.findings[0]
    assert (record.verdict, found.code, found.step) == ("other", "true-nan", 0)
    assert found.source is not None
    assert found.source.text.startswith("loss = ((torch.sqrt(")


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_with_a_safe_root_it_is_healthy(tmp_path: Path, gradient: str) -> None:
    _, record = run(tmp_path, penalty(gradient, 1e-4))
    assert (record.verdict, {found.severity for found in record.findings} - {"info"}) == ("healthy", set())
