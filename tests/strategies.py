"""Hypothesis strategies for records with any numbers, including infinities and NaN, and any text."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import reduce
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from ampdbg.record.findings import Count, Finding
from ampdbg.record.pins import Pin, Search, Trial
from ampdbg.record.run import Costs, GroupOverflow, Record, Replay, Step

# JSON in UTF-8 can hold every character except lone surrogates.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
counts = st.integers(min_value=0, max_value=2**40)
plain_data = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
CODES = st.sampled_from(["scale-collapse", "forward-overflow", "unknown"]) | texts
SPECIAL: dict[type, dict[str, st.SearchStrategy[Any]]] = {
    # Indices into other parts of the record.
    Finding: {"code": CODES, "root": st.none()},
    Pin: {"reason": st.none()},
    GroupOverflow: {"index": st.integers(0, 6)},
    Replay: {"dtype": st.sampled_from(["bfloat16", "float16", "float32"]) | texts, "producers": st.just(())},
}
LEFT_OUT = (
    "handover investigations trends script listings left_out scales_gradients config_folder format version".split()
)
"""Fields of a record that pages assume to be from one real run, and fields that name the format."""


def of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that a field of this type may hold, in small collections."""
    origin, given = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        special = SPECIAL.get(hint, {})  # type: ignore[arg-type]
        hints = get_type_hints(hint, include_extras=True)
        fields = {name: of(of_field) for name, of_field in hints.items() if name not in (*special, *LEFT_OUT)}
        return st.builds(hint, **special, **fields)  # type: ignore[arg-type]
    if origin in (Union, UnionType):
        return reduce(st.SearchStrategy.__or__, map(of, given))
    if origin is tuple and given[-1] is ...:
        return st.lists(of(given[0]), max_size=3).map(tuple)
    if origin is Mapping:
        return st.dictionaries(of(given[0]), of(given[1]), max_size=2)
    return PLAIN[hint] if hint in PLAIN else st.from_type(hint)


PLAIN: dict[Any, st.SearchStrategy[Any]] = {str: texts, Count: counts, Any: plain_data, object: plain_data}

steps: st.SearchStrategy[Step] = of(Step)
pins: st.SearchStrategy[Pin] = of(Pin)
trials: st.SearchStrategy[Trial] = of(Trial)
searches: st.SearchStrategy[Search] = of(Search)
compared: st.SearchStrategy[Costs] = of(Costs)
any_record: st.SearchStrategy[Record] = of(Record)


def records() -> st.SearchStrategy[Record]:
    """Records of every shape, sensible or not."""
    return any_record
