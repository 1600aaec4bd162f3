"""apex's FusedAdam computes what AdamW does, without weight decay unless it is given."""

from typing import Any

import torch


class FusedAdam(torch.optim.AdamW):
    def __init__(self, params: Any, lr: float = 1e-3, *, weight_decay: float = 0.0, set_grad_none: bool = True) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)
