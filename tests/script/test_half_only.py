"""Code that takes only half tensors, as FlashAttention does, is compared with FP32 all the same."""

from pathlib import Path

import pytest

from ampdbg.record.run import Record
from tests.commands.program import start
from tests.script import scripts
from tests.script.test_run import captured, first_finding, run_with_page
from tests.siblings import slow_except

NET = '''
import numpy as np
from torch.utils.checkpoint import checkpoint

kind, gain = sys.argv[1], float(sys.argv[2])
TAKES = "FlashAttention only supports fp16 and bf16"

class Kernel(torch.autograd.Function):
    """Takes half tensors alone, as compiled code does that no Python sees."""

    @staticmethod
    def forward(ctx, q, k, v):
        if any(one.detach().numpy().dtype != np.float16 for one in (q, k, v)):
            raise RuntimeError(TAKES)
        weights = (q.float() @ k.float().mT / q.shape[-1] ** 0.5).softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        return (weights @ v.float()).half()

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, weights = ctx.saved_tensors
        if gradient.numpy().dtype != np.float16:
            raise RuntimeError(TAKES)
        gradient = gradient.float()
        of_weights = gradient @ v.float().mT
        scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
        return (scores @ k.float()).half(), (scores.mT @ q.float()).half(), (weights.mT @ gradient).half()

def attention(q, k, v):
    if kind == "kernel":
        return Kernel.apply(q, k, v)
    if kind != "plain":
        assert q.dtype in (torch.float16, torch.bfloat16), TAKES
    return F.scaled_dot_product_attention(q, k, v)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        x = x + self.out(attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm(x))) ** 2) / gain ** 2

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(32, 4)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if kind == "checkpoint" else block(x)
        return self.head(x).mean(1)

net = Net().cuda()
with torch.no_grad():
    net.blocks[1].up.weight.mul_(gain)
optimizer = torch.optim.AdamW(net.parameters(), 1e-4)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
for step in range(12):
    x, y = torch.randn(4, 8, 32).cuda(), torch.randint(4, (4,)).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(net(x), y)
    STEP
'''
KINDS = ("assert", "kernel", "checkpoint")


def fp32_loss(record: Record) -> float:
    return record.investigations[0].reference.loss


@pytest.mark.parametrize("kind", slow_except(["kernel"], KINDS))
def test_an_overflow_beside_half_only_code_is_named_and_patched(kind: str, tmp_path: Path) -> None:
    text = scripts.loop(NET)
    plain, _, _ = run_with_page(tmp_path, text, "plain", "400")
    record, page, code = run_with_page(tmp_path, text, kind, "400")
    line = "return x + self.down(F.relu(self.up(self.norm(x))) ** 2) / gain ** 2"
    assert (code, record.verdict) == (1, "precision")
    assert first_finding(record) == first_finding(plain) == ("forward-overflow", 0, "blocks.1.down", line)
    assert fp32_loss(record) == pytest.approx(fp32_loss(plain), rel=1e-3)
    assert "FP32 was refused" in page
    assert "FlashAttention only supports fp16 and bf16" in page
    suggested = start(tmp_path, "suggest-fp32", captured(record)[0])
    assert suggested.code == 0, suggested.stderr
    assert "the patch for it is proven on the failing step" in " ".join(suggested.stderr.split())


@pytest.mark.parametrize("kind", slow_except(["assert"], KINDS))
def test_healthy_half_only_code_is_compared_with_fp32(kind: str, tmp_path: Path) -> None:
    record, _, code = run_with_page(tmp_path, scripts.loop(NET), kind, "1")
    assert (code, record.verdict, record.findings) == (0, "healthy", ())
    reference = record.investigations[0].reference
    assert (reference.error, bool(reference.refusal)) == ("", True)


def test_a_step_that_refuses_fp32_whatever_it_takes_stays_unknown(tmp_path: Path) -> None:
    text = scripts.loop(NET).replace(
        "assert q.dtype in (torch.float16, torch.bfloat16)", "assert torch.is_autocast_enabled('cuda')"
    )
    record, _, _ = run_with_page(tmp_path, text, "assert", "400")
    assert (record.findings[0].code, record.verdict) == ("unknown", "inconclusive")
    assert "raised AssertionError" in record.investigations[0].reference.error
