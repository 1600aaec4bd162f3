"""A search that was cut off goes on where it was, and ends as if it had not been; what no longer holds is not used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ampdbg.config import Config
from ampdbg.pinning import pin_search
from ampdbg.pinning.bisection import bisect_run
from ampdbg.pinning.experiment import Case, Experiment
from ampdbg.record.pins import PinSite
from ampdbg.record.run import Record
from ampdbg.search import Seen, atom_tree
from tests.bisection.spiked import CULPRITS, interrupted_at, names, spiked, told, write_culprits
from tests.observing import observing


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Record]:
    """A workload that is not to be changed, with a search of it that nothing interrupted."""
    config = spiked(tmp_path_factory.mktemp("workload"))
    return config, bisect_run(config)


@pytest.mark.parametrize(
    "trials", [1, 3, 6, *(pytest.param(trials, marks=pytest.mark.slow) for trials in (2, 4, 5, 7))]
)
def test_a_resumed_search_says_what_an_uninterrupted_one_does(
    trials: int, workload: tuple[Config, Record], tmp_path: Path
) -> None:
    (config, whole), folder = workload, tmp_path / "trials"
    assert tuple(pin.name for pin in whole.pins) == names(*CULPRITS)
    assert all(pin.sites for pin in whole.pins)
    assert interrupted_at(trials, config, journal_folder=folder).interrupted
    begun: list[tuple[str, ...]] = []
    resumed = bisect_run(config, journal_folder=folder, observer=observing(trial_start=begun.append))
    assert told(resumed) == told(whole)
    proof = 4  # the set once more, and on three further batches: that is not for the journal
    assert len(begun) == max(proof, len(whole.trials) - trials)
    assert list(folder.iterdir()) == []


def test_a_blind_search_too(workload: tuple[Config, Record], tmp_path: Path) -> None:
    (config, _), folder = workload, tmp_path / "trials"
    whole = bisect_run(config, strategy="ddmin")
    interrupted_at(6, config, strategy="ddmin", journal_folder=folder)
    assert told(bisect_run(config, strategy="ddmin", journal_folder=folder)) == told(whole)


def test_what_goes_wrong_in_the_loss_is_not_forgotten(tmp_path: Path) -> None:
    config, folder = spiked(tmp_path, "loss_with_a_spike"), tmp_path / "trials"
    whole = bisect_run(config)
    assert whole.search is not None
    assert whole.search.outcome == "not-in-a-module"
    interrupted_at(len(whole.trials), config, journal_folder=folder)
    assert told(bisect_run(config, journal_folder=folder)) == told(whole)


def test_a_recalled_trial_leaves_what_a_trial_leaves() -> None:
    replays = SimpleNamespace(scale=65536.0)
    experiment = Experiment(
        cast(Any, None), [Case(cast(Any, None), cast(Any, replays))], atom_tree(["", "a", "b"]), is_silent=False
    )
    sites = tuple(PinSite("forward", module, "aten.mm.default", None, 1e5) for module in ("a", "b"))
    experiment.recall(["b"], Seen(healthy=False, sites=sites, scales=(16.0,)))
    experiment.recall([], Seen(healthy=False, why="killed the process"))
    assert (experiment.sites(["a", "b"]), experiment.outside) == (sites[:1], [sites[1]])
    assert replays.scale == 16.0


EDITS: dict[str, Callable[[Path], object]] = {
    "a source in another folder": lambda folder: write_culprits(folder, 2),
    "a file that is no source": lambda folder: (folder / "source" / "gains.txt").write_text("1.0 2.0 1.0 0.01"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_what_was_tried_before_an_edit_does_not_count(edit: str, tmp_path: Path) -> None:
    config, folder = spiked(tmp_path), tmp_path / "trials"
    interrupted_at(2, config, journal_folder=folder)
    EDITS[edit](tmp_path)
    assert told(bisect_run(config, journal_folder=folder)) == told(bisect_run(config))


def test_a_journal_that_the_proof_contradicts_is_discarded(workload: tuple[Config, Record], tmp_path: Path) -> None:
    (config, whole), folder = workload, tmp_path / "trials"
    interrupted_at(2, config, journal_folder=folder)
    [file] = folder.iterdir()
    # As if one of the culprits were none: the set would be too small.
    file.write_text(file.read_text().replace('"healthy": false', '"healthy": true'))
    searched: list[tuple[str, ...]] = []
    resumed = bisect_run(config, journal_folder=folder, observer=observing(search=searched.append))
    assert told(resumed) == told(whole)
    assert len(searched) == 2
    assert list(folder.iterdir()) == []


class FailsNowAndThen(Experiment):
    """Its runs of these numbers are healthy, whatever they are with."""

    healthy: frozenset[int] = frozenset()
    ran = 0

    def run(self, pins: Any) -> Seen:
        self.ran += 1
        return Seen(healthy=True) if self.ran in self.healthy else super().run(pins)


def test_a_step_that_fails_twice_and_then_only_sometimes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pin_search, "Experiment", FailsNowAndThen)
    monkeypatch.setattr(pin_search, "MOST_REPEATS", 3)
    # 1 and 2 are without pins, 3 is with the candidates; 4 and 5 with fewer: no pin seems to be needed.
    monkeypatch.setattr(FailsNowAndThen, "healthy", frozenset({4, 5, 6, 9, 11, 13}))
    searched: list[tuple[str, ...]] = []
    record = bisect_run(
        spiked(tmp_path), observer=observing(search=searched.append), journal_folder=tmp_path / "trials"
    )
    assert len(searched) == 2
    assert record.search is not None
    assert (record.search.outcome, record.search.minimal, record.search.repeats) == ("found", True, 3)
    assert 2 < record.search.failed < record.search.tried == 12
    assert tuple(pin.name for pin in record.pins) == names(*CULPRITS)
    assert all(trial.runs == 3 for trial in record.trials if trial.healthy)
    assert list((tmp_path / "trials").iterdir()) == []
