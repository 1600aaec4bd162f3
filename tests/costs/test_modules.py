"""The costs of modules belong to the module and the line that compute, and never end a search."""

from operator import itemgetter

import pytest

from ampdbg.config.schema import Config
from ampdbg.costs import step
from ampdbg.costs.step import step_costs
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
    config, failed = failing
    with prepared(config) as run:
        costs = step_costs(run, failed)
    flops: dict[str, int] = {}
    for (module, _), count in filter(itemgetter(1), costs.flops.items()):
        flops[module] = flops.get(module, 0) + count
    product = flops["before"]
    assert product > 0
    products = dict.fromkeys(("before", "", "after", "query.add", "lender.inner"), product)
    assert flops == {**products, "alone": product // 4, "lender": product // 4}
    # The results in half: the casts of input, weight and bias, and the product, at two bytes a number.
    rows = failed.snapshot.batches[0][0].shape[0]
    assert costs.activation_bytes["before"] == 2 * (8 * rows + 8 * 8 + 8 + 8 * rows)
    assert {name for name, size in costs.activation_bytes.items() if size} == {*flops, "query"}
    file = str(config.folder / "net.py")
    lines = WHOLE.splitlines()
    (line,) = (number for number, text in enumerate(lines, 1) if "torch.eye(8, 2" in text)
    assert costs.share_of_flops(["lender", "alone"], {(file, line)}) == costs.of(["lender", "alone"]).flops == 1 / 11
    assert costs.share_of_flops(["before", "lender"], {(file, line)}) == costs.of(["lender"]).flops
    assert costs.share_of_flops([""], {(file, line + 1)}) == 0.0


def test_flops_are_zero_if_the_formulas_refuse_their_operands(
    failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object, **named: object) -> int:
        raise NotImplementedError("nested tensors")

    config, failed = failing
    monkeypatch.setattr(step, "FORMULAS", dict.fromkeys(step.FORMULAS, refuse))
    with prepared(config) as run:
        costs = step_costs(run, failed)
    assert costs.of(["before"]).flops == 0.0
    assert costs.of(["before"]).activation_bytes > 0
