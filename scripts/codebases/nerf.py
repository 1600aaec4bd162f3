"""nerf-pytorch: its MLP, its encodings and its raw2outputs, with the 1e10 behind the last sample."""

import torch
from run_nerf import raw2outputs
from run_nerf_helpers import NeRF, get_embedder
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
SAMPLES = 32


class Rays(nn.Module):
    """Colours of rays: the network at points along each, rendered."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, channels = get_embedder(10)
        self.embed_views, view_channels = get_embedder(4)
        self.network = NeRF(
            D=8, W=64, input_ch=channels, input_ch_views=view_channels, output_ch=5, skips=[4], use_viewdirs=True
        )

    def forward(self, origins: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
        depths = torch.linspace(2.0, 6.0, SAMPLES).expand(len(origins), SAMPLES)
        points = origins[:, None] + directions[:, None] * depths[..., None]
        views = (directions / directions.norm(dim=-1, keepdim=True))[:, None].expand(points.shape)
        embedded = torch.cat([self.embed(points.reshape(-1, 3)), self.embed_views(views.reshape(-1, 3))], -1)
        raw = self.network(embedded).reshape(len(origins), SAMPLES, 4)
        return raw2outputs(raw, depths, directions)[0]


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Rays()


def build_data() -> list[Batch]:
    torch.manual_seed(1)
    return [(torch.randn(64, 3) * 0.1, torch.randn(64, 3), torch.rand(64, 3)) for _ in range(6)]


def step(model: nn.Module, batch: Batch) -> torch.Tensor:
    return torch.mean((model(batch[0], batch[1]) - batch[2]) ** 2)
