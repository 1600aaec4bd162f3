"""One of two losses overflows."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="forward-overflow",
    verdict="precision",
    module="",
    op="aten.mul.Tensor",
    step=0,
    twin=("model.args.penalty=1.0",),
)


class Model(nn.Module):
    def __init__(self, penalty: float = 60000.0) -> None:
        super().__init__()
        self.penalty = penalty
        self.body = nn.Linear(4, 1)
        nn.init.constant_(self.body.bias, 3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def step(model: Model, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = model(batch[0])
    penalty = (out * model.penalty).mean()  # <- here
    return {"fit": F.mse_loss(out, batch[1]), "penalty": penalty}
