"""What a set costs is told where torch's counter can tell it, and never ends a search; tied modules are one part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ampdbg.costs.step import FlopCount
from ampdbg.pinning.pin_set import step_costs, tied_together
from ampdbg.replay.run import prepared
from tests.proof.overflowing import NET, failing_steps, written

QUERY = NET.replace("nn.Linear(8, 8), nn.Linear(8, 8)", "nn.Linear(8, 8), Out()").replace(
    "class Net",
    """class Out(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.add = nn.Parameter(torch.zeros(1, 8)), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.add(self.query.expand(len(x), -1))


class Net""",
)


def test_a_view_of_a_parameter_may_go_into_a_module(tmp_path: Path) -> None:
    config = written(tmp_path, {"net.py": QUERY})
    failing = failing_steps(config)
    with prepared(config) as run:
        costs = step_costs(run, failing[0])
    assert costs.flops["before"] == costs.flops["after.add"] > 0


BORROWED = NET.replace("nn.Linear(8, 8), nn.Linear(8, 8)", "nn.Linear(8, 8), Holder()").replace(
    "class Net",
    """class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return (x @ torch.eye(8, 2, device=x.device)).repeat(1, 4)


class Net""",
)


@pytest.mark.parametrize("last", ["self.after(x)", "self.after(self.after.inner(x))"])
def test_flops_are_those_of_who_computes_whoever_calls_it(last: str, tmp_path: Path) -> None:
    """What a module that another than its parent calls computes, was none of its parent's to begin with."""
    config = written(tmp_path, {"net.py": BORROWED.replace("self.after(x)", last)})
    failing = failing_steps(config)
    with prepared(config) as run:
        costs = step_costs(run, failing[0])
    product = costs.flops["before"]
    inner = {} if last == "self.after(x)" else {"after.inner": product}
    assert costs.flops == {"before": product, "": product, "after": product // 4, **inner}


def test_bytes_are_those_that_a_forward_pass_gives_in_half(tmp_path: Path) -> None:
    config = written(tmp_path)
    failing = failing_steps(config)
    with prepared(config) as run:
        rows = failing[0].snapshot.batches[0][0].shape[0]
        costs = step_costs(run, failing[0])
    assert costs.activation_bytes.keys() == {"before", "", "after"}
    # The casts of its input, weight and bias, and the product, two bytes each.
    assert costs.activation_bytes["before"] == 2 * (8 * rows + 8 * 8 + 8 + 8 * rows)


def test_a_model_that_the_counter_cannot_run_has_no_flops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(counter: object) -> None:
        raise AssertionError("Expected gradient function to be set")

    config = written(tmp_path)
    failing = failing_steps(config)
    monkeypatch.setattr(FlopCount, "__enter__", refuse)
    with prepared(config) as run:
        costs = step_costs(run, failing[0])
    assert costs.of(["before"]).flops == 0.0
    assert costs.activation_bytes


def test_modules_that_share_a_parameter_are_one_part_also_by_way_of_a_third() -> None:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in ("a", "b", "c", "d")})
    model["b"].weight, model["b"].bias = model["a"].weight, model["d"].bias
    assert tied_together(["a", "b", "c", "d"], model) == (("a", "b", "d"), ("c",))
    assert tied_together([":own", "a", "c"], model) == ((":own",), ("a",), ("c",))
