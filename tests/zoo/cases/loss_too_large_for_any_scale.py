"""A loss so large that its gradients only fit half at a loss scale below 1."""

import torch

from tests.zoo.case import Case, OneLayer, Pair, pairs

CASE = Case(
    code="gradient-overflow",
    verdict="precision",
    phase="backward",
    follows=("scale-runaway",),
    steps=30,
    twin=("data.args.weight=1.0",),
)
Model = OneLayer


def batches(weight: float = 1e6) -> list[Pair]:
    draws = pairs()
    return [(x, torch.cat([y, torch.full_like(y, weight)], dim=1)) for x, y in draws]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (target[:, 1:] * (output.float() - target[:, :1]).square()).mean()  # <- here
