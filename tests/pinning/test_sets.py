"""``bisect`` on zoo cases, outliers in real models and examples: the exact set, or the reason for none."""

from pathlib import Path

import pytest
import yaml

import ampdbg
from ampdbg.config.file import load_config
from ampdbg.pinning.bisection import bisect_run
from ampdbg.record.file import read_record
from ampdbg.record.run import Record
from tests.commands.program import ROOT, start
from tests.models import runs
from tests.models.test_outliers import OVERFLOWS, planted
from tests.pinning.spiked import assert_found
from tests.siblings import slow_except
from tests.zoo.test_zoo import CASES, FILES, ONE_OF_EACH, config_of

# What must run in FP32: only the own lines, if the case's finding names a line of a module with children.
SETS = {
    "accumulated": ("body",),
    "clipped": ("second",),
    "cumulative_add": (":own",),
    "custom_backward": (":own",),
    "eps_in_the_backward_pass": (":own",),
    # The gradient of 1 / 1e-8 is too large for half too: the layer before the division receives it.
    "eps_on_a_zero_row": ("body",),
    # With its factor the product becomes FP32; then its gradient and the next layer's input cast are too large.
    "gain_beyond_half": ("body", "head"),
    "gradient_overflow": ("body", "head"),
    "infinite_prices": (":own",),
    "loss_too_large_for_any_scale": ("head",),
    # A pin fixes these three too, but suggest-fp32 edits the constant instead.
    "mask_by_index": (":own",),
    "mask_constant": ("attn",),
    "mask_of_a_whole_row": (":own",),
    # With this layer pinned a lower loss scale is enough.
    "no_scale_for_one_layer": ("out",),
    "no_usable_scale": ("first",),
    "poisoned_batch_norm": ("body",),
    "poisoned_beside_a_mask": ("body",),
    "poisoned_statistic": ("monitor",),
    "positions_in_half": (":own",),
    "residual_add": ("block:own",),
    "rotary_angles_by_a_half_product": ("block:own",),
    "running_sum": (":own",),
    "scores_before_scaling": ("attn:own",),
    "several_losses": (":own",),
    "silent_rms_norm": ("norm",),
    "sum_over_sequence": ("pool",),
}

WITHOUT_A_SET = {
    "half_by_hand": "not-in-a-module",
    "infinite_ctc_loss": "fp32-fails",
    "true_nan_forward": "fp32-fails",
    "true_nan_gradient": "fp32-fails",
    "all_targets_ignored": "fp32-fails",
    "true_nan_in_one_batch": "fp32-fails",
    "rows_masked_throughout": "fp32-fails",
    "batch_with_nan": "fp32-fails",
    "divergence": "fp32-fails",
    "divergence_of_gradients": "fp32-fails",
    "weights_from_a_checkpoint": "fp32-fails",
    "batch_out_of_range": "no-pin-helps",
    "gradient_underflow": "no-pin-helps",
    "runaway_scale": "no-pin-helps",
    "static_scale_too_high": "no-pin-helps",
}


def file_of(name: str) -> Path:
    return next(file for file in FILES if file.stem == name)


def bisected(name: str, folder: Path, overrides: tuple[str, ...] = ()) -> Record:
    return bisect_run(load_config(config_of(file_of(name), folder), overrides))


@pytest.mark.parametrize("name", slow_except(["residual_add"], SETS))
def test_bisect_finds_and_proves_the_exact_set_of_a_zoo_case(name: str, tmp_path: Path) -> None:
    record = bisected(name, tmp_path)
    assert_found(record, *SETS[name])
    # Dropping any pin was tried and fails; the whole set was run once more.
    assert all(pin.without for pin in record.pins)
    assert [trial.healthy for trial in record.trials if trial.stage == "the whole set once more"] == [True]


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_a_zoo_case_has_nothing_to_pin_once_its_set_is_pinned(name: str, tmp_path: Path) -> None:
    record = bisected(name, tmp_path, (f"precision.pins=[{', '.join(repr(pin) for pin in SETS[name])}]",))
    assert record.search is not None
    assert record.search.outcome == "nothing-to-pin", record.findings


@pytest.mark.parametrize("name", slow_except(("half_by_hand",), WITHOUT_A_SET))
def test_bisect_without_a_set_gives_the_reason_and_only_lines_outside_modules(name: str, tmp_path: Path) -> None:
    record = bisected(name, tmp_path)
    assert record.search is not None
    assert record.search.outcome == WITHOUT_A_SET[name]
    assert record.search.message
    lines = [
        number for number, line in enumerate(file_of(name).read_text().splitlines(), 1) if line.endswith("# <- here")
    ]
    assert [pin.source and pin.source.line for pin in record.pins] == (
        lines if WITHOUT_A_SET[name] == "not-in-a-module" else []
    )


@pytest.mark.parametrize("name", slow_except(ONE_OF_EACH, [name for name, case in CASES.items() if not case.code]))
def test_a_healthy_run_has_nothing_to_pin(name: str, tmp_path: Path) -> None:
    record = bisected(name, tmp_path)
    assert record.search is not None
    assert (record.search.outcome, record.pins, record.trials) == ("nothing-to-pin", (), ())


# After the residual the stream stays beyond half, and so do the inputs of the next convolutions.
MORE_PINS = {"residual of a resnet of timm": ("layer2.0.conv1", "layer2.0.downsample.0")}


@pytest.mark.slow
@pytest.mark.parametrize("name", OVERFLOWS)
def test_bisect_finds_the_module_with_the_outliers(name: str, tmp_path: Path) -> None:
    overflow = OVERFLOWS[name]
    record = bisect_run(load_config(runs.config_of(planted(overflow), tmp_path), ("train.steps=3",)))
    # A library's line cannot be patched: the whole module is pinned.
    assert_found(record, overflow.module, *MORE_PINS.get(name, ()))
    assert record.pins[0].sites[0].op == overflow.op


OF_EXAMPLES = {
    "linear_attention": ["blocks.0.attn:own", "blocks.1.attn:own"],
    "camera": [":own"],
    "house_prices": [":own"],
    # Finally the logits overflow; the gradient of their projection only needs a lower loss scale.
    "vit": ["block1.0.attn:own"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_EXAMPLES)
def test_bisect_finds_the_exact_set_of_an_example(name: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    config = str(ROOT / "configs" / f"{name}.yaml")
    # One thread: the number of threads changes the order of additions, and with it a long run.
    result = start(tmp_path, "bisect", config, "--record", "record.json", OMP_NUM_THREADS="1")
    assert result.code == 1, result.stderr
    record = read_record(tmp_path / "record.json")
    assert_found(record, *OF_EXAMPLES[name])
    assert all(name in result.stdout for name in OF_EXAMPLES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear_attention", "camera", "vit"])
def test_an_example_is_healthy_for_200_steps_with_its_set_pinned(name: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pins = yaml.safe_dump(OF_EXAMPLES[name], default_flow_style=True).strip()
    record = ampdbg.scan(ROOT / "configs" / f"{name}.yaml", steps=200, overrides=[f"precision.pins={pins}"])
    assert [finding.code for finding in record.findings if finding.severity != "info"] == []
    assert record.verdict == "healthy"
    assert len(record.steps) == 200


@pytest.mark.slow
@pytest.mark.parametrize("name", ["camera_healthy", "house_prices_healthy"])
def test_a_healthy_example_has_nothing_to_pin(name: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    result = start(tmp_path, "bisect", str(ROOT / "configs" / f"{name}.yaml"), OMP_NUM_THREADS="1")
    assert result.code == 0, result.stderr
    assert "Nothing to pin: no step failed" in result.stdout
