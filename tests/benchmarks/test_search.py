"""The search benchmark runs at a small size, finds every planted set and stays within the allowed trials."""

import pytest

from benchmarks import search


def test_every_search_finds_exactly_the_planted_set(capsys: pytest.CaptureFixture[str]) -> None:
    search.main(["--rounds", "3", "--modules", "50", "200", "--culprits", "1", "4"])
    _, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 4 * len(search.STRATEGIES)
    for row in rows:
        *_, trials, allowed, _, exact, _, rounds = row.split()
        assert int(trials) <= int(allowed)
        assert exact == rounds == "3"


def test_transformer_makes_a_tree_of_the_requested_number_of_modules() -> None:
    tree = search.transformer(50)
    assert len(tree.atoms) == 50
    assert tree.compress(tree.under("blocks.1")) == ("blocks.1",)
