"""At O2, whose weights are half, pins are proven as settings of the config: edits of code rely on autocast."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from ampdbg.config.file import load_config
from ampdbg.proof import proof
from ampdbg.proof.experiments import perform
from ampdbg.proof.suggestion import suggest
from ampdbg.report.suggestion import content
from tests.siblings import slow_but_for
from tests.zoo.test_zoo import FILES, config_of


@pytest.mark.parametrize("form", slow_but_for(["yaml"], ["diff", "module", "yaml"]))
def test_pins_of_a_half_model_are_proven_as_settings(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "fresh_processes", lambda folder: contextlib.nullcontext(perform))
    file = next(file for file in FILES if file.stem == "scores_before_scaling")
    config = load_config(config_of(file, tmp_path), ("precision.level=O2",))
    record = suggest(config, form=form).record  # type: ignore[arg-type]
    assert record.verification is not None
    assert record.verification.passed, record.verification
    assert record.handover is not None
    assert (record.handover.names, record.handover.form, record.handover.files) == (("attn:own",), "yaml", ())
    assert (content(record) or b"").decode().splitlines()[-3:] == ["precision:", "  pins:", "    - attn:own"]
