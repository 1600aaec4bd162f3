"""Conversion of version 2 records to the current form. Damaged parts stay as they are, so that the reader names
them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

DAMAGED = AttributeError, KeyError, TypeError, ValueError


def upgraded(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the plain data of a version 2 record in the current form."""
    fields = dict(record)
    with contextlib.suppress(*DAMAGED):
        fields["investigations"] = [*map(upgraded_investigation, record.get("investigations", ()))]
    with contextlib.suppress(*DAMAGED):
        search = record["search"]
        fields["search"] = {**search, "outcome": OUTCOMES.get(search["outcome"], search["outcome"])}
    return fields


def upgraded_investigation(made: Any) -> Any:
    """Return a version 2 investigation in the current form. Version 2 has all replays in one list, in the order of
    roles."""
    with contextlib.suppress(*DAMAGED):
        low, *others = made["replays"]
        fp32, *others = others or [None]
        floor = next((one for one in others if one.get("rounded")), None)
        at_lower = [one for one in others if one is not floor]
        wide = at_lower.pop() if at_lower and made["why"] != "end" else None
        roles = {"low": low, "fp32": fp32, "wide": wide, "at_lower": at_lower, "floor": floor}
        is_traced = fp32 is None and made.get("reproduced", 1) > 0
        reach = "none" if is_traced else "whole" if made.get("has_loss", True) else "modules"
        return {**made, **roles, "reach": reach}
    return made


OUTCOMES = {"spoilt-input": "not-reproduced"}
"""Current names of version 2 outcomes. A step with ``spoilt-input`` may have computed its own inputs: replays showed
nothing."""
