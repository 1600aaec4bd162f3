"""The costs of modules are known if torch's counter can run, and never end a search."""

import pytest

from ampdbg.config.schema import Config
from ampdbg.costs.step import FlopCount, step_costs
from ampdbg.replay.run import prepared
from ampdbg.replay.snapshot import FailingStep
from tests.proof.overflowing import NET, failing_steps, written

PARTS = """class Query(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.add = nn.Parameter(torch.zeros(1, 8)), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.add(self.query.expand(len(x), -1))


class Lender(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return (x @ torch.eye(8, 2, device=x.device)).repeat(1, 4)


class Net"""
WHOLE = (
    NET.replace("class Net", PARTS)
    .replace(
        "        self.before,",
        "        self.query, self.alone, self.lender = Query(), Lender(), Lender()\n        self.before,",
    )
    .replace("self.after(x)", "self.lender(self.lender.inner(self.alone(self.query(self.after(x)))))")
)
"""A view of a parameter enters a module, and another module calls a submodule that its parent never calls."""

Failing = tuple[Config, FailingStep]


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Failing:
    config = written(tmp_path_factory.mktemp("costs"), {"net.py": WHOLE})
    [step] = failing_steps(config)
    return config, step


def test_costs_belong_to_the_module_that_computes_whichever_module_calls_it(failing: Failing) -> None:
    """The costs of a submodule that another module calls are not deducted from its parent, which never had them."""
    config, step = failing
    with prepared(config) as run:
        costs = step_costs(run, step)
    product = costs.flops["before"]
    assert product > 0
    products = dict.fromkeys(("before", "", "after", "query.add", "lender.inner"), product)
    assert costs.flops == {**products, "alone": product // 4, "lender": product // 4}
    # The results in half: the casts of input, weight and bias, and the product, at two bytes a number.
    rows = step.snapshot.batches[0][0].shape[0]
    assert costs.activation_bytes["before"] == 2 * (8 * rows + 8 * 8 + 8 + 8 * rows)
    assert costs.activation_bytes.keys() == {*costs.flops, "query"}


def test_flops_are_zero_if_the_flop_counter_cannot_run(failing: Failing, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(counter: object) -> None:
        raise AssertionError("Expected gradient function to be set")

    config, step = failing
    monkeypatch.setattr(FlopCount, "__enter__", refuse)
    with prepared(config) as run:
        costs = step_costs(run, step)
    assert costs.of(["before"]).flops == 0.0
    assert costs.activation_bytes
