"""A static loss scale below 1 that somebody has chosen."""

import torch

from tests.zoo.case import Case, OneLayer, Pair, pairs

CASE = Case(config={"precision": {"loss_scale": 0.25}})
Model = OneLayer


def batches(weight: float = 1.0) -> list[Pair]:
    draws = pairs()
    return [(x, torch.cat([y, torch.full_like(y, weight)], dim=1)) for x, y in draws]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (target[:, 1:] * (output.float() - target[:, :1]).square()).mean()
