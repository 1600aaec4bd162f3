"""Pins: what runs in FP32, what runs as before, and that nothing of them stays behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ampdbg.errors import WorkloadError
from ampdbg.precision.emulation import cuda_on_cpu
from ampdbg.precision.pins import pin_fp32


class Seen(nn.Module):
    """A linear layer that notes the dtypes of its product and whether autocast was on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[tuple[torch.dtype, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.linear(x)
        self.seen.append((output.dtype, torch.is_autocast_enabled("cpu")))
        return output


class Block(nn.Module):
    """Two children, a product of its own between them, and a list of layers that it loops over."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Seen(), Seen()
        self.layers = nn.ModuleList([Seen(), Seen()])
        self.own: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        product = x @ x.T
        self.own.append(product.dtype)
        x = self.second(product @ x)
        for layer in self.layers:
            x = layer(x)
        self.own.append(x.dtype)
        return x


class Model(nn.Module):
    """A block, and a block in FP32 by the user's own hand."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.wide = Seen()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x)
        with torch.autocast("cpu", enabled=False):
            return self.wide(x.float())


HALF, WIDE = (torch.float16, True), (torch.float32, False)


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    with cuda_on_cpu():
        yield


def run(model: Model) -> torch.Tensor:
    with torch.autocast("cuda", dtype=torch.float16):
        output: torch.Tensor = model(torch.randn(3, 4))
    return output


H, W = torch.float16, torch.float32

PINNED: dict[tuple[str, ...], tuple[list[torch.dtype], list[tuple[torch.dtype, bool]]]] = {
    (): ([H, H], [HALF] * 4),
    ("block",): ([W, W], [WIDE] * 4),
    ("block:own",): ([W, W], [HALF] * 4),
    (":own",): ([H, H], [HALF] * 4),
    ("block:own", "block.second"): ([W, W], [HALF, WIDE, HALF, HALF]),
    ("block", "block.first:own"): ([W, W], [WIDE] * 4),
    # Its own line reads the cast result of its linear layer.
    (":own", "block:own", "block.first:own"): ([W, W], [WIDE, HALF, HALF, HALF]),
}
"""By the pins: the dtypes of the block's own lines, and what its four inner modules see."""


@pytest.mark.parametrize("names", PINNED, ids=lambda names: " ".join(names) or "none")
def test_what_is_pinned_runs_in_fp32_and_all_else_as_before(names: tuple[str, ...]) -> None:
    model = Model()
    with pin_fp32(model, names) as pins:
        output = run(model)
    own, inner = PINNED[names]
    assert model.block.own == own
    assert [seen for module in model.block.modules() if isinstance(module, Seen) for seen in module.seen] == inner
    assert model.wide.seen == [WIDE]  # by the user's own region
    assert output.dtype is torch.float32
    assert sorted(pins.modules) == sorted(names)


def test_own_lines_inside_a_whole_pin_are_no_pin_of_their_own() -> None:
    with pin_fp32(Model(), ["block", "block:own"]) as pins:
        assert pins.modules == ("block",)


def test_without_autocast_nothing_is_turned_on() -> None:
    model = Model()
    with pin_fp32(model, ["block:own"]):
        model(torch.randn(3, 4))
    assert model.block.first.seen == [WIDE]
    assert model.block.own == [torch.float32] * 2


def test_own_lines_that_raise_can_be_called_again() -> None:
    class Picky(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 2:
                raise ValueError("two rows")
            return super().forward(x)

    model = Picky()
    with pin_fp32(model, [":own"]), torch.autocast("cuda", dtype=torch.float16):
        with pytest.raises(ValueError, match="two rows"):
            model(torch.randn(2, 4))
        model(torch.randn(3, 4))
    assert model.first.seen == [HALF]


def test_gradients_come_back_in_the_parameters_dtype() -> None:
    model = Model()
    with pin_fp32(model, ["block:own"]):
        run(model).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.dtype is torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "shown"), [("blok", "blok"), ("blok:own", "blok"), ("b" * 200_000, "b" * 197 + "...")], ids=len
)
def test_a_misspelt_name_is_refused_and_not_shown_whole_where_it_is_long(name: str, shown: str) -> None:
    with pytest.raises(WorkloadError, match=f"no module is named '{shown}'; the model has 'block'"):
        pin_fp32(Model(), [name])


def test_a_name_is_itself_before_it_is_a_pattern() -> None:
    model = nn.ModuleDict({"a[0]": nn.Linear(4, 4), "a0": nn.Linear(4, 4), "a1": nn.Linear(4, 4)})
    assert pin_fp32(model, ["a[0]"]).modules == ("a[0]",)
    assert pin_fp32(model, ["a[1]", "a[0]:own"]).modules == ("a1", "a[0]:own")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((None, ["first"]), "got a NoneType in the place of a Module"),
        ((Block(), None), "got a NoneType in the place of a list of names"),
        ((Block(), ["first", None]), "got a NoneType in the place of a name of a module"),
        ((Block(), "first"), "got 'first' in the place of a list of names"),
    ],
)
def test_what_is_no_model_or_list_of_names_is_refused_by_its_kind(given: tuple[Any, Any], told: str) -> None:
    with pytest.raises(TypeError) as raised:
        pin_fp32(*given)
    assert str(raised.value).startswith(f'{told}; allowed: pin_fp32(model, ["blocks.2.attn", ...])')
    assert "\n" not in str(raised.value)
