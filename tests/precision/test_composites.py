"""Ops made of several: their intermediates round and overflow in half, and are not cast again, as on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ampdbg.precision.emulation import cuda_on_cpu


@pytest.fixture(autouse=True)
def _emulation() -> Iterator[None]:
    with cuda_on_cpu():
        yield


LARGE, SMALL = torch.full((2, 2), 300.0), torch.full((2, 2), 1e-3)
"""LARGE @ LARGE is 180000, and times SMALL 360: finite in half, but not on the way there."""

PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "einsum": lambda *t: torch.einsum("ij,jk,kl->il", *t),
    "multi_dot": lambda *t: torch.linalg.multi_dot(t),
    "chain_matmul": torch.chain_matmul,
    "matmul twice": lambda a, b, c: a @ b @ c,
}
by_product = pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS.keys())


@pytest.mark.filterwarnings("ignore:.*deprecated")
@by_product
def test_an_intermediate_overflows_though_the_final_value_is_finite_unless_the_order_keeps_it_small(
    product: Callable[..., Tensor],
) -> None:
    assert product(LARGE, LARGE, SMALL).isfinite().all()
    with torch.autocast("cuda"):
        assert product(LARGE, LARGE, SMALL).isinf().all()
        torch.testing.assert_close(product(LARGE, SMALL, SMALL).float(), torch.full((2, 2), 1.2e-3), rtol=1e-2, atol=0)


@by_product
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_an_intermediate_of_the_backward_pass_overflows_too(product: Callable[..., Tensor]) -> None:
    first = torch.full((2, 2), 1e-3, requires_grad=True)
    with torch.autocast("cuda"):
        output = product(first, SMALL, SMALL)
    # 60000 flows back through SMALL twice in any case: 240 and 0.5; with LARGE in between it cannot.
    (fine,) = torch.autograd.grad(output, first, torch.full((2, 2), 6e4).half())
    assert fine.isfinite().all()
    with torch.autocast("cuda"):
        output = product(first, SMALL, LARGE)
    (gradient,) = torch.autograd.grad(output, first, torch.full((2, 2), 6e4).half())
    assert gradient.isinf().all()


def test_the_sum_inside_an_einsum_overflows_where_a_sum_of_its_own_does_not() -> None:
    tall = torch.full((1, 4), 30000.0)
    with torch.autocast("cuda"):
        assert torch.einsum("ij->i", tall).item() == torch.inf
        assert tall.half().sum(1).item() == 120000.0


LAYERS: tuple[Any, ...] = (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN)


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers_give_half_and_train(kind: Any, bidirectional: bool) -> None:
    layer = kind(4, 3, num_layers=2, bidirectional=bidirectional)
    with torch.autocast("cuda"):
        output = layer(torch.randn(5, 2, 4))[0]
    output.sum().backward()
    assert output.dtype is torch.float16
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in layer.parameters())


def test_a_packed_sequence_runs_through_a_recurrent_layer() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    with torch.autocast("cuda"):
        output = torch.nn.LSTM(4, 3)(packed)[0]
    assert output.data.dtype is torch.float16


def test_fused_attention_accumulates_its_scores_in_float32() -> None:
    q = torch.full((1, 1, 4, 64), 100.0)
    with torch.autocast("cuda"):
        # Each score is 64 · 100 · 100 = 640000 before the scaling by 1/8, which the kernel does not round to half.
        assert F.scaled_dot_product_attention(q, q, q).isfinite().all()
        assert (q @ q.mT).isinf().all()


def test_multi_head_attention_of_torch_runs_in_half() -> None:
    attention, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    with torch.autocast("cuda"):
        output, weights = attention(x, x, x)
    assert (output.dtype, weights.dtype) == (torch.float16, torch.float32)


def test_a_transformer_layer_trains() -> None:
    layer, x = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 5, 8)
    with torch.autocast("cuda"):
        output = layer(x)
    output.float().pow(2).sum().backward()
    # LayerNorm is in CUDA's FP32 list.
    assert output.dtype is torch.float32
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
