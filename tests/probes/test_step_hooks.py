"""Tests of hooks around the steps of all optimizers, also while an optimizer steps."""

import contextlib
import gc
import types
import weakref
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torchs

from ampdbg.probes.step_hooks import hook_own_step, hooked_steps, is_torchs, name_of, steps_around


def optimizer_with_a_gradient() -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return torch.optim.SGD([weight], lr=0.1)


def test_hooks_can_be_added_and_removed_while_an_optimizer_steps() -> None:
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


def writes_itself(self: torch.optim.Optimizer, closure: Any = None) -> str:
    self.param_groups[0]["params"][0].data.sub_(1.0)
    return "stepped"


def by_hand(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step = types.MethodType(writes_itself, optimizer)  # type: ignore[method-assign]


def scheduled(optimizer: torch.optim.Optimizer) -> None:
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


def by_hand_and_scheduled(optimizer: torch.optim.Optimizer) -> None:
    by_hand(optimizer)
    scheduled(optimizer)


def around_its_class(optimizer: torch.optim.Optimizer) -> None:
    inner = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    optimizer.step = step  # type: ignore[method-assign]


SETS: list[Callable[[torch.optim.Optimizer], None]] = [by_hand, scheduled, by_hand_and_scheduled, around_its_class]
BY_TORCH = (scheduled,)


def noted(seen: list[tuple[str, int]], when: str, optimizer: Any, *given: Any) -> None:
    seen.append((when, list(steps_around()).count(optimizer)))


@pytest.mark.parametrize("sets", SETS)
@pytest.mark.parametrize("is_set_before", [True, False])
def test_a_step_set_on_an_optimizer_is_called_between_hooks_and_restored(
    sets: Callable[[torch.optim.Optimizer], None], is_set_before: bool
) -> None:
    optimizer, seen = optimizer_with_a_gradient(), list[tuple[str, int]]()
    if is_set_before:
        sets(optimizer)
    own = vars(optimizer).get("step")
    hooks = hooked_steps(partial(noted, seen, "before"), partial(noted, seen, "behind"))
    with contextlib.suppress(ZeroDivisionError), hooks:
        if not is_set_before:
            sets(optimizer)
        hook_own_step(optimizer)
        optimizer.step()
        assert [one for one in seen if not one[1]] == [("before", 0), ("behind", 0)]
        assert is_torchs(optimizer.step) == (sets in BY_TORCH)
        raise ZeroDivisionError
    count = len(seen)
    optimizer.step()
    assert len(seen) == count
    assert "__setattr__" not in vars(torch.optim.Optimizer)
    if is_set_before:
        assert vars(optimizer)["step"] is own


def test_a_step_that_calls_the_step_of_its_class_is_hooked_around_it() -> None:
    optimizer, seen = optimizer_with_a_gradient(), list[tuple[str, int]]()
    with hooked_steps(partial(noted, seen, "before"), partial(noted, seen, "behind")):
        around_its_class(optimizer)
        optimizer.step()
        optimizer.step = optimizer.step  # type: ignore[method-assign]  # as a temporary replacement
        optimizer.step()
    assert seen == [("before", 0), ("before", 1), ("behind", 1), ("behind", 0)] * 2


def test_a_step_that_raises_does_not_count_as_around_a_later_step() -> None:
    def fails(*given: Any) -> None:
        raise ZeroDivisionError

    optimizer, seen = optimizer_with_a_gradient(), list[tuple[str, int]]()
    with hooked_steps(partial(noted, seen, "before"), partial(noted, seen, "behind")):
        optimizer.step = types.MethodType(fails, optimizer)  # type: ignore[method-assign]
        with contextlib.suppress(ZeroDivisionError):
            optimizer.step()
        by_hand(optimizer)
        assert optimizer.step() == "stepped"
    assert seen == [("before", 0), ("before", 0), ("behind", 0)]


def test_a_step_that_is_not_callable_is_left_alone_and_no_optimizer_is_kept_alive() -> None:
    optimizer: Any = optimizer_with_a_gradient()
    with hooked_steps(lambda *call: None):
        by_hand(optimizer)
        assert optimizer.step.__func__.__name__ == "writes_itself"
        alive = weakref.ref(optimizer)
        optimizer.step = 3
        assert optimizer.step == 3
        by_hand(optimizer)
        del optimizer
        gc.collect()
        assert alive() is None


def test_a_step_is_torchs_only_if_every_function_around_it_is_torchs() -> None:
    optimizer = optimizer_with_a_gradient()
    inner = optimizer.step
    assert is_torchs(inner)
    assert is_torchs(torch.no_grad()(inner))
    assert is_torchs(torch.optim.LBFGS.step)
    assert not is_torchs(wraps(inner)(lambda *given: [inner(*given)]))
    assert not is_torchs(torch.no_grad()(writes_itself))


class Own(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_step_set_by_the_script_is_named_as_its_own_and_one_of_a_scheduler_is_not() -> None:
    optimizer = Own([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    with hooked_steps(lambda *_: None, lambda *_: None):
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        hook_own_step(optimizer)
        assert name_of(optimizer) == f"{__name__}.Own"
        optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
        assert name_of(optimizer) == f"the script's own step of {__name__}.Own"
