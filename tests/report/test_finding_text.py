"""Which finding a follow-up is shown below."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampdbg.record.findings import Finding
from ampdbg.report.finding_text import root_of


def chained(roots: list[int | None]) -> list[Finding]:
    return [Finding("unknown", "error", 0, "forward", "message", root=root) for root in roots]


@pytest.mark.parametrize(
    ("roots", "ends"),
    [
        ([None, 0, 0], [0, 0, 0]),
        ([None, 0, 1], [0, 0, 0]),
        ([7, None], [0, 1]),
        ([-1], [0]),
        ([0], [0]),
        ([1, 0], [0, 0]),
        ([1, 2, 1], [0, 1, 1]),
    ],
)
def test_a_chain_ends_at_the_finding_that_explains_it(roots: list[int | None], ends: list[int]) -> None:
    assert [root_of(chained(roots), index) for index in range(len(roots))] == ends


@given(st.lists(st.none() | st.integers(-1, 8), min_size=1, max_size=8))
def test_no_finding_is_hidden_however_damaged_the_chains(roots: list[int | None]) -> None:
    findings = chained(roots)
    ends = [root_of(findings, index) for index in range(len(findings))]
    assert all(ends[end] == end for end in ends)
