"""The note on ``_keep_in_fp32_modules``: when it helps, and when nothing is said."""

from __future__ import annotations

from torch import nn

from ampdbg.patch.by_name.helper import takes_one_tensor
from ampdbg.patch.by_name.hugging_face import keep_in_fp32_note


class PreTrainedModel(nn.Module):
    """As transformers has it, by its name."""


PreTrainedModel.__module__ = "transformers.modeling_utils"


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(2, 2), nn.Linear(2, 2)


class Mine(PreTrainedModel):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleList([Feed(), Feed()])


class Done(Mine):
    _keep_in_fp32_modules = ["wo"]  # noqa: RUF012 - as transformers has it


ALL = ("block.0.wo", "block.1.wo")


def test_layers_of_a_pretrained_model_have_the_note() -> None:
    note = keep_in_fp32_note(Mine(), ALL)
    assert note == (
        'for Mine loaded in half (dtype=torch.float16), _keep_in_fp32_modules = ["wo"] in the class keeps these '
        "weights in FP32 too; under autocast it does nothing"
    )


def test_it_is_found_inside_another_model() -> None:
    assert "keeps these weights" in keep_in_fp32_note(nn.ModuleDict({"t5": Mine()}), ["t5." + name for name in ALL])


def test_more_modules_of_that_name_are_counted() -> None:
    assert "(and of 1 more modules of that name)" in keep_in_fp32_note(Mine(), ALL[:1])


def test_a_class_that_has_it_is_told_as_such() -> None:
    assert keep_in_fp32_note(Done(), ALL).startswith("Done has _keep_in_fp32_modules for this already")


def test_nothing_is_said_where_it_would_not_help() -> None:
    assert keep_in_fp32_note(nn.ModuleDict({"a": Feed()}), ["a.wo"]) == ""  # not of transformers
    assert keep_in_fp32_note(Mine(), ["block.0"]) == ""  # not a layer
    assert keep_in_fp32_note(Mine(), ["block.0.wo:own"]) == ""
    assert keep_in_fp32_note(Mine(), []) == ""


class WithMore(nn.Linear):
    def forward(self, x: nn.Parameter, scale: float = 1.0) -> nn.Parameter:  # type: ignore[override]
        raise AssertionError


def test_layers_that_take_one_tensor() -> None:
    assert takes_one_tensor(nn.Linear(2, 2))
    assert takes_one_tensor(nn.Conv2d(2, 2, 1))
    assert not takes_one_tensor(nn.ConvTranspose2d(2, 2, 1))
    assert not takes_one_tensor(WithMore(2, 2))
    assert not takes_one_tensor(nn.Embedding(2, 2))
    assert not takes_one_tensor(nn.Sequential())
