"""A step that fails only sometimes is run as often in the proof as it was in the search."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampdbg.pinning import bisection
from ampdbg.proof import suggestion
from ampdbg.proof.jobs import Job
from ampdbg.record.pins import Proof
from tests.proof.overflowing import written


def test_the_proof_repeats_what_the_search_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []

    def prove(job: Job, *args: object) -> Proof:
        jobs.append(job)
        return Proof(True)

    monkeypatch.setattr(suggestion, "prove", prove)
    monkeypatch.setattr(bisection, "_repeats", lambda rate: 2)
    found = suggestion.suggest(written(tmp_path))
    assert found.record.search is not None
    assert (found.record.search.repeats, jobs[0].repeats) == (2, 2)
