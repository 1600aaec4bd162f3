"""pygcn: a sparse adjacency matrix through torch.spmm."""

import torch
import torch.nn.functional as F
from pygcn.models import GCN
from torch import nn


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return GCN(nfeat=32, nhid=16, nclass=4, dropout=0.5)


def build_data() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    edges = (torch.rand(100, 100) > 0.95).float()
    adjacency = ((edges + edges.T + torch.eye(100)) > 0).float()
    adjacency = adjacency / adjacency.sum(1, keepdim=True)
    return [(torch.rand(100, 32), adjacency.to_sparse(), torch.randint(0, 4, (100,)))]


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.nll_loss(model(batch[0], batch[1]), batch[2])
