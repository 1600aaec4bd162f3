"""Training scripts as users write them: none mentions ampdbg."""

import re
import textwrap

HEAD = """
import copy, io, itertools, math, os, signal, sys, threading, time, warnings, torch, torch.nn.functional as F
from torch import nn

torch.manual_seed(0)

"""

STEP = """\
optimizer.zero_grad()
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
"""


def loop(text: str) -> str:
    """Prefixes the usual imports and the seed, and replaces each line ``STEP`` by the end of a usual step."""
    return HEAD + re.sub("^( *)STEP\n", lambda found: textwrap.indent(STEP, found[1]), text.lstrip(), flags=re.M)


PLAIN = """
import sys, torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

class Attention(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.q, self.gain = nn.Linear(16, 16), gain

    def forward(self, x):
        h = self.q(x) * self.gain
        scores = h @ h.transpose(-1, -2)
        return scores.mean(-1, keepdim=True) * 1e-4 + x

class Net(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.attention, self.out = Attention(gain), nn.Linear(16, 4)

    def forward(self, x):
        return self.out(self.attention(x)).mean(1)

def main(gain, steps):
    net = Net(gain).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(steps):
        x = torch.randn(8, 5, 16, device=device)
        target = torch.randint(4, (8,), device=device)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(net(x), target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    print("weights", sum(float(p.detach().double().sum()) for p in net.parameters()))
    torch.save(net.state_dict(), "weights.pt")

if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
"""
"""The attention overflows with a gain of 400, but not with 1."""

LOSS_LINE = loop("""
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda")
for _ in range(7):
    x = torch.randn(64, 16, device="cuda")
    with torch.autocast("cuda"):
        y = net(x)
        similar = (y * GAIN) @ (y * GAIN).T
        loss = similar.float().mean() * 1e-9 + y.float().square().mean()
    STEP
""")
"""The overflow is outside every module."""

GAN = loop("""
netG, netD = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)).cuda(), nn.Sequential(nn.Linear(8, 1)).cuda()
optimizers = [torch.optim.Adam(net.parameters(), 1e-3) for net in (netG, netD)]
scaler = torch.cuda.amp.GradScaler()
criterion = nn.BCEWithLogitsLoss()
one, zero = torch.ones(16, 1).cuda(), torch.zeros(16, 1).cuda()
for step in range(8):
    fake_input, real = torch.randn(16, 8).cuda(), torch.randn(16, 8).cuda()
    optimizers[1].zero_grad()
    with torch.cuda.amp.autocast():
        fake = netG(fake_input)
        lossD = criterion(netD(real), one) + criterion(netD(fake.detach()), zero)
    scaler.scale(lossD).backward()
    scaler.step(optimizers[1])
    optimizers[0].zero_grad()
    with torch.cuda.amp.autocast():
        lossG = criterion(netD(fake), one) * GAIN
    scaler.scale(lossG).backward()
    scaler.step(optimizers[0])
    scaler.update()
""")
"""With a gain of 1e9 no gradient of the generator is finite; the discriminator's own step has finite gradients."""

ONE_MODULE = loop("""
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((16, 16), GAIN))

    def forward(self, x):
        return (x @ self.weight).float().mean()

def main():
    net = Own().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(4):
        with torch.autocast("cuda"):
            loss = net(torch.full((8, 16), 10.0, device="cuda"))
        STEP

main()
""")
"""A model without submodules, freed before the script ends."""

CALIBRATION = loop("""
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda")
for _ in range(30):
    x = torch.randn(64, 16, device="cuda")
    with torch.autocast("cuda"):
        loss = (net(x) * 12 - 3).pow(2).mean() * 3
    STEP
""")
"""The loss scale settles at 256, as in healthy scripts."""

UNSCALED = """
for _ in range(3):
    optimizer.zero_grad()
    net(x).pow(2).mean().backward()
    optimizer.step()
"""
"""A second loop without a scaler, to append to another script."""

DIVERGING = loop("""
net = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 1)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=3.0)
scaler = torch.amp.GradScaler("cuda", init_scale=64.0)
for _ in range(30):
    x = torch.randn(64, 16, device="cuda")
    with torch.autocast("cuda"):
        loss = (net(x).float() - 3).pow(2).mean()
    STEP
""")
"""The learning rate is far too large: FP32 diverges too."""

ALTERNATING = loop("""
actor, critic = nn.Linear(16, 16).cuda(), nn.Linear(16, 1).cuda()
of_actor, of_critic = torch.optim.Adam(actor.parameters(), 1e-4), torch.optim.Adam(critic.parameters(), 1e-4)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
for _ in range(8):
    with torch.autocast("cuda"):
        y = actor(torch.randn(32, 16).cuda())
        squared = (y * GAIN) @ (y * GAIN).T
    of_actor.zero_grad()
    scaler.scale((squared / GAIN**2).float().logsumexp(-1).mean()).backward()
    scaler.step(of_actor)
    scaler.update()
    for _ in range(2):
        loss = critic(torch.randn(8, 16).cuda()).square().mean()
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
""")
"""Each turn has three steps; the first overflows with a gain of 1e3."""

ODD = loop("""
class Equal(torch.optim.SGD):
    def __eq__(self, other):
        raise RuntimeError("compared")

def train(net, x, scaler):
    optimizer = Equal(net.parameters(), lr=1e-3)
    for _ in range(4):
        with torch.autocast("cuda"):
            loss = net(x).square().mean()
        STEP

train(nn.Linear(4, 4, device="meta"), torch.ones(2, 4, device="meta"), torch.amp.GradScaler("cuda", enabled=False))
print("tried out")
train(nn.Linear(4, 4).cuda(), torch.ones(2, 4).cuda(), torch.amp.GradScaler("cuda"))
""")
"""A loop that first runs on a model on the meta device, with an unhashable optimizer."""

FP32 = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(16, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for _ in range(4):
    y = net(torch.randn(8, 16))
    loss = LOSS.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
"""It trains in FP32 only; with a logarithm of negative numbers its loss is NaN."""

FOLDS = loop("""
for fold in range(4):
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for step in range(30):
        x = torch.randn(64, 16, device="cuda")
        with torch.autocast("cuda"):
            loss = (net(x) * 12 - 3).pow(2).mean() * 3
            if fold == 3 and step > 12:
                BREAKS
        STEP
""")
"""The loss scale of each fold settles at 256, as in healthy scripts; a line for BREAKS makes the last collapse."""

MODEL = loop("""
class Mix(nn.Module):
    def forward(self, x):
        print("mixes")
        similar = (x * GAIN) @ (x * GAIN).transpose(-1, -2)
        return x + similar.mean(-1, keepdim=True) / GAIN**2

net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), Mix(), nn.Linear(32, 4)).cuda()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
criterion = nn.CrossEntropyLoss()

def batch():
    return torch.randn(8, 16, device="cuda"), torch.randint(4, (8,), device="cuda")

""")

_STEPS = {
    "accumulation and clipping": """
    for micro in range(2):
        x, y = batch()
        with torch.autocast("cuda"):
            loss = criterion(net(x), y) / 2
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
""",
    "a gradient penalty": """
    x, y = batch()
    x.requires_grad_()
    with torch.autocast("cuda"):
        output = net(x)
        loss = criterion(output, y)
    (slope,) = torch.autograd.grad(output.float().square().mean(), x, create_graph=True)
    scaler.scale(loss + slope.square().mean()).backward()
""",
    "several losses": """
    x, y = batch()
    with torch.autocast("cuda"):
        output = net(x)
        loss, small = criterion(output, y), output.float().square().mean()
    scaler.scale(loss).backward(retain_graph=True)
    scaler.scale(small * 0.1).backward()
""",
    "a batch that is changed in place": """
    x, y = batch()
    with torch.autocast("cuda"):
        loss = criterion(net(x.mul_(0.5)), y)
    scaler.scale(loss).backward()
    x.zero_()
""",
}


def _looped(step: str) -> str:
    ending = "    scaler.step(optimizer)\n    scaler.update()\n    optimizer.zero_grad()\n"
    return f'{MODEL}for step in range(6):{step}{ending}\ntorch.save(net.state_dict(), "weights.pt")\n'


LOOPS = {name: _looped(step) for name, step in _STEPS.items()}
"""Loops over one model: ``similar`` overflows with a gain of 1e3, but not with 1.0. It prints and draws numbers."""

DISTRIBUTED = (
    PLAIN.partition("def main(")[0].replace('device = "cuda" if torch.cuda.is_available() else "cpu"', "")
    + """
import os
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

local = int(os.environ["LOCAL_RANK"])
dist.init_process_group("nccl")
rank = dist.get_rank()
device = f"cuda:{local}"
torch.cuda.set_device(device)
net = DistributedDataParallel(Net(1.0).to(device), device_ids=[local])
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
torch.manual_seed(rank)
for step in range(8):
    net.module.attention.gain = 400.0 if step < 3 and str(rank) in sys.argv[1] else 1.0
    x = torch.randn(8, 5, 16, device=device)
    target = torch.randint(4, (8,), device=device)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(net(x), target)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print(f"weights {rank} {sum(float(p.detach().double().sum()) for p in net.parameters())!r}\\n", end="", flush=True)
dist.barrier()
dist.destroy_process_group()
"""
)
"""For two processes with NCCL and a GPU each: on the given ranks, the attention overflows in three steps."""
