"""The benchmark of searches runs, at a small size, finds every planted set and keeps to the trials allowed."""

import pytest

from benchmarks import search


def test_every_row_finds_exactly_what_was_planted(capsys: pytest.CaptureFixture[str]) -> None:
    search.main(["--rounds", "3", "--modules", "50", "200", "--culprits", "1", "4"])
    _, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 4 * len(search.STRATEGIES)
    for row in rows:
        *_, trials, allowed, _, exact, _, rounds = row.split()
        assert int(trials) <= int(allowed)
        assert exact == rounds == "3"


def test_a_transformer_has_as_many_modules_as_asked_for() -> None:
    tree = search.transformer(50)
    assert len(tree.atoms) == 50
    assert tree.compress(tree.under("blocks.1")) == ("blocks.1",)
