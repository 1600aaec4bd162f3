"""crnn.pytorch reading lines of text 100 pixels wide; one label of each batch has more letters than columns."""

import torch
import torch.nn.functional as F
from models.crnn import CRNN
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return CRNN(32, 1, 37, 32)


def build_data() -> list[Batch]:
    torch.manual_seed(1)
    lengths = torch.tensor([5, 9, 30, 4])
    return [(torch.randn(4, 1, 32, 100), torch.randint(1, 37, (48,)), lengths) for _ in range(3)]


def step(model: nn.Module, batch: Batch) -> torch.Tensor:
    images, letters, lengths = batch
    scores = model(images).log_softmax(2)
    return F.ctc_loss(scores, letters, torch.full((4,), scores.shape[0]), lengths)
