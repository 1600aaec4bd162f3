"""A Python file in place of a config: the names that are read from it, and one clear message for each mistake."""

import textwrap
from pathlib import Path

import pytest

from ampdbg.config.schema import Config
from ampdbg.errors import AmpdbgError, ConfigError, UserCodeError, WorkloadError
from ampdbg.workload.build import Workload, build_workload
from ampdbg.workload.targets import config_of_module_file
from tests.workload.folders import CPU, NET, first_losses

DATA = """
def build_data():
    return [(inputs.cos(), target) for inputs, target in batches()]
"""
FACTORY = """
def build_model(width=4):
    return Net(width)
"""
LOSS = "from torch.nn.functional import cross_entropy as loss\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(*parts: str, name: str = "model.py") -> Path:
    """Writes the parts to a file in the current folder."""
    Path(name).write_text("\n".join(map(textwrap.dedent, parts)), encoding="utf-8")
    return Path(name)


def targets(config: Config) -> dict[str, str]:
    return {key: spec.target for key in ("model", "data", "loss", "step") if (spec := getattr(config, key)) is not None}


def built(path: Path, *overrides: str) -> Workload:
    return build_workload(config_of_module_file(path, overrides), CPU)


def test_a_factory_data_and_a_loss_are_found_by_name(folder: Path) -> None:
    path = written(NET, FACTORY, DATA, LOSS)
    config = config_of_module_file(path)
    assert targets(config) == {"model": "model.py:build_model", "data": "model.py:build_data", "loss": "model.py:loss"}
    assert (config.optimizer.target, config.train.steps) == ("torch.optim:AdamW", 50)
    assert first_losses(build_workload(config, CPU))["loss"].isfinite()


def test_the_only_class_without_arguments_is_the_model_and_main_code_is_ignored(folder: Path) -> None:
    path = written(NET, "class Block(nn.Module):\n    def __init__(self, width): ...\n", DATA, LOSS)
    assert targets(config_of_module_file(path)).items() >= {"model": "model.py:Net", "loss": "model.py:loss"}.items()
    not_run = "if __name__ == '__main__':\n    loss = build_model()(build_data()[0][0])\n"
    assert "loss" not in targets(config_of_module_file(written(NET, FACTORY, DATA, not_run)))


def test_an_imported_class_is_not_taken_for_the_model(folder: Path) -> None:
    written(NET, name="net.py")
    path = written("from net import Net, batches\nclass Wide(Net): ...\n", DATA, LOSS)
    assert type(built(path).model).__name__ == "Wide"


def test_a_training_step_function_is_used_as_the_step(folder: Path) -> None:
    step = "def training_step(model, batch):\n    return {'mean': model(batch[0]).mean()}\n"
    assert list(first_losses(built(written(NET, FACTORY, DATA, step)))) == ["mean"]


def test_model_and_data_arguments_are_set_like_any_key(folder: Path) -> None:
    path = written(NET, FACTORY, "def build_data(width=4):\n    return [torch.ones(2, width)]\n")
    workload = built(path, "model.args.width=6", "data.args.width=6", "train.seed=3")
    assert workload.model.get_parameter("head.weight").shape == (2, 6)


def test_the_file_is_imported_once_per_build(folder: Path) -> None:
    path = written(NET, FACTORY, DATA, LOSS, "open('imports', 'a').write('x')\n")
    config = config_of_module_file(path)
    build_workload(config, CPU)
    assert Path("imports").read_text() == "x"
    build_workload(config, CPU)
    assert Path("imports").read_text() == "xx"


def test_a_file_in_another_folder_is_named_from_here_and_imports_its_siblings(folder: Path) -> None:
    (folder / "src").mkdir()
    written(NET, name="src/layers.py")
    path = written("from layers import Net, batches\n", FACTORY, DATA, LOSS, name="src/my-model.py")
    config = config_of_module_file(path)
    assert targets(config)["model"] == "src/my-model.py:build_model"
    assert first_losses(build_workload(config, CPU))["loss"].isfinite()


def test_targets_given_by_options_need_not_be_in_the_file(folder: Path) -> None:
    written(NET, name="net.py")
    path = written("VALUE = 1\n")
    config = config_of_module_file(path, ("model.target=net.py:Net", "data={target: net.py:batches}"))
    assert targets(config) == {"model": "net.py:Net", "data": "net.py:batches"}


TWO = "class Other(nn.Module): ...\n"
ARGUMENTS = "from torch import nn\nclass Net(nn.Module):\n    def __init__(self, width, *, depth, bias=True): ...\n"
SOURCE = "--module model.py: "
FACTORY_NEEDED = "build_model() that returns the model"
ONE = "build_model() that returns the one to train"
NO_PLAIN_CLASS = "no nn.Module class that can be made without arguments"
NO_CLASS = f"{SOURCE}it defines neither build_model() nor an nn.Module class; needed: {FACTORY_NEEDED}."
NO_DATA = f"{SOURCE}it defines no build_data(); needed: a function that returns an iterable of batches."
REFUSED = {
    "no model": ("def build_data(): ...\ndef make_model(): ...\n", f"{NO_CLASS} It defines make_model."),
    "two classes": (
        NET + TWO + DATA,
        f"{SOURCE}it defines 2 nn.Module classes that take no arguments: Net and Other; needed: {ONE}",
    ),
    "a class with arguments": (
        ARGUMENTS + "def build_data(): ...\n",
        f"{SOURCE}it defines no build_model(), and {NO_PLAIN_CLASS}: Net(width, depth); needed: {FACTORY_NEEDED}",
    ),
    "no data": (NET + FACTORY, f"{NO_DATA} It defines Net and batches."),
    "nothing": ("", f"{NO_CLASS}\n{NO_DATA}"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_missing_or_ambiguous_name_is_reported(name: str, folder: Path) -> None:
    source, message = REFUSED[name]
    with pytest.raises(WorkloadError) as caught:
        config_of_module_file(written(source))
    assert str(caught.value) == message


def test_a_failing_import_shows_only_frames_of_the_user(folder: Path) -> None:
    path = written("def deep():\n    return 1 / 0\n\ndeep()\n")
    with pytest.raises(UserCodeError) as caught:
        config_of_module_file(path)
    assert str(caught.value) == "--module model.py: importing it raised ZeroDivisionError: division by zero"
    assert caught.value.user_traceback.count('  File "') == 2
    assert str(Path("ampdbg", "workload")) not in caught.value.user_traceback


def test_the_error_for_a_missing_file_suggests_a_similar_name(folder: Path) -> None:
    written(NET, name="modle.py")
    with pytest.raises(ConfigError) as caught:
        config_of_module_file(Path("model.py"))
    assert str(caught.value) == (
        f"--module model.py: got 'model.py', but there is no such file in {folder}. Did you mean 'modle.py'?"
    )


def test_a_file_that_is_not_python_is_refused(folder: Path) -> None:
    path = written("model: {}\n", name="config.yaml")
    with pytest.raises(ConfigError, match=r"--module config\.yaml: got 'config\.yaml'; allowed: a Python file, FILE"):
        config_of_module_file(path)


def test_a_mistake_in_an_option_is_reported_as_in_a_config(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--set train\.step=3: train\.step: unknown key"):
        config_of_module_file(written(NET, FACTORY, DATA), ("train.step=3",))


def test_the_error_for_a_non_module_model_names_the_file(folder: Path) -> None:
    path = written(NET, "def build_model():\n    return 3\n", DATA)
    with pytest.raises(AmpdbgError, match=r"^--module model\.py: model\.target: model\.py:build_model returned an int"):
        built(path)
