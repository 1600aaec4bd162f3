"""What a case of the zoo says of itself, its batches and its loss where it has none of its own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

HERE = "# <- here"
"""Marks the line of a case's file that the finding must name."""

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """``code`` is the root finding's, ``None`` where nothing worse than calibration may be found.

    ``verdict``, ``module``, ``op``, ``step`` and ``phase`` are the root's, where they are given; ``follows`` are
    codes that must be there too, and ``says`` are parts of its message. ``config`` replaces keys of the
    config that the runner makes from the names in the file; ``twin`` are the settings that make it healthy.
    The source line must be the one that is marked, and there must be none where no line is.
    """

    code: str | None = None
    verdict: str = "healthy"
    module: str | None = None
    op: str | None = None
    step: int | None = None
    phase: str | None = None
    severity: str = "error"
    follows: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    steps: int = 6
    config: Mapping[str, Any] = field(default_factory=dict)
    twin: tuple[str, ...] = ()


def pairs(count: int = 3, rows: tuple[int, ...] = (8,), width: int = 4) -> list[Pair]:
    """Random inputs of shape (*rows, width), and random targets of shape (*rows, 1)."""
    generator = torch.Generator().manual_seed(0)
    x, y = (*rows, width), (*rows, 1)
    return [(torch.randn(x, generator=generator), torch.randn(y, generator=generator)) for _ in range(count)]


def batches() -> list[Pair]:
    return pairs()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.float(), target)


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


class OneLayerTimes50(OneLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) * 50.0


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class HalfLayers(nn.Module):
    def __init__(self, half: bool = True) -> None:
        super().__init__()
        self.body = nn.Linear(4, 16)
        self.head = nn.Linear(16, 1)
        if half:
            self.half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.to(self.body.weight.dtype)).relu())
