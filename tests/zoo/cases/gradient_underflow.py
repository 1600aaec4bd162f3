"""A static loss scale of 1 with a tiny loss: the gradients are flushed to zero."""

import torch
import torch.nn.functional as F

from tests.zoo.case import Case, TwoLayers

CASE = Case(
    code="gradient-underflow",
    verdict="precision",
    config={"precision": {"loss_scale": 1}},
    twin=("precision.loss_scale=65536",),
)
Model = TwoLayers


def step(model: Model, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1]) * 1e-8
