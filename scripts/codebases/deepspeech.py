"""deepspeech.pytorch as a LightningModule, whose training_step changes its batch with mul_."""

import dataclasses
from collections.abc import Iterator
from functools import partial

import torchvision_on_cpu  # noqa: F401

# isort: split
import pytorch_lightning  # noqa: F401
import torch
import torchmetrics  # noqa: F401
from hydra.core import config_store  # noqa: F401
from omegaconf import OmegaConf
from torch import nn

# Its configs have a dataclass as the default of a field, which Python 3.11 takes only of one that can be hashed.
plain, dataclasses.dataclass = dataclasses.dataclass, partial(dataclasses.dataclass, unsafe_hash=True)

from deepspeech_pytorch.configs.train_config import AdamConfig, BiDirectionalConfig, SpectConfig  # noqa: E402
from deepspeech_pytorch.model import DeepSpeech  # noqa: E402

dataclasses.dataclass = plain

LABELS = list("_'ABCDEFGHIJKLMNOPQRSTUVWXYZ ")


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return DeepSpeech(
        labels=LABELS,
        model_cfg=OmegaConf.structured(BiDirectionalConfig(hidden_size=32, hidden_layers=2)),
        precision=16,
        optim_cfg=OmegaConf.structured(AdamConfig()),
        spect_cfg=OmegaConf.structured(SpectConfig()),
    )


class Batches:
    """Spectrograms, targets in one row, the share of each that is speech, target lengths; new ones in each epoch."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        torch.manual_seed(1)
        for _ in range(3):
            targets = torch.randint(1, len(LABELS), (16,), dtype=torch.int32)
            shares, lengths = torch.tensor([1.0, 0.8]), torch.tensor([8, 8], dtype=torch.int32)
            yield torch.randn(2, 1, 161, 60), targets, shares, lengths


def build_data() -> Batches:
    return Batches()
