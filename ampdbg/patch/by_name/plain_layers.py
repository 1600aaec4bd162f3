"""Layers that are called with one floating-point tensor, so that a pin of them takes little code."""

from __future__ import annotations

import inspect

import torch
from torch import nn

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED_LINEAR = "transformers.pytorch_utils.Conv1D"
"""GPT-2's Linear, by its name: transformers is not to be imported."""


def takes_one_tensor(module: nn.Module) -> bool:
    """Whether the module is a layer of products with a ``weight``, whose ``forward`` takes one tensor alone."""
    kind = type(module)
    is_layer = isinstance(module, LAYERS) or f"{kind.__module__}.{kind.__qualname__}" == TRANSPOSED_LINEAR
    if not is_layer or not isinstance(getattr(module, "weight", None), torch.Tensor):
        return False
    parameters = list(inspect.signature(kind.forward).parameters.values())
    return [item.kind for item in parameters[1:]] == [inspect.Parameter.POSITIONAL_OR_KEYWORD]
