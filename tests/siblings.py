"""Test parameters of which a few represent all: the others are slow."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """All values as parameters; values that are not in ``quick`` are slow."""
    return [pytest.param(value, marks=() if value in quick else pytest.mark.slow) for value in values]
