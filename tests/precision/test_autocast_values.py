"""What autocast rounds in float16 as on CUDA: gradients of a reused weight, intermediates of one op."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ampdbg.precision.autocast_policy import casts_keep_gradients, weight_casts
from ampdbg.precision.emulation import cuda_on_cpu


@pytest.fixture(autouse=True)
def _emulation() -> Iterator[None]:
    with cuda_on_cpu():
        yield


@dataclass(frozen=True)
class Use:
    """One op that multiplies ``x`` of shape (1, 1) by a weight of shape ``shape``."""

    name: str
    call: Callable[[Tensor, Tensor], Tensor]
    shape: tuple[int, ...] = (1, 1)


USES = (
    Use("linear", F.linear),
    Use("matmul", torch.matmul),
    Use("conv1d", lambda x, w: F.conv1d(x[..., None], w), (1, 1, 1)),
    Use("einsum", lambda x, w: torch.einsum("bi,oi->bo", x, w)),
    Use("prelu", lambda x, w: F.prelu(-x, w), (1,)),
    Use("addmv", lambda x, w: torch.addmv(torch.zeros(1), x, w), (1,)),
    Use("multi_dot", lambda x, w: torch.linalg.multi_dot((x, w))),
)


def gradient(use: Use, values: Sequence[float], cached: bool = True) -> float:
    """The magnitude of the gradient of a weight that multiplies each value, with the products added in float32."""
    weight = torch.ones(use.shape, requires_grad=True)
    with torch.autocast("cuda", cache_enabled=cached):
        products = [use.call(torch.full((1, 1), value), weight).float().sum() for value in values]
    torch.stack(products).sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float32
    return abs(weight.grad.item())


by_use = pytest.mark.parametrize("use", USES, ids=lambda use: use.name)


@by_use
def test_weight_gradients_add_up_in_float16_with_the_cache_and_in_float32_without(use: Use) -> None:
    assert gradient(use, [40000.0]) == 40000.0
    assert gradient(use, [40000.0, 40000.0]) == torch.inf
    assert gradient(use, [40000.0, 40000.0], cached=False) == 80000.0
    # Float16 holds all whole numbers only up to 2048: one more is lost, in either order.
    assert gradient(use, [1.0, 2048.0]) == 2048.0
    assert gradient(use, [1.0, 2048.0], cached=False) == 2049.0


@by_use
def test_weight_gradients_of_separate_regions_add_up_in_float32(use: Use) -> None:
    weight = torch.ones(use.shape, requires_grad=True)
    for value in (1.0, 2048.0):
        with torch.autocast("cuda"):
            product = use.call(torch.full((1, 1), value), weight).float().sum()
        product.backward()
    assert weight.grad is not None
    assert abs(weight.grad.item()) == 2049.0


@pytest.mark.parametrize("other", [use for use in USES if use.shape == (1, 1)], ids=lambda use: use.name)
def test_gradients_of_two_ops_that_share_a_weight_overflow_in_float16(other: Use) -> None:
    weight, x = torch.ones(1, 1, requires_grad=True), torch.full((1, 1), 40000.0)
    with torch.autocast("cuda"):
        total = F.linear(x, weight).float() + other.call(x, weight).float()
    total.sum().backward()
    assert weight.grad is not None
    assert weight.grad.item() == torch.inf


def test_a_weight_changed_between_two_regions_is_cast_again() -> None:
    weight, x = torch.ones(1, 1, requires_grad=True), torch.ones(1, 1)
    for expected in (1.0, 3.0):
        with torch.autocast("cuda"), torch.autocast("cuda"):
            assert torch.einsum("bi,oi->bo", x, weight).item() == expected
        assert not weight_casts
        with torch.no_grad():
            weight.fill_(3.0)


def test_a_weight_changed_inside_a_region_is_stale_until_the_cache_is_cleared() -> None:
    weight, x = torch.ones(1, 1, requires_grad=True), torch.ones(1, 1)
    with torch.autocast("cuda"):
        torch.einsum("bi,oi->bo", x, weight)
        with torch.no_grad():
            weight.fill_(3.0)
        assert torch.einsum("bi,oi->bo", x, weight).item() == 1.0
        torch.clear_autocast_cache()
        assert torch.einsum("bi,oi->bo", x, weight).item() == 3.0


def test_only_casts_of_float32_leaves_that_require_grad_are_cached() -> None:
    frozen, leaf = torch.ones(1, 1), torch.ones(1, 1, requires_grad=True)
    with torch.autocast("cuda"):
        for weight in (frozen, leaf * 1, leaf.view(1, 1), leaf.double()):
            torch.einsum("bi,oi->bo", torch.ones(1, 1).to(weight.dtype), weight)
        assert not weight_casts


@by_use
def test_a_use_under_no_grad_cuts_off_later_gradients_only_if_torch_does_so(use: Use) -> None:
    weight, x = torch.ones(use.shape, requires_grad=True), torch.ones(1, 1)
    with torch.autocast("cuda"):
        with torch.no_grad():
            use.call(x, weight)
        assert use.call(x, weight).requires_grad is casts_keep_gradients()


def test_the_cache_of_torch_keeps_gradients_from_torch_2_13() -> None:
    """PyTorch issue 112583, fixed in torch 2.13."""
    if torch_version() >= (2, 13):
        assert casts_keep_gradients()
    if torch_version() < (2, 10):
        assert not casts_keep_gradients()


def torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def test_no_cast_is_cached_in_inference_mode() -> None:
    weight = torch.ones(1, 1, requires_grad=True)
    with torch.autocast("cuda"):
        with torch.inference_mode():
            torch.einsum("bi,oi->bo", torch.ones(1, 1), weight)
        torch.einsum("bi,oi->bo", torch.ones(1, 1), weight).sum().backward()
    assert weight.grad is not None


LARGE, SMALL = torch.full((2, 2), 300.0), torch.full((2, 2), 1e-3)
"""LARGE @ LARGE is 180000, and times SMALL 360: the result is finite in float16, the intermediate is not."""

PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "einsum": lambda *t: torch.einsum("ij,jk,kl->il", *t),
    "multi_dot": lambda *t: torch.linalg.multi_dot(t),
    "chain_matmul": torch.chain_matmul,
    "matmul twice": lambda a, b, c: a @ b @ c,
}
by_product = pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS.keys())


@pytest.mark.filterwarnings("ignore:.*deprecated")
@by_product
def test_a_product_with_a_finite_result_overflows_if_an_intermediate_does(product: Callable[..., Tensor]) -> None:
    assert product(LARGE, LARGE, SMALL).isfinite().all()
    with torch.autocast("cuda"):
        assert product(LARGE, LARGE, SMALL).isinf().all()
        torch.testing.assert_close(product(LARGE, SMALL, SMALL).float(), torch.full((2, 2), 1.2e-3), rtol=1e-2, atol=0)


@by_product
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_an_intermediate_product_overflows_in_the_backward_pass_too(product: Callable[..., Tensor]) -> None:
    first = torch.full((2, 2), 1e-3, requires_grad=True)
    with torch.autocast("cuda"):
        output = product(first, SMALL, SMALL)
    # 60000 flows back through SMALL twice as 240 and 0.5. Through LARGE it overflows.
    (fine,) = torch.autograd.grad(output, first, torch.full((2, 2), 6e4).half())
    assert fine.isfinite().all()
    with torch.autocast("cuda"):
        output = product(first, SMALL, LARGE)
    (gradient,) = torch.autograd.grad(output, first, torch.full((2, 2), 6e4).half())
    assert gradient.isinf().all()


def test_the_sum_inside_an_einsum_overflows_but_a_separate_sum_does_not() -> None:
    tall = torch.full((1, 4), 30000.0)
    with torch.autocast("cuda"):
        assert torch.einsum("ij->i", tall).item() == torch.inf
        assert tall.half().sum(1).item() == 120000.0


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers_return_float16_and_train_also_on_packed_sequences(kind: Any, bidirectional: bool) -> None:
    layer = kind(4, 3, num_layers=2, bidirectional=bidirectional)
    with torch.autocast("cuda"):
        output = layer(torch.randn(5, 2, 4))[0]
        packed = layer(torch.nn.utils.rnn.pack_sequence([torch.randn(3, 4), torch.randn(2, 4)]))[0]
    output.sum().backward()
    assert output.dtype is packed.data.dtype is torch.float16
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in layer.parameters())


def test_fused_attention_accumulates_its_scores_in_float32() -> None:
    q = torch.full((1, 1, 4, 64), 100.0)
    with torch.autocast("cuda"):
        # Each score is 64 · 100 · 100 = 640000 before the scaling by 1/8. The kernel does not round it to float16.
        assert F.scaled_dot_product_attention(q, q, q).isfinite().all()
        assert (q @ q.mT).isinf().all()


def test_multi_head_attention_of_torch_runs_in_float16() -> None:
    attention, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    with torch.autocast("cuda"):
        output, weights = attention(x, x, x)
    assert (output.dtype, weights.dtype) == (torch.float16, torch.float32)


def test_a_transformer_layer_returns_float32_and_has_finite_gradients() -> None:
    layer, x = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 5, 8)
    with torch.autocast("cuda"):
        output = layer(x)
    output.float().pow(2).sum().backward()
    # LayerNorm is in CUDA's FP32 list.
    assert output.dtype is torch.float32
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
