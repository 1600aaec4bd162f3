"""Models of any number of modules with planted culprits: layers whose inner product is beyond half."""

import functools
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8
GAIN = 300.0


class Steady(nn.Module):
    """A layer that keeps its values near 1 for any input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) + 0.1 * torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x @ self.weight, (WIDTH,))


class Spike(Steady):
    """Its product is 90,000 times as large as its input, and is scaled down again: only FP16 overflows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = (x @ (GAIN * self.weight)) @ (GAIN * torch.eye(WIDTH, device=x.device))
        return F.layer_norm(large / GAIN**2, (WIDTH,))


class BackwardSpike(torch.autograd.Function):
    """The identity; in its own dtype, the gradient is multiplied by ``gain`` and divided again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gain: float = 2.0**30) -> torch.Tensor:
        ctx.gain = gain
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (gradient * ctx.gain) / ctx.gain, None


class SpikeInGradients(Steady):
    """Its forward pass is like that of other layers; its backward pass overflows at any useful loss scale."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(BackwardSpike.apply(x @ self.weight), (WIDTH,))


class MildSpikeInGradients(Steady):
    """Its backward pass overflows at a loss scale of 1,024, but not at 64."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(BackwardSpike.apply(x @ self.weight, 2.0**14), (WIDTH,))


class Erased(Steady):
    """An overflow that erases itself: the norm of large values is infinite in half, and x / inf is 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = 400.0 * (x @ self.weight)
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6).detach()


KINDS: dict[str, type[Steady]] = {"spike": Spike, "backward": SpikeInGradients, "erased": Erased}


class Block(nn.Module):
    """Layers in a chain with a residual connection, optionally checkpointed."""

    def __init__(self, layers: Sequence[nn.Module], checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return x + checkpoint(self.through, x, use_reentrant=False)
        return x + self.through(x)

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return 0.1 * x


class Planted(nn.Module):
    """About ``modules`` modules in blocks of ``depth`` layers; the layers with the numbers ``culprits`` overflow."""

    def __init__(
        self, modules: int, culprits: Sequence[int], kind: str = "spike", depth: int = 6, checkpointed: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        count = modules * depth // (depth + 1)
        layers = [KINDS[kind]() if number in culprits else Steady() for number in range(count)]
        self.blocks = nn.ModuleList(
            Block(layers[start : start + depth], checkpointed) for start in range(0, count, depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functools.reduce(lambda value, block: block(value), self.blocks, x)


def name_of(culprit: int, depth: int = 6) -> str:
    """The qualified name of a layer of Planted."""
    return f"blocks.{culprit // depth}.layers.{culprit % depth}"


def chain(**parts: Callable[[], nn.Module]) -> nn.Sequential:
    """The parts in a chain, with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict((name, make()) for name, make in parts.items()))


def named(name: str) -> nn.Module:
    """A chain with one spike of this name."""
    return chain(**{name: Spike, "steady": Steady})


class Shared(nn.Module):
    """One spike that is called three times, and overflows only in the third call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.spike, self.after = Steady(), SizeOfItsInput(), Steady()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for size in (1.0, 2.0, 2000.0):
            x = self.spike(x, size) / size**2
        return self.after(x)


class SizeOfItsInput(Steady):
    """Scales by its argument, twice."""

    def forward(self, x: torch.Tensor, size: float = 1.0) -> torch.Tensor:
        return F.layer_norm((x @ (size * self.weight)) @ (size * torch.eye(WIDTH, device=x.device)), (WIDTH,)) * size


class Choice(nn.Module):
    """Adds a part of its input if a product exceeds 2,048, which it does by ``excess``. FP16 rounds an excess of 0.4
    away: the part's weight then has no gradient at any loss scale. The weight is 0, so the output is the same."""

    height: torch.Tensor

    def __init__(self, excess: float) -> None:
        super().__init__()
        self.register_buffer("height", torch.tensor([[2048.0], [excess]]))
        self.part = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_above = torch.ones(1, 2, device=x.device) @ self.height > 2048.0
        return x + torch.where(is_above, self.part * x, 0.0)


def chooser(excess: float) -> nn.Module:
    """With the spike in FP32, gradients are finite at a lower loss scale; FP16 may choose otherwise than FP32."""
    choice = functools.partial(Choice, excess)
    return chain(choice=choice, spike=SpikeInGradients, mild=MildSpikeInGradients)


class SpikeInHalfAlone(Steady):
    """Overflows only in float16: bfloat16 takes another path."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x @ self.weight
        if made.dtype is torch.float16:
            made = (made * GAIN**2) / GAIN**2
        return F.layer_norm(made, (WIDTH,))


class Steeper(torch.autograd.Function):
    """The identity, whose gradient is ``gain`` times as large."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gain: float) -> torch.Tensor:
        ctx.gain = gain
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.gain, None


class CastBack(nn.Module):
    """A layer whose output is read in FP32: the gradient, times ``gain`` there, is cast back to half at the output."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain, self.linear = gain, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(Steeper.apply(x, 1 / self.gain))
        return F.layer_norm(Steeper.apply(made.float(), self.gain), (WIDTH,)) + x


class Steep(nn.Module):
    """``count`` layers; those with the numbers ``culprits`` get gradients beyond half."""

    def __init__(self, count: int, culprits: Sequence[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(CastBack(2.0**30 if number in culprits else 1.0) for number in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functools.reduce(lambda value, layer: layer(value), self.layers, x)


class SideBySide(nn.Module):
    """Layers with the same input, each of which overflows only in float16: none hides another."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(SpikeInHalfAlone() for _ in range(count))
        self.head = Steady()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.stack([layer(x) for layer in self.layers]).mean(0))


class Saturated(nn.Module):
    """Layers in a chain, each of which overflows, even in FP32's range, and is squashed: no infinity leaves a layer."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        for weight in self.parameters():
            nn.init.constant_(weight, 9000.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.abs() + 1.0
        for layer in self.layers:
            x = x + 1e-3 * torch.tanh(layer(x).float() / 1e5)
        return x


class Product(Steady):
    """A spike whose result has the dtype of its products."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ (GAIN * self.weight)) @ (GAIN * torch.eye(WIDTH, device=x.device))) / GAIN**2


class Meek(Steady):
    """Overflows if its input is FP32, like a kernel without a half path."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gain = GAIN if x.dtype is torch.float32 else 1.0
        return F.layer_norm((x @ (gain * self.weight)) @ (gain * torch.eye(WIDTH, device=x.device)) / gain**2, (WIDTH,))


def roused() -> nn.Module:
    """A spike, and a layer that overflows on the spike's FP32 result but not on its half result."""
    return chain(spike=Product, meek=Meek, after=Steady)


class Large(Steady):
    """Its output is about 300."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return GAIN * (1 + (x @ self.weight).abs())


class Alternatives(nn.Module):
    """The product of two half factors: either one in FP32 is enough."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = chain(left=Large, right=Large, head=Steady)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right, head = self.parts
        return head((left(x) * right(x)) / GAIN**2)


def narrow() -> nn.Module:
    """Gradients of its output are beyond half at any loss scale, and those of ``hidden`` only at a large one."""
    linear = functools.partial(nn.Linear, WIDTH, WIDTH)
    made = chain(hidden=linear, out=linear)
    nn.init.normal_(made.get_parameter("out.weight"), std=0.01)
    return made


def likelihood(output: torch.Tensor, target: torch.Tensor, log_precision: float = 14.0) -> torch.Tensor:
    """The negative logarithm of a Gaussian likelihood up to a constant, summed over the features."""
    squares = (output.float() - target).square().sum(-1).mean()
    return 0.5 * (math.exp(log_precision) * squares - log_precision)


def broad_likelihood(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The same with a variance of 1: its gradients are small."""
    return likelihood(output, target, log_precision=0.0)


class Sometimes(nn.Module):
    """A spike in three of ten calls, chosen by an iterator that no replay can restore."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.layer, self.after = Steady(), Spike(), Steady()
        self.calls = itertools.count(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        return self.after(self.layer(x) if next(self.calls) % 10 in (0, 3, 7) else x @ self.layer.weight)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Four batches of 16 rows."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, WIDTH, generator=generator), torch.randn(16, WIDTH, generator=generator)) for _ in range(4)
    ]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean squared error in FP32."""
    return F.mse_loss(output.float(), target)
