"""Half parameters: every update is smaller than half a unit in the last place of its weight."""

from tests.zoo.case import Case, HalfLayers

CASE = Case(
    code="optimizer-underflow",
    verdict="precision",
    phase="optimizer",
    says=("6 steps lose", "of the updates' energy"),
    config={"precision": {"level": "O0"}, "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 1e-5}}},
    twin=("precision.level=O1", "model.args.half=false"),
)
Model = HalfLayers
