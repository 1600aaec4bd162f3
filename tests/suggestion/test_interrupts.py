"""Ctrl-C while a suggestion is planned or proven: the search that had ended by then stands."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ampdbg.proof import suggestion
from ampdbg.proof.suggestion import suggest
from ampdbg.record.pins import Form, Proof
from tests.pinning.spiked import CULPRITS, names, spiked


def interrupt(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("form", "at"), [("diff", "own_lines"), ("module", "prove")])
def test_an_interrupt_keeps_the_search(form: Form, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suggestion, at, interrupt)
    found = suggest(spiked(tmp_path), form=form)
    assert found.record.interrupted
    assert found.record.command == "suggest-fp32"
    assert (found.edits, found.record.verification) == ((), None)
    assert tuple(pin.name for pin in found.record.pins) == names(*CULPRITS)
    assert found.record.search is not None
    assert found.record.search.minimal
    assert found.record.trials
    assert found.record.handover is not None
    assert found.record.handover.files == ()


@pytest.mark.slow
def test_an_interrupt_of_the_proof_keeps_the_patch_to_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic

    def an_hour_later(*args: object) -> Proof:
        monkeypatch.setattr(time, "monotonic", lambda: now() + 3600)
        raise KeyboardInterrupt

    monkeypatch.setattr(suggestion, "prove", an_hour_later)
    found = suggest(spiked(tmp_path))
    assert found.record.interrupted
    assert (found.edits, found.record.verification) == ((), None)
    assert found.record.handover is not None
    (file,) = found.record.handover.files
    assert "enabled=False" in file.diff
    assert found.record.elapsed > 3600


@pytest.mark.slow
def test_a_proof_that_ended_counts_in_the_time_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic

    def an_hour_later(*args: object) -> Proof:
        monkeypatch.setattr(time, "monotonic", lambda: now() + 3600)
        return Proof(True, ())

    monkeypatch.setattr(suggestion, "prove", an_hour_later)
    found = suggest(spiked(tmp_path))
    assert not found.record.interrupted
    assert found.edits
    assert found.record.elapsed > 3600


def test_an_interrupt_before_there_is_a_record_goes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suggestion, "bisected", interrupt)
    with pytest.raises(KeyboardInterrupt):
        suggest(spiked(tmp_path))
