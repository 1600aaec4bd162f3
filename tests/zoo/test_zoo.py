"""The zoo: every file in ``cases`` is a planted fault that must be named to the line, with a healthy twin."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from ampdbg.config.file import load_config
from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.errors import UserCodeError
from ampdbg.record.codes import CODES
from ampdbg.record.file import from_json, to_json
from ampdbg.record.findings import Finding
from ampdbg.record.run import Record
from ampdbg.training.loop import train
from tests.siblings import slow_except
from tests.zoo.case import HERE, Case

USUAL = Path(__file__).parent / "case.py"
FILES = sorted((Path(__file__).parent / "cases").glob("*.py"))


def loaded(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"zoo_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MODULES = {file.stem: loaded(file) for file in FILES}
CASES: dict[str, Case] = {name: module.CASE for name, module in MODULES.items()}
CONTROLS = [name for name, case in CASES.items() if case.code is None]
ONE_OF_EACH = """
    batch_out_of_range batch_with_nan beyond_fp32 decay_used_twice divergence eps_of_adam_at_o3 eps_on_a_zero_row
    frozen_weights gain_beyond_half gradient_overflow gradient_underflow gradients_that_are_not_added infinite_ctc_loss
    mask_constant no_usable_scale second_moment_that_sticks
    poisoned_statistic positions_in_half runaway_scale scale_that_grows_too_often static_scale_too_high
    stochastic_rounding true_nan_forward weights_from_a_checkpoint
""".split()
"""A case of each code, the quickest of those that name a line, and one that only looks like a fault."""
QUICK_TWINS = """
    divergence eps_of_adam_at_o3 frozen_weights gain_beyond_half gradient_overflow gradient_underflow infinite_ctc_loss
    mask_constant no_usable_scale positions_in_half runaway_scale static_scale_too_high
""".split()
QUICK = [*ONE_OF_EACH, "eps_of_adam", "not_deterministic", "steps_too_small_for_half"]
STANDS_BESIDE_A_QUICKER_ONE = """
    another_choice another_choice_by_index calibration gradient_behind_a_relu_beside_rounding
    residue_over_a_small_divisor
""".split()
"""What only looks like a fault, and does so as another case does that is quicker."""


def config_of(file: Path, folder: Path) -> Path:
    """A config from the names that the file defines: Model, batches, and loss or step, or the usual ones."""
    case, module = CASES[file.stem], MODULES[file.stem]
    usual = {"batches"} if hasattr(module, "step") else {"batches", "loss"}
    keys: dict[str, Any] = {"train": {"steps": case.steps}}
    for key, name in {"model": "Model", "data": "batches", "loss": "loss", "step": "step"}.items():
        if getattr(module, name, None) is not None:
            keys[key] = {"target": f"{file}:{name}"}
        elif not hasattr(module, name) and name in usual:
            keys[key] = {"target": f"{USUAL}:{name}"}
    for key, value in case.config.items():
        keys[key] = {**keys.get(key, {}), **value} if isinstance(value, dict) else value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(keys))
    return path


def scanned(name: str, folder: Path, overrides: tuple[str, ...] = ()) -> Record:
    file = next(file for file in FILES if file.stem == name)
    record = diagnose(train(load_config(config_of(file, folder), overrides)))
    assert diagnose(from_json(to_json(record))).findings == record.findings
    return record


def worse_than_calibration(record: Record) -> list[Finding]:
    return [finding for finding in record.findings if finding.severity != "info"]


def is_not_blamed(record: Record) -> None:
    assert worse_than_calibration(record) == []
    # A scale that still settles at the end of a short run has let no step be taken yet.
    assert record.verdict == ("inconclusive" if record.took_no_step else "healthy")


def marked_line(file: Path) -> int | None:
    return next((n for n, line in enumerate(file.read_text().splitlines(), start=1) if line.endswith(HERE)), None)


def test_parameters_that_no_gradient_reaches_are_kept_beside_the_distances_and_blamed_for_nothing(
    tmp_path: Path,
) -> None:
    record = scanned("another_choice", tmp_path)
    is_not_blamed(record)
    first, second = record.investigations
    for investigation in (first, second):
        (finite,) = (low for low in (investigation.low, *investigation.at_lower) if low.unreached)
        assert (finite.unreached, finite.lost) == (("chosen.weight", "chosen.bias"), ())
        assert (finite.dtype, finite.gradients) == ("float16", ())


@pytest.mark.parametrize("name", slow_except(QUICK, [name for name, case in CASES.items() if case.code]))
def test_a_planted_fault_is_named(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    record = scanned(name, tmp_path)
    assert record.findings, "nothing was found"
    root = record.findings[0]
    assert (root.code, record.verdict, root.severity) == (case.code, case.verdict, case.severity), root.message
    for field in ("module", "op", "step", "phase"):
        expected = getattr(case, field)
        assert expected is None or getattr(root, field) == expected, (field, root)
    file = next(file for file in FILES if file.stem == name)
    line = marked_line(file)
    assert (root.source and root.source.line) == line, root
    assert line is None or (root.source is not None and Path(root.source.file).name == file.name)
    assert set(case.follows) <= {finding.code for finding in record.findings[1:]}
    assert all(part in root.message for part in case.says), root.message
    assert all(finding.root == 0 for finding in worse_than_calibration(record)[1:])


@pytest.mark.parametrize("name", slow_except(QUICK_TWINS, [name for name, case in CASES.items() if case.twin]))
def test_the_healthy_twin_is_not_blamed(name: str, tmp_path: Path) -> None:
    is_not_blamed(scanned(name, tmp_path, CASES[name].twin))


@pytest.mark.parametrize("name", slow_except(set(CASES) - set(STANDS_BESIDE_A_QUICKER_ONE), CONTROLS))
def test_what_only_looks_like_a_fault_is_not_blamed(name: str, tmp_path: Path) -> None:
    record = scanned(name, tmp_path)
    is_not_blamed(record)
    # A GPU adds in another order: there near ties fall as in FP32, or otherwise.
    assert set(CASES[name].follows) <= {finding.code for finding in record.findings} or torch.cuda.is_available()


def test_every_code_is_found_in_some_case_or_by_the_order_of_calls() -> None:
    found = {code for case in CASES.values() for code in (case.code, *case.follows)}
    missing = {code for code in CODES if not code.startswith("misuse-")} - found
    # It takes a second kernel or device to tell that one computes wrongly, and a loop that ampdbg merely watches to be
    # one in which autocast does nothing (tests/probes/test_watch.py, tests/script). What grows is told of a script
    # (tests/script/test_trend.py), apex and old spellings of source code (tests/lint); a loop of its own makes a new
    # scaler again and again (tests/script/test_rows.py). A config asks no framework for a precision, and its model is
    # cast before anybody watches (tests/probes/test_dtype_contract.py).
    apex = {"apex-amp", "apex-class", "deprecated-amp"}
    asked = {"not-half", "half-weights", "rounded-buffer"}
    watched = {"hardware", "limit-ahead", "scale-restart", "frozen-average"}  # averages: tests/probes/test_averages.py
    assert missing == watched | asked | apex


def test_every_fault_has_a_twin_and_one_of_each_code_is_quick() -> None:
    assert [name for name, case in CASES.items() if case.code and not case.twin] == []
    assert {CASES[name].code for name in ONE_OF_EACH} == {case.code for case in CASES.values()}


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), ("train.clip_grad_norm=null",)])
def test_groups_are_counted_before_gradients_are_clipped(overrides: tuple[str, ...], tmp_path: Path) -> None:
    [*_, last] = scanned("clipped", tmp_path, overrides).steps
    counts = {group.name: (each.inf, each.nan) for group in last.groups for each in group.parameters}
    assert counts == MODULES["clipped"].GROUPS


def test_a_short_run_that_takes_no_step_at_all_is_not_healthy(tmp_path: Path) -> None:
    record = scanned("true_nan_gradient", tmp_path, ("train.steps=2",))
    assert all(step.skipped for step in record.steps)
    assert (record.findings[0].code, record.verdict) == ("true-nan", "other")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "level", "code"),
    [
        ("true_nan_gradient", "O0", "true-nan"),
        ("true_nan_gradient", "O3", "true-nan"),
        ("gradient_overflow", "O0", None),
        ("gradient_overflow", "O2", "gradient-overflow"),
        ("gradient_overflow", "O3", "gradient-overflow"),
        ("residual_add", "O2", "forward-overflow"),
        ("divergence", "O2", "divergence"),
        ("dropout", "O2", None),
        ("half_parameters_that_learn", "O3", None),
    ],
)
def test_a_fault_is_named_at_other_levels_too(name: str, level: str, code: str | None, tmp_path: Path) -> None:
    record = scanned(name, tmp_path, (f"precision.level={level}",))
    assert next((finding.code for finding in worse_than_calibration(record)), None) == code, record.findings
    file = next(file for file in FILES if file.stem == name)
    if code in ("gradient-overflow", "forward-overflow") and level != "O3":
        assert (record.findings[0].source and record.findings[0].source.line) == marked_line(file)


def test_where_dtypes_meet_in_a_half_model_its_weights_are_said_to_be_half(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match="at this level the weights are half") as raised:
        scanned("half_by_hand", tmp_path, ("precision.level=O2",))
    assert "under autocast" not in str(raised.value)


def test_the_last_step_is_run_again_behind_one_that_was_skipped(tmp_path: Path) -> None:
    record = scanned("decay_used_twice", tmp_path, ("train.steps=2",))
    assert [step.skipped for step in record.steps] == [True, False]
    assert [found.code for found in record.findings] == ["silent-overflow"]
