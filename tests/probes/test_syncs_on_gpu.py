"""A watched step on a real GPU is waited for once more than a bare one, at most."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn

from ampdbg.probes.watch import watch

pytestmark = pytest.mark.gpu

STEPS = 24

LOOKS = 4
"""Of the 2nd, 4th, 8th and 16th backward pass it is read whether it starts at 1, which tells of a loop's own scale."""


def waits(watched: bool, scaled: bool, fused: bool) -> int:
    """How often so many healthy steps wait for the GPU."""
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


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_waits_once_more(scaled: bool, fused: bool) -> None:
    bare = waits(False, scaled, fused)
    assert bare == (STEPS if scaled and not fused else 0)  # the control: what waits is seen
    assert bare <= waits(True, scaled, fused) <= bare + STEPS + LOOKS
