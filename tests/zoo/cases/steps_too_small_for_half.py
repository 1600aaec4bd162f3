"""Half parameters: every update is smaller than half a unit in the last place of its weight."""

from tests.zoo.case import Case, HalfLayers

CASE = Case(
    code="frozen-weights",
    verdict="precision",
    phase="optimizer",
    says=("hardly moved in 6 sampled steps", "the movement of float32 weights"),
    config={"precision": {"level": "O0"}, "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 1e-5}}},
    twin=("precision.level=O1", "model.args.half=false"),
)
Model = HalfLayers
