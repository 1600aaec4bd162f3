"""A learning rate that diverges in FP32 too; FP16 only overflows first."""

from tests.zoo.case import Case, TwoLayers

CASE = Case(
    code="divergence",
    verdict="other",
    steps=30,
    config={"optimizer": {"target": "torch.optim:SGD", "args": {"lr": 3.0}}},
    twin=("optimizer.args.lr=0.05",),
)
Model = TwoLayers
