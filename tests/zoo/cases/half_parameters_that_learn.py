"""Half parameters, trained with updates that they can hold."""

from tests.zoo.case import Case, HalfLayers

CASE = Case(
    config={
        "precision": {"level": "O0"},
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.05, "momentum": 0.9}},
    }
)
Model = HalfLayers
