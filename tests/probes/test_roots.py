"""Tests of the names of pins for scripts with several models: the object that each name begins with."""

import sys
from pathlib import Path

import pytest
from torch import nn

from ampdbg.probes.makings import Constructions, roots_of
from ampdbg.probes.models import ModelGroup, Models
from ampdbg.record.pins import RootModel, call_of_pins


class Net(nn.Module):
    """A model of a script."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)


class Critic(Net):
    """Another model of the script."""


FILE = Path(__file__).name


def made() -> nn.Module:
    return nn.DataParallel(Net())


def together(*models: nn.Module) -> nn.Module:
    found = Models()
    found.adopt(models)
    return found.as_one_module()


def test_the_pins_of_a_single_model_have_no_prefix() -> None:
    assert roots_of(together(Net()), ["head"], Constructions()) == ()


def test_a_model_is_named_by_its_global_variable_in_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    net, critic = made(), Critic()
    monkeypatch.setattr(sys.modules["__main__"], "net_g", net, raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "net_d", critic, raising=False)
    roots = roots_of(together(net, critic), ["net_g.head", "net_d:own", "net_g:own"], Constructions())
    assert roots == (
        RootModel("net_g", "net_g", "the model that the script calls net_g", is_global=True),
        RootModel("net_d", "net_d", "the model that the script calls net_d", is_global=True),
    )
    assert call_of_pins(roots) == "pin_fp32(net_g=net_g, net_d=net_d)"


def test_a_model_without_a_global_variable_is_named_by_its_class() -> None:
    net, critic = made(), Critic()
    roots = roots_of(together(net, critic), ["Critic"], Constructions())
    assert roots == (RootModel("Critic", "Critic", "the model of class Critic that the script makes"),)
    assert call_of_pins(roots) == "pin_fp32(Critic=...)"


def test_instances_of_one_class_are_told_apart_by_their_creation_line() -> None:
    with Constructions() as makings:
        there = made()
        back = made()
        line = sys._getframe().f_lineno - 1
        both = together(there, back)
    (first, second) = roots_of(both, ["Net.head", "Net_.head"], makings)
    assert first == RootModel("Net", "Net", f"the model of class Net that line {line - 1} of {FILE} makes")
    assert second == RootModel("Net_", "Net_", f"the model of class Net that line {line} of {FILE} makes")


def test_instances_of_one_class_made_on_one_line_are_reported_as_ambiguous() -> None:
    with Constructions() as makings:
        both = together(*[made() for _ in range(2)])
    unknown = "one of the 2 models of class Net that the script makes; which of them is not known"
    for known in (makings, Constructions()):
        assert [root.what for root in roots_of(both, ["Net_.head"], known)] == [unknown]


def test_the_argument_of_a_model_never_collides_with_another_name() -> None:
    whole = ModelGroup()
    for name in ("functools", "name", "_Net"):
        whole.add_module(name, nn.Identity())
    roots = roots_of(whole, ["functools", "name", "_Net"], Constructions())
    assert [root.argument for root in roots] == ["functools_", "name_", "_Net"]
