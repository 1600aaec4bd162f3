"""Parameters of a test of which a few stand for all: the others are slow."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but_for(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """All values as parameters; those that are not among the quick ones are slow."""
    return [pytest.param(value, marks=() if value in quick else pytest.mark.slow) for value in values]
