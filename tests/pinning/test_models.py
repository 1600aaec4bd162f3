"""``bisect`` on real models with outliers: the module that upstream keeps in FP32, or that a person would."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampdbg.config.file import load_config
from ampdbg.pinning.bisection import bisect_run
from tests.models.runs import config_of
from tests.models.test_outliers import OVERFLOWS, planted
from tests.siblings import slow_but_for

# Behind the residual the stream itself stays beyond half, and so are the inputs of the next convolutions.
BESIDES = {"residual of a resnet of timm": ("layer2.0.conv1", "layer2.0.downsample.0")}

QUICK = ("gpt2 queries and keys",)


@pytest.mark.parametrize("name", slow_but_for(QUICK, OVERFLOWS))
def test_the_module_with_the_outliers_is_the_set(name: str, tmp_path: Path) -> None:
    overflow = OVERFLOWS[name]
    record = bisect_run(load_config(config_of(planted(overflow), tmp_path), ("train.steps=3",)))
    search = record.search
    assert search is not None
    assert (search.outcome, search.message, search.minimal) == ("found", "", True)
    # A library's line cannot be patched: its module is taken whole.
    assert [pin.name for pin in record.pins] == [overflow.module, *BESIDES.get(name, ())]
    assert record.pins[0].sites[0].op == overflow.op
    assert (search.further, search.further_healthy) == (3, 3)
