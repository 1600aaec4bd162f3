"""A static loss scale at which every step overflows."""

import torch
import torch.nn.functional as F

from tests.zoo.case import Case, OneLayerTimes50

CASE = Case(
    code="scale-calibration",
    verdict="other",
    phase="backward",
    config={"precision": {"loss_scale": 65536}},
    twin=("precision.loss_scale=1",),
)
Model = OneLayerTimes50


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.float(), target)  # <- here
