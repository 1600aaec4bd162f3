"""Ctrl-C while a suggestion is planned or proven: the finished search is kept."""

import time
from pathlib import Path

import pytest

from ampdbg.proof import suggestion
from ampdbg.proof.suggestion import suggest
from ampdbg.record.pins import Form, Proof
from tests.pinning.spiked import CULPRITS, names, spiked


def interrupt(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("form", "at"), [("diff", "own_lines"), pytest.param("module", "prove", marks=pytest.mark.slow)]
)
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
@pytest.mark.parametrize("is_interrupted", [True, False])
def test_the_time_of_a_proof_counts_and_an_unproven_patch_stays_in_the_record(
    is_interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic

    def an_hour_later(*args: object) -> Proof:
        monkeypatch.setattr(time, "monotonic", lambda: now() + 3600)
        if is_interrupted:
            raise KeyboardInterrupt
        return Proof(True, ())

    monkeypatch.setattr(suggestion, "prove", an_hour_later)
    found = suggest(spiked(tmp_path))
    assert found.record.interrupted is is_interrupted
    assert found.record.elapsed > 3600
    assert bool(found.edits) is not is_interrupted
    assert (found.record.verification is None) is is_interrupted
    assert found.record.handover is not None
    (file,) = found.record.handover.files
    assert "enabled=False" in file.diff


def test_an_interrupt_before_there_is_a_record_propagates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suggestion, "bisected", interrupt)
    with pytest.raises(KeyboardInterrupt):
        suggest(spiked(tmp_path))
