"""Weights in bfloat16, and an optimizer that rounds each of its small steps up as often as it takes."""

from collections.abc import Callable

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    steps=20,
    config={
        "precision": {"dtype": "bfloat16"},
        "optimizer": {"target": f"{__file__}:Stochastic", "args": {"lr": 1e-4}},
    },
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 16)
        self.norm = nn.RMSNorm(16)
        self.head = nn.Linear(16, 1)
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x.to(self.body.weight.dtype)).relu()))


class Stochastic(torch.optim.Optimizer):
    """The sign of the gradient times the learning rate, rounded up or down by chance."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                wide = parameter.float() - group["lr"] * parameter.grad.float().sign()
                bits = wide.view(torch.int32) + torch.randint_like(wide, 1 << 16, dtype=torch.int32)
                rounded = (bits & -(1 << 16)).view(torch.float32)
                parameter.copy_(rounded if parameter.dtype is torch.bfloat16 else wide)
