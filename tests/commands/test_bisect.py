"""``ampdbg bisect``: the config that it runs, its output, its exit codes, and usage errors."""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import ampdbg
from ampdbg.config.file import load_config
from ampdbg.config.schema import Config
from ampdbg.errors import ConfigError
from ampdbg.pinning import bisection
from ampdbg.record.file import read_record, write_record
from ampdbg.record.run import Record
from tests.commands.program import Here
from tests.report.bisections import BISECTIONS, TRIALS, found

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, gain=1.0):
        super().__init__()
        self.gain = gain
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x):
        return self.second(self.first(x) * self.gain)


def build_model(gain=1.0):
    torch.manual_seed(0)
    return Net(gain)


def build_data():
    return [torch.ones(8, 4)]


def training_step(model, batch):
    return model(batch).float().square().mean()
"""
CONFIG = "model: {target: model.py:build_model}\ndata: {target: model.py:build_data}\ntrain: {steps: 3}\n"
MODULE = ("bisect", "--module", "model.py", "--quiet")


@dataclass
class Faked:
    """A search without experiments: returns ``record`` and keeps the arguments of its calls."""

    record: Record
    configs: list[Config] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, config: Config, **options: Any) -> Record:
        self.configs.append(config)
        self.options = options
        options["observer"].search(("", "block"))
        for trial in self.record.trials:
            options["observer"].trial(trial)
        return self.record


Fake = Callable[[Record], Faked]


@pytest.fixture
def fake(here: Here) -> Fake:
    def put(record: Record) -> Faked:
        faked = Faked(record)
        here.monkeypatch.setattr(bisection, "bisect_run", faked)
        return faked

    written()
    return put


def written(source: str = NET) -> None:
    Path("model.py").write_text(source, encoding="utf-8")
    Path("config.yaml").write_text(CONFIG, encoding="utf-8")


def test_the_report_goes_to_stdout_and_the_trials_to_stderr(here: Here, fake: Fake) -> None:
    fake(found())
    result = here("bisect", "config.yaml")
    assert result.code == 1
    assert result.stdout.startswith("✗ 2 of 48 modules need FP32")
    assert result.stdout.rstrip().endswith("ampdbg suggest-fp32 .ampdbg/20250102T030405Z-bisect.json")
    assert len([line for line in result.stderr.splitlines() if line.startswith("trial ")]) == len(TRIALS)


CODES = dict.fromkeys(BISECTIONS, 1) | {"nothing_to_pin": 0, "interrupted": 130}


@pytest.mark.parametrize("name", CODES)
def test_each_outcome_has_its_exit_code_and_writes_a_record(name: str, here: Here, fake: Fake) -> None:
    record = BISECTIONS[name]()
    fake(record)
    assert here("bisect", "config.yaml", "--quiet", "--record", "r.json").code == CODES[name]
    assert read_record(Path("r.json")).search == record.search


def test_an_interrupt_before_the_search_exits_with_130_and_is_reported(here: Here, fake: Fake) -> None:
    fake(replace(BISECTIONS["nothing_to_pin"](), search=None, interrupted=True))
    result = here("bisect", "config.yaml", "--quiet")
    assert result.code == 130
    assert result.stdout.startswith("! Interrupted after 12 of 12 steps, in the search that follows.")


def test_json_prints_the_saved_record_and_report_redraws_the_page(here: Here, fake: Fake) -> None:
    fake(found())
    result = here("bisect", "config.yaml", "--quiet", "--json", "--record", "r.json")
    assert json.loads(result.stdout) == json.loads(Path("r.json").read_text(encoding="utf-8"))
    page = here("bisect", "config.yaml", "--quiet", "--record", "r.json").stdout
    assert here("report", "r.json").stdout == page


def test_the_options_reach_the_search(here: Here, fake: Fake) -> None:
    faked = fake(found())
    here("bisect", "config.yaml", "--strategy", "ddmin", "--max-trials", "7", "--steps", "9", "--set", "train.seed=4")
    assert (faked.options["strategy"], faked.options["max_trials"]) == ("ddmin", 7)
    assert (faked.configs[0].train.steps, faked.configs[0].train.seed) == (9, 4)


def test_bisect_from_python_writes_no_file(here: Here, fake: Fake) -> None:
    faked = fake(found())
    assert replace(ampdbg.bisect("config.yaml"), listings=()) == replace(faked.record, listings=())
    assert not Path(".ampdbg").exists()


# Where the config comes from


def test_bisect_of_a_record_reruns_the_config_of_the_record(here: Here, fake: Fake) -> None:
    faked = fake(found())
    config = load_config(Path("config.yaml"), ("train.clip_grad_norm=2.5", "precision.loss_scale=1024"))
    write_record(replace(found(), config=config.resolved()), Path("r.json"))
    here("bisect", "r.json", "--set", "train.steps=7")
    assert faked.configs[0].resolved() == {**config.resolved(), "train": faked.configs[0].resolved()["train"]}
    assert (faked.configs[0].train.steps, faked.configs[0].train.clip_grad_norm) == (7, 2.5)
    assert faked.configs[0].model_fields_set >= {"model", "data"}
    assert "optimizer" not in faked.configs[0].model_fields_set  # it would override the model's own


def test_the_error_for_a_record_from_another_folder_says_where_to_run_it(here: Here, fake: Fake) -> None:
    fake(found())
    write_record(replace(found(), config=load_config(Path("config.yaml")).resolved()), Path("r.json"))
    Path("model.py").unlink()
    result = here("bisect", "r.json")
    assert result.code == 2
    assert "r.json: model.target: got 'model.py:build_model', but there is no such file in" in result.stderr
    assert result.stderr.endswith(
        "a record's paths are relative to the folder where it was made; run this there, or give the config itself\n"
    )


def test_bisect_runs_a_module_file_without_a_config(here: Here, fake: Fake) -> None:
    faked = fake(BISECTIONS["nothing_to_pin"]())
    result = here(*MODULE, "--set", "model.args.gain=2.0")
    assert faked.configs[0].step is not None
    assert faked.configs[0].model.args == {"gain": 2.0}
    assert "  ampdbg bisect --module model.py --set model.args.gain=2.0 --steps 120\n" in result.stdout


def test_the_next_command_carries_the_options_that_change_the_run(here: Here, fake: Fake) -> None:
    fake(BISECTIONS["interrupted"]())
    given = ("config.yaml", "--set", "model.args={gain: 2}", "--steps", "5", "--device", "cpu", "--seed", "4")
    result = here("bisect", *given, "--quiet", "--max-trials", "3")
    assert result.stdout.splitlines()[-1].strip() == shlex.join(["ampdbg", "bisect", *given])


def test_the_record_of_a_watched_loop_cannot_be_rerun(here: Here, fake: Fake) -> None:
    fake(found())
    write_record(replace(found(), command="watch", config={}, search=None), Path("loop.json"))
    for command in ("bisect", "suggest-fp32", "scan"):
        result = here.refused(command, "loop.json")
        assert result.stderr == "error: loop.json: a watched loop has no config; give one\n"


@pytest.mark.parametrize("function", [ampdbg.scan, ampdbg.ranges, ampdbg.bisect, ampdbg.suggest_fp32])
def test_an_argument_that_is_not_a_path_is_refused(function: Callable[[Any], object]) -> None:
    with pytest.raises(ConfigError, match="got a config of type int; allowed: the path of a config, a record"):
        function(5)


# End to end, with real experiments


def test_bisect_pins_the_module_that_overflows(here: Here) -> None:
    written(NET.replace("self.first(x) *", "self.first(x * self.gain) / ").replace(".mean()", ".mean() / 1e3"))
    record = ampdbg.bisect(module="model.py", steps=2, device="cpu", overrides=("model.args.gain=300000.0",))
    assert record.search is not None
    assert record.search.outcome == "found"
    assert [pin.name for pin in record.pins] == ["first"]


def test_a_module_file_that_cannot_be_imported_is_refused_in_one_message(here: Here) -> None:
    written("import not_there\n")
    result = here.refused(*MODULE)
    assert result.stderr.count("error: ") == 1
    raised = "importing it raised ModuleNotFoundError: No module named 'not_there'"
    assert f"error: --module model.py: {raised}" in result.stderr
    assert str(Path("ampdbg", "commands")) not in result.stderr
