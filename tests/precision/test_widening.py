"""Tensors rounded to a narrower format, to the nearest value or at random."""

import math

import pytest
import torch

from ampdbg.precision.widening import rounded, spread

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
