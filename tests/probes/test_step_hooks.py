"""Hooks around the steps of all optimizers, while those step."""

from typing import Any

import torch
from torch.optim import optimizer as torchs

from ampdbg.probes.step_hooks import hooked_steps


def optimizer_with_a_gradient() -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return torch.optim.SGD([weight], lr=0.1)


def test_they_come_and_go_while_an_optimizer_steps() -> None:
    seen: list[str] = []

    def comes_and_goes(*call: Any) -> None:
        theirs.remove()
        with hooked_steps(lambda *call: seen.append("before"), lambda *call: seen.append("behind")):
            optimizer_with_a_gradient().step()

    theirs = torchs.register_optimizer_step_post_hook(comes_and_goes)
    optimizer_with_a_gradient().step()
    assert seen == ["before", "behind"]
    with hooked_steps(lambda *call: seen.append("outer")):
        theirs = torchs.register_optimizer_step_pre_hook(comes_and_goes)
        optimizer_with_a_gradient().step()
    assert seen[2:] == ["outer", "before", "behind", "outer"]


def test_a_hook_that_others_add_meanwhile_stays_until_they_remove_it() -> None:
    before = torchs._global_optimizer_pre_hooks
    own: list[str] = []
    with hooked_steps(lambda *call: own.append("ours")):
        handle = torchs.register_optimizer_step_pre_hook(lambda *call: own.append("theirs"))
        optimizer_with_a_gradient().step()
    assert own == ["theirs", "ours"]
    assert torchs._global_optimizer_pre_hooks is before
    optimizer_with_a_gradient().step()
    assert own == ["theirs", "ours", "theirs"]
    handle.remove()
    optimizer_with_a_gradient().step()
    assert own == ["theirs", "ours", "theirs"]
    assert not before
