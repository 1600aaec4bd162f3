"""Ctrl-C while a suggestion is planned or proven: the search that had ended by then stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampdbg.proof import suggestion
from ampdbg.proof.suggestion import suggest
from ampdbg.record.pins import Form
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


def test_an_interrupt_before_there_is_a_record_goes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suggestion, "bisected", interrupt)
    with pytest.raises(KeyboardInterrupt):
        suggest(spiked(tmp_path))
