"""Ctrl-C at the end of a search: what is proven stands, and every trial that was made is in the record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ampdbg.config.schema import Config
from ampdbg.pinning import pin_set
from ampdbg.pinning.bisection import bisect_run
from ampdbg.record.pins import Trial
from ampdbg.record.run import Record
from tests.observing import observing
from tests.pinning.spiked import CULPRITS, names, spiked


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def interrupted_at(number: int, config: Config, **kwargs: Any) -> Record:
    """A search with Ctrl-C at the end of the trial of this number, counted from 1."""
    left = iter(range(number - 1, -1, -1))

    def count(trial: Trial) -> None:
        if next(left) == 0:
            raise KeyboardInterrupt

    return bisect_run(config, observer=observing(trial=count), **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("closing", [1, 2, 4])
def test_in_the_closing_trials(closing: int, tmp_path: Path) -> None:
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
def test_while_its_costs_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pin_set, "step_costs", interrupt)
    record = bisect_run(spiked(tmp_path))
    assert record.interrupted
    assert record.search is not None
    assert (record.search.minimal, record.search.further_healthy) == (True, 3)
    assert tuple(pin.name for pin in record.pins) == names(*CULPRITS)
    assert all(pin.sites and pin.without for pin in record.pins)
    assert [pin.cost for pin in record.pins] == [None, None]


@pytest.mark.slow
def test_without_a_set_nothing_is_measured(tmp_path: Path) -> None:
    record = interrupted_at(1, spiked(tmp_path, "loss_with_a_spike"))
    assert record.interrupted
    assert (record.pins, len(record.trials)) == ((), 1)
