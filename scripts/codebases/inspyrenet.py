"""InSPyReNet on Res2Net-50 with its own loss of sigmoids, at the mixed_precision of its issues 10 and 36."""

from typing import Any

import torch
import torchvision_on_cpu  # noqa: F401
from lib.backbones.Res2Net_v1b import res2net50_v1b_26w_4s
from lib.InSPyReNet import InSPyReNet
from torch import nn

SIZE = 64


def build_model() -> nn.Module:
    torch.manual_seed(0)
    backbone = res2net50_v1b_26w_4s(pretrained=False)
    return InSPyReNet(backbone, [64, 256, 512, 1024, 2048], depth=16, base_size=[SIZE, SIZE]).train()


def build_data() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    mask = torch.zeros(2, 1, SIZE, SIZE)
    mask[:, :, 16:48, 16:48] = 1
    return [{"image": torch.randn(2, 3, SIZE, SIZE), "gt": mask} for _ in range(2)]


def step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(dict(batch))["loss"]
