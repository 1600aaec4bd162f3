"""What a value holds has one digest, in this process and in the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ampdbg.pinning.digests import content_digest
from ampdbg.pinning.journals import loaded_sources


@dataclass
class Sample:
    """A batch of a class of its own."""

    ids: torch.Tensor
    names: list[str] = field(default_factory=list)


WEIGHT = torch.arange(6.0).reshape(2, 3)

DIFFERENT: dict[str, tuple[Any, Any]] = {
    "the order of weights": (WEIGHT, WEIGHT.flip(0)),
    "the shape": (WEIGHT, WEIGHT.reshape(3, 2)),
    "the dtype": (WEIGHT, WEIGHT.to(torch.bfloat16)),
    "the sign of zero": (torch.zeros(2), -torch.zeros(2)),
    "a sparse value": (WEIGHT.to_sparse(), (2 * WEIGHT).to_sparse()),
    "a nested value": (torch.nested.nested_tensor([WEIGHT]), torch.nested.nested_tensor([2 * WEIGHT])),
    "a complex value": (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j])),
    "which of two": ({"x": WEIGHT, "y": 2 * WEIGHT}, {"y": WEIGHT, "x": 2 * WEIGHT}),
    "where a list ends": ([["a"], ["b"]], [["a", "b"], []]),
    "an attribute": (Sample(WEIGHT, ["a"]), Sample(WEIGHT, ["b"])),
    "an array": (np.arange(3), np.arange(3)[::-1]),
    "a number": ((1, 2.0), (1, 2.5)),
    "text": ("1", 1),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_difference_shows(what: str) -> None:
    one, other = DIFFERENT[what]
    assert content_digest(one) != content_digest(other)
    assert content_digest(one) == content_digest(one)


def test_equal_contents_have_one_digest_wherever_they_lie() -> None:
    def made() -> object:
        return [Sample(WEIGHT.clone().t().t(), ["a"]), {"f": SimpleNamespace(at=object())}, {"b", "a"}, print, None]

    assert content_digest(made()) == content_digest(made())
    assert content_digest(WEIGHT.t()) == content_digest(WEIGHT.t().contiguous())
    assert content_digest(torch.nn.Parameter(WEIGHT)) == content_digest(WEIGHT)


def test_a_value_within_itself_ends() -> None:
    value: list[object] = [1]
    value.append(value)
    assert content_digest(value) == content_digest(value)


def test_the_sources_that_are_loaded_are_the_users_own() -> None:
    sources = loaded_sources()
    assert __file__ in sources
    assert not any(name in file for file in sources for name in ("site-packages", "remedy/pins/journals.py"))
