"""Tests of the shadow trace: the values in FP16, the start of each overflow, and bfloat16 in place of float16."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampdbg.diagnosis.ranges import diagnose_ranges, overflows_at_any_scale
from ampdbg.formats import Exponents
from ampdbg.probes.op_trace import placed
from ampdbg.probes.shadow_trace import RangeSeen, ShadowTrace, bfloat16_for_float16, sites_of
from ampdbg.probes.tensors import MAX_SAMPLE, exponents_of, magnitude_of
from ampdbg.record.run import Record, Site
from tests.report.records import ENVIRONMENT


def shadow_of(code: Callable[[], object], model: nn.Module | None = None) -> list[RangeSeen]:
    """The ops of ``code`` whose values FP16 would hold."""
    with bfloat16_for_float16(), placed(model or nn.Identity(), ShadowTrace) as trace:
        code()
    return trace.ranges


def half(*values: float) -> torch.Tensor:
    return torch.tensor(values).to(torch.float16)


def overflows(ranges: list[RangeSeen]) -> list[tuple[str, str]]:
    return [(seen.op.split(".")[1], seen.overflow) for seen in ranges if seen.overflow]


def carried_on() -> None:
    x = half(300.0) * half(300.0)
    (x + half(1.0)).float().to(torch.float16)


def divided_and_squared() -> None:
    x = half(300.0) * half(300.0)
    y = x / half(300.0)
    y * y


MULTIPLIED, CAST = ("mul", "starts"), ("_to_copy", "starts")
WIDE = torch.tensor([0.3, 200.0])

OVERFLOWS: dict[str, tuple[Callable[[], object], list[tuple[str, str]]]] = {
    "it starts once and is carried on": (carried_on, [MULTIPLIED, ("add", "carried"), ("_to_copy", "carried")]),
    "a second one behind the first starts on its own": (divided_and_squared, [MULTIPLIED, MULTIPLIED]),
    "the cast of a wide value": (lambda: (WIDE * WIDE * WIDE).to(torch.float16), [CAST]),
    "a factor of values": (lambda: half(0.3, 2.0) * 1e5, [MULTIPLIED]),
    "a factor of large values": (lambda: half(300.0) * 1e5, [MULTIPLIED]),
    "a factor of a mask": (lambda: half(0.0, 1.0) * -1e9, [("mul", "carried")]),
    "a factor of wide values": (lambda: (WIDE * 1e6).to(torch.float16), [CAST]),
    "a factor of whole wide values": (lambda: (torch.tensor([3.0, 7.0]) * 1e6).to(torch.float16), [CAST]),
}


@pytest.mark.parametrize("name", OVERFLOWS)
def test_an_overflow_starts_where_values_exceed_fp16(name: str) -> None:
    code, expected = OVERFLOWS[name]
    assert overflows(shadow_of(code)) == expected


CONSTANTS: dict[str, Callable[[], object]] = {
    "masked_fill": lambda: half(1.0, 2.0).masked_fill(torch.tensor([True, False]), -1e9),
    "where": lambda: torch.where(torch.tensor([True, False]), half(1.0, 2.0), -1e9),
    "full": lambda: torch.full((2,), -1e9).to(torch.float16),
    "written out": lambda: torch.tensor(-1e9).to(torch.float16),
    "times a mask": lambda: ((1.0 - torch.tensor([0.0, 1.0])) * -1e9).to(torch.float16),
    "times a mask and another": lambda: (torch.tensor([0.0, 1.0, 2.0]) * -1e9).to(torch.float16),
    "times a mask of booleans": lambda: (torch.tensor([False, True]) * -1e9).to(torch.float16),
    "added": lambda: half(1.0, 2.0) + torch.full((2,), -1e9).to(torch.float16),
    "intended infinity": lambda: half(1.0, 2.0).masked_fill(torch.tensor([True, False]), -math.inf),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_in_the_code_starts_no_overflow(name: str) -> None:
    op = {"masked_fill": "masked_fill", "where": "where", "added": "add"}.get(name, "_to_copy")
    found = overflows(shadow_of(CONSTANTS[name]))
    assert found[-1:] == ([] if name == "intended infinity" else [(op, "carried")])
    assert {how for _, how in found} <= {"carried"}


def test_a_buffer_beyond_fp16_counts_as_a_constant() -> None:
    model = nn.Module()
    model.register_buffer("masked_bias", torch.tensor(-1e9))
    assert overflows(shadow_of(lambda: model.masked_bias.to(torch.float16), model)) == [("_to_copy", "carried")]


def test_finfo_of_a_half_tensor_gives_the_limits_of_float16() -> None:
    def code() -> None:
        x = half(1.0, 2.0)
        x.masked_fill(torch.tensor([True, False]), torch.finfo(x.dtype).min)

    (seen,) = [seen for seen in shadow_of(code) if "masked_fill" in seen.op]
    assert (seen.output.largest, seen.overflow) == (65536.0, "carried")  # 65504, rounded to eight bits


BEFORE = torch.ones(2, dtype=torch.float16)

CASTS: dict[str, Callable[[], torch.Tensor]] = {
    "half": lambda: torch.ones(2).half(),
    "to": lambda: torch.ones(2).to(torch.float16),
    "type": lambda: torch.ones(2).type(torch.float16),
    "zeros": lambda: torch.zeros(2, dtype=torch.float16),
    "full": lambda: torch.full((2,), 3.0, dtype=torch.half),
    "tensor": lambda: torch.tensor([1.0, 2.0], dtype=torch.float16),
    "zeros_like": lambda: torch.zeros_like(torch.ones(2), dtype=torch.float16),
    "sum": lambda: torch.ones(2).sum(dtype=torch.float16),
    "a half tensor from before": lambda: BEFORE + 1.0,
    "autocast": lambda: _product_under(torch.float16),
}


def _product_under(dtype: torch.dtype) -> torch.Tensor:
    with torch.autocast("cpu", dtype=dtype):
        return torch.ones(2, 2) @ torch.ones(2, 2)


@pytest.mark.parametrize("code", CASTS.values(), ids=CASTS)
def test_code_that_asks_for_float16_gets_bfloat16(code: Callable[[], torch.Tensor]) -> None:
    with bfloat16_for_float16(), placed(nn.Identity(), ShadowTrace):
        assert code().dtype is torch.bfloat16
    assert code().dtype is torch.float16, "float16 is back afterwards"


def test_a_half_tensor_that_is_written_into_stays_half() -> None:
    target = torch.zeros(2, dtype=torch.float16)
    shadow_of(lambda: target.copy_(torch.ones(2)).add_(half(1.0, 1.0)))
    assert target.dtype is torch.float16
    assert target.tolist() == [2.0, 2.0]


def test_an_op_without_a_bfloat16_kernel_is_widened() -> None:
    x, target = torch.randn(3, 4), torch.tensor([0, 1, 2])
    (seen,) = [
        seen
        for seen in shadow_of(lambda: nn.functional.multi_margin_loss(x.half(), target))
        if "multi_margin" in seen.op
    ]
    assert seen.output.dtype == "bfloat16"


def a_spectrum(x: torch.Tensor) -> torch.Tensor:
    return torch.stft(x, 8, window=torch.ones(8, dtype=x.dtype), return_complex=True)


TRANSFORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rfft": torch.fft.rfft,
    "fft2": torch.fft.fft2,
    "hfft by name": lambda x: torch.fft.hfft(input=x),
    "stft": a_spectrum,
    "istft": lambda x: torch.istft(a_spectrum(x), 8, window=torch.ones(8)),
}


MAKERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "complex": lambda x: torch.complex(x, 2 * x),
    "polar": lambda x: torch.polar(x.abs(), x),
    "view_as_complex": lambda x: torch.view_as_complex(x.view(2, 16, 2)),
}


@pytest.mark.parametrize("name", [*TRANSFORMS, *MAKERS])
def test_fourier_and_complex_ops_of_half_run_in_float32_with_half_gradients(name: str) -> None:
    make = {**TRANSFORMS, **MAKERS}[name]
    x = torch.randn(2, 32, dtype=torch.bfloat16, requires_grad=True)
    wide = make(x.detach().float())
    with bfloat16_for_float16() as transforms, placed(nn.Identity(), ShadowTrace):
        make(x.detach().float())
        assert transforms.have_run == [], "it is told of only where something half was transformed"
        made = make(x)
        made.abs().sum().backward()
    assert transforms.have_run == ["Fourier transforms" if name in TRANSFORMS else "complex numbers"]
    assert made.dtype is wide.dtype
    assert torch.allclose(made, wide)
    assert x.grad is not None
    assert x.grad.dtype is torch.bfloat16


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("goes_backward", [torch.Tensor.backward, torch.autograd.backward])
def test_a_recomputed_checkpoint_runs_fourier_transforms_in_float32(
    goes_backward: Callable[[torch.Tensor], None], use_reentrant: bool
) -> None:
    x = torch.randn(2, 32, dtype=torch.bfloat16, requires_grad=True)

    def mixed(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft2(x).real

    def gradient(given: torch.Tensor) -> torch.Tensor | None:
        x.grad = None
        goes_backward(given.square().sum())
        return x.grad

    plain = gradient(torch.fft.fft2(x.float()).real)
    with bfloat16_for_float16(), placed(nn.Identity(), ShadowTrace):
        again = gradient(checkpoint(mixed, x, use_reentrant=use_reentrant))
    assert plain is not None
    assert again is not None
    assert torch.equal(again, plain)


def test_finfo_and_autocast_are_restored_after_an_exception() -> None:
    before = torch.finfo, torch.autocast.__init__
    with pytest.raises(ValueError, match="planted"), bfloat16_for_float16():
        raise ValueError("planted")
    assert (torch.finfo, torch.autocast.__init__) == before


def test_float32_tensors_have_no_ranges() -> None:
    assert shadow_of(lambda: torch.ones(3) * 1e6) == []


def test_a_gradient_whose_terms_cancel_is_noise() -> None:
    def code(terms: torch.Tensor) -> list[bool]:
        bias = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
        ranges = shadow_of(lambda: (bias.expand(4) * terms).sum().backward())
        return [seen.is_noise for seen in ranges if seen.op == "aten.sum.dim_IntList"]

    assert code(torch.tensor([1.0, -1.0, 1.0, -1.0]).bfloat16()) == [True]
    assert code(torch.tensor([1.0, -1.0, 1.0, 1.0]).bfloat16()) == [False]


def backward_sites(of: Callable[[torch.Tensor], torch.Tensor], *values: float) -> dict[str, Site]:
    """The sites of the backward pass of ``of`` on these values in half, by op."""
    x = torch.tensor(values, requires_grad=True)

    def code() -> None:
        (of(x.to(torch.float16)).float().mean() * 1e-3).backward()

    ranges = shadow_of(code)
    return {site.op.split(".")[1]: site for site in sites_of(ranges) if site.phase == "backward"}


def test_a_backward_value_of_the_forward_pass_alone_has_no_scale_limits() -> None:
    """The gradient of ``abs`` is multiplied by a sign, which is 1 at any loss scale."""
    made = backward_sites(torch.abs, 3.0, -2.0)
    sign = made.pop("sgn")
    assert (sign.abs_max, sign.scale_ceiling, sign.scale_floor, sign.overflow) == (1.0, None, None, "")
    assert len(made) > 1
    assert all(site.scale_ceiling and site.scale_floor for site in made.values())


def test_a_backward_value_of_the_forward_pass_may_overflow_at_any_loss_scale() -> None:
    """The gradient of ``rsqrt`` has its third power."""
    made = backward_sites(torch.rsqrt, 1e-4)
    assert (made["pow"].scale_ceiling, made["pow"].overflow) == (None, "starts")
    assert made["pow"].abs_max == pytest.approx(1e6, rel=0.05)
    record = Record("ranges", "", ENVIRONMENT, {}, "inconclusive", sites=tuple(made.values()))
    found = diagnose_ranges(record).findings[0]
    assert (found.code, found.op) == ("gradient-overflow", "aten.pow.Tensor_Scalar")
    assert overflows_at_any_scale(record.sites)


def exponents(*values: float) -> Exponents:
    tensor = torch.tensor(values).bfloat16()
    return exponents_of(tensor, magnitude_of(tensor))


def test_exponents_are_counted_for_any_strides_without_zeros_infinities_and_nan() -> None:
    assert exponents(1.0, 1.5, -2.0, 0.0, 0.25, math.inf, -math.inf, math.nan) == Exponents(-2, (1, 0, 2, 1))
    assert exponents(0.0, 0.0) == exponents(math.inf) == Exponents()
    tensor = torch.tensor([[1.0, 2.0], [4.0, 8.0]]).bfloat16()
    for view in (tensor.t(), tensor[:, :1].expand(2, 3), tensor[0, 0]):
        assert sum(exponents_of(view, magnitude_of(view)).counts) == view.numel()
    # Both tails are gathered.
    assert exponents(2.0**-100, 2.0**-70, 2.0**-64) == Exponents(-64, (3,))
    assert exponents(2.0**100, 2.0**31) == Exponents(31, (2,))


def test_a_sample_always_holds_the_largest_value() -> None:
    values = torch.ones(4 * MAX_SAMPLE, dtype=torch.bfloat16)
    values[1] = 1024.0
    assert exponents_of(values, magnitude_of(values)) == Exponents(0, (4 * MAX_SAMPLE, *[0] * 9, 1))
