"""The JSON schema of the config, for editors: rejects mistakes and accepts every valid config."""

from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ampdbg.config.file import load_config
from ampdbg.config.schema import json_schema
from ampdbg.config.yaml_document import read_yaml
from ampdbg.errors import ConfigError
from tests.commands.program import ROOT

SCHEMA = json_schema()

MINIMAL = 'model: {target: "torch.nn:Identity"}\ndata: {target: "builtins:list"}\n'

RIGHT = {
    "no more than is needed": "",
    "sections with nothing in them": "precision:\noptimizer:\ntrain:\n",
    "a static scale": "precision: {loss_scale: 1024}",
    "a dynamic one": "precision: {loss_scale: {init: 1024, max: 65536}}",
    "the scale left to the level": "precision: {level: O2, loss_scale: null, keep_norms_fp32: false}",
    "pins": "precision: {pins: [a, 'b.*']}",
    "pins that are none": "precision: {pins: null}",
    "arguments that are none": "optimizer: {args: null, groups: module}",
    "a device": "train: {device: 'cuda:3', clip_grad_norm: 0.5}",
    "a scheduler": "scheduler: {target: 'torch.optim.lr_scheduler:LinearLR'}",
}

WRONG = {
    "an unknown key": "trian: {steps: 3}",
    "an unknown key below": "train: {step: 3}",
    "a count of zero": "train: {steps: 0}",
    "a count that is text": "train: {steps: many}",
    "a truth for a number": "train: {steps: true}",
    "a scale of zero": "precision: {loss_scale: 0}",
    "a factor that shrinks": "precision: {loss_scale: {growth_factor: 1}}",
    "a level that is none": "precision: {level: O4}",
    "a device that is none": "train: {device: gpu}",
    "one text for the pins": "precision: {pins: head}",
    "no clipping at all": "train: {clip_grad_norm: 0}",
    "a target that is a list": "loss: {target: [a, b]}",
}


def mistakes(text: str) -> list[str]:
    return [error.message for error in Draft202012Validator(SCHEMA).iter_errors(read_yaml(text).data)]


def test_the_schema_is_valid_requires_model_and_data_and_has_no_pydantic_keywords() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert {"model", "data"} == set(SCHEMA["required"])
    assert not {"ge", "gt", "le", "lt"} & keywords(SCHEMA)


def keywords(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {word for item in value.values() for word in keywords(item)}
    return {word for item in value for word in keywords(item)} if isinstance(value, list) else set()


@pytest.mark.parametrize("more", RIGHT.values(), ids=RIGHT)
def test_the_schema_accepts_valid_configs(more: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(MINIMAL + more, encoding="utf-8")
    load_config(tmp_path / "c.yaml")
    assert mistakes(MINIMAL + more) == []


@pytest.mark.parametrize("more", WRONG.values(), ids=WRONG)
def test_the_schema_and_the_config_loader_reject_a_mistake(more: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(MINIMAL + more, encoding="utf-8")
    with pytest.raises(ConfigError):
        load_config(tmp_path / "c.yaml")
    assert mistakes(MINIMAL + more)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_schema_accepts_every_example_config(path: Path) -> None:
    assert mistakes(path.read_text(encoding="utf-8")) == []


def test_the_schema_accepts_every_form_of_checkpoint_and_no_unknown_key() -> None:
    for form in ("w.pt", "{model: w.pt, optimizer: o.pt}", "{optimizer: [a.pt, b.pt], scaler: s.pt}"):
        assert mistakes(f"{MINIMAL}checkpoint: {form}") == []
    assert mistakes(f"{MINIMAL}checkpoint: {{weights: w.pt}}")
