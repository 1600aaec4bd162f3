"""Random models of common blocks, with random gains and eps, and the FP32 loop that their scans are checked against."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import ampdbg
from ampdbg.precision.emulation import cuda_on_cpu
from ampdbg.record.run import Record

WIDTH, LENGTH, CLASSES = 32, 12, 4
STEPS, RATE = 12, 5e-4

NEAR = 0.02
"""The largest difference from FP32's gradients, as a share of their norm, that counts as equal."""

Form = Callable[["Block", torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """One block: ``form`` names its function of an input of shape (batch, LENGTH, WIDTH)."""

    def __init__(self, form: str, gain: float, eps: float) -> None:
        super().__init__()
        self.form, self.gain, self.eps = form, gain, eps
        self.a, self.b, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FORMS[self.form](self, x)


def linear_attention(block: Block, x: torch.Tensor) -> torch.Tensor:
    q, k = F.elu(block.a(x)) + 1, F.elu(block.b(x)) + 1
    z = 1 / (torch.einsum("bnd,bd->bn", q, k.sum(1)) + block.eps)
    return x + torch.einsum("bnd,bde,bn->bne", q, torch.einsum("bnd,bne->bde", k, x), z) * block.gain


def masked_attention(block: Block, x: torch.Tensor) -> torch.Tensor:
    scores = block.a(x) @ block.b(x).transpose(-1, -2) * block.gain
    mask = torch.triu(torch.ones(LENGTH, LENGTH, device=x.device), 1) * -1e5
    return x + torch.softmax(scores + mask.to(scores.dtype), -1) @ x


def half_sum(block: Block, x: torch.Tensor) -> torch.Tensor:
    h = block.a(x) * block.gain
    return x + (h * h).sum(-1, keepdim=True, dtype=h.dtype) / WIDTH


def standardised(block: Block, x: torch.Tensor) -> torch.Tensor:
    h = block.a(x)
    return (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) * block.gain + block.eps)


def by_variance(block: Block, x: torch.Tensor) -> torch.Tensor:
    h = block.a(x) * block.gain
    return h * torch.rsqrt(h.var(-1, keepdim=True) + block.eps)


def of_unit_length(block: Block, x: torch.Tensor) -> torch.Tensor:
    h = block.a(x) * block.gain
    return h / (h.norm(dim=-1, keepdim=True) + block.eps) * WIDTH**0.5


def products_of_channels(block: Block, x: torch.Tensor) -> torch.Tensor:
    h = block.a(x) * block.gain
    return x + (h.transpose(1, 2) @ h)[:, :LENGTH] * 0.01


FORMS: dict[str, Form] = {
    "mlp": lambda block, x: x + block.b(F.gelu(block.a(block.norm(x)))) * block.gain,
    "attention": lambda block, x: x + torch.softmax(block.a(x) @ block.b(x).transpose(-1, -2) * block.gain, -1) @ x,
    "linear attention": linear_attention,
    "masked attention": masked_attention,
    "rms norm": lambda block, x: block.a(x) * torch.rsqrt((x * x).mean(-1, keepdim=True) * block.gain + block.eps),
    "standardised": standardised,
    "by variance": by_variance,
    "of unit length": of_unit_length,
    "bump": lambda block, x: x + torch.exp(-((block.a(x) * block.gain) ** 2)),
    "gate": lambda block, x: x * torch.sigmoid(block.a(x) * block.gain) + block.b(x),
    "squared relu": lambda block, x: x + F.relu(block.a(block.norm(x)) * block.gain) ** 2,
    "logarithm": lambda block, x: block.b(x) + torch.log(torch.sigmoid(block.a(x) * block.gain) + block.eps),
    "cosine": lambda block, x: x + F.cosine_similarity(block.a(x), block.b(x), dim=-1)[..., None] * block.gain,
    "root": lambda block, x: x + torch.sqrt(F.relu(block.a(x)) + block.eps) * block.gain,
    "running sum": lambda block, x: x + torch.cumsum(block.a(x) * block.gain, 1) * 0.1,
    "half sum": half_sum,
    "sum of powers": lambda block, x: x + torch.log(torch.exp(block.a(x) * block.gain).sum(-1, True) + block.eps),
    "product": lambda block, x: x * (block.a(x) * block.gain) * torch.sigmoid(block.b(x)),
    "products of channels": products_of_channels,
}


class Net(nn.Module):
    """One to four random blocks between two layers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.inlet, self.outlet = nn.Linear(8, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.Sequential(
            *(
                Block(draw.choice(list(FORMS)), 10 ** draw.uniform(-2, 3), 10 ** draw.uniform(-9, -1))
                for _ in range(draw.randint(1, 4))
            )
        )
        self.factor = 10 ** draw.uniform(-1, 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outlet(self.blocks(self.inlet(x)).mean(1)) * self.factor


def batches(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, LENGTH, 8, generator=generator), torch.randint(0, CLASSES, (8,), generator=generator))
        for _ in range(4)
    ]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target)


CONFIG = f"""
model: {{target: "tests.fuzz.models:Net", args: {{seed: SEED}}}}
data: {{target: "tests.fuzz.models:batches", args: {{seed: SEED}}}}
loss: {{target: "tests.fuzz.models:loss"}}
optimizer: {{args: {{lr: {RATE}}}}}
train: {{steps: {STEPS}}}
"""


@dataclass(frozen=True)
class Plain:
    """A loop without autocast: its losses, and whether all gradients of each step are finite.

    ``is_held``: half precision holds each step. At some loss scale, on the same weights, emulated autocast has FP32's
    loss and gradients, and no parameter loses its whole gradient, however small.
    """

    losses: list[float]
    are_finite: list[bool]
    is_held: bool

    @staticmethod
    def of(seed: int, withheld: Collection[int] = ()) -> Plain:
        """The FP32 loop of a model. It skips the steps that a scan ``withheld``, so that its weights match the scan's,
        and with them what half precision holds."""
        model, data = Net(seed), batches(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        losses, are_finite, is_held = [], [], True
        for step in range(STEPS):
            x, target = data[step % len(data)]
            value, gradients = _step(model, x, target)
            losses.append(value)
            are_finite.append(bool(gradients.isfinite().all()))
            is_held = is_held and _is_held(model, x, target, value, gradients, _learning(model))
            _step(model, x, target)
            if step not in withheld:
                optimizer.step()
        return Plain(losses, are_finite, is_held)

    @property
    def is_sound(self) -> bool:
        """Whether all losses and gradients are finite."""
        return all(self.are_finite) and all(map(math.isfinite, self.losses))


def _step(model: nn.Module, x: torch.Tensor, target: torch.Tensor, scale: float = 1.0) -> tuple[float, torch.Tensor]:
    """The loss, and all gradients of one step as one tensor. The weights keep theirs in ``grad``, times the scale."""
    model.zero_grad()
    value = loss(model(x), target)
    (value * scale).backward()
    held = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return value.item(), torch.cat([gradient.flatten() for gradient in held]) / scale


def _learning(model: nn.Module) -> set[str]:
    """The parameters with a nonzero gradient."""
    return {name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.any()}


def _is_held(
    model: nn.Module,
    x: torch.Tensor,
    target: torch.Tensor,
    value: float,
    gradients: torch.Tensor,
    learning: Collection[str],
) -> bool:
    with cuda_on_cpu(), torch.autocast("cuda", dtype=torch.float16):
        for scale in (2.0**12, 2.0**8, 2.0**4, 1.0):
            half, found = _step(model, x, target, scale)
            near = float((found - gradients).norm() / gradients.norm())
            is_near = math.isclose(half, value, rel_tol=0.01, abs_tol=1e-3) and near < NEAR
            if is_near and _learning(model).issuperset(learning):
                return True
    return False


def scanned(folder: Path, seed: int) -> Record:
    """The record of a scan of a model."""
    path = folder / "c.yaml"
    path.write_text(CONFIG.replace("SEED", str(seed)), encoding="utf-8")
    return ampdbg.scan(path)


def faults(record: Record, plain: Plain) -> list[str]:
    """The statements of the record that the FP32 loop disproves."""
    found = [finding.code for finding in record.findings if finding.severity == "error"]
    wrong: list[str] = []
    if plain.is_sound and record.verdict == "other":
        wrong.append(f"{found}, and FP32 trains")
    if record.verdict == "precision" and not (math.isfinite(plain.losses[0]) and plain.are_finite[0]):
        wrong.append(f"{found}, and FP32 fails from its first step on")
    if record.verdict == "precision" and found and plain.is_held:
        wrong.append(f"{found}, and half precision holds each step")
    if record.verdict == "healthy" and not math.isfinite(record.steps[-1].loss):
        wrong.append("healthy, and the last loss is not finite")
    return wrong
