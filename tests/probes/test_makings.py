"""Tests of the line of the user's code that makes a model: the last line outside the model that its pins depend on."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampdbg.probes.makings import Construction, Constructions
from ampdbg.probes.models import Models, unwrapped


class Net(nn.Module):
    """Makes its layers in methods."""

    def __init__(self) -> None:
        super().__init__()
        self.add_body()
        self.head = nn.Linear(4, 1)

    def add_body(self) -> None:
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def here(back: int = 0) -> int:
    """The line of the caller, or ``back`` lines before it."""
    return sys._getframe(1).f_lineno - back


def found(makings: Constructions, model: nn.Module, *pins: str) -> tuple[int, tuple[str, ...]]:
    making = makings.of(model, pins)
    assert making is not None
    assert making.file == __file__
    return making.line, making.known


@pytest.mark.parametrize("pin", ["head", "body.0", "body:own", ":own", ""])
def test_a_model_is_made_on_the_line_that_calls_its_class(pin: str) -> None:
    with Constructions() as makings:
        model = Net().train()
        line = here(1)
    assert found(makings, model, pin) == (line, ())


def test_a_single_layer_counts_as_a_model() -> None:
    with Constructions() as makings:
        model = nn.Linear(4, 1)
        line = here(1)
    assert found(makings, model, "") == (line, ())


def test_a_layer_that_is_replaced_later_moves_the_line_of_its_pins() -> None:
    with Constructions() as makings:
        net = Net()
        made = here(1)
        net.body[0] = nn.Linear(4, 4, bias=False)
        changed = here(1)
        parts = nn.Sequential(net)
        whole = here(1)
    assert found(makings, net, "head") == (made, ())
    assert found(makings, net, "head", "body.0") == (changed, ("net",))
    assert found(makings, parts, "0.head") == (whole, ())


def changed(block: nn.Sequential) -> None:
    block[0] = nn.Linear(4, 4)


def test_a_function_that_does_not_hold_the_model_is_skipped_for_its_caller() -> None:
    with Constructions() as makings:
        net = Net()
        changed(net.body)
        line = here(1)
    assert found(makings, net, "body.0") == (line, ("net",))


def test_a_copied_model_has_no_line() -> None:
    with Constructions() as makings:
        model = copy.deepcopy(Net())
    assert makings.of(model, ["head"]) is None


class Late(nn.Module):
    """Makes a layer in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        self.second = nn.Linear(4, 4)
        return self.second(self.first(x))


def test_a_layer_that_a_forward_makes_has_no_line() -> None:
    with Constructions() as makings:
        model = Late()
        line = here(1)
        model(torch.ones(1, 4))
    assert makings.of(model, ["second"]) is None
    assert found(makings, model, "first") == (line, ())


def test_a_wrapper_counts_only_on_the_line_that_makes_the_model() -> None:
    with Constructions() as makings:
        first, second = Net(), nn.DataParallel(Net())
        line = here(1)
        whole = nn.DataParallel(first)
    assert makings.of(unwrapped(whole), ["head"]) == Construction(__file__, line)
    assert makings.of(unwrapped(second), ["head"]) == Construction(__file__, line, is_wrapped=True)


def test_the_line_is_that_of_the_one_model_that_holds_the_pins() -> None:
    with Constructions() as makings:
        first, second = Net(), Net()
        line = here(1)
        models = Models()
        models.adopt([first, second])
        whole = models.as_one_module()
    names = [name for name, _ in whole.named_children()]
    assert makings.of(whole, [f"{names[1]}.body.0"]) == Construction(__file__, line, path=names[1])
    assert makings.of(whole, [f"{names[0]}.head", f"{names[1]}.head"]) is None
    assert makings.of(whole, [":own"]) is None


def test_no_line_is_recorded_after_the_block_raises(tmp_path: Path) -> None:
    makings = Constructions()
    with pytest.raises(ZeroDivisionError), makings:
        raise ZeroDivisionError
    assert makings.of(Net(), ["head"]) is None
