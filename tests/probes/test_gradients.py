"""Tests of gradients between backward and step: their norm, and the groups that are not finite."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from ampdbg.probes.gradients import SMALL, gradient_norm
from ampdbg.probes.optimizers import nonfinite_groups
from ampdbg.record.run import GroupOverflow, ParameterCounts


def optimizer_with(*gradients: torch.Tensor) -> torch.optim.SGD:
    parameters = [torch.nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return torch.optim.SGD([{"params": [p], "name": f"p{i}"} for i, p in enumerate(parameters)], lr=0.1)


@given(
    sizes=st.lists(st.sampled_from([1, 3, 64, SMALL, SMALL + 1, 3 * SMALL]), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.float64]),
)
def test_the_norm_is_that_of_all_gradients_together(sizes: list[int], seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    gradients = [torch.randn(size, dtype=torch.float32).to(dtype) for size in sizes]
    expected = torch.cat([gradient.double() for gradient in gradients]).norm()
    norm = gradient_norm(optimizer_with(*gradients), divisor=2.0)
    assert norm is not None
    assert float(norm) == pytest.approx(expected.item() / 2, rel=1e-5)


class Tagged(torch.Tensor):
    """A library's own tensor subclass."""


@pytest.mark.parametrize("side", [3, 300])
@pytest.mark.parametrize(
    "kind",
    [
        lambda plain: plain.t(),
        lambda plain: torch.complex(plain, plain).conj().imag,
        lambda plain: plain.as_subclass(Tagged),
        torch.Tensor.to_sparse,
        torch.Tensor.to_sparse_csr,
        torch.Tensor.double,
    ],
)
def test_the_norm_is_right_for_every_kind_of_gradient(kind: Callable[[torch.Tensor], torch.Tensor], side: int) -> None:
    plain = torch.randn(side, side, generator=torch.Generator().manual_seed(side))
    parameters = [torch.nn.Parameter(kind(torch.zeros(side, side))), torch.nn.Parameter(torch.zeros(3))]
    parameters[0].grad, parameters[1].grad = kind(plain), torch.full((3,), 2.0)
    norm = gradient_norm(torch.optim.SGD(parameters, lr=0.1))
    assert norm is not None
    assert float(norm) == pytest.approx(math.hypot(plain.norm().item(), 12.0**0.5), rel=1e-5)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_the_norm_is_nonfinite_only_if_a_gradient_is_nonfinite(bad: float) -> None:
    norm = gradient_norm(optimizer_with(torch.ones(3), torch.tensor([1.0, bad])))
    assert norm is not None
    assert not math.isfinite(float(norm))
    norm = gradient_norm(optimizer_with(torch.full((4,), 1e30)))  # their squares overflow float32
    assert norm is not None
    assert float(norm) == pytest.approx(2e30)


def test_the_norm_is_none_without_gradients() -> None:
    assert gradient_norm(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)) is None


def test_nonfinite_groups_are_named_with_counts_by_parameter() -> None:
    inf, nan = math.inf, math.nan
    optimizer = optimizer_with(torch.ones(2), torch.tensor([inf, -inf, nan, 0.0]), torch.tensor([nan]).half())
    names = {id(group["params"][0]): f"layer.{i}" for i, group in enumerate(optimizer.param_groups)}
    assert nonfinite_groups(optimizer, names, first_index=5) == (
        GroupOverflow(6, "p1", (ParameterCounts("layer.1", inf=2, nan=1, size=4),)),
        GroupOverflow(7, "p2", (ParameterCounts("layer.2", inf=0, nan=1, size=1),)),
    )


def test_a_sparse_gradient_is_coalesced_before_its_values_are_counted() -> None:
    # Two halves of 40000 are finite, their sum is not.
    values = torch.full((2, 1), 40000.0, dtype=torch.float16)
    gradient = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), values, (4, 1))
    [found] = nonfinite_groups(optimizer_with(gradient), {})
    assert found.parameters[0].inf == 1
    assert nonfinite_groups(optimizer_with(torch.sparse_coo_tensor(torch.tensor([[1, 2]]), values, (4, 1))), {}) == ()


INF, NAN = math.inf, math.nan
Clip = Callable[..., object]
CLIPPED: dict[str, tuple[Clip, list[list[float]], list[tuple[int, str, int, int]]]] = {
    "inf, by norm": (clip_grad_norm_, [[1.0] * 3, [INF, 1.0], [2.0]], [(1, "parameter 0", 1, 0)]),
    "NaN, by norm": (clip_grad_norm_, [[1.0] * 3, [NAN, 1.0], [2.0]], [(1, "parameter 0", 0, 1)]),
    # By value an infinite gradient is made finite, also beside one that is NaN.
    "inf, by value": (
        clip_grad_value_,
        [[1.0] * 3, [INF, 1.0, INF], [INF, 1.0]],
        [(1, "parameter 0", 1, 0), (2, "parameter 0", 1, 0)],
    ),
    "inf beside NaN, by value": (
        clip_grad_value_,
        [[1.0] * 3, [INF, 1.0, INF], [NAN, 1.0]],
        [(1, "parameter 0", 1, 0), (2, "parameter 0", 0, 1)],
    ),
    "neither": (lambda *given: None, [[1.0] * 3, [INF, NAN, NAN]], [(1, "parameter 0", 1, 2)]),
}
"""The clipping function, the values of the gradients, and the counts: exact where clipping rewrote nothing."""


@pytest.mark.parametrize("name", CLIPPED)
def test_nonfinite_groups_after_clipping_are_named_by_the_norms_from_before_clipping(name: str) -> None:
    """As on a GPU, where gradients are read only after the step is known to be skipped."""
    clip, values, expected = CLIPPED[name]
    gradients = [torch.tensor(one) for one in values]
    optimizer = optimizer_with(*gradients)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    versions = tuple((id(parameter), parameter.grad._version) for parameter in parameters)
    norms = torch.stack([gradient.norm() for gradient in gradients])
    clip(parameters, 1.0)
    found = nonfinite_groups(optimizer, {}, before=(versions, norms))
    assert [(group.index, one.name, one.inf, one.nan) for group in found for one in group.parameters] == expected


def test_the_norm_of_gradients_with_a_graph_adds_nothing_to_the_graph() -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("something was kept for a backward pass")

    weights = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    weights.square().sum().backward(create_graph=True)
    optimizer = torch.optim.SGD([weights], lr=0.1)
    assert weights.grad is not None
    assert weights.grad.requires_grad
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert gradient_norm(optimizer) == pytest.approx(math.sqrt(20.0))
    weights.grad = None
