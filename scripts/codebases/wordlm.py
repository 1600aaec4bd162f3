"""The word language model of PyTorch's examples, whose hidden state goes on from batch to batch."""

import torch
import torch.nn.functional as F
from model import RNNModel
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


class Carried(nn.Module):
    """The model with its hidden state, as its own main.py carries it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = RNNModel("LSTM", 64, 32, 32, 2, dropout=0.2)
        self.hidden: tuple[torch.Tensor, ...] = self.net.init_hidden(4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out, hidden = self.net(words, tuple(each.detach() for each in self.hidden))
        self.hidden = hidden
        return out


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Carried()


def build_data() -> list[Batch]:
    torch.manual_seed(1)
    text = torch.randint(0, 64, (161, 4))
    return [(text[i : i + 20], text[i + 1 : i + 21].reshape(-1)) for i in range(0, 160, 20)]


def step(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.nll_loss(model(batch[0]), batch[1])
