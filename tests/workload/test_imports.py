"""Where targets come from (files, siblings, packages), and that an import leaves no trace."""

import pickle
import sys
from pathlib import Path

import pytest

import ampdbg
from ampdbg.errors import AmpdbgError, UserCodeError, WorkloadError
from ampdbg.workload.batches import BatchSource
from ampdbg.workload.build import build_workload
from ampdbg.workload.targets import config_of_module_file
from tests.workload.folders import CPU, NET, build, first_losses


def test_an_import_leaves_sys_path_unchanged(tmp_path: Path) -> None:
    before = list(sys.path)
    build(tmp_path)
    with pytest.raises(UserCodeError):
        build(tmp_path, net="raise OSError\n")
    assert sys.path == before


def test_a_file_may_import_its_siblings_also_in_forward(tmp_path: Path) -> None:
    workload = build(
        tmp_path,
        "model.target=net.py:Late",
        net="""
            class Late(Net):
                def forward(self, x):
                    from sizes import SCALE
                    return super().forward(x) * SCALE
        """,
        sizes="SCALE = 0.0\n",
    )
    assert first_losses(workload)["loss"].item() == pytest.approx(0.6931, abs=1e-4)  # log 2: all logits are 0


def test_a_file_that_is_both_target_and_sibling_is_one_module(tmp_path: Path) -> None:
    workload = build(
        tmp_path,
        "step={target: train.py:step}",
        train="""
            from net import Net

            def step(model, batch):
                assert isinstance(model, Net)
                return model(batch[0]).sum()
        """,
    )
    assert first_losses(workload)["loss"].ndim == 0


def test_files_and_siblings_of_equal_names_in_two_folders_do_not_clash(tmp_path: Path) -> None:
    for name, width in (("a", 4), ("b", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "layers.py").write_text(f"WIDTH = {width}\n")
        (tmp_path / name / "net.py").write_text(f"{NET}\n\nfrom layers import WIDTH\n\nwide = Net(WIDTH)\n")
    data = "data={target: net.py:batches}"
    workloads = [build(tmp_path, f"model.target={name}/net.py:wide", data) for name in ("a", "b")]
    assert [workload.model.get_parameter("head.weight").shape[1] for workload in workloads] == [4, 5]
    both = build(tmp_path, "model.target=a/net.py:wide", "data={target: b/net.py:batches, args: {count: 1}}")
    assert isinstance(both.source, BatchSource)
    data_factory = both.source.found.value
    assert type(both.model).__module__ != data_factory.__module__
    assert (sys.modules[type(both.model).__module__].WIDTH, sys.modules[data_factory.__module__].WIDTH) == (4, 5)


def test_a_file_named_like_a_standard_library_module_does_not_replace_it(tmp_path: Path) -> None:
    import tokenize

    build(tmp_path, "data.target=tokenize.py:batches", tokenize=NET)
    assert sys.modules["tokenize"] is tokenize


def test_every_build_imports_the_current_files(tmp_path: Path) -> None:
    values = [
        next(
            build(
                tmp_path, "data.target=data.py:stream", data="from deep import stream\n", deep=f"stream = [{value}]\n"
            ).batches()
        )
        for value in (1, 22)
    ]
    assert values == [1, 22]


def test_a_package_next_to_the_config_is_found(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").touch()
    (tmp_path / "shop" / "nets.py").write_text(NET)
    assert type(build(tmp_path, "model.target=shop.nets:Net").model).__module__ == "shop.nets"


def test_a_dotted_target_may_name_a_class_method(tmp_path: Path) -> None:
    workload = build(
        tmp_path,
        "model={target: net.py:Wide.of, args: {width: 4}}",
        net="""
            class Wide(Net):
                @classmethod
                def of(cls, width):
                    return cls(width)
        """,
    )
    assert type(workload.model).__name__ == "Wide"


def test_a_model_defined_in_a_file_can_be_pickled(tmp_path: Path) -> None:
    model = build(tmp_path).model
    assert type(pickle.loads(pickle.dumps(model))) is type(model)


def test_a_file_whose_stem_is_not_an_identifier_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "my-net.py").write_text(NET)
    assert type(build(tmp_path, "model.target=my-net.py:Net").model).__name__ == "Net"


def test_star_imported_names_are_found_or_reported_as_missing(tmp_path: Path) -> None:
    dynamic = {"dynamic": "from net import *\n"}
    assert type(build(tmp_path, "model.target=dynamic.py:Net", **dynamic).model).__name__ == "Net"
    with pytest.raises(WorkloadError, match=r"model\.target: got 'dynamic\.py:Nett', but dynamic has no 'Nett'\. Did"):
        build(tmp_path, "model.target=dynamic.py:Nett", **dynamic)


def test_a_failing_import_inside_a_user_module_is_a_user_code_error(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").write_text("import not_installed\n")
    with pytest.raises(UserCodeError, match="No module named 'not_installed'"):
        build(tmp_path, "model.target=shop:Net")


def test_code_that_changes_the_working_folder_at_import_breaks_no_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "losses.py").write_text("import torch.nn.functional\nloss = torch.nn.functional.cross_entropy\n")
    (tmp_path / "run" / "wandering.py").write_text(f"import os\n{NET}\nos.chdir('/')\n")
    (tmp_path / "run" / "data.py").write_text(NET)
    config = (
        "model: {target: wandering.py:Net}\ndata: {target: data.py:batches}\nloss: {target: losses:loss}\n"
        "train: {steps: 1, device: cpu}\n"
    )
    (tmp_path / "run" / "config.yaml").write_text(config)
    monkeypatch.chdir(tmp_path)
    record = ampdbg.scan("run/config.yaml")
    assert (record.config_folder, len(record.steps)) == ("run", 1)


def test_a_module_file_that_changes_the_working_folder_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        NET.replace("def batches", "def build_data")
        + "\nloss = nn.functional.cross_entropy\n__import__('os').chdir('/')\n"
    )
    (tmp_path / "one.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    config = config_of_module_file(Path("one.py"))
    assert (config.folder, config.start, config.folder_from_start()) == (tmp_path, tmp_path, ".")
    assert build_workload(config, CPU).model is not None


@pytest.mark.parametrize("target", ["torch.nn:St{}", "no_such_module_{}:Net", "torch.nn.functional:f{}"])
def test_the_error_message_for_a_very_long_target_is_short(tmp_path: Path, target: str) -> None:
    with pytest.raises(AmpdbgError) as raised:
        build(tmp_path, f"model.target={target.format('9' * 4000)}")
    assert len(str(raised.value)) < 1000
    assert target.partition("{")[0] in str(raised.value)
