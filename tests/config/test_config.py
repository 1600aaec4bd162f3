"""The config: defaults, round trips, --set, line numbers, and the names in a FILE.py without an import."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ampdbg.config.file import load_config
from ampdbg.config.schema import Config, LossScale, TargetSpec
from ampdbg.config.targets import defined_names, parse_target
from ampdbg.errors import ConfigError
from ampdbg.formats import FLOAT32

HEALTHY = """\
model: {target: workload.py:Net}
data:
  target: workload.py:batches
  args:
    size: 8
"""

# All examples of a property share one tmp_path; each example rewrites all of its files.
SHARED_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "workload.py").write_text("class Net: ...\nbatches = []\n")
    (tmp_path / "config.yaml").write_text(HEALTHY)
    return tmp_path


def load(folder: Path, *overrides: str, text: str | None = None) -> Config:
    if text is not None:
        (folder / "config.yaml").write_text(text, encoding="utf-8")
    return load_config(folder / "config.yaml", overrides)


def message(folder: Path, *overrides: str, text: str | None = None) -> str:
    with pytest.raises(ConfigError) as raised:
        load(folder, *overrides, text=text)
    return str(raised.value).replace(str(folder / "config.yaml"), "config.yaml")


# --- values and defaults ---


def test_the_resolved_config_has_every_key_and_only_relative_paths(folder: Path) -> None:
    (folder / "w.pt").touch()
    config = load(folder, "checkpoint=./w.pt")
    assert config.folder == folder
    assert config.resolved() == {
        "model": {"target": "workload.py:Net", "args": {}},
        "data": {"target": "workload.py:batches", "args": {"size": 8}},
        "loss": None,
        "step": None,
        "optimizer": {"target": "torch.optim:AdamW", "args": {}, "groups": "parameter"},
        "checkpoint": "w.pt",
        "scheduler": None,
        "precision": {
            "dtype": "float16",
            "level": "O1",
            "policy": "cuda",
            "loss_scale": {
                "init": 65536.0,
                "growth_factor": 2.0,
                "backoff_factor": 0.5,
                "growth_interval": 2000,
                "min": None,
                "max": None,
            },
            "pins": [],
            "keep_norms_fp32": None,
            "master_weights": None,
        },
        "train": {"steps": 50, "accumulate": 1, "clip_grad_norm": None, "seed": 0, "device": "auto"},
    }


def test_an_empty_section_means_its_defaults(folder: Path) -> None:
    text = HEALTHY + "optimizer:\n  # groups: single\nprecision:\n  pins:\ntrain:\nloss:\n"
    assert load(folder, text=text).resolved() == load(folder, text=HEALTHY).resolved()


@pytest.mark.parametrize("written", ["3e-4", "3.0e-4", "0.0003", "+3E-4", ".3e-3", "3.e-04"])
def test_every_spelling_of_a_small_float_is_read_as_a_number(folder: Path, written: str) -> None:
    config = load(folder, text=HEALTHY + f"optimizer: {{args: {{lr: {written}}}}}\n")
    assert config.optimizer.args == {"lr": 3e-4}


def test_a_quoted_number_is_a_string_in_args_and_a_number_in_numeric_keys(folder: Path) -> None:
    config = load(folder, text=HEALTHY + "optimizer: {args: {name: '3e-4'}}\nprecision: {loss_scale: '1e3'}\n")
    assert config.optimizer.args == {"name": "3e-4"}
    assert config.precision.loss_scale == 1000.0


@pytest.mark.parametrize(
    ("written", "scale"), [("1024", 1024.0), ("1e3", 1000.0), ("{init: 8}", LossScale(init=8.0)), ("{}", LossScale())]
)
def test_a_number_is_a_static_loss_scale_and_a_mapping_a_dynamic_loss_scale(
    folder: Path, written: str, scale: LossScale | float
) -> None:
    assert load(folder, text=HEALTHY + f"precision: {{loss_scale: {written}}}\n").precision.loss_scale == scale


@pytest.mark.parametrize("scale", [FLOAT32.smallest_normal, 1, 65536, FLOAT32.largest])
def test_a_loss_scale_from_the_smallest_to_the_largest_normal_float32_is_accepted(folder: Path, scale: float) -> None:
    assert load(folder, f"precision.loss_scale={scale!r}").precision.loss_scale == scale


@pytest.mark.parametrize("scale", ["0", "-1", ".nan", ".inf", "1e39", "1e-39", "true"])
def test_an_invalid_loss_scale_is_refused(folder: Path, scale: str) -> None:
    assert "precision.loss_scale: got" in message(folder, f"precision.loss_scale={scale}")


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:13"])
def test_valid_devices_are_accepted(folder: Path, device: str) -> None:
    assert load(folder, f"train.device={device}").train.device == device


@pytest.mark.parametrize("device", ["CPU", "mps", "cuda:", "cuda:x", "cuda:-1", "cuda:²", "3"])
def test_an_invalid_device_is_refused_with_the_allowed_devices(folder: Path, device: str) -> None:
    assert "allowed: auto, cpu, cuda or cuda:INDEX" in message(folder, f"train.device={device}")


def test_yaml_anchors_and_merge_keys_are_resolved(folder: Path) -> None:
    text = HEALTHY.replace("model: {", "model: &target {") + "loss:\n  <<: *target\n  args: {a: 1}\n"
    assert load(folder, text=text).loss == TargetSpec(target="workload.py:Net", args={"a": 1})


def test_a_byte_order_mark_is_ignored(folder: Path) -> None:
    (folder / "config.yaml").write_bytes(b"\xef\xbb\xbf" + HEALTHY.encode())
    assert load(folder).model.target == "workload.py:Net"


def test_a_json_config_may_hold_a_surrogate_pair_but_not_half_a_pair(folder: Path) -> None:
    text = json.dumps(
        {"model": {"target": "workload.py:Net", "args": {"a": "\U0001f600"}}, "data": {"target": "math:pi"}}
    )
    assert "\\ud83d\\ude00" in text
    assert load(folder, text=text).model.args == {"a": "\U0001f600"}
    assert "half a surrogate pair" in message(folder, text=text.replace("\\ude00", ""))


def test_dates_sets_and_integer_keys_resolve_to_json_values(folder: Path) -> None:
    config = load(
        folder, text=HEALTHY + "loss: {target: 'math:prod', args: {day: 2024-05-01, bag: !!set {a}, 1a: {2: 3}}}\n"
    )
    assert json.loads(json.dumps(config.resolved()["loss"]["args"])) == {
        "day": "2024-05-01",
        "bag": ["a"],
        "1a": {"2": 3},
    }


# --- round trips ---

NAMES = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), min_size=1, max_size=12)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
ARGS = st.dictionaries(NAMES, PLAIN, max_size=3)
SCALES = st.floats(FLOAT32.smallest_normal, FLOAT32.largest)


@st.composite
def dynamic_scales(draw: st.DrawFn) -> dict[str, Any]:
    low, high = sorted(draw(st.tuples(SCALES, SCALES)))
    return {
        "init": draw(SCALES),
        "growth_factor": draw(st.floats(1, 1e6, exclude_min=True)),
        "backoff_factor": draw(st.floats(0, 1, exclude_min=True, exclude_max=True)),
        "growth_interval": draw(st.integers(1, 2**63 - 1)),
        "min": draw(st.sampled_from([None, low])),
        "max": draw(st.sampled_from([None, high])),
    }


def precisions(levels: Sequence[str], flags: st.SearchStrategy[bool | None]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["float16", "bfloat16", "float32"]),
            "level": st.sampled_from(levels),
            "policy": st.sampled_from(["cuda", "native"]),
            "loss_scale": SCALES | dynamic_scales(),
            "pins": st.lists(NAMES, max_size=3),
            "keep_norms_fp32": flags,
            "master_weights": flags,
        }
    )


SECTIONS = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries({"target": st.just("workload.py:Net"), "args": ARGS}),
        "data": st.fixed_dictionaries({"target": st.just("workload.py:batches"), "args": ARGS}),
        "loss": st.none() | st.fixed_dictionaries({"target": st.just("math:prod"), "args": ARGS}),
        "step": st.none() | st.fixed_dictionaries({"target": st.just("math:prod"), "args": ARGS}),
        "optimizer": st.fixed_dictionaries(
            {"target": st.just("math:prod"), "args": ARGS, "groups": st.sampled_from(["parameter", "module", "single"])}
        ),
        "checkpoint": st.none(),
        "scheduler": st.none() | st.fixed_dictionaries({"target": st.just("math:prod"), "args": ARGS}),
        "precision": precisions(("O0", "O1"), st.none()) | precisions(("O2", "O3"), st.none() | st.booleans()),
        "train": st.fixed_dictionaries(
            {
                "steps": st.integers(1, 2**63 - 1),
                "accumulate": st.integers(1, 2**63 - 1),
                "clip_grad_norm": st.none() | st.floats(0, exclude_min=True, allow_infinity=False),
                "seed": st.integers(0, 2**32 - 1),
                "device": st.sampled_from(["auto", "cpu", "cuda", "cuda:1"]),
            }
        ),
    }
)


@settings(SHARED_FOLDER, max_examples=25)
@given(data=SECTIONS)
def test_a_resolved_config_resolves_to_itself(folder: Path, data: dict[str, Any]) -> None:
    # JSON is YAML, and quotes every string.
    assert load(folder, text=json.dumps(data)).resolved() == data


@pytest.mark.slow
@SHARED_FOLDER
@given(data=SECTIONS)
def test_set_of_whole_sections_gives_the_same_config_as_a_file(folder: Path, data: dict[str, Any]) -> None:
    overrides = [f"{key}={json.dumps(value)}" for key, value in data.items()]
    assert load(folder, *overrides, text=HEALTHY).resolved() == data


@pytest.mark.slow
@SHARED_FOLDER
@given(data=SECTIONS)
def test_set_of_single_keys_gives_the_same_config_as_a_file(folder: Path, data: dict[str, Any]) -> None:
    overrides = [
        f"{section}.{key}={json.dumps(value)}"
        for section in ("optimizer", "precision", "train")
        for key, value in data[section].items()
    ]
    resolved = load(folder, *overrides, text=HEALTHY).resolved()
    assert [resolved[section] for section in ("optimizer", "precision", "train")] == [
        data[section] for section in ("optimizer", "precision", "train")
    ]


# --- --set ---


@pytest.mark.parametrize(
    ("overrides", "section", "key", "value"),
    [
        (["precision.loss_scale.init=8"], "precision", "loss_scale", LossScale(init=8.0)),
        (["train.steps=3", "train.steps=4"], "train", "steps", 4),
        (["data.args.size=16", "data.args.kind=a=b"], "data", "args", {"size": 16, "kind": "a=b"}),
        (["train.clip_grad_norm=1", "train.clip_grad_norm="], "train", "clip_grad_norm", None),
    ],
    ids=["it makes the sections it needs", "the later wins", "it reaches into args", "an empty value is null"],
)
def test_set_changes_its_key(folder: Path, overrides: list[str], section: str, key: str, value: object) -> None:
    assert getattr(getattr(load(folder, *overrides), section), key) == value


def test_set_overrides_an_invalid_value_of_the_file(folder: Path) -> None:
    text = HEALTHY + "train: {steps: 0}\n"
    assert message(folder, text=text) == (
        "config.yaml:6: train.steps: got 0; allowed: a whole number of at least 1, below 2**63"
    )
    assert load(folder, "train.steps=1", text=text).train.steps == 1


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=0", "--set train.steps=0: train.steps: got 0; allowed: a whole number of at least 1"),
        ("train={steps: 0}", "--set train={steps: 0}: train.steps: got 0; allowed: a whole number of at least 1"),
        ("train.steps", "--set train.steps: write it as dotted.key=value, for example --set train.steps=100"),
        ("=3", "--set =3: write it as dotted.key=value, for example --set train.steps=100"),
        ("train..steps=3", "--set train..steps=3: write it as dotted.key=value, for example --set train.steps=100"),
        (
            "model.target.x=3",
            '--set model.target.x=3: model.target is "workload.py:Net", which has no keys; set model.target as a whole',
        ),
        (
            "model={a: 1, a: 2, target: 'math:pi'}",
            "--set model={a: 1, a: 2, target: 'math:pi'}: model.a is given twice",
        ),
        ("s\udce9ed=3", "as a key; allowed: the names of"),
        ("trian.steps=3", "precision, train. Did you mean 'train'?"),
    ],
)
def test_a_mistake_in_a_set_option_names_the_option(folder: Path, override: str, expected: str) -> None:
    assert expected in message(folder, override)


def test_the_error_for_a_long_set_option_stays_short(folder: Path) -> None:
    assert len(message(folder, f"x={'y' * 10_000}", f"{'z' * 10_000}=1")) < 2000


def test_an_invalid_yaml_value_in_a_set_option_names_the_option(folder: Path) -> None:
    expected = "--set train.steps=[: the value is not YAML: a value is missing, or a bracket is not closed"
    assert message(folder, "train.steps=[").startswith(expected)


def test_mistakes_in_the_file_are_listed_before_mistakes_in_the_options(folder: Path) -> None:
    lines = message(folder, "train.steps=0", text=HEALTHY + "precision: {level: O7, policy: gpu}\n").splitlines()
    assert lines == [
        "config.yaml: 3 mistakes",
        (
            '  config.yaml:6: precision.level: got "O7"; allowed: O0 (FP32), O1 (autocast), '
            "O2 (half model, FP32 batch norms and master weights), O3 (all half)"
        ),
        '  config.yaml:6: precision.policy: got "gpu"; allowed: cuda or native',
        "  --set train.steps=0: train.steps: got 0; allowed: a whole number of at least 1, below 2**63",
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "{keep_norms_fp32: true}",
            "precision.keep_norms_fp32: got true at level O1; allowed at O2, O3, whose weights are half",
        ),
        ("{level: O2, master_weights: 1}", "precision.master_weights: got 1; allowed: true, false, or null"),
        (
            "{loss_scale: {min: 8, max: 4}}",
            "precision.loss_scale.max: got 4, below min, which is 8; allowed: at least that",
        ),
    ],
)
def test_a_key_that_conflicts_with_another_key_is_refused(folder: Path, given: str, said: str) -> None:
    assert said in message(folder, text=HEALTHY + f"precision: {given}\n")


# --- the line or option of a key ---


def test_where_names_the_line_or_the_option_that_set_a_key(folder: Path) -> None:
    config = load(folder, "data.args.kind=3")
    path = folder / "config.yaml"
    assert config.where("model.target") == f"{path}:1: model.target"
    assert config.where("data.args.size") == f"{path}:5: data.args.size"
    assert config.where("data.args.kind") == "--set data.args.kind=3: data.args.kind"
    assert config.where("data.args.other") == f"{path}:4: data.args.other"
    assert config.where("optimizer.target") == "optimizer.target"


# --- the file itself ---


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("confg.yaml", r"no such file in .*\. Did you mean 'config\.yaml'\?"),
        ("vit.yaml", r"no such file in .*\. There is config\.yaml\."),
        ("none/vit.yaml", r"vit\.yaml.*, but there is no folder .*none"),
        ("", r"is a folder; allowed: a file\. There is config\.yaml\."),
    ],
)
def test_the_error_for_a_missing_config_names_the_configs_next_to_it(folder: Path, given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(folder / given)


def test_yaml_nested_deeper_than_100_levels_is_refused(folder: Path) -> None:
    refused = "config.yaml:2: nested too deeply: more than 100 lists and mappings in one another"
    assert message(folder, text="a: [1]\nb: " + "[" * 5000) == refused
    assert message(folder, text="a: [1]\nb: " + "[" * 101 + "]" * 101) == refused


@pytest.mark.slow
def test_a_config_is_not_read_beyond_100_000_values(folder: Path) -> None:
    text = "a: [\n" + "1,\n" * 150_000 + "no: [valid"
    assert message(folder, text=text).startswith("config.yaml:99999: more than 100,000 values")


def test_reading_a_config_imports_neither_torch_nor_the_targets(folder: Path) -> None:
    (folder / "workload.py").write_text("raise SystemExit\nNet = batches = 1\n")
    code = (
        "import sys; from pathlib import Path; from ampdbg.config.file import load_config;"
        "load_config(Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder / "config.yaml")], check=False)
    assert done.returncode == 0


def test_a_config_is_frozen(folder: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(folder).train.steps = 3


# --- targets ---


@pytest.mark.parametrize(
    ("text", "file", "module", "name"),
    [
        ("model.py:build", "model.py", "", "build"),
        ("../src/model.py:Net.small", "../src/model.py", "", "Net.small"),
        ("C:\\src\\model.py:build", "C:\\src\\model.py", "", "build"),
        ("torch.optim:AdamW", "", "torch.optim", "AdamW"),
        ("math:pi", "", "math", "pi"),
    ],
)
def test_a_target_names_a_file_or_a_module(text: str, file: str, module: str, name: str) -> None:
    target = parse_target(text)
    assert (target.file, target.module, target.name) == (file, module, name)


@pytest.mark.parametrize("text", ["", ":", "a:", ":b", "a", "a.b", "a.py", "a.py:", "a:b c", "a-b:c", "a/b:c", "a:1"])
def test_text_of_another_form_is_refused_as_a_target(text: str) -> None:
    with pytest.raises(ValueError, match=r"allowed: FILE\.py:NAME .* or package\.module:NAME"):
        parse_target(text)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def a(): ...\nasync def b(): ...\nclass C: ...\n", ["a", "b", "C"]),
        ("a = 1\nb: int = 2\nc, (d, *e) = 1, (2, 3)\n", ["a", "b", "c", "d", "e"]),
        ("if 1:\n    a = 1\nelse:\n    b = 2\nfor c in []:\n    d = 1\nwith x as e: ...\n", ["a", "b", "c", "d", "e"]),
        ("try:\n    import a.b, c as d\nexcept E as f:\n    from g import h as i\n", ["f", "a", "d", "i"]),
        ("(a := 1)\ndef f():\n    b = 1\n    global c\n", ["a", "f", "c"]),
        ("class A:\n    b = 1\nx = lambda y: (z := y)\n", ["A", "x"]),
        ("", []),
    ],
)
def test_defined_names_lists_the_top_level_names_of_a_file(tmp_path: Path, source: str, names: list[str]) -> None:
    (tmp_path / "x.py").write_text(source)
    assert defined_names(tmp_path / "x.py") == names


@pytest.mark.parametrize(
    "source", ["from x import *", "globals()['a'] = 1", "exec('a = 1')", "def __getattr__(name): ...", "def (", "\x00"]
)
def test_defined_names_returns_none_for_dynamic_or_invalid_code(tmp_path: Path, source: str) -> None:
    (tmp_path / "x.py").write_text(source)
    assert defined_names(tmp_path / "x.py") is None


def test_infinite_and_nan_arguments_resolve_unchanged(folder: Path) -> None:
    args = load(folder, text=HEALTHY + "loss: {target: 'math:prod', args: {a: .inf, b: .nan}}\n").resolved()["loss"][
        "args"
    ]
    assert args["a"] == math.inf
    assert math.isnan(args["b"])


@pytest.mark.skipif(os.name == "nt", reason="Windows has neither")
def test_a_pipe_or_a_device_is_refused_as_a_config(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=f"{path}: .*neither a file nor a folder; allowed: a file"):
            load_config(path)
