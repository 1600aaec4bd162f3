"""Tensors rounded to a narrower format, to the nearest value of it or at random."""

import math

import pytest
import torch

from ampdbg.precision.widening import rounded

HALVES = (torch.float16, torch.bfloat16)


def values(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Magnitudes that are normal numbers of either format."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (4096,), generator=generator) * 2 - 1
    exponents = torch.randint(-8, 9, (4096,), generator=generator)
    return signs * (1 + torch.rand(4096, generator=generator, dtype=dtype)) * 2.0**exponents


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("own", [torch.float32, torch.float64])
def test_at_random_each_value_becomes_one_of_its_two_neighbours(half: torch.dtype, own: torch.dtype) -> None:
    exact = values(own)
    unit = torch.finfo(half).eps * 2.0 ** torch.log2(exact.abs()).floor()
    draws = [rounded(exact, half, draw) for draw in range(1, 65)]
    for draw in draws:
        assert draw.dtype is own
        assert torch.equal(draw, draw.to(half).to(own))
        assert bool(((draw - exact).abs() < unit).all())
    assert not torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], rounded(exact, half, 1))
    bias = (torch.stack(draws).mean(0) - exact) / unit
    assert abs(float(bias.mean())) < 0.01


@pytest.mark.parametrize("draw", [0, 1, 2])
@pytest.mark.parametrize("half", HALVES)
def test_what_the_format_holds_or_cannot_hold_stays(half: torch.dtype, draw: int) -> None:
    held = values().to(half).float()
    assert torch.equal(rounded(held, half, draw), held)
    limit = torch.finfo(half).max
    ends = torch.tensor([0.0, -0.0, limit, -limit, math.inf, -math.inf, 3.4e38])
    assert torch.equal(rounded(ends, half, draw), ends)
    assert bool(rounded(torch.tensor([math.nan]), half, draw).isnan())
    whole = torch.arange(5)
    assert rounded(whole, half, draw) is whole


def test_a_draw_leaves_the_random_state_alone_and_takes_any_shape() -> None:
    before = torch.get_rng_state()
    for tensor in (torch.rand(()), torch.rand(0, 3), torch.rand(4, 6).t(), torch.rand(3, 1).expand(3, 5)):
        before = torch.get_rng_state()
        assert rounded(tensor, torch.float16, 1).shape == tensor.shape
        assert torch.equal(torch.get_rng_state(), before)
