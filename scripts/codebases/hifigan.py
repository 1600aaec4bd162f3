"""HiFi-GAN's generator against its period discriminator, with weight norm and its feature and generator losses."""

import torch
from env import AttrDict
from models import Generator, MultiPeriodDiscriminator, discriminator_loss, feature_loss, generator_loss
from torch import nn


class Both(nn.Module):
    """Generator and discriminator, so that one optimizer trains each in its own loss."""

    def __init__(self) -> None:
        super().__init__()
        config = AttrDict(
            resblock="2",
            upsample_rates=[8, 8],
            upsample_kernel_sizes=[16, 16],
            upsample_initial_channel=32,
            resblock_kernel_sizes=[3],
            resblock_dilation_sizes=[[1, 3]],
        )
        self.generator, self.discriminator = Generator(config), MultiPeriodDiscriminator()
        self.discriminator.discriminators = self.discriminator.discriminators[:1]

    def forward(self, mel: torch.Tensor, audio: torch.Tensor) -> torch.Tensor:
        fake = self.generator(mel)
        real, generated, _, _ = self.discriminator(audio, fake.detach())
        loss = discriminator_loss(real, generated)[0]
        _, generated, real_maps, maps = self.discriminator(audio, fake)
        return loss + generator_loss(generated)[0] + feature_loss(real_maps, maps)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Both()


def build_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(1, 80, 16), torch.randn(1, 1, 1024) * 0.1) for _ in range(3)]


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return model(*batch)
