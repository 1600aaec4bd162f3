"""Tied modules are one part of a set."""

import torch

from ampdbg.pinning.pin_set import tied_together


def test_modules_that_share_a_parameter_directly_or_through_a_third_are_one_part() -> None:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in ("a", "b", "c", "d")})
    model["b"].weight, model["b"].bias = model["a"].weight, model["d"].bias
    assert tied_together(["a", "b", "c", "d"], model) == (("a", "b", "d"), ("c",))
    assert tied_together([":own", "a", "c"], model) == ((":own",), ("a",), ("c",))
