"""Tests of the models that an optimizer trains, and of the names of their parameters."""

import gc
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from ampdbg.probes.models import Models, outermost_owners, unwrapped


def learnt(parameters: Iterable[torch.Tensor]) -> Models:
    """The models that are found for an optimizer of these parameters."""
    models = Models()
    models.learn([*parameters])
    return models


def test_the_names_of_a_single_model_have_no_prefix_also_in_wrappers() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    wrapped = nn.DataParallel(model)
    models = learnt(wrapped.parameters())
    assert [name for name, _ in models.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert models.as_one_module() is model
    assert unwrapped(wrapped) is model


def test_models_are_found_while_a_tuple_is_being_filled() -> None:
    model = nn.Linear(2, 2)

    def numbers() -> Iterator[int]:
        for number in range(50):
            if number == 20:  # the tuple is already among the objects of the process, and still grows
                assert outermost_owners({id(model.weight)}) == [model]
            yield number

    assert len(tuple(numbers())) == 50


def test_names_of_several_models_begin_with_the_name_of_their_model() -> None:
    class Encoder(nn.Linear):
        pass

    one, two = Encoder(2, 2), Encoder(2, 2)
    models = learnt([*one.parameters(), *two.parameters()])
    names = {f"{name}.{kind}" for name in ("Encoder", "Encoder_") for kind in ("weight", "bias")}
    assert {name for name, _ in models.named_parameters()} == names
    assert {name for name, _ in models.named_modules()} == {"Encoder", "Encoder_"}


def test_models_are_named_in_the_order_of_their_parameters_in_the_optimizer() -> None:
    def named_when_collected(moment: int) -> list[bool]:
        made: list[nn.Linear] = []
        for number in range(4):
            made.append(nn.Linear(2, 2))
            if number == moment:
                gc.collect()  # from here on Python lists earlier objects after later ones
        models = learnt([made[place].weight for place in (2, 0, 3, 1)])
        names = ("Linear", "Linear_", "Linear__", "Linear___")
        found = dict(models.named_modules())
        return [found[name] is made[place] for name, place in zip(names, (2, 0, 3, 1), strict=True)]

    assert [named_when_collected(moment) for moment in range(4)] == [[True] * 4] * 4


def test_a_submodule_that_is_trained_is_named_by_the_whole_model() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    models = learnt(model[1].parameters())
    assert "1.weight" in dict(models.named_parameters())


def test_found_models_are_not_kept_alive() -> None:
    model = nn.Linear(2, 2)
    models, gone = learnt(model.parameters()), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert list(models.named_parameters()) == []


def test_parameters_without_a_module_have_no_name() -> None:
    models = learnt([nn.Parameter(torch.ones(2))])
    assert list(models.named_parameters()) == []
