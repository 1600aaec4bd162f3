"""EfficientDet-D0 with its training bench and its own anchors, labels and loss."""

from typing import Any

import torch
import torchvision_on_cpu  # noqa: F401
from torch import nn

torch.jit._state.disable()  # it scripts its detections, which a torchvision without its ops has no nms for

from effdet import DetBenchTrain, EfficientDet, get_efficientdet_config  # noqa: E402


def build_model() -> nn.Module:
    torch.manual_seed(0)
    config = get_efficientdet_config("tf_efficientdet_d0")
    config.image_size, config.num_classes, config.fpn_cell_repeats, config.box_class_repeats = (128, 128), 5, 1, 1
    config.backbone_name, config.backbone_args = "mobilenetv3_small_050", {}
    return DetBenchTrain(EfficientDet(config, pretrained_backbone=False), create_labeler=True)


def build_data() -> list[tuple[torch.Tensor, dict[str, Any]]]:
    torch.manual_seed(1)
    target = {
        "bbox": [torch.tensor([[10.0, 10.0, 60.0, 70.0]]), torch.tensor([[30.0, 40.0, 100.0, 90.0]])],
        "cls": [torch.tensor([1.0]), torch.tensor([3.0])],
    }
    return [(torch.randn(2, 3, 128, 128), target) for _ in range(3)]


def step(model: nn.Module, batch: tuple[torch.Tensor, dict[str, Any]]) -> torch.Tensor:
    return model(*batch)["loss"]
