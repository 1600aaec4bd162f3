"""Tensors rounded to a narrower format, to the nearest value or at random."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ampdbg.precision.widening import HalfClaims, lifted, rounded, spread

HALVES = (torch.float16, torch.bfloat16)


def values(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that are normal numbers in either format."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (4096,), generator=generator) * 2 - 1
    exponents = torch.randint(-8, 9, (4096,), generator=generator)
    return signs * (1 + torch.rand(4096, generator=generator, dtype=dtype)) * 2.0**exponents


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("own", [torch.float32, torch.float64])
def test_spread_moves_values_at_random_as_far_as_rounding_does(half: torch.dtype, own: torch.dtype) -> None:
    for exact in (values(own), values().to(half).to(own)):  # representable values move too
        draws = [spread(exact, half, draw) for draw in range(1, 65)]
        shares = torch.stack(draws).double() / exact.double() - 1.0
        assert {draw.dtype for draw in draws} == {own}
        assert 0.49 < float(shares.abs().max()) / torch.finfo(half).eps < 0.51
        assert abs(float(shares.mean())) / torch.finfo(half).eps < 0.01
        assert not torch.equal(draws[0], draws[1])
        assert torch.equal(draws[0], spread(exact, half, 1))


@pytest.mark.parametrize("half", HALVES)
def test_spread_widens_half_weights_and_keeps_zeros_infinities_and_integers(half: torch.dtype) -> None:
    assert spread(values().to(half), half, 1).dtype is torch.float32
    ends = torch.tensor([0.0, -0.0, math.inf, -math.inf])
    assert torch.equal(spread(ends, half, 1), ends)
    whole = torch.arange(5)
    assert spread(whole, half, 1) is whole


@pytest.mark.parametrize("half", HALVES)
def test_rounded_keeps_representable_out_of_range_and_integer_values(half: torch.dtype) -> None:
    held = values().to(half).float()
    assert torch.equal(rounded(held, half), held)
    limit = torch.finfo(half).max
    ends = torch.tensor([0.0, -0.0, limit, -limit, math.inf, -math.inf, 3.4e38])
    assert torch.equal(rounded(ends, half), ends)
    assert bool(rounded(torch.tensor([math.nan]), half).isnan())
    whole = torch.arange(5)
    assert rounded(whole, half) is whole


def test_spread_leaves_the_random_state_unchanged_and_accepts_any_shape() -> None:
    before = torch.get_rng_state()
    for tensor in (torch.rand(()), torch.rand(0, 3), torch.rand(4, 6).t(), torch.rand(3, 1).expand(3, 5)):
        before = torch.get_rng_state()
        assert spread(tensor, torch.float16, 1).shape == tensor.shape
        assert torch.equal(torch.get_rng_state(), before)


class TakesHalf(torch.autograd.Function):
    """Refuses float32, as compiled code does: no Python code asks for the dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.detach().numpy().dtype != np.float16:
            raise RuntimeError("half only")
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        assert gradients[0].numpy().dtype == np.float16
        return (2 * gradients[0].float()).half()


def test_float32_tensors_claim_to_be_half_and_a_refused_call_runs_in_half() -> None:
    claims = HalfClaims(torch.float16, torch.float32)
    x = torch.full((3,), 1 / 3, requires_grad=True)
    with lifted("float32", claims.in_half), claims:
        assert (x.dtype, x.double().dtype, x.long().dtype) == (torch.float16, torch.float64, torch.int64)
        y = claims.run(TakesHalf.apply, (x,), {})
        (y * 1e-9).sum().backward()  # zero in half
        (x * 1e-9).sum().backward()
    assert (y.dtype, x.dtype) == (torch.float32, torch.float32)
    assert y.tolist() == (2 * x.half()).tolist()
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([1e-9] * 3)


def test_a_call_that_refuses_half_too_raises_its_own_error() -> None:
    with HalfClaims(torch.float16, torch.float32), pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        torch.ones(2, 3) @ torch.ones(2, 3)
