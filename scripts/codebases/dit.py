"""DiT with the training losses of its diffusion package."""

import torch
import torchvision_on_cpu  # noqa: F401
from diffusion import create_diffusion
from models import DiT
from torch import nn

DIFFUSION = create_diffusion(timestep_respacing="")


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return DiT(input_size=16, patch_size=4, hidden_size=96, depth=3, num_heads=4, num_classes=10)


def build_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(4, 4, 16, 16), torch.randint(0, 10, (4,))) for _ in range(4)]


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    latents, classes = batch
    times = torch.randint(0, DIFFUSION.num_timesteps, (len(latents),))
    return DIFFUSION.training_losses(model, latents, times, {"y": classes})["loss"].mean()
