"""Scene coordinate regression: from a patch of a photograph to the point in the world that it shows.

The network is trained by projecting its points through the camera back into the photograph, where
they should land on the patches they came from (Brachmann and Rother, DSAC; ACE). The photograph is scikit-learn's
``china.jpg``; the camera stands 190 metres from the world's origin, a surveyor's mark.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from sklearn.datasets import load_sample_image
from torch import nn

PHOTOGRAPH = torch.tensor(load_sample_image("china.jpg"), dtype=torch.float32).permute(2, 0, 1) / 255
HEIGHT, WIDTH = PHOTOGRAPH.shape[1:]
FOCAL_LENGTH = 1200.0
PATCH = 32

HEADING = math.radians(25)
CAMERA_POSITION = torch.tensor([165.0, -1.7, -95.0])
TEMPLE = torch.tensor([202.0, -8.0, -15.0])
"""Metres: x to the east, y down, z to the north. The temple is 90 metres in front of the camera."""


def intrinsics() -> torch.Tensor:
    """The 3 × 3 matrix from camera coordinates to homogeneous pixels."""
    return torch.tensor([[FOCAL_LENGTH, 0, WIDTH / 2], [0, FOCAL_LENGTH, HEIGHT / 2], [0, 0, 1]])


def extrinsics() -> torch.Tensor:
    """The 3 × 4 matrix from homogeneous world coordinates to camera coordinates."""
    cos, sin = math.cos(HEADING), math.sin(HEADING)
    rotation = torch.tensor([[cos, 0, -sin], [0, 1, 0], [sin, 0, cos]])
    return torch.cat([rotation, -rotation @ CAMERA_POSITION[:, None]], dim=1)


class SceneCoordinates(nn.Module):
    """Patches of shape (batch, 3, 32, 32) to where their scene points project to, (batch, 2).

    The result is a share of the photograph's width and height. With ``fp32_projection`` the projection is
    done in FP32, outside of autocast.
    """

    intrinsics: torch.Tensor
    extrinsics: torch.Tensor
    centre: torch.Tensor
    size: torch.Tensor

    def __init__(self, channels: int = 32, fp32_projection: bool = False) -> None:
        super().__init__()
        self.fp32_projection = fp32_projection
        self.features = nn.Sequential(
            nn.Conv2d(3, channels, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * channels, 4 * channels, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.point = nn.Linear(4 * channels * (PATCH // 8) ** 2, 3)
        self.register_buffer("intrinsics", intrinsics())
        self.register_buffer("extrinsics", extrinsics())
        self.register_buffer("centre", TEMPLE)
        self.register_buffer("size", torch.tensor([WIDTH, HEIGHT]))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        world = self.centre + 10 * self.point(self.features(patches))
        if self.fp32_projection:
            with torch.autocast(world.device.type, enabled=False):
                return self.project(world.float()) / self.size
        return self.project(world) / self.size

    def project(self, world: torch.Tensor) -> torch.Tensor:
        """Points in the world, in metres, to pixels; both of shape (batch, 2 or 3)."""
        camera = self.intrinsics @ self.extrinsics
        homogeneous = torch.cat([world, torch.ones_like(world[:, :1])], dim=1)
        pixels = homogeneous @ camera.T
        return pixels[:, :2] / pixels[:, 2:]


def build_batches(batch_size: int = 64, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches of patches, and where in the photograph their centres lie."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        left = torch.randint(WIDTH - PATCH, (batch_size,), generator=generator)
        top = torch.randint(HEIGHT - PATCH, (batch_size,), generator=generator)
        patches = [
            PHOTOGRAPH[:, y : y + PATCH, x : x + PATCH] for x, y in zip(left.tolist(), top.tolist(), strict=True)
        ]
        centres = torch.stack([left, top], dim=1) + PATCH / 2
        yield torch.stack(patches), centres / torch.tensor([WIDTH, HEIGHT])
