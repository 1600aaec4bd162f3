"""What a line of source tells of a remedy."""

from __future__ import annotations

import pytest

from ampdbg.diagnosis.remedies import scales_after_its_product, takes_a_sum


@pytest.mark.parametrize(
    "line",
    [
        "scores = q @ k.transpose(-1, -2) / math.sqrt(d)",
        "    return self.scale * torch.einsum('bqd,bkd->bqk', q, k)",
        "w = torch.bmm(q, k).softcap(5).mul_(s)",
        "x = f((torch.matmul(q, k) + bias) / d)",
    ],
)
def test_a_scaling_after_the_product(line: str) -> None:
    assert scales_after_its_product(line)


@pytest.mark.parametrize(
    "line",
    [
        "logits = (q * self.scale) @ k.transpose(-2, -1)",
        "x = torch.bmm(q / d, k)",
        "x = a / (b @ c)",  # a product that divides is not scaled
        "x = self.proj(x) * 2",
        "scores = q @ k.transpose(  # the statement goes on",
        "",
    ],
)
def test_none_after_the_product(line: str) -> None:
    assert not scales_after_its_product(line)


@pytest.mark.parametrize("line", ["return x.sum()", "y = torch.sum(x, 0)", "loss = F.mse_loss(a, b, reduction='sum')"])
def test_a_sum(line: str) -> None:
    assert takes_a_sum(line)


@pytest.mark.parametrize("line", ["k_sum = k.mean()", "loss = F.mse_loss(a, b, reduction='mean')", "x.sum("])
def test_no_sum(line: str) -> None:
    assert not takes_a_sum(line)
