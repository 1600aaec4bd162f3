"""``bisect`` on models with planted culprits: it finds exactly the planted set, within few trials."""

import itertools
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from ampdbg import search
from ampdbg.config.file import load_config
from ampdbg.config.schema import Config
from ampdbg.errors import WorkloadError
from ampdbg.pinning import bisection, pin_set
from ampdbg.pinning.bisection import bisect_run
from ampdbg.pinning.experiment import Experiment
from ampdbg.record.pins import Trial
from ampdbg.record.run import Record
from tests.observing import observing
from tests.pinning.planted import name_of
from tests.pinning.spiked import CULPRITS, assert_found, names, spiked
from tests.siblings import slow_except

PROOF = ("the whole set once more", "further batch")


def bisected(
    folder: Path,
    model: str,
    args: Mapping[str, Any] | None = None,
    *,
    steps: int = 3,
    loss: str = "loss",
    scale: float | dict[str, float] | None = None,
    **kwargs: Any,
) -> Record:
    home = "tests.pinning.planted"
    config = {
        "model": {"target": f"{home}:{model}", "args": dict(args or {})},
        "data": {"target": f"{home}:batches"},
        "loss": {"target": f"{home}:{loss}"},
        "optimizer": {"args": {"lr": 1.0e-4}},
        "precision": {"loss_scale": scale or {"init": 1024.0}},
        "train": {"steps": steps},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return bisect_run(load_config(path), **kwargs)


def searched(record: Record) -> list[Trial]:
    """The trials of the search itself, without those that prove its result."""
    return [trial for trial in record.trials if not trial.stage.startswith(PROOF)]


def culprits_of(modules: int, count: int, seed: int) -> list[int]:
    return sorted(random.Random(seed).sample(range(modules * 6 // 7), count))


SEARCHES = [
    *(("guided", *size) for size in ((50, 1), (50, 3), (50, 8), (500, 1), (500, 4), (500, 8), (2000, 8))),
    *(("ddmin", *size) for size in ((50, 1), (50, 3), (50, 8), (500, 2), (2000, 1))),
]
"""The strategy, the number of modules, and the number of culprits."""


@pytest.mark.parametrize("search", slow_except([("guided", 50, 1)], SEARCHES), ids=str)
def test_bisect_finds_the_planted_set_within_the_bound_on_trials(search: tuple[str, int, int], tmp_path: Path) -> None:
    strategy, modules, count = search
    culprits = culprits_of(modules, count, seed=modules + count)
    record = bisected(tmp_path, "Planted", {"modules": modules, "culprits": culprits}, strategy=strategy)
    assert_found(record, *map(name_of, culprits))
    assert record.search is not None
    # The guided search needs one more trial to prove the whole set.
    most = 2 * count + 2 if strategy == "guided" else 3 * count * math.log2(record.search.modules) + 10
    assert len(searched(record)) <= most


OTHER_KINDS: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "in a checkpointed block": ({"culprits": [7, 20], "checkpointed": True}, 3, "forward-overflow", ""),
    "in the backward pass": ({"culprits": [9], "kind": "backward"}, 12, "gradient-overflow", "gradient of "),
    "of an overflow that erases itself": ({"culprits": [11], "kind": "erased"}, 6, "silent-overflow", ""),
}
"""The planted model, the number of steps, the code of the finding, and the start of the first pin's reason."""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["guided", "ddmin"])
@pytest.mark.parametrize("name", OTHER_KINDS)
def test_bisect_finds_checkpointed_backward_and_silent_culprits(name: str, strategy: str, tmp_path: Path) -> None:
    args, steps, code, why = OTHER_KINDS[name]
    record = bisected(tmp_path, "Planted", {"modules": 30, **args}, steps=steps, strategy=strategy)
    assert record.findings[0].code == code
    assert_found(record, *map(name_of, args["culprits"]))
    assert record.pins[0].without.startswith(why)


@pytest.mark.slow
def test_a_gradient_cast_back_to_half_is_blamed_on_the_layer_of_its_tensor(tmp_path: Path) -> None:
    """A pin on the code that reads the tensor in FP32 does not help."""
    record = bisected(tmp_path, "Steep", {"count": 12, "culprits": [2, 3, 7, 10]}, steps=12)
    assert record.findings[0].code == "gradient-overflow"
    assert_found(record, *(f"layers.{number}.linear" for number in (2, 3, 7, 10)))
    assert record.pins[0].sites[0].module == "layers.2.linear"
    assert len(searched(record)) <= 2 * 4 + 2


@pytest.mark.slow
def test_many_silent_overflows_are_searched_without_a_trial_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "MOST_ATOM_RUNS", 100)  # as if each trial took minutes
    record = bisected(tmp_path, "Saturated", {"count": 40})
    assert record.findings[0].code == "silent-overflow"
    assert record.search is not None
    assert (record.search.outcome, record.search.minimal, len(record.pins)) == ("found", False, 40)
    assert [trial.stage for trial in searched(record)] == ["candidates", "with fewer"]


@pytest.mark.parametrize(
    ("loss", "scale", "names", "set_scale"),
    [
        pytest.param(
            "likelihood", {"init": 4096.0}, ("out",), 4.0, id="where a lower scale does", marks=pytest.mark.slow
        ),
        pytest.param("likelihood", 4096.0, ("hidden", "out"), None, id="a static scale", marks=pytest.mark.slow),
        pytest.param("broad_likelihood", {"init": 4096.0}, (), None, id="small gradients"),
    ],
)
def test_a_layer_is_pinned_only_if_no_usable_loss_scale_helps(
    loss: str, scale: float | dict[str, float], names: tuple[str, ...], set_scale: float | None, tmp_path: Path
) -> None:
    record = bisected(tmp_path, "narrow", steps=16, loss=loss, scale=scale)
    assert record.search is not None
    if not names:
        assert record.search.outcome == "nothing-to-pin"
        return
    assert_found(record, *names)
    assert (record.search.scale, record.search.set_scale) == (4096.0, set_scale)


SHAPES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "a culprit in the third call of a module": ("Shared", {}, ("spike",)),
    # Either factor in FP32 would help, and so does the line of the product, where the overflow is found.
    "two alternative sets, and the line that joins them": ("Alternatives", {}, (":own",)),
    # The spike's half result is small enough for the second culprit: it overflows once the spike is pinned.
    "a culprit that only shows when another is cured": ("roused", {}, ("spike", "meek")),
    "many culprits that no shadow shows": ("SideBySide", {"count": 30}, tuple(f"layers.{at}" for at in range(30))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_bisect_finds_culprits_that_recur_hide_or_replace_each_other(name: str, tmp_path: Path) -> None:
    model, args, pins = SHAPES[name]
    record = bisected(tmp_path, model, args)
    assert_found(record, *pins)
    trials = [(trial.pins, trial.stage) for trial in searched(record)]
    if model == "Shared":
        assert [site.call for site in record.pins[0].sites] == [2]
    if model == "roused":
        assert [tried for tried, _ in trials][:2] == [("spike",), pins]
    if model == "SideBySide":
        assert [stage for _, stage in trials] == ["candidates"] + ["with fewer"] * 30


@pytest.mark.slow
def test_a_step_that_fails_3_times_in_10_needs_11_runs_per_healthy_trial(tmp_path: Path) -> None:
    record = bisected(tmp_path, "Sometimes", steps=12)
    assert_found(record, "layer")
    search = record.search
    assert search is not None
    assert (search.failed, search.tried) == (3, 10)
    # 0.7 ** 11 is less than 2 %.
    assert search.repeats == 11
    assert all(trial.runs == 11 for trial in record.trials if trial.healthy)


@pytest.mark.slow
def test_a_step_that_turns_out_flaky_is_searched_again_with_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Runs 1 and 2 have no pins, 3 has the candidates, 4 and 5 have fewer: no pin seems to be needed.
    healthy, ran, run = {4, 5, 6, 9, 11, 13}, itertools.count(1), Experiment.run
    monkeypatch.setattr(
        Experiment,
        "run",
        lambda *given, **brief: Trial((), healthy=True) if next(ran) in healthy else run(*given, **brief),
    )
    monkeypatch.setattr(bisection, "MOST_REPEATS", 3)
    searched: list[tuple[str, ...]] = []
    record = bisect_run(spiked(tmp_path), observer=observing(search=searched.append))
    assert len(searched) == 2
    assert record.search is not None
    assert (record.search.outcome, record.search.minimal, record.search.repeats) == ("found", True, 3)
    assert 2 < record.search.failed < record.search.tried == 12
    assert tuple(pin.name for pin in record.pins) == names(*CULPRITS)
    assert all(trial.runs == 3 for trial in record.trials if trial.healthy)


@pytest.mark.slow
def test_the_search_counts_pinned_and_all_instances_of_a_class(tmp_path: Path) -> None:
    record = bisected(tmp_path, "Planted", {"modules": 14, "culprits": list(range(12))})
    assert record.search is not None
    assert record.search.classes["Spike"] == (12, 12)


@pytest.mark.slow
def test_the_best_set_is_kept_if_trials_run_out(tmp_path: Path) -> None:
    args = {"modules": 50, "culprits": [7, 20]}
    record = bisected(tmp_path, "Planted", args, max_trials=9, strategy="ddmin")
    assert record.search is not None
    assert (record.search.outcome, record.search.minimal) == ("out-of-trials", False)
    assert len(record.trials) == 9
    assert record.pins
    assert not record.interrupted


@pytest.mark.slow
def test_an_interrupt_keeps_the_best_set_so_far(tmp_path: Path) -> None:
    def interrupt(trial: Trial) -> None:
        if trial.healthy:
            raise KeyboardInterrupt

    record = bisected(tmp_path, "Planted", {"modules": 50, "culprits": [7, 20]}, observer=observing(trial=interrupt))
    assert record.interrupted
    assert [pin.name for pin in record.pins] == [name_of(7), name_of(20)]
    assert record.search is not None
    assert not record.search.minimal


@pytest.mark.slow
def test_two_bisections_have_the_same_losses_and_trials(tmp_path: Path) -> None:
    args = {"modules": 30, "culprits": [7]}
    first, second = (bisected(tmp_path, "Planted", args) for _ in range(2))
    # As text: a NaN is not equal to itself.
    assert [repr(step.loss) for step in first.steps] == [repr(step.loss) for step in second.steps]
    assert [(t.pins, t.healthy, t.why) for t in first.trials] == [(t.pins, t.healthy, t.why) for t in second.trials]
    assert [pin.name for pin in first.pins] == [pin.name for pin in second.pins] == [name_of(7)]


@pytest.mark.slow
@pytest.mark.parametrize("excess", [pytest.param(0.4, id="FP16 chooses otherwise"), pytest.param(2.0, id="healthy")])
def test_a_set_that_is_healthy_in_the_search_is_healthy_again_without_repeats(excess: float, tmp_path: Path) -> None:
    record = bisected(tmp_path, "chooser", {"excess": excess})
    assert_found(record, "spike")
    assert record.search is not None
    assert (record.search.repeats, record.search.set_scale) == (1, 64.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x:own", ":own"])
def test_a_module_name_that_ends_like_a_pin_of_own_lines_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(WorkloadError, match=f"a module is named '{name}'; allowed: a name that does not end in"):
        bisected(tmp_path, "named", {"name": name})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["*", "own", "x:y", "[0]"])
def test_a_module_whose_name_looks_like_a_pattern_is_pinned_literally(tmp_path: Path, name: str) -> None:
    assert [pin.name for pin in bisected(tmp_path, "named", {"name": name}).pins] == [name]


def interrupted(*args: object) -> None:
    raise KeyboardInterrupt


def interrupted_at(number: int, config: Config, **kwargs: Any) -> Record:
    """A search that Ctrl-C interrupts at the end of this trial, counted from 1."""
    left = iter(range(number - 1, -1, -1))

    def count(trial: Trial) -> None:
        if next(left) == 0:
            raise KeyboardInterrupt

    return bisect_run(config, observer=observing(trial=count), **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("closing", [1, 2, 4])
def test_an_interrupt_in_the_closing_trials_keeps_the_proven_set_and_every_trial(closing: int, tmp_path: Path) -> None:
    config = spiked(tmp_path)
    whole = bisect_run(config)
    trials = len(whole.trials) - 4 + closing
    record = interrupted_at(trials, config)
    assert record.interrupted
    assert [(trial.pins, trial.stage) for trial in record.trials] == [
        (trial.pins, trial.stage) for trial in whole.trials[:trials]
    ]
    assert record.search is not None
    assert (record.search.outcome, record.search.minimal, record.search.further) == ("found", True, closing - 1)
    assert record.pins == whole.pins


@pytest.mark.slow
def test_an_interrupt_while_costs_are_counted_keeps_the_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pin_set, "step_costs", interrupted)
    record = bisect_run(spiked(tmp_path))
    assert record.interrupted
    assert record.search is not None
    assert (record.search.minimal, record.search.further_healthy) == (True, 3)
    assert tuple(pin.name for pin in record.pins) == names(*CULPRITS)
    assert all(pin.sites and pin.without for pin in record.pins)
    assert [pin.cost for pin in record.pins] == [None, None]


@pytest.mark.slow
def test_an_interrupt_in_the_first_trial_leaves_one_trial_and_no_pins(tmp_path: Path) -> None:
    record = interrupted_at(1, spiked(tmp_path, "loss_with_a_spike"))
    assert record.interrupted
    assert (record.pins, len(record.trials)) == ((), 1)
