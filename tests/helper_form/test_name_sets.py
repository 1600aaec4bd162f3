"""How a set of names is written down, and that what is written names the set and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampdbg.patch.by_name.name_sets import FEW, NameSet, in_words, name_set

T5 = tuple(
    f"{side}.block.{n}.layer.{at}.DenseReluDense.{part}"
    for side, at in (("encoder", 1), ("decoder", 2))
    for n in range(6)
    for part in ("wi", "wo")
)

WRITTEN = {
    "few are listed": (T5[1:8:2], T5, ("", "")),
    "an ending that all others lack": (T5[1::2], T5, ("", ".DenseReluDense.wo")),
    "a beginning and an ending": (T5[1:12:2], T5, ("encoder.block.", ".DenseReluDense.wo")),
    "all but one": (T5[1:22:2], T5, ("", "")),
    "nothing in common": (("a.b", "a.c", "a.d", "a.e", "a.f"), ("a.b", "a.c", "a.d", "a.e", "a.f", "a.g"), ("", "")),
    "a number at the end": (tuple(f"layers.{n}" for n in range(6)), ("layers", "layers.7"), ("", "")),
    "modules that are not known": (T5[1::2], (), ("", "")),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_set_is_written_as_a_maintainer_would_merge_it(name: str) -> None:
    names, every, (start, end) = WRITTEN[name]
    assert name_set(names, every) == NameSet(tuple(names), start, end)


def test_a_name_that_is_given_twice_is_written_once() -> None:
    assert name_set(["a", "b", "a"]).names == ("a", "b")


def test_a_bare_number_is_told_as_a_module() -> None:
    names = ("2", "1.0", "2:own", "blocks.2", "", ":own")
    assert [in_words(name) for name in names] == [
        "module 2",
        "module 1.0",
        "module 2 (its own lines)",
        "blocks.2",
        "the model",
        "the model (its own lines)",
    ]


# Keys of an nn.ModuleDict may hold anything but dots.
parts = st.sampled_from(["a", "attn", "0", "1", "a[0]", "a*", 'a"'])
paths = st.lists(parts, min_size=1, max_size=4).map(".".join)


@given(st.sets(paths, min_size=1), st.data())
def test_a_pattern_names_the_set_and_nothing_else(every: set[str], data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(every)), min_size=1, unique=True))
    found = name_set(names, every)
    assert set(found.names) == set(names)
    if found.is_pattern:
        assert len(names) > FEW
        assert {name for name in every if name.startswith(found.start) and name.endswith(found.end)} == set(names)
