"""Tests of the calls of real loops: legal calls are not blamed, misuses are told apart, and no trace is left."""

import gc
import math
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_

from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.probes import calls
from ampdbg.probes.seams import classes_with_own
from ampdbg.probes.tensors import hold_values
from ampdbg.probes.watch import watch

rates = torch.optim.lr_scheduler


@dataclass(frozen=True)
class Turn:
    """One iteration of a legal loop: the optimizer, and which of the allowed variations it has."""

    optimizer: int
    scaled: bool
    micro_batches: int
    clip: bool
    in_place: bool
    overflows: bool
    asks_for_scale: bool
    reaches_both: bool
    schedules: bool


NEITHER = dict.fromkeys(("asks_for_scale", "reaches_both", "schedules"), False)


turns = st.builds(
    Turn,
    optimizer=st.integers(0, 1),
    scaled=st.booleans(),
    micro_batches=st.integers(1, 3),
    **dict.fromkeys(("clip", "in_place", "overflows", "asks_for_scale", "reaches_both", "schedules"), st.booleans()),
)


def two_models() -> tuple[nn.ModuleList, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    models = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    return models, [torch.optim.SGD(models[0].parameters(), 0.01), torch.optim.Adam(models[1].parameters(), 0.01)]


def run_turn(turn: Turn, models: nn.ModuleList, optimizer: Any, scaler: GradScaler, scheduler: Any) -> None:
    optimizer.zero_grad(set_to_none=not turn.in_place)
    for _ in range(turn.micro_batches):
        out = models[turn.optimizer](torch.ones(3, 2))
        if turn.reaches_both:
            out = out * models[1 - turn.optimizer](torch.ones(3, 2))
        loss = out.square().mean() * (1e38 if turn.overflows and turn.scaled else 1.0)
        (scaler.scale(loss) if turn.scaled else loss).backward()
    parameters = models[turn.optimizer].parameters()
    if not turn.scaled:
        if turn.clip:
            clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return
    before = scaler.get_scale() if turn.asks_for_scale else math.nan
    if turn.clip:
        scaler.unscale_(optimizer)
        clip_grad_norm_(parameters, 1.0)
    scaler.step(optimizer)
    scaler.update()
    if turn.schedules and turn.asks_for_scale and scaler.get_scale() >= before:
        scheduler.step()


@given(st.lists(turns, min_size=1, max_size=8), st.booleans())
@settings(max_examples=30, deadline=None)
def test_no_legal_sequence_of_calls_is_blamed(sequence: list[Turn], one_scaler: bool) -> None:
    models, optimizers = two_models()
    scalers = [GradScaler("cpu", init_scale=8.0), GradScaler("cpu", init_scale=16.0)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
    with watch(models, optimizers) as seen:
        for turn in sequence:
            scaler = scalers[0 if one_scaler else turn.optimizer]
            run_turn(turn, models, optimizers[turn.optimizer], scaler, schedulers[turn.optimizer])
    assert seen.misuses == ()
    assert len(seen.steps) == len(sequence)


def test_several_misuses_are_told_apart_and_counted() -> None:
    models, [optimizer, _] = two_models()
    scaler = GradScaler("cpu", init_scale=8.0)
    with watch(models, optimizer) as seen:
        for _ in range(40):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False), torch.autocast("cpu"):
                loss = models[0](torch.ones(3, 2)).float().square().mean()
                scaler.scale(loss).backward()
            clip_grad_norm_(models.parameters(), 1.0)
            clip_grad_norm_(models.parameters(), 2.0)
            scaler.step(optimizer)
            scaler.update()
    found = [(misuse.code, misuse.step, misuse.count) for misuse in seen.misuses]
    assert found[0][:2] == ("misuse-backward-in-autocast", 0)
    # Read from the graph of the 1st, 2nd, 4th … backward pass only; the rest is counted each time.
    assert found[1] == ("misuse-scaler-bfloat16", 0, 6)
    assert found[2:] == [("misuse-clip-scaled", 0, 40), ("misuse-clip-scaled", 0, 40)]
    lines = [misuse.source.line for misuse in seen.misuses if misuse.source]
    assert lines[3] - lines[2] == 1
    record = diagnose(seen.record())
    assert [finding.severity for finding in record.findings] == ["error", "error", "warning", "warning"]
    assert record.verdict == "other"


def state_of_torch() -> tuple[Any, ...]:
    schedulers = classes_with_own(torch.optim.lr_scheduler.LRScheduler, "step")
    clipping = (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_)
    optimizers = sys.modules["torch.optim.optimizer"]
    return (
        torch.autograd._engine_run_backward,  # type: ignore[attr-defined]
        *(vars(owner)["step"] for owner in schedulers),
        *(cell.cell_contents for function in clipping for cell in function.__closure__ or ()),
        *(vars(GradScaler)[name] for name in ("scale", "unscale_", "step", "update", "get_scale")),
        optimizers._global_optimizer_pre_hooks,
        optimizers._global_optimizer_post_hooks,
    )


class Stop(BaseException):
    """Not even an Exception."""


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), Stop()], ids=type)
def test_torch_is_restored_when_the_loop_raises_and_an_interrupt_is_recorded(error: BaseException) -> None:
    before = state_of_torch()
    models, optimizers = two_models()
    seen = watch(models, optimizers)

    def loop() -> None:
        with seen:
            models[0](torch.ones(1, 2)).sum().backward()
            assert not any(now is then for now, then in zip(state_of_torch(), before, strict=True))
            raise error

    with pytest.raises(type(error)):
        loop()
    assert all(now is then for now, then in zip(state_of_torch(), before, strict=True))
    assert seen.record().interrupted is isinstance(error, KeyboardInterrupt)


def test_no_graph_loss_or_gradient_of_a_step_is_kept_alive() -> None:
    models, [optimizer, _] = two_models()
    scaler = GradScaler("cpu")
    with watch(models, optimizer):
        for factor in (1.0, 1e38):
            out = models[0](torch.ones(1, 2))
            scaled = scaler.scale(out.sum() * factor)
            scaled.backward()
            gradients = [parameter.grad for parameter in models[0].parameters() if parameter.grad is not None]
            kept = [weakref.ref(one) for one in (out, scaled, *gradients)]
            del out, scaled
            gc.collect()
            assert [ref() for ref in kept] == [None, None, *gradients]
            scaler.step(optimizer)
            scaler.update()
            del gradients
            optimizer.zero_grad()
            gc.collect()
            assert [ref() for ref in kept] == [None] * 4


@pytest.mark.parametrize(
    ("clear", "reads", "blamed"),
    [
        (lambda optimizer: optimizer.zero_grad(), 0, 0),
        (lambda optimizer: optimizer.zero_grad(set_to_none=False), 0, 0),
        (lambda optimizer: [one.grad.data.zero_() for one in optimizer.param_groups[0]["params"]], 1, 0),
        (lambda optimizer: None, 5, 5),
    ],
    ids=["none", "in place", "unseen", "never"],
)
def test_gradients_are_read_only_where_they_seem_to_accumulate(
    monkeypatch: pytest.MonkeyPatch, clear: Callable[[Any], None], reads: int, blamed: int
) -> None:
    seen_values: list[bool] = []

    def look(gradients: Any) -> bool:
        seen_values.append(hold_values(gradients))
        return seen_values[-1]

    monkeypatch.setattr(calls, "hold_values", look)
    models, optimizers = two_models()
    scaler = GradScaler("cpu", init_scale=8.0)
    with watch(models, optimizers) as seen:
        for _ in range(6):
            scaler.scale(models[0](torch.ones(3, 2)).square().mean()).backward()
            scaler.step(optimizers[0])
            scaler.update()
            clear(optimizers[0])
    assert len(seen_values) == reads
    assert [(misuse.code, misuse.step, misuse.count) for misuse in seen.misuses] == (
        [("misuse-accumulate", 1, blamed)] if blamed else []
    )


def scheduler_misuses(make: Callable[[torch.optim.Optimizer], Any], *told: Any, every: int = 1) -> int:
    """How often a scheduler is blamed that steps with ``told`` once in ``every`` steps. The scaler skips the first
    three steps. The loop makes the scheduler while it is watched, as a script does."""
    models, [optimizer, _] = two_models()
    scaler = GradScaler("cpu", init_scale=1024.0)
    with watch(models, optimizer) as seen:
        scheduler = make(optimizer)
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(models[0](torch.ones(3, 2)).mean() * (1e38 if step < 3 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            if step % every == every - 1:
                scheduler.step(*told)
    assert [step.skipped for step in seen.steps] == [True] * 3 + [False] * 3
    assert {misuse.code for misuse in seen.misuses} <= {"misuse-scheduler-on-skip"}
    return sum(misuse.count for misuse in seen.misuses)


def own_scheduler(optimizer: torch.optim.Optimizer) -> rates.LRScheduler:
    """Counts steps."""

    class Own(rates.StepLR):
        def step(self, epoch: int | None = None, *rest: Any, quiet: bool = True) -> None:
            super().step(epoch)

    return Own(optimizer, 2)


def own_scheduler_of_a_score(optimizer: torch.optim.Optimizer) -> rates.LRScheduler:
    """Takes a score and calls its base class without it."""

    class OnScore(rates.StepLR):
        def step(self, score: float) -> None:  # type: ignore[override]
            super().step()

        def _initial_step(self) -> None:
            self._step_count = 1  # the first step has no score and does not move

    return OnScore(optimizer, 2)


SCHEDULERS: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...], int, int]] = {
    "by steps": (lambda optimizer: rates.StepLR(optimizer, 2), (), 1, 3),
    "given no epoch": (lambda optimizer: rates.StepLR(optimizer, 2), (None,), 1, 3),
    "by a function": (lambda optimizer: rates.LambdaLR(optimizer, lambda step: 0.9**step), (), 1, 3),
    "of the user's own": (own_scheduler, (), 1, 3),
    "by epochs": (lambda optimizer: rates.StepLR(optimizer, 2), (), 3, 0),
    "on a plateau": (rates.ReduceLROnPlateau, (1.0,), 1, 0),
    "of the user's own, on a score": (own_scheduler_of_a_score, (1.0,), 1, 0),
    "by a place": (lambda optimizer: rates.CosineAnnealingWarmRestarts(optimizer, 4), (0.5,), 1, 0),
}
"""Each with its arguments, the number of steps between its moves, and how often it is blamed."""


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_only_a_scheduler_that_counts_steps_must_leave_out_skipped_steps(name: str) -> None:
    make, told, every, blamed = SCHEDULERS[name]
    assert scheduler_misuses(make, *told, every=every) == blamed


def test_a_clipping_function_that_the_user_replaced_is_watched_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    clipped: list[int] = []

    def clip(parameters: Any, max_norm: float) -> None:
        clipped.append(len(list(parameters)))

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    models, [optimizer, _] = two_models()
    scaler = GradScaler("cpu", init_scale=8.0)
    with watch(models, optimizer) as seen:
        scaler.scale(models[0](torch.ones(1, 2)).sum()).backward()
        torch.nn.utils.clip_grad_norm_(models.parameters(), 1.0)
    assert [misuse.code for misuse in seen.misuses] == ["misuse-clip-scaled"]
    assert clipped == [4]
    assert vars(torch.nn.utils)["clip_grad_norm_"] is clip


def test_a_scaler_subclass_with_its_own_step_and_unscale_has_no_misuse() -> None:
    class Sharded(GradScaler):
        def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
            return super().step(optimizer, *args, **kwargs)

        def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
            state = self._per_optimizer_states[id(optimizer)]
            inverse, found = torch.tensor(1 / self.get_scale()), torch.zeros(())
            state["found_inf_per_device"] = self._unscale_grads_(optimizer, inverse, found, True)
            state["stage"] = torch.amp.grad_scaler.OptState.UNSCALED

    models, [optimizer, _] = two_models()
    scaler = Sharded("cpu", init_scale=8.0)
    with watch(models, optimizer) as seen:
        for overflows in (False, True, False):
            turn = Turn(0, True, 2, clip=True, in_place=False, overflows=overflows, **NEITHER)
            run_turn(turn, models, optimizer, scaler, None)
        run_turn(
            Turn(0, True, 2, clip=False, in_place=False, overflows=True, **NEITHER), models, optimizer, scaler, None
        )
    assert seen.misuses == ()
    assert [step.skipped for step in seen.steps] == [False, True, False, True]


def test_a_wrapped_optimizer_is_watched_through_its_wrapper() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.optimizer = inner

        def step(self, closure: Any = None) -> Any:
            return self.optimizer.step(closure)

    models, [optimizer, _] = two_models()
    wrapper = Wrapper(optimizer)
    with watch(models, wrapper) as seen:
        models[0](torch.ones(1, 2)).sum().backward()
        wrapper.step()
    assert len(seen.steps) == 1
