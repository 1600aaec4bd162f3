"""EGNN on atoms of a complex some 350 angstroms long: squared distances beyond 65,504."""

import torch
import torch.nn.functional as F
from models.egnn_clean.egnn_clean import EGNN, get_edges
from torch import nn

ATOMS = 20
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Energy(nn.Module):
    """A scalar for each complex."""

    def __init__(self) -> None:
        super().__init__()
        self.egnn = EGNN(in_node_nf=5, hidden_nf=32, out_node_nf=1, n_layers=2, normalize=True)

    def forward(self, kinds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        edges = [torch.tensor(ends) for ends in get_edges(ATOMS)]
        return self.egnn(kinds, positions, edges, None)[0].mean()


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Energy()


def build_data() -> list[Batch]:
    torch.manual_seed(1)
    extent = torch.tensor([350.0, 60.0, 60.0])
    kinds = [F.one_hot(torch.randint(0, 5, (ATOMS,)), 5).float() for _ in range(4)]
    return [(kind, torch.rand(ATOMS, 3) * extent, torch.randn(())) for kind in kinds]


def step(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.l1_loss(model(batch[0], batch[1]), batch[2])
