"""apex.amp at O0: nothing is lowered and nothing is scaled."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def initialize(models: Any, optimizers: Any, **options: Any) -> tuple[Any, Any]:
    return models, optimizers


@contextlib.contextmanager
def scale_loss(loss: torch.Tensor, optimizers: Any, **options: Any) -> Iterator[torch.Tensor]:
    yield loss


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
