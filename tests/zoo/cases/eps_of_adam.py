"""Half parameters: the eps of Adam is 0 there, and the first update divides by it."""

from tests.zoo.case import Case, HalfLayers

CASE = Case(
    code="optimizer-underflow",
    verdict="precision",
    phase="optimizer",
    step=0,
    says=("body.weight", "eps=1e-08 is 0 in half"),
    config={"precision": {"level": "O0"}, "optimizer": {"target": "torch.optim:Adam"}},
    twin=("precision.level=O1", "model.args.half=false"),
)
Model = HalfLayers
