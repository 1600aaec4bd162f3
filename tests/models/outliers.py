"""Outliers as training grows them: a few output features of a layer become many times as large as the rest."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

Growth = Mapping[str, tuple[float, int]]
"""By the weight's name: the factor, and how many of its first output features grow by it."""


def grown(model: nn.Module, growth: Growth | None) -> nn.Module:
    """Multiplies the first output features of each named weight in place and returns the model."""
    with torch.no_grad():
        for name, (factor, count) in (growth or {}).items():
            _by_output_feature(model, name)[:count] *= factor
    return model


def _by_output_feature(model: nn.Module, name: str) -> torch.Tensor:
    """The weight with its output features first: transformers' Conv1D, unlike nn.Linear, has them last."""
    weight = model.get_parameter(name)
    owner = model.get_submodule(name.rpartition(".")[0])
    return weight.T if type(owner).__name__ == "Conv1D" else weight
