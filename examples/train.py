"""A training script as people write them, with a fault: its loss is NaN from the first step on. The README runs it.

It trains a small model of bytes with linear attention, on its own source: copy it anywhere.
"""

from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

data = torch.tensor(list(Path(__file__).read_bytes()) * 8)
vocabulary, batch_size, length, width, depth = 256, 2, 3072, 64, 2


class LinearAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        kv = torch.einsum("bsd,bsm->bdm", k, v)
        norm = torch.einsum("bld,bd->bl", q, k.sum(dim=1))
        return self.proj(torch.einsum("bld,bdm->blm", q, kv) / norm.unsqueeze(-1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = LinearAttention()
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(length, width)
        self.h = nn.Sequential(*(Block() for _ in range(depth)))
        self.lm_head = nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.h(self.wte(x) + self.wpe.weight))


torch.manual_seed(0)
model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")

for step in range(6):
    starts = torch.randint(len(data) - length, (batch_size,))
    x = torch.stack([data[i : i + length] for i in starts]).cuda()
    y = torch.stack([data[i + 1 : i + length + 1] for i in starts]).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if step % 5 == 0:
        print(f"step {step}: loss {loss.item():.4f}, loss scale {scaler.get_scale():.0f}")
