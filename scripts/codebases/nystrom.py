"""Nystrom attention with its iterated pseudo-inverse and a mask of padded tokens."""

import torch
from nystrom_attention import Nystromformer
from torch import nn


class Tokens(nn.Module):
    """A classifier over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.body = Nystromformer(dim=64, dim_head=16, heads=4, depth=2, num_landmarks=32, pinv_iterations=6)
        self.head = nn.Linear(64, 100)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens), mask=mask))


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Tokens()


def build_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    mask = torch.ones(2, 256, dtype=torch.bool)
    mask[1, 150:] = False
    return [(torch.randint(0, 100, (2, 256)), mask) for _ in range(4)]


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    tokens, mask = batch
    return nn.functional.cross_entropy(model(tokens, mask)[mask], tokens[mask])
