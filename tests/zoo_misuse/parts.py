"""What every loop of the zoo is made of: two small models, their optimizers and a few batches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler


@dataclass
class Parts:
    """A loop trains ``model`` with ``optimizer``; some have a second pair. Every batch is of shape (4, 3)."""

    model: nn.Sequential
    optimizer: torch.optim.Optimizer
    other: nn.Sequential
    other_optimizer: torch.optim.Optimizer
    batches: tuple[torch.Tensor, ...]

    @property
    def both(self) -> nn.ModuleList:
        """Both models as one, to be watched."""
        return nn.ModuleList([self.model, self.other])

    @property
    def weight(self) -> torch.Tensor:
        """The first weight of the model, on whose gradient a penalty can be put."""
        return next(self.model.parameters())

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Those of the model."""
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Both optimizers."""
        return [self.optimizer, self.other_optimizer]


def make_parts() -> Parts:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    other = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
    return Parts(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        other,
        torch.optim.Adam(other.parameters(), lr=0.01),
        tuple(torch.randn(6, 4, 3)),
    )


def scaler_of(parts: Parts) -> GradScaler:
    """An enabled scaler at a scale at which none of the loops overflows by itself."""
    return GradScaler(parts.batches[0].device.type, init_scale=1024.0)


def amp(dtype: torch.dtype = torch.float16) -> torch.autocast:
    """Autocast, as a script would write it for a GPU; the zoo runs it emulated."""
    return torch.autocast("cuda", dtype=dtype)


def scaled(parts: Parts, infinite: int | None = None) -> Iterator[GradScaler]:
    """The scaler, behind a scaled backward pass of each batch; the loss of the one of that number is infinite."""
    scaler = scaler_of(parts)
    for number, x in enumerate(parts.batches):
        parts.optimizer.zero_grad()
        loss = parts.model(x).square().mean()
        scaler.scale(loss * 1e38 if number == infinite else loss).backward()
        yield scaler


def train(parts: Parts, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A plain scaled step on each batch, whose loss is computed under autocast."""
    scaler = scaler_of(parts)
    for x in parts.batches:
        parts.optimizer.zero_grad()
        with amp():
            loss = loss_of(x)
        scaler.scale(loss).backward()
        scaler.step(parts.optimizer)
        scaler.update()


def train_and_clear(parts: Parts, clear: Callable[[], None], micro_batches: int = 1) -> None:
    """A scaled step after so many micro-batches, and what clears the gradients behind it."""
    scaler = scaler_of(parts)
    for number, x in enumerate(parts.batches, start=1):
        scaler.scale(parts.model(x).square().mean()).backward()
        if number % micro_batches == 0:
            scaler.step(parts.optimizer)
            scaler.update()
            clear()
