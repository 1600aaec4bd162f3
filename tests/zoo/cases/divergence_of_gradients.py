"""A linear model that diverges: the gradients overflow while the loss is finite."""

from tests.zoo.case import Case, OneLayer

CASE = Case(
    code="divergence",
    verdict="other",
    steps=40,
    config={"optimizer": {"target": "torch.optim:SGD", "args": {"lr": 1.5}}},
    twin=("optimizer.args.lr=0.05",),
)
Model = OneLayer
