"""Fourier transforms of half tensors under the emulation: cuFFT's dtypes, refusals, overflows, and ops on spectra."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ampdbg.precision.emulation import cuda_on_cpu
from ampdbg.precision.half_kernels import NARROWER, OF_COMPLEX, OF_REAL, half_transforms
from ampdbg.precision.widening import lifted
from tests.precision.test_half_kernels import Trace

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

FUNCTIONS = [name.removeprefix("fft_") for name in (*OF_REAL, *OF_COMPLEX)]
UNSCALED = {"fft", "fft2", "fftn", "rfft", "rfft2", "rfftn", "hfft", "hfft2", "hfftn"}
"""The transforms that norm="backward" does not scale. norm="forward" does not scale the others."""
TWICE = {"hfft2", "hfftn", "ihfft2", "ihfftn"}
REFUSED = "powers of two when computing in half precision, but got a signal size of{}"


@pytest.fixture
def emulated() -> Iterator[None]:
    with cuda_on_cpu():
        yield


def signal(*shape: int) -> Tensor:
    """Float32 values that float16 represents exactly."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).half().float()


def pairs(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def same(ours: Tensor, wide: Tensor) -> bool:
    """Whether every value is the float32 value, rounded once."""
    return ours.dtype is NARROWER[wide.dtype] and torch.equal(pairs(ours), pairs(wide).half())


def close(ours: Tensor, wide: Tensor, error: float) -> bool:
    """Whether the dtype is the half one, and no value is off by more than ``error`` times the largest."""
    off = (pairs(ours.detach()).float() - pairs(wide.detach())).abs().max() / pairs(wide.detach()).abs().max()
    return ours.dtype is NARROWER[wide.dtype] and float(off) <= error


def arguments(name: str) -> list[dict[str, Any]]:
    if name[-1] in "2n":
        return [{}, {"s": (4, 8)}, {"s": (16, -1), "dim": (0, 2)}, {"dim": (1,)}]
    return [{}, {"n": 32}, {"n": 4, "dim": 1}, {"dim": 0}]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_half_transform_and_its_gradient_are_rounded_from_float32(name: str, emulated: None) -> None:
    function = getattr(torch.fft, name)
    gives_signal = name.startswith(("irfft", "hfft"))
    unscaled = "backward" if name in UNSCALED else "forward"
    for given in arguments(name):
        wide = signal(4, 8, 17 if gives_signal else 16).requires_grad_()
        half = wide.detach().half().requires_grad_()
        if gives_signal and given.get("n", given.get("s")) is None and "dim" in given:
            continue  # a signal of 2 * (size - 1)
        exact, ours = (function(x, norm=unscaled, **given) for x in (wide, half))
        # A Hermitian transform of several dims is two transforms, and each rounds.
        assert close(ours, exact, 2e-3) if name in TWICE else same(ours, exact)
        seed = torch.randn_like(exact)
        (expected,) = torch.autograd.grad(exact, wide, seed)
        (gradient,) = torch.autograd.grad(ours, half, seed.to(ours.dtype))
        assert close(gradient, expected, 2e-3)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_of_a_half_transform_and_its_gradient_matches_each_row(name: str, emulated: None) -> None:
    function = getattr(torch.fft, name)
    size = 17 if name.startswith(("irfft", "hfft")) else 16

    def transformed(x: Tensor) -> Tensor:
        return pairs(function(x))

    def row_by_row(x: Tensor, dim: int) -> Tensor:
        return torch.stack([transformed(row) for row in x.unbind(dim)])

    for dim in (0, 1):
        x = signal(4, 8, 32).narrow(-1, 0, size).half().requires_grad_()
        mapped, expected = torch.vmap(transformed, dim)(x), row_by_row(x, dim)
        # Not a mean, whose gradients are so small here that half rounds them by a thousandth.
        gradients = [torch.autograd.grad(output.float().square().sum(), x)[0] for output in (mapped, expected)]
        # A sum over two dims may have another order.
        assert all(close(ours, other.float(), 2e-3) for ours, other in ((mapped, expected), gradients))
    wide = signal(4, 8, 24)
    assert torch.allclose(torch.vmap(transformed)(wide), row_by_row(wide, 0), atol=1e-5)
    with pytest.raises(RuntimeError, match="powers of two"):
        torch.vmap(transformed)(wide.half())


@pytest.mark.parametrize("norm", [None, "backward", "ortho", "forward"])
@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "irfft"])
def test_a_half_transform_with_each_norm_is_close_to_float32(name: str, norm: str | None, emulated: None) -> None:
    function, x = getattr(torch.fft, name), signal(64)
    x = torch.fft.rfft(x) if name == "irfft" else x
    x = x.to(NARROWER[x.dtype]).to(x.dtype)
    assert close(function(x.to(NARROWER[x.dtype]), norm=norm), function(x, norm=norm), 2e-3)


def test_a_sum_beyond_float16_is_infinite_before_the_norm_scales_the_transform(emulated: None) -> None:
    loud = torch.full((8,), 10000.0)
    assert torch.fft.rfft(loud.half()).abs().tolist() == [math.inf, 0, 0, 0, 0]
    assert torch.fft.rfft(loud.half() * 0.5).abs().tolist() == [40000, 0, 0, 0, 0]
    assert float(torch.fft.irfft(loud.half(), n=8, norm="forward")[0]) == math.inf
    assert float(torch.fft.irfft(loud.half(), n=8)[0]) == math.inf  # the sum divided by 8 is 10000
    assert float(torch.fft.irfft(loud, n=8)[0]) == 10000


def test_half_transforms_refuse_sizes_that_are_not_powers_of_two(emulated: None) -> None:
    refused: list[tuple[Callable[[Tensor], Tensor], str]] = [
        (lambda x: torch.fft.rfft(x, n=12), "[12]"),
        (lambda x: torch.fft.fft2(x[:3]), "[3, 16]"),
        (torch.fft.irfft, "[30]"),
        (lambda x: torch.stft(x, 12, window=torch.ones(12).to(x), return_complex=True), "[12]"),
    ]
    for transform, size in refused:
        assert transform(signal(4, 16)).isfinite().all()
        with pytest.raises(RuntimeError) as raised:
            transform(signal(4, 16).half())
        assert str(raised.value).endswith(REFUSED.format(size))


@pytest.mark.parametrize("given", [{"n": 0}, {"dim": 3}, {"norm": "none"}], ids=str)
def test_wrong_arguments_of_a_half_transform_raise_the_message_of_torch(given: dict[str, Any], emulated: None) -> None:
    messages = []
    for x in (signal(8), signal(8).half()):
        with pytest.raises((RuntimeError, IndexError)) as raised:
            torch.fft.rfft(x, **given)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_transforms_and_ops_of_other_dtypes_keep_their_bits(dtype: torch.dtype) -> None:
    def results() -> list[Tensor]:
        x = signal(4, 16).to(dtype)
        return [torch.fft.fft(x), torch.fft.ifft2(x), x.exp(), x / 3, x / x, 1 / x, x.sum(0), torch.arange(3) / 2]

    expected = results()
    with cuda_on_cpu():
        torch.fft.rfft(signal(8).half())  # from here on, quotients and sums run through the emulation
        for ours, native in zip(results(), expected, strict=True):
            assert ours.dtype is native.dtype
            assert torch.equal(ours, native)


def stft(x: Tensor, **given: Any) -> Tensor:
    return torch.stft(x, 16, 4, window=torch.hann_window(16).to(x.dtype), return_complex=True, **given)


AFTER: dict[str, Callable[[Tensor], Tensor]] = {
    "stft": stft,
    "stft, normalized": lambda x: stft(x, normalized=True),
    "stft, two-sided": lambda x: stft(x, onesided=False),
    "magnitude": lambda x: stft(x).abs(),
    "magnitude of pairs": lambda x: torch.sqrt(torch.view_as_real(stft(x)).pow(2).sum(-1) + 1e-2),
    "real part": lambda x: stft(x).real,
    "masked": lambda x: stft(x) * torch.sigmoid(stft(x).abs()),
    "power": lambda x: stft(x).pow(2),
    "phase": lambda x: (stft(x) + (30 + 30j)).angle(),
    "spectrum of a phase": lambda x: x.unsqueeze(1) * torch.exp(1j * x.unsqueeze(1)),
    "halved": lambda x: stft(x) / 2,
    "direction": lambda x: stft(x) / (stft(x).abs() + 1),
    "quotient of a number": lambda x: (stft(x).abs() + 1) / (stft(x) + 20),
    "divided in place": lambda x: stft(x).clone().div_(3),
    "quotient of whole numbers": lambda x: stft(x) / torch.arange(1, 18),
    "sum": lambda x: stft(x).sum(-1),
    "broadcast": lambda x: stft(x) * x.mean(-1, keepdim=True)[:, :, None],
    "istft": lambda x: torch.istft(stft(x), 16, 4, window=torch.hann_window(16).to(x.dtype)),
    "convolution": lambda x: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(x) / 8, n=64),
    "mixing of tokens": lambda x: torch.fft.fft(torch.fft.fft(x), dim=0).real,
}


IN_FLOAT32 = {"magnitude of pairs", "istft"}
"""Entries with a power or sum that autocast computes in float32."""


@pytest.mark.parametrize("region", [False, True], ids=["outside", "in a region"])
@pytest.mark.parametrize("name", AFTER)
def test_ops_on_a_half_spectrum_run_forward_and_backward_in_half(name: str, region: bool, emulated: None) -> None:
    wide = signal(4, 64).requires_grad_()
    half = wide.detach().half().requires_grad_()
    exact = AFTER[name](wide)
    seed = torch.randn_like(exact) / 16
    with torch.autocast("cuda", enabled=region):
        ours = AFTER[name](half)
    if region and name in IN_FLOAT32:
        assert ours.dtype is torch.float32
        ours = ours.half()
    assert close(ours, exact, 5e-3)
    (expected,) = torch.autograd.grad(exact, wide, seed)
    (gradient,) = torch.autograd.grad(ours, half, seed.to(ours.dtype))
    assert close(gradient, expected, 1e-2)


def test_emulated_transforms_are_invisible_to_dispatch_modes() -> None:
    def ops(x: Tensor) -> list[str]:
        with Trace() as trace:
            (torch.fft.rfft(x, n=32) / 2).abs().sum().backward()
        return [op for op, _ in trace.ops]

    expected = ops(signal(64).requires_grad_())
    assert "aten._fft_r2c.default" in expected
    with half_transforms():
        assert ops(signal(64).half().requires_grad_()) == expected


def test_a_lifted_step_has_no_complex_half_tensor() -> None:
    for dtype, expected in (("float32", torch.complex64), ("float64", torch.complex128)):
        wide = getattr(torch, dtype)
        with cuda_on_cpu(), lifted(dtype), Trace() as trace:
            x = signal(1, 64).to(wide).half().requires_grad_()
            spectrum = torch.stft(x, 16, 4, window=torch.ones(16, dtype=wide), return_complex=True)
            torch.view_as_real(spectrum).sum().backward()
            assert torch.zeros(3).to(torch.complex32).dtype is expected
        assert spectrum.dtype is expected
        assert x.grad is not None
        assert x.grad.dtype is wide
        assert torch.complex32 not in {one for _, dtypes in trace.ops for one in dtypes}


def test_half_transforms_are_refused_again_after_the_emulation() -> None:
    with cuda_on_cpu():
        spectrum = torch.fft.rfft(signal(8).half())
    in_rows = torch.vmap(torch.fft.rfft)
    assert torch.equal(in_rows(signal(2, 8)), torch.fft.rfft(signal(2, 8)))
    with pytest.raises(RuntimeError, match="Half"):
        in_rows(signal(2, 8).half())
    for native in (lambda: torch.fft.rfft(signal(8).half()), lambda: stft(signal(1, 64).half()), lambda: spectrum / 2):
        with pytest.raises(RuntimeError, match="Half"):
            native()
    assert torch.fft.rfft(signal(8)).dtype is torch.complex64
