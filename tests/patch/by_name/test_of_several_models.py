"""The pin file of a script with several models: it takes the models with pins, as the script holds them."""

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from ampdbg.patch.by_name import module_text
from ampdbg.record.pins import RootModel
from tests.patch.by_name.pinned_models import (
    Model,
    Scores,
    autocast_as_on_cuda,
    dtypes_of_outputs,
    pin_function,
    pinned,
)

ROOTS = (
    RootModel("net", "net", "the model that the script calls net", is_global=True),
    RootModel("Model", "Model_", "another"),
)
WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "as it is": lambda model: model,
    "DataParallel": nn.DataParallel,
    "within two": lambda model: nn.DataParallel(nn.DataParallel(model)),
}


def model() -> Model:
    torch.manual_seed(0)
    return Model(inner=Scores())


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_each_model_is_pinned_by_its_own_module_names(wrapping: str, tmp_path: Path) -> None:
    first, second, expected = model(), model(), model()
    names = ["net.first", "Model.attn:own", "net.attn.inner:own", "Model.attn.inner:own", "Model:own"]
    pin = pin_function(tmp_path, names, roots=ROOTS)
    assert list(inspect.signature(pin).parameters) == ["net", "Model_"]
    given = WRAPPINGS[wrapping](first), WRAPPINGS[wrapping](second)
    assert pin(*given) == given
    for one in (first, second):
        one.cpu()  # on a machine with a GPU, DataParallel has moved it there
    pinned(expected, ["attn:own", "attn.inner:own", ":own"], tmp_path)
    batch = torch.randn(4, 4)
    with autocast_as_on_cuda():
        seen = dtypes_of_outputs(first, batch)
        assert (seen["first"], seen["attn.inner"], seen["attn"]) == (torch.float32, torch.float32, torch.float16)
        assert dtypes_of_outputs(second, batch) == dtypes_of_outputs(expected, batch)


def test_a_wrapped_model_can_be_pinned_as_a_whole_and_is_returned_still_wrapped(tmp_path: Path) -> None:
    wrapped = nn.DataParallel(model())
    assert pin_function(tmp_path, ["net"], roots=ROOTS[:1])(net=wrapped) is wrapped
    with autocast_as_on_cuda():
        assert wrapped(torch.randn(4, 4)).dtype is torch.float32


def test_a_submodule_named_module_is_not_mistaken_for_a_wrapped_model(tmp_path: Path) -> None:
    net = nn.Sequential()
    net.add_module("module", nn.Linear(4, 4))
    net.add_module("out", nn.Linear(4, 4))
    pin_function(tmp_path, ["net.module"], roots=ROOTS[:1])(net)
    assert ["forward" in vars(part) for part in net] == [True, False]


HEAD = '''\
"""Keeps modules in FP32 under autocast. Found by `ampdbg suggest-fp32`; needs torch alone.

    from ampdbg_pins import pin_fp32

    pin_fp32(net=net, Model_=...)  # once, when all of its modules are made, and before it is compiled

The script has several models. Call it with these, wrapped in DataParallel or not:

    net: the model that the script calls net
    Model_: another
"""
'''


def test_the_docstring_of_the_pin_file_lists_the_models_to_pass() -> None:
    text = module_text(["net.first", "Model.first"], roots=ROOTS)
    assert text.startswith(HEAD)
    assert "under autocast; returns the models." in text
