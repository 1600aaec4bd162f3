"""Two losses and two optimizers: each loss trains the side of its own, as a loop by hand would."""

from __future__ import annotations

from pathlib import Path

import torch

from ampdbg.observer import UNOBSERVED
from ampdbg.replay.run import prepared
from ampdbg.training.loop import train_prepared
from tests.written import written

WORKLOAD = """
import torch
import torch.nn.functional as F
from torch import nn

class GAN(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.discriminator = nn.Linear(2, 4), nn.Linear(4, 1)

    def configure_optimizers(self):
        sides = (self.generator, self.discriminator)
        return [torch.optim.SGD(side.parameters(), lr=0.1) for side in sides]

    def training_step(self, batch, index):
        fake = self.generator(batch[:, :2])
        judged = self.discriminator(torch.cat([batch, fake.detach()])).squeeze(-1)
        truth = (torch.arange(2 * len(batch), device=batch.device) < len(batch)).float()
        return {
            "generator": F.softplus(-self.discriminator(fake)).mean(),
            "discriminator": F.binary_cross_entropy_with_logits(judged, truth),
        }

def data():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 4, generator=generator) for _ in range(3)]
"""


def test_each_loss_trains_its_own_side(tmp_path: Path) -> None:
    train = {"steps": 3, "device": "cpu"}  # as the loop below
    config = written(tmp_path, WORKLOAD, model="GAN", data="data", precision={"level": "O0"}, train=train)
    with prepared(config) as run:
        record = train_prepared(run, observer=UNOBSERVED, command="scan", replays=2)
        trained = [parameter.detach().clone() for parameter in run.workload.model.parameters()]
    assert set(record.steps[0].losses) == {"generator", "discriminator"}

    scope: dict[str, object] = {}
    exec(WORKLOAD, scope)
    gan, batches = scope["GAN"](), scope["data"]()  # type: ignore[operator]
    optimizers = gan.configure_optimizers()
    for batch in batches:
        losses = gan.training_step(batch, 0)
        sides = [list(gan.generator.parameters()), list(gan.discriminator.parameters())]
        gradients = [torch.autograd.grad(loss, side) for loss, side in zip(losses.values(), sides, strict=True)]
        for side, own, optimizer in zip(sides, gradients, optimizers, strict=True):
            for parameter, gradient in zip(side, own, strict=True):
                parameter.grad = gradient
            optimizer.step()
    assert all(map(torch.equal, trained, gan.parameters()))
