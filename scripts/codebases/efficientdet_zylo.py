"""Yet-Another-EfficientDet's heads and focal loss, not yet so sure that its clamp rounds to 1 (its issue 502)."""

import torch
import torchvision_on_cpu  # noqa: F401
from efficientdet.loss import FocalLoss
from efficientdet.model import Classifier, Regressor
from efficientdet.utils import Anchors
from torch import nn

Batch = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]
SIZE = 128


class Heads(nn.Module):
    """The two heads over features of the pyramid."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = Classifier(16, num_anchors=9, num_classes=2, num_layers=1, pyramid_levels=5)
        self.regressor = Regressor(16, num_anchors=9, num_layers=1, pyramid_levels=5)
        self.anchors = Anchors(anchor_scale=4.0)

    def forward(self, features: list[torch.Tensor], image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.classifier(features), self.regressor(features), self.anchors(image, torch.float32)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Heads()


def build_data() -> list[Batch]:
    torch.manual_seed(1)
    features = [torch.randn(2, 16, SIZE // 2**level, SIZE // 2**level) for level in range(3, 8)]
    boxes = torch.tensor([[[16.0, 16.0, 48.0, 48.0, 0.0], [64.0, 60.0, 124.0, 120.0, 1.0]]])
    return [(features, torch.zeros(2, 3, SIZE, SIZE), boxes.repeat(2, 1, 1))]


def step(model: nn.Module, batch: Batch) -> torch.Tensor:
    features, image, boxes = batch
    classes, regression, anchors = model(features, image)
    class_loss, box_loss = FocalLoss()(classes, regression, anchors, boxes)
    return class_loss.mean() + box_loss.mean()
