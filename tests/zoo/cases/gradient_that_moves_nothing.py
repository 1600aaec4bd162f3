"""Gradients of 1e-15 are flushed to zero at a loss scale of 1; in FP32 they could not move a weight either."""

import torch
import torch.nn.functional as F

from tests.zoo.case import Case, TwoLayers

CASE = Case(config={"precision": {"loss_scale": 1}})
Model = TwoLayers


def step(model: Model, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1]) * 1e-15
