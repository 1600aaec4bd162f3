"""The comparison of levels: each level equals a scan of its own, memory matches a hand count, failures are rows."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import ampdbg
from ampdbg.config.file import load_config
from ampdbg.costs import levels
from ampdbg.costs.levels import compare, levels_of
from ampdbg.observer import Observer
from ampdbg.precision.modes import mode_of
from ampdbg.record.file import from_json, to_json, write_record
from ampdbg.record.pins import Pin
from ampdbg.record.run import LevelCost, Record, StepMemory
from ampdbg.replay.run import prepared
from tests.costs.perceptron import CLASSES, CONFIG, HIDDEN, NET, PARAMETERS, activations, written
from tests.observing import observing
from tests.replay import test_tensor_kinds

ALL = ["FP32", "O1", "O2", "O3", "bfloat16"]


def by_name(record: Record) -> Mapping[str, LevelCost]:
    assert record.costs is not None
    return {one.name: one for one in record.costs.levels}


def code_of(one: LevelCost) -> str:
    return one.finding.code if one.finding else ""


SETTINGS = {
    "FP32": ("precision.level=O0",),
    "O1": (),
    "O2": ("precision.level=O2",),
    "O3": ("precision.level=O3",),
    "bfloat16": ("precision.dtype=bfloat16",),
}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The costs of a model that trains at every level except O3, where AdamW's eps is 0."""
    return ampdbg.cost(written(tmp_path_factory.mktemp("healthy")), memory="64 kB")


def test_each_level_has_the_loss_and_verdict_of_a_separate_scan(tmp_path: Path, healthy: Record) -> None:
    seen = by_name(healthy)
    assert list(seen) == ALL
    for name, settings in SETTINGS.items():
        alone = ampdbg.scan(written(tmp_path), overrides=settings)
        assert repr(seen[name].loss) == repr(alone.steps[-1].loss), name
        assert (seen[name].verdict, seen[name].steps) == (alone.verdict, 4), name


GIVEN = {
    "{loss_scale: {init: 1024}}": [1.0, 1024.0, 1024.0, 1024.0, 1.0],
    "{loss_scale: 8}": [1.0, 8.0, 8.0, 8.0, 1.0],
    "{level: O3}": [1.0, 65536.0, 65536.0, 1.0, 1.0],
    "{level: O2, keep_norms_fp32: false, loss_scale: {growth_interval: 9}}": [1.0, 65536.0, 65536.0, 65536.0, 1.0],
}


@pytest.mark.parametrize("precision", GIVEN)
def test_the_loss_scale_of_the_config_applies_at_each_level_that_scales(precision: str, tmp_path: Path) -> None:
    config = load_config(written(tmp_path, config=f"{CONFIG}precision: {precision}\n"))
    modes = [mode_of(at.precision, torch.device("cpu")) for _, at in levels_of(config, ())]
    assert [mode.scaler().get_scale() for mode in modes] == GIVEN[precision]
    assert {mode.precision.keep_norms_fp32 for mode in modes} <= {None, False}


def test_the_memory_of_each_level_matches_a_hand_count(healthy: Record) -> None:
    seen = by_name(healthy)
    full, half = 4 * PARAMETERS, 2 * PARAMETERS
    state = 2 * 2 * 2  # AdamW counts the steps of each of the four parameters in its own float32
    assert {name: asdict(one.memory) for name, one in seen.items() if one.memory} == {
        name: asdict(memory)
        for name, memory in {
            "FP32": StepMemory(full, 0, full, 2 * full + 2 * state, 0, activations(4)),
            "O1": StepMemory(full, 0, full, 2 * full + 2 * state, HIDDEN * CLASSES * 2, activations(2)),
            "O2": StepMemory(half, full, half, 2 * full + 2 * state, 0, activations(2)),
            "O3": StepMemory(half, 0, half, 2 * half + 2 * state, 0, activations(2)),
            "bfloat16": StepMemory(full, 0, full, 2 * full + 2 * state, HIDDEN * CLASSES * 2, activations(2)),
        }.items()
    }
    assert seen["O1"].memory is not None
    assert seen["O1"].memory.total == 4 * full + 2 * state + HIDDEN * CLASSES * 2 + activations(2)


OVERFLOWS = NET.replace("torch.relu(self.first(x))", "torch.relu(self.first(x) * 65504.0 * 100.0 / 6.5504e6)")


@pytest.mark.slow
def test_only_levels_that_train_are_compared_with_fp32_and_its_noise(tmp_path: Path, healthy: Record) -> None:
    seen = by_name(ampdbg.cost(written(tmp_path, OVERFLOWS)))
    assert (seen["O1"].skipped, code_of(seen["O1"]), seen["O1"].trains) == (4, "forward-overflow", False)
    assert [name for name, one in seen.items() if one.apart is not None] == ["bfloat16"]
    # The optimizer's state counts although O1 took no step.
    assert seen["O1"].memory is not None
    assert seen["FP32"].memory is not None
    assert seen["O1"].memory.optimizer == seen["FP32"].memory.optimizer > 0
    floors = {name: one.noise for name, one in by_name(healthy).items() if one.apart is not None}
    assert list(floors) == ["O1", "O2", "bfloat16"]
    assert floors["O1"] == floors["O2"] != floors["bfloat16"]


@pytest.mark.slow
def test_the_fp32_twin_of_a_level_skips_the_steps_that_the_level_skipped(tmp_path: Path) -> None:
    steep = NET.replace(".mean()", ".mean() * 100").replace("range(4)", "range(16)")
    config = CONFIG.replace("steps: 4", "steps: 16") + "optimizer: {target: torch.optim:SGD, args: {lr: 0.002}}\n"
    begun: dict[str, list[str]] = {}
    for scale in ("65536", "128"):
        stages = begun.setdefault(scale, [])
        path = written(tmp_path, steep, f"{config}precision: {{loss_scale: {{init: {scale}}}}}\n")
        record = ampdbg.cost(path, observer=observing(stage=stages.append))
        seen = by_name(record)["O1"]
        assert (seen.trains, bool(seen.skipped)) == (True, scale == "65536")
        assert seen.apart is not None
        assert seen.apart < 1e-3, scale
        assert record.costs is not None
        assert any("skipped" in note for note in record.costs.notes) == bool(seen.skipped)
    twins = {scale: [stage for stage in stages if "skipped" in stage] for scale, stages in begun.items()}
    # O2 skipped the same steps, and is compared with the same twin.
    assert twins == {"65536": ["FP32 without the steps that O1 skipped"], "128": []}


@pytest.mark.slow
def test_pins_of_the_config_and_of_the_record_have_a_separate_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, OVERFLOWS, CONFIG + "precision: {pins: [second]}\n")
    own = ampdbg.scan("c.yaml", steps=1)
    write_record(replace(own, pins=(Pin("", own=True),)), "r.json")
    seen = by_name(ampdbg.cost("r.json"))
    pinned = seen["O1 with pins"]
    assert (list(seen), seen["O1"].pins, seen["O1"].trains) == ([*ALL[:2], "O1 with pins", *ALL[2:]], (), False)
    assert (pinned.pins, pinned.trains, pinned.steps) == (("second", ":own"), True, 1)


HALF_BY_HAND = NET.replace("self.second(torch.relu(self.first(x)))", "self.second(torch.relu(self.first(x)).float())")
BANNED = NET.replace(
    "(model(batch[0]).float() ** 2).mean()",
    "nn.functional.binary_cross_entropy(model(batch[0]).sigmoid(), torch.ones(8, 4))",
)


@pytest.mark.slow
def test_a_level_that_cannot_run_is_a_row_with_its_error(tmp_path: Path) -> None:
    seen = by_name(ampdbg.cost(written(tmp_path, HALF_BY_HAND)))
    assert [name for name, one in seen.items() if one.error] == ["O2", "O3"]
    assert "at this level the weights are half" in seen["O2"].error
    assert "\n" not in seen["O2"].error
    assert seen["O2"].memory is None
    assert not seen["O2"].trains
    banned = by_name(ampdbg.cost(written(tmp_path, BANNED)))
    assert (code_of(banned["O1"]), banned["O1"].memory) == ("misuse-bce", None)
    assert "unsafe to autocast" in banned["O1"].error
    assert banned["FP32"].trains


def test_an_interrupt_keeps_the_finished_levels(tmp_path: Path) -> None:
    def level(name: str) -> None:
        if name == "O2":
            raise KeyboardInterrupt

    record = ampdbg.cost(written(tmp_path), steps=1, observer=observing(level=level))
    assert record.interrupted
    assert list(by_name(record)) == ["FP32", "O1"]
    with pytest.raises(KeyboardInterrupt):
        ampdbg.cost(written(tmp_path), observer=observing(level=lambda name: level("O2")))


def test_the_batch_multiple_of_each_level_is_the_largest_that_fits(healthy: Record) -> None:
    for name, one in by_name(healthy).items():
        assert one.memory is not None
        assert one.fit is not None
        room = 64_000 - one.memory.total + one.memory.activations
        assert one.fit.times * one.memory.activations <= room < 2 * one.fit.times * one.memory.activations, name


def test_a_cost_record_round_trips_and_names_its_command_and_config(healthy: Record) -> None:
    assert repr(from_json(to_json(healthy))) == repr(healthy)
    assert (healthy.command, healthy.verdict, healthy.environment.emulated) == ("cost", "inconclusive", True)
    assert (healthy.config["precision"]["level"], healthy.planned_steps) == ("O1", 4)
    assert (healthy.steps, healthy.findings, healthy.updates) == ((), (), None)
    assert healthy.costs is not None
    assert (healthy.costs.batch, healthy.costs.budget) == (8, 64_000)


NORM = NET.replace("torch.relu(self.first(x))", "self.norm(self.first(x) * 2000.0)").replace(
    "        self.first,", "        self.norm = nn.BatchNorm1d(32)\n        self.first,"
)
"""The norm's input has a variance of about a million: a running variance in half precision is infinite."""


@pytest.mark.parametrize(
    ("level", "keeps", "codes"),
    [
        ("O2", None, []),
        pytest.param("O2", False, ["buffer-poisoned"], marks=pytest.mark.slow),
        ("O3", None, ["buffer-poisoned", "frozen-weights"]),  # its gains of 1 do not move in half either
        pytest.param("O3", True, [], marks=pytest.mark.slow),
    ],
)
def test_a_batch_norm_with_half_weights_overflows_its_running_variance(
    level: str, keeps: bool | None, codes: list[str], tmp_path: Path
) -> None:
    key = "" if keeps is None else f", keep_norms_fp32: {str(keeps).lower()}"
    optimizer = "optimizer: {target: torch.optim:SGD, args: {lr: 1.0e-3}}\n"
    path = written(tmp_path, NORM, f"{CONFIG}{optimizer}precision: {{level: {level}{key}}}\n")
    record = ampdbg.scan(path)
    assert ([finding.code for finding in record.findings], record.verdict == "healthy") == (codes, not codes)


ONE_SHOT = NET.replace("def batches()", "def made()") + "\n\nbatches = iter(made()[:2])\n"
FIXED = NET.replace("x):\n", "x):\n        assert len(x) == 8, 'made for 8'\n")


@pytest.mark.slow
def test_costs_state_why_a_level_was_not_measured_or_a_batch_not_doubled(tmp_path: Path) -> None:
    record = ampdbg.cost(written(tmp_path, ONE_SHOT), steps=2)
    assert record.costs is not None
    assert [(one.trains, one.memory) for one in record.costs.levels[:2]] == [(True, None)] * 2
    assert record.costs.notes[0].startswith("FP32 could not be measured: ")
    fixed = by_name(ampdbg.cost(written(tmp_path, FIXED), steps=1, memory="64 kB"))["O1"].fit
    assert fixed is not None
    assert fixed.times == 1
    assert "made for 8" in fixed.why


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("place", "kind"), [(place, kind) for place, kinds in test_tensor_kinds.CASES.items() for kind in kinds]
)
def test_every_kind_of_tensor_passes_the_comparison_of_levels(place: str, kind: str, tmp_path: Path) -> None:
    config = test_tensor_kinds.config(tmp_path, [kind], test_tensor_kinds.HEALTHY, place)
    costs = compare(config, (), 10**6, Observer()).costs
    assert costs is not None
    assert [(one.name, one.trains) for one in costs.levels[:2]] == [("FP32", True), ("O1", True)]
    whys = [one.error for one in costs.levels if one.error]
    assert all("torch cannot make a buffer of the model itself" in why for why in whys)
    assert {one.level for one in costs.levels if one.error} <= {"O2", "O3"}


def test_the_time_of_a_step_is_the_median_after_the_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 9.0] * 3 + [0.0, 1.0] * 4 + [0.0, 2.0] * 6)
    seen = list[str]()

    def noting(name: str) -> Callable[..., int]:
        def call(device: torch.device) -> int:
            seen.append(name)
            return 77

        return call

    with prepared(load_config(written(tmp_path), ("precision.level=O0",))) as run, monkeypatch.context() as patched:
        for name in ("synchronize", "reset_peak_memory_stats", "max_memory_allocated"):
            patched.setattr(torch.cuda, name, noting(name))
        patched.setattr("time.perf_counter", lambda: next(ticks))
        assert levels._timed(run) == (2.0, 77)
    assert seen.index("reset_peak_memory_stats") == 2 * levels.WARM_UP
    assert seen[-1] == "max_memory_allocated"


@pytest.mark.gpu
def test_time_and_peak_memory_are_measured_on_a_gpu(tmp_path: Path) -> None:
    seen = by_name(ampdbg.cost(written(tmp_path), device="cuda"))
    for one in seen.values():
        assert one.memory is not None
        assert one.seconds is not None
        assert one.peak is not None
        assert one.seconds > 0
        assert one.peak >= one.memory.parameters + one.memory.optimizer
