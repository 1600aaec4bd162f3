"""apex.amp at O0: no op runs in half precision and no loss is scaled."""

from collections.abc import Iterator
from typing import Any

import torch


def initialize(models: Any, optimizers: Any, opt_level: str) -> tuple[Any, Any]:
    return models, optimizers


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
