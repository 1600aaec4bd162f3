"""Tests of watching a training loop: the recorded steps, and that nothing in the loop changes."""

import contextlib
import functools
import gc
import itertools
import linecache
import math
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.amp.grad_scaler import GradScaler
from torch.utils.flop_counter import FlopCounterMode

from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.precision.emulation import cuda_on_cpu
from ampdbg.probes import models
from ampdbg.probes.guard import Guard
from ampdbg.probes.steps import FEW_STEPS, FLAT, NORM_EVERY, STEPS_AT_ENDS
from ampdbg.probes.watch import UNSEEN, Watch, watch
from ampdbg.record.file import from_json, to_json
from ampdbg.record.run import Step, TensorCounts
from ampdbg.replay.snapshot import rewound, take_snapshot
from ampdbg.report.scan import headline
from tests.report.pages import rendered

OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
]


def small_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))


def small_loop(lr: float = 0.1) -> tuple[torch.nn.Sequential, torch.optim.SGD]:
    model = small_model()
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def by_parameter(model: torch.nn.Module) -> torch.optim.SGD:
    """A group for each parameter, named after the parameter."""
    return torch.optim.SGD([{"params": [p], "name": name} for name, p in model.named_parameters()], lr=0.1)


def scaled_loop(scale: float = 4.0, lr: float = 0.1) -> tuple[torch.nn.Sequential, torch.optim.SGD, GradScaler]:
    return *small_loop(lr), GradScaler("cpu", init_scale=scale)


def two_loops() -> tuple[torch.nn.ModuleList, list[torch.optim.Optimizer]]:
    models = [small_model(), small_model()]
    return torch.nn.ModuleList(models), [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]


def normed_loop() -> tuple[torch.nn.Sequential, torch.optim.SGD, GradScaler, torch.Tensor]:
    """A model with a batch norm, its optimizer and scaler, and the norm's running mean."""
    norm = torch.nn.BatchNorm1d(2, affine=False)
    assert norm.running_mean is not None
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), norm, torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, optimizer, GradScaler("cpu", init_scale=4.0), norm.running_mean


def one_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler,
    factor: float = 1.0,
    clip: bool = False,
) -> None:
    optimizer.zero_grad()
    loss = model(torch.ones(2, 3)).square().mean() * factor
    scaler.scale(loss).backward()
    if clip:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("clip", [False, True])
def test_healthy_and_skipped_steps_are_recorded_as_they_end(
    make: Callable[[Any], torch.optim.Optimizer], clip: bool
) -> None:
    model, scaler, seen = small_model(), GradScaler("cpu", init_scale=4.0), list[Step]()
    optimizer = make(model.parameters())
    with watch(model, optimizer, on_step=seen.append) as watcher:
        for number, factor in enumerate((1.0, 1e38, 1.0)):
            one_step(model, optimizer, scaler, factor=factor, clip=clip)
            assert [step.step for step in seen] == [*range(number + 1)]
    assert watcher.steps == tuple(seen)
    healthy, skipped, after = watcher.steps
    assert (healthy.skipped, healthy.found_inf, healthy.groups, healthy.scale) == (False, False, (), 4.0)
    assert (skipped.skipped, skipped.found_inf, skipped.scale) == (True, True, 4.0)
    assert [group.name for group in skipped.groups] == ["group 0"]
    assert {p.name for p in skipped.groups[0].parameters} <= {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert (after.skipped, after.scale) == (False, 2.0)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_the_gradient_norm_is_unscaled_and_unclipped(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = small_model()
    model(torch.ones(2, 3)).square().mean().backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    for scaler in (GradScaler("cpu", init_scale=256.0), GradScaler("cpu", enabled=False)):
        for clip in (False, True):
            model = small_model()
            optimizer = make(model.parameters())
            with watch(model, optimizer) as watcher:
                one_step(model, optimizer, scaler, clip=clip)
            assert watcher.steps[0].grad_norm == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("clip", [False, True])
def test_a_long_run_has_the_gradient_norms_of_some_healthy_steps(clip: bool) -> None:
    model, optimizer = small_loop(lr=1e-3)
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=10_000)
    bad = STEPS_AT_ENDS + NORM_EVERY + 3
    with watch(model, optimizer) as watcher:
        for step in range(STEPS_AT_ENDS + 3 * NORM_EVERY):
            one_step(model, optimizer, scaler, factor=math.inf if step == bad else 1.0, clip=clip)
    taken = [step.step for step in watcher.steps if step.grad_norm is not None]
    later = range(STEPS_AT_ENDS, STEPS_AT_ENDS + 3 * NORM_EVERY)
    behind = range(bad, bad + NORM_EVERY + 1)  # whether gradients are finite again
    assert taken == [*range(STEPS_AT_ENDS), *(step for step in later if step % NORM_EVERY == 0 or step in behind)]
    assert [step.step for step in watcher.steps if step.skipped] == [bad]
    # Clipping has changed the gradients by the time that the step is skipped.
    assert {one.name for one in watcher.steps[bad].groups[0].parameters} == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize("enabled", [False, None])
def test_every_step_has_a_gradient_norm_if_no_scaler_checks_the_gradients(enabled: bool | None) -> None:
    model, optimizer = small_loop(lr=1e-3)
    with watch(model, optimizer) as watcher:
        for _ in range(STEPS_AT_ENDS + NORM_EVERY + 2):
            if enabled is None:
                optimizer.zero_grad()
                model(torch.ones(2, 3)).square().mean().backward()
                optimizer.step()
            else:
                one_step(model, optimizer, GradScaler("cpu", enabled=enabled))
    assert all(step.grad_norm is not None for step in watcher.steps)


def test_an_optimizer_that_is_not_watched_adds_no_step_and_no_loss() -> None:
    [model, other], [optimizer, unwatched] = two_loops()
    scaler = GradScaler("cpu", init_scale=4.0)
    with watch(model, optimizer) as watcher:
        one_step(other, unwatched, scaler)
        for _ in range(2):
            bare_step(other, unwatched, factor=math.inf)
            one_step(model, optimizer, scaler)
    assert all(math.isfinite(step.loss) for step in watcher.steps)
    assert len(watcher.steps) == 2


def test_bad_weights_are_seen_before_the_first_step_and_bad_buffers_after_the_last() -> None:
    model, optimizer, scaler, mean = normed_loop()
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    with watch(model, optimizer) as watcher:
        one_step(model, optimizer, scaler)
        mean[0] = math.inf
        one_step(model, optimizer, scaler)
    first, second = watcher.steps
    assert [(found.name, found.when) for found in first.nonfinite] == [("mask", "before")]
    assert second.nonfinite == (TensorCounts("buffer", "1.running_mean", 1, 0, 2, (0,), "after", dtype="float32"),)

    with torch.no_grad():
        model.get_parameter("2.bias").fill_(math.nan)
    with watch(model, optimizer) as watcher:
        one_step(model, optimizer, scaler)
    assert [(found.name, found.when) for found in watcher.steps[0].nonfinite] == [
        ("2.bias", "before"),
        ("mask", "before"),
        ("1.running_mean", "before"),
    ]


@pytest.mark.parametrize(
    ("scales", "code"), [(True, "scale-calibration"), (False, "unknown")], ids=["a scaled penalty", "no penalty"]
)
def test_a_nonfinite_loss_of_scaled_gradients_is_blamed_on_the_settling_scale(scales: bool, code: str) -> None:
    model = small_model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), GradScaler("cpu", init_scale=2.0**18)
    with cuda_on_cpu(), watch(model, optimizer) as watcher:
        for _ in range(12):
            x = torch.ones(2, 3, requires_grad=True)
            with torch.autocast("cuda"):
                made = model(x)
            (pulled,) = torch.autograd.grad(scaler.scale(made), x, torch.ones(2, 1), create_graph=True)
            penalty = (pulled / scaler.get_scale()).square().sum()
            optimizer.zero_grad()
            scaler.scale(penalty).backward()
            scaler.step(optimizer)
            scaler.update()
    record = watcher.record()
    assert record.scales_gradients
    assert [math.isfinite(step.loss) for step in record.steps].index(True) > 1
    # A loss without such gradients is lost for another reason, whatever the scale does.
    record = replace(record, scales_gradients=scales)
    assert [finding.code for finding in diagnose(record).findings] == [code]


@pytest.mark.parametrize("factor", [1.0, 1e38])
def test_a_model_that_takes_gradients_with_torch_func_is_watched(factor: float) -> None:
    class Pulled(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = super().forward(x)
            pull = torch.func.grad(lambda one: one.square().sum())(made.detach())
            return made + 0.01 * pull

    model = Pulled(*small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer) as watcher:
        one_step(model, optimizer, GradScaler("cpu", init_scale=4.0), factor=factor)
    assert watcher.failure == ""
    assert [step.skipped for step in watcher.steps] == [factor > 1.0]


def trace_of_watching(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """The functions that a watch replaces, and the hooks."""
    optimizers = sys.modules["torch.optim.optimizer"]
    hooks = (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)
    scaler = tuple(vars(GradScaler)[name] for name in ("scale", "unscale_", "step", "update", "get_scale"))
    clipping = (torch.nn.utils.clip_grad_norm_, vars(torch.autograd)["_engine_run_backward"])
    replaced = tuple(map(id, (*hooks, *scaler, *clipping, torch.optim.Optimizer.__init__)))
    replaced += ("__setattr__" in vars(torch.optim.Optimizer),)
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return replaced, *(tuple(each.values()) for each in (*hooks, *own))


@pytest.mark.slow
@pytest.mark.parametrize("enters", [True, False])
def test_an_interrupt_at_any_line_while_a_watch_starts_leaves_no_trace(enters: bool) -> None:
    """After an interrupt, a user who enters the watch cannot leave it, and a user who starts it may stop it."""
    model, optimizer = small_loop()
    before = trace_of_watching(optimizer)

    def interrupted(at: int) -> bool:
        lines, watcher = itertools.count(1), watch(model, optimizer)

        def interrupt(frame: FrameType, event: str, argument: object) -> Any:
            if not frame.f_globals.get("__name__", "").startswith("ampdbg."):
                return None
            # Python itself handles no signal between taking a lock and entering its block.
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            if event == "line" and not line.startswith("with ") and next(lines) == at:
                raise KeyboardInterrupt
            return interrupt

        sys.settrace(interrupt)
        try:
            watcher.__enter__() if enters else watcher.start()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
            if not enters or next(lines) <= at:
                watcher.stop()
        return False

    at = 1
    while interrupted(at):
        assert trace_of_watching(optimizer) == before, at
        at += 1
    assert trace_of_watching(optimizer) == before
    assert at > 40


@pytest.mark.parametrize("enabled", [True, False], ids=["scaled", "bare"])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_weights_are_bit_identical_with_and_without_watching(
    make: Callable[[Any], torch.optim.Optimizer], enabled: bool
) -> None:
    def trained(watched: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(3, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1)]
        model = torch.nn.Sequential(*layers)
        optimizer, scaler = make(model.parameters()), GradScaler("cpu", growth_interval=3)
        inputs = torch.randn(20, 8, 3)
        with watch(model, optimizer) if watched else torch.enable_grad():
            for number, batch in enumerate(inputs):
                optimizer.zero_grad()
                loss = model(batch).square().mean() * (math.inf if enabled and number % 7 == 3 else 0.1)
                (scaler.scale(loss) if enabled else loss).backward()
                if number % 2 == 0:
                    if enabled:
                        scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                end_step(optimizer, scaler if enabled else None)
        return model.state_dict()

    bare, watched = trained(False), trained(True)
    assert all(torch.equal(bare[name], watched[name]) for name in bare)


def descends(self: torch.optim.Optimizer, closure: Any = None) -> Any:
    """A step that a test sets on an optimizer instance."""
    loss = None if closure is None else closure()
    with torch.no_grad():
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"])
    return loss


def end_step(optimizer: torch.optim.Optimizer, scaler: GradScaler | None) -> None:
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def set_step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step = types.MethodType(descends, optimizer)  # type: ignore[method-assign]


@pytest.mark.parametrize("enabled", [True, False], ids=["scaled", "bare"])
@pytest.mark.parametrize("at", [-2, -1, 0, 3], ids=["before", "before a scheduler", "inside", "later"])
def test_a_step_set_on_an_optimizer_is_seen_once_and_writes_the_same_bits(enabled: bool, at: int) -> None:
    seen: list[Step] = []

    def trained(watched: bool) -> dict[str, torch.Tensor]:
        model, optimizer, scaler = scaled_loop()
        if at == -1:
            set_step(optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        if at == -2:
            set_step(optimizer)
        with watch(model, optimizer, seen.append) if watched else torch.enable_grad():
            for number in range(6):
                if number == at:
                    set_step(optimizer)
                loss = model(torch.ones(2, 3)).square().mean() * (math.inf if enabled and number == 4 else 1.0)
                (scaler.scale(loss) if enabled else loss).backward()
                end_step(optimizer, scaler if enabled else None)
                if not (enabled and number == 4):
                    schedule.step()
                optimizer.zero_grad()
        return model.state_dict()

    bare, watched = trained(False), trained(True)
    assert all(torch.equal(bare[name], watched[name]) for name in bare)
    assert [step.skipped for step in seen] == [enabled and number == 4 for number in range(6)]
    assert None not in [step.grad_norm for step in seen]


def test_a_step_with_a_closure_set_on_an_optimizer_is_seen_from_the_first_step() -> None:
    with Watch(None, ()) as watched:
        model, optimizer = small_loop(lr=0.01)
        set_step(optimizer)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().mean()
            loss.backward()
            return loss

        losses = [float(optimizer.step(closure).detach()) for _ in range(3)]
    assert [step.loss for step in watched.steps] == losses


class Around(torch.optim.Optimizer):
    """Calls the step of another optimizer inside its own step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


FOLLOWED = {"both": (True, True), "the outer": (False, True), "the inner": (True, False)}
"""Whether the inner and the outer of two nested optimizers are watched."""


@pytest.mark.parametrize("follows", FOLLOWED)
@pytest.mark.parametrize("enabled", [True, False], ids=["scaled", "bare"])
def test_the_outermost_watched_optimizer_of_nested_optimizers_makes_the_step(enabled: bool, follows: str) -> None:
    model, inner, scaler = scaled_loop()
    outer = Around(inner)
    with watch(model, [*itertools.compress((inner, outer), FOLLOWED[follows])]) as watched:
        for factor in (1.0, math.inf, 1.0) if enabled else (1.0, 1.0, 1.0):
            loss = model(torch.ones(2, 3)).square().mean() * factor
            (scaler.scale(loss) if enabled else loss).backward()
            end_step(outer, scaler if enabled else None)
            outer.zero_grad()
    assert watched.misuses == ()
    if follows == "the inner" and enabled:  # the scaler steps the outer one, whose calls are not watched
        assert (watched.steps, watched.record().unseen.notes) == ((), (UNSEEN,))
    else:
        assert [step.skipped for step in watched.steps] == [False, enabled, False]
        assert [step.scaler for step in watched.steps] == [int(enabled)] * 3


class ByItsScaler(Around):
    """Also holds the scaler, which steps the inner optimizer; in the steps ``bare`` it steps the optimizer itself."""

    def __init__(self, inner: torch.optim.Optimizer, scaler: Any, bare: frozenset[int], clips: bool) -> None:
        super().__init__(inner)
        self.scaler, self.bare, self.clips, self.steps = scaler, bare, clips, 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps in self.bare:
            self.inner.step()
            return
        if self.clips:
            self.scaler.unscale_(self.inner)
            torch.nn.utils.clip_grad_norm_(self.inner.param_groups[0]["params"], 1.0)
        self.scaler.step(self.inner)
        self.scaler.update()


@pytest.mark.parametrize("follows", FOLLOWED)
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("bare", [(), (1, 2, 3), (3,)])
def test_a_scaler_step_inside_a_step_counts_once_and_a_step_past_the_scaler_is_bare(
    bare: tuple[int, ...], clips: bool, follows: str
) -> None:
    model, inner, scaler = scaled_loop()
    outer = ByItsScaler(inner, scaler, frozenset(bare), clips)
    with watch(model, [*itertools.compress((inner, outer), FOLLOWED[follows])]) as watched:
        for factor in (1.0, math.inf, 1.0):
            outer.zero_grad()
            scaler.scale(model(torch.ones(2, 3)).square().mean() * factor).backward()
            outer.step()
    misuses = [(one.code, one.step, one.count) for one in watched.misuses]
    assert misuses == [("misuse-bare-step", first - 1, len(bare)) for first in bare[:1]]
    assert [step.skipped for step in watched.steps] == [False, 2 not in bare, False]
    assert [step.found_inf for step in watched.steps] == [False, True, 2 in bare]  # a bare step writes NaN
    assert [step.scaler for step in watched.steps] == [1, 1, 1]


@pytest.mark.parametrize("writes", [True, False])
def test_each_pass_of_a_loop_that_writes_weights_in_its_backward_pass_counts_as_a_step_with_a_note(
    writes: bool,
) -> None:
    model, _ = small_loop()

    def update(parameter: torch.Tensor) -> None:
        if writes:
            assert parameter.grad is not None
            parameter.data.sub_(parameter.grad)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    with Watch(None, ()) as watched:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for factor in (1.0, 1.0, math.inf, math.inf):
            (model(torch.ones(2, 3)).square().mean() * factor).backward()
            optimizer.zero_grad()
    record = watched.record()
    assert [step.skipped for step in record.steps] == ([False] * 4 if writes else [True, True])
    assert (UNSEEN in record.unseen.notes) == writes


def bare_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, factor: float = 1.0, clip: bool = False
) -> None:
    optimizer.zero_grad()
    (model(torch.ones(2, 3)).square().mean() * factor).backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("clip", [False, True])
def test_a_loop_without_a_scaler_has_steps(make: Callable[[Any], torch.optim.Optimizer], clip: bool) -> None:
    model, seen = small_model(), list[Step]()
    loss = model(torch.ones(2, 3)).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with watch(model, make(model.parameters()), on_step=seen.append) as watcher:
        bare_step(model, next(iter(watcher.optimizers)), clip=clip)
        # The step is recorded as it ends, not with the next step.
        [step] = seen
    assert watcher.steps == (step,)
    assert (step.scale, step.skipped, step.found_inf) == (1.0, False, False)
    assert step.loss == pytest.approx(loss.item())
    assert step.grad_norm == pytest.approx(torch.nn.utils.get_total_norm(gradients).item())
    record = diagnose(watcher.record())
    assert (record.verdict, record.unseen.notes) == ("healthy", ())


@pytest.mark.parametrize("is_bare", [True, False], ids=["no scaler", "a disabled scaler"])
def test_without_an_enabled_scaler_a_nonfinite_step_is_written_to_the_weights(is_bare: bool) -> None:
    model = small_model()
    optimizer = by_parameter(model)
    with watch(model, optimizer) as watcher:
        for factor in (1.0, math.inf):
            if is_bare:
                bare_step(model, optimizer, factor=factor)
            else:
                one_step(model, optimizer, GradScaler("cpu", enabled=False), factor=factor)
    healthy, bad = watcher.steps
    assert (healthy.found_inf, healthy.nonfinite) == (False, ())
    assert (bad.found_inf, bad.skipped, bad.scale, bad.loss) == (True, False, 1.0, math.inf)
    assert [group.name for group in bad.groups] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    # The optimizer wrote the non-finite gradients into the weights: seen after the step.
    assert {(found.kind, found.when) for found in bad.nonfinite} == {("parameter", "after")}


def test_optimizers_that_step_on_one_backward_pass_share_a_step() -> None:
    models, optimizers = two_loops()
    with watch(models, optimizers) as watcher:
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            sum(model(torch.ones(1, 3)) for model in models).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert [(step.optimizer, step.iteration) for step in watcher.steps] == [(0, 0), (0, 1), (0, 2)]


def test_the_loss_of_a_bare_step_is_the_sum_over_its_micro_batches() -> None:
    model, optimizer = small_loop()
    with watch(model, optimizer) as watcher:
        for factor in (0.25, 0.75):
            (model(torch.ones(2, 3)).square().mean() * factor).backward()
        optimizer.step()
    assert watcher.steps[0].loss == pytest.approx(small_model()(torch.ones(2, 3)).square().mean().item())


def test_an_optimizer_step_without_gradients_is_not_recorded() -> None:
    with Watch(None, ()) as watcher:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.step()
        bare_step(model, optimizer)
    assert len(watcher.steps) == 1


CLOSURES: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], int]] = {
    "once": (lambda p: torch.optim.SGD(p, lr=0.1), 1),
    "many times": (lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=5), 2),
}
"""Optimizers with the least number of times that they call a closure."""


def closed_step(number: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, least: int) -> float:
    """The return value of a step with a closure."""
    runs = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean() * (1 + number)
        loss.backward()
        runs.append(loss.item())
        return loss

    returned = float(optimizer.step(closure))  # type: ignore[arg-type]
    assert len(runs) >= least
    return returned


@pytest.mark.parametrize("count", [1, 2], ids=["an only optimizer", "two that take turns"])
@pytest.mark.parametrize("name", CLOSURES)
def test_a_step_with_a_closure_has_the_loss_that_the_step_returns(name: str, count: int) -> None:
    make, least = CLOSURES[name]
    models = [small_model() for _ in range(count)]
    optimizers = [make(model.parameters()) for model in models]
    with watch(torch.nn.ModuleList(models), optimizers) as watcher:
        turns = 3 * list(zip(range(count), models, optimizers, strict=True))
        returned = [closed_step(*turn, least) for turn in turns]
    assert [step.loss for step in watcher.steps] == pytest.approx(returned)
    assert all(step.grad_norm for step in watcher.steps)


def test_a_closure_in_the_first_step_of_a_script_belongs_to_that_step() -> None:
    make, least = CLOSURES["many times"]
    with Watch(None, ()) as watcher:
        model = small_model()
        optimizer = make(model.parameters())
        returned = [closed_step(0, model, optimizer, least) for _ in range(3)]
    assert [step.loss for step in watcher.steps] == pytest.approx(returned)
    assert all(step.grad_norm for step in watcher.steps)


@pytest.mark.parametrize("is_scaled", [True, False], ids=["one is scaled", "none is scaled"])
def test_optimizers_that_take_turns_have_separate_steps(is_scaled: bool) -> None:
    models, optimizers = two_loops()
    scaler = GradScaler("cpu", init_scale=4.0)
    with watch(models, optimizers) as watcher:
        for _ in range(3):
            if is_scaled:
                one_step(models[0], optimizers[0], scaler)
            else:
                bare_step(models[0], optimizers[0])
            bare_step(models[1], optimizers[1], factor=100.0)
    first = (4.0, True) if is_scaled else (1.0, False)
    assert [(step.scale, step.scaler > 0) for step in watcher.steps] == [first, (1.0, False)] * 3
    assert watcher.steps[1].loss > 10 * watcher.steps[0].loss
    assert [(step.optimizer, step.iteration) for step in watcher.steps] == [(n % 2, n // 2) for n in range(6)]
    record = watcher.record()
    assert record.steps_run == 3
    assert [[step.step for step in one.steps] for one in record.timelines] == [[0, 2, 4], [1, 3, 5]]


def test_optimizers_are_numbered_in_the_order_of_their_first_steps() -> None:
    (one, other), (first, second) = two_loops()
    scaler = GradScaler("cpu", init_scale=4.0)
    with watch(torch.nn.ModuleList([one, other]), [first, second]) as watcher:
        for model, optimizer in [(other, second), (other, second), (one, first), (other, second)]:
            one_step(model, optimizer, scaler)
    assert [(step.optimizer, step.iteration) for step in watcher.steps] == [(0, 0), (0, 1), (1, 0), (0, 2)]


def turns_of(watcher: Watch) -> list[tuple[int, int, float]]:
    """The optimizer, the iteration and the loss of each step."""
    return [(step.optimizer, step.iteration, step.loss) for step in watcher.steps]


def weights_and_optimizers() -> tuple[torch.nn.ModuleList, list[torch.optim.Optimizer]]:
    """Two weights with an optimizer each."""
    models = [torch.nn.Linear(1, 1, bias=False) for _ in "ab"]
    return torch.nn.ModuleList(models), [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]


def loss_of(model: Any, value: float) -> torch.Tensor:
    """A loss of this value, which is also the gradient of the weight."""
    made: torch.Tensor = (model.weight - model.weight.detach() + 1.0).sum() * value
    return made


@pytest.mark.parametrize("order", ["in turns", "after both backward passes"])
@pytest.mark.parametrize("scalers", [0, 1, 2])
def test_each_optimizer_has_its_own_loss_gradient_norm_and_skips(order: str, scalers: int) -> None:
    models, optimizers = weights_and_optimizers()
    made = [GradScaler("cpu", init_scale=4.0) for _ in range(scalers)]
    of = [made[0], made[-1]] if made else [GradScaler("cpu", enabled=False)] * 2
    bad = math.inf if scalers else 10.0
    with watch(models, optimizers) as watcher:
        for values in [(1.0, 10.0), (1.0, bad), (1.0, 10.0)]:
            for place, value in enumerate(values):
                optimizers[place].zero_grad()
                of[place].scale(loss_of(models[place], value)).backward()
                if order == "in turns":
                    of[place].step(optimizers[place])
            for place in (0, 1) if order != "in turns" else ():
                of[place].step(optimizers[place])
            for scaler in made:
                scaler.update()
    assert turns_of(watcher) == [(0, 0, 1.0), (1, 0, 10.0), (0, 1, 1.0), (1, 1, bad), (0, 2, 1.0), (1, 2, 10.0)]
    assert [step.grad_norm for step in watcher.steps if step.step != 3] == [1.0, 10.0, 1.0, 1.0, 10.0]
    assert [step.skipped for step in watcher.steps] == [number == 3 and scalers > 0 for number in range(6)]
    scales = {0: [1.0] * 6, 1: [4.0, 4.0, 4.0, 4.0, 2.0, 2.0], 2: [4.0, 4.0, 4.0, 4.0, 4.0, 2.0]}
    assert [step.scale for step in watcher.steps] == scales[scalers]


@pytest.mark.parametrize("scaled", [True, False])
def test_an_optimizer_that_steps_every_third_iteration_has_the_sum_of_their_losses(scaled: bool) -> None:
    models, optimizers = weights_and_optimizers()
    scaler = GradScaler("cpu", init_scale=4.0, enabled=scaled)
    with watch(models, optimizers) as watcher:
        for step in range(6):
            for place, value in enumerate((1.0, 10.0)):
                scaler.scale(loss_of(models[place], value)).backward()
                if place == 0 or step % 3 == 2:
                    scaler.step(optimizers[place])
                    optimizers[place].zero_grad()
            scaler.update()
    every, third = [(0, at, 1.0) for at in range(6)], [(1, at, 30.0) for at in range(2)]
    assert turns_of(watcher) == [*every[:3], third[0], *every[3:], third[1]]


def test_optimizers_with_different_backward_passes_have_separate_steps() -> None:
    models, optimizers = weights_and_optimizers()
    with watch(models, optimizers) as watcher:
        for _ in range(2):
            (loss_of(models[0], 1.0) + loss_of(models[1], 2.0)).backward()
            loss_of(models[1], 10.0).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert turns_of(watcher) == [(0, 0, 3.0), (1, 0, 13.0), (0, 1, 3.0), (1, 1, 13.0)]


def test_an_unscaled_step_between_scaler_step_and_update_is_a_separate_step() -> None:
    models, optimizers = two_loops()
    scaler = GradScaler("cpu", init_scale=4.0)
    with watch(models, optimizers) as watcher:
        for step in range(3):
            optimizers[0].zero_grad()
            scaler.scale(models[0](torch.ones(1, 3)).square().sum()).backward()
            scaler.step(optimizers[0])
            bare_step(models[1], optimizers[1], factor=math.inf if step == 2 else 1.0)
            scaler.update()
    assert [(step.optimizer, step.scaler, step.scale) for step in watcher.steps] == [(0, 1, 4.0), (1, 0, 1.0)] * 3
    assert [math.isfinite(step.loss) for step in watcher.steps] == [True] * 5 + [False]
    assert not any(step.skipped for step in watcher.steps)
    assert watcher.misuses == ()


@pytest.mark.parametrize("is_last", [False, True])
def test_a_nonfinite_loss_whose_step_the_loop_leaves_out_is_a_skipped_step(is_last: bool) -> None:
    model, optimizer = small_loop()
    with watch(model, optimizer) as watcher:
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().mean() * (math.inf if step == (3 if is_last else 1) else 1.0)
            loss.backward()
            if loss.isfinite():
                optimizer.step()
    bad = 3 if is_last else 1
    assert [(step.skipped, math.isfinite(step.loss)) for step in watcher.steps] == [
        (number == bad, number != bad) for number in range(4)
    ]


def test_a_nonfinite_first_pass_whose_gradients_the_loop_always_clears_is_not_a_step() -> None:
    """Sharpness-aware minimization moves the weights by the gradients of one pass and steps on those of another."""
    model, optimizer = small_loop()
    with watch(model, optimizer) as watcher:
        for step in range(4):
            for _ in range(2):
                optimizer.zero_grad()
                (model(torch.ones(2, 3)).square().mean() * (math.inf if step > 1 else 1.0)).backward()
            optimizer.step()
    assert [(step.skipped, math.isfinite(step.loss)) for step in watcher.steps] == [
        (False, step < 2) for step in range(4)
    ]


def test_each_step_records_its_scaler() -> None:
    model = small_model()
    optimizer, scalers = torch.optim.SGD(model.parameters(), lr=0.1), [GradScaler("cpu", init_scale=4.0) for _ in "ab"]
    with watch(model, optimizer) as watcher:
        for scaler in (*scalers, scalers[0], GradScaler("cpu", enabled=False)):
            one_step(model, optimizer, scaler)
    first, second, third, off = (step.scaler for step in watcher.steps)
    assert first == third != second
    assert (off, 0 in (first, second)) == (0, False)


def test_the_record_of_a_watched_loop_can_be_diagnosed_and_rendered() -> None:
    model = small_model()
    optimizer = by_parameter(model)
    scaler = GradScaler("cpu", init_scale=1024.0)
    with watch(model, optimizer) as watcher:
        for number in range(12):
            one_step(model, optimizer, scaler, factor=1e38 if number > 3 else 1.0)
            assert len(watcher.record().steps) == number + 1
    record = diagnose(watcher.record())
    assert (record.command, record.verdict) == ("watch", "inconclusive")
    assert record.groups == ("0.weight", "0.bias", "2.weight", "2.bias")
    here = record.environment
    assert (here.device, here.policy, here.emulated) == ("cpu", "native", False)
    assert "scale-collapse" in {finding.code for finding in record.findings}
    assert repr(from_json(to_json(record)).steps) == repr(record.steps)
    assert "Non-finite gradients" in rendered(record, width=100)


TOUCHES = ("nothing", "unscale", "unscale and clip norm", "unscale and clip values", "unscale and zero", "clip norm")
"""Changes that a loop makes to gradients between ``backward`` and ``step``."""


def touch(how: str, scaler: GradScaler, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    if how.startswith("unscale"):
        scaler.unscale_(optimizer)
    if how.endswith("clip norm"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if how.endswith("clip values"):
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
    if how.endswith("zero"):
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.0)


def overflowing_step(how: str, enabled: bool, bad: float, micro_batches: int) -> Step:
    """A step with ``bad`` in five elements of one of its four gradients, in the last micro-batch."""
    model, first = small_model(), torch.nn.Linear(3, 4)
    model[0] = first
    optimizer = by_parameter(model)
    scaler = GradScaler("cpu", init_scale=4.0, enabled=enabled)

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        spoilt = gradient.clone()
        spoilt.view(-1)[:5] = bad
        return spoilt

    with watch(model, optimizer) as watcher:
        for number in range(micro_batches):
            if number == micro_batches - 1:
                first.weight.register_hook(spoil)
            scaler.scale(model(torch.ones(2, 3)).square().mean()).backward()
        touch(how, scaler, optimizer, model)
        scaler.step(optimizer)
        scaler.update()
    [step] = watcher.steps
    return step


PLANTED: dict[str, tuple[bool, float, int, list[tuple[str, int, int]]]] = {
    "inf": (True, math.inf, 1, [("0.weight", 5, 0)]),
    "inf in the last of three micro-batches": (True, math.inf, 3, [("0.weight", 5, 0)]),
    "NaN": (True, math.nan, 1, [("0.weight", 0, 5)]),
    "inf without an enabled scaler": (False, math.inf, 1, [("0.weight", 5, 0)]),
    "nothing bad": (True, 1.0, 1, []),
}
"""Whether a scaler is enabled, the bad value, the number of micro-batches, and the counts of inf and NaN."""


@pytest.mark.parametrize("how", TOUCHES)
@pytest.mark.parametrize("name", PLANTED)
def test_nonfinite_gradients_are_counted_before_the_loop_changes_them(name: str, how: str) -> None:
    enabled, bad, micro_batches, expected = PLANTED[name]
    step = overflowing_step(how, enabled, bad, micro_batches)
    assert step.found_inf is bool(expected)
    assert step.skipped is (enabled and bool(expected))
    assert [(p.name, p.inf, p.nan) for group in step.groups for p in group.parameters] == expected
    assert [group.name for group in step.groups] == [name for name, _, _ in expected]
    if name.startswith("inf"):
        assert step.grad_norm == math.inf


def test_an_overflow_is_seen_even_if_every_micro_batch_is_clipped() -> None:
    """Clipping every micro-batch is a misuse; here the last micro-batch overflows."""
    model, optimizer, scaler = scaled_loop()
    with watch(model, optimizer) as watcher:
        for factor in (1.0, 1e38):
            scaler.scale(model(torch.ones(2, 3)).square().mean() * factor).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    [step] = watcher.steps
    assert step.skipped
    assert step.groups
    assert step.grad_norm is not None
    assert not math.isfinite(step.grad_norm)


def test_watches_may_overlap_and_end_in_any_order() -> None:
    (first, second), optimizers = two_loops()
    before = [trace_of_watching(optimizer) for optimizer in optimizers]
    scaler = GradScaler("cpu", init_scale=4.0)
    watches = [watch(model, optimizer).start() for model, optimizer in zip((first, second), optimizers, strict=True)]
    for model, optimizer in zip((first, second), optimizers, strict=True):
        one_step(model, optimizer, scaler, clip=True)
    watches[0].stop()
    one_step(first, optimizers[0], scaler)
    one_step(second, optimizers[1], scaler)
    watches[1].stop()
    assert [len(one.steps) for one in watches] == [1, 2]
    assert [trace_of_watching(optimizer) for optimizer in optimizers] == before


def test_each_of_two_watches_knows_which_scaler_scaled_a_loss() -> None:
    (models, optimizers), scalers = two_loops(), [GradScaler("cpu"), GradScaler("cpu")]
    with watch(models[0], optimizers[0]) as first:
        one_step(models[0], optimizers[0], scalers[0])
        with watch(models[1], optimizers[1]) as second:  # the other scaler is its first
            losses = [model(torch.ones(2, 3)).square().mean() for model in models]
            for index in (1, 0):
                scalers[index].scale(losses[index]).backward()
            for scaler, optimizer in zip(reversed(scalers), reversed(optimizers), strict=True):
                scaler.step(optimizer)
                scaler.update()
    assert first.misuses == second.misuses == ()


def test_watches_of_loops_in_threads_are_kept_apart() -> None:
    turns = threading.Barrier(2)

    def in_turns(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        turns.wait(10)  # both are inside of scaler.step, and leave in the order in which they entered
        time.sleep(0.2 * (optimizer is optimizers[1]))

    models, optimizers = two_loops()
    watches = [watch(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]

    def train(index: int) -> None:
        scaler = GradScaler("cpu", init_scale=4.0)
        optimizers[index].register_step_pre_hook(in_turns)
        with watches[index]:
            for _ in range(3):
                one_step(models[index], optimizers[index], scaler)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(train, range(2)))
    assert [(len(one.steps), one.misuses) for one in watches] == [(3, ()), (3, ())]
    assert not any(step.skipped for one in watches for step in one.steps)
    assert all("several threads" in one.notes[-1] for one in watches)  # the order of their calls is not judged


def test_a_wrapper_that_others_set_during_a_watch_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    (model, optimizer, scaler), calls = scaled_loop(), []
    monkeypatch.setattr(GradScaler, "update", original := GradScaler.update)
    first, second = watch(model, optimizer), watch(model, optimizer)
    with first:
        watched = GradScaler.update
        assert watched is not original

        def counting(self: GradScaler, *args: Any) -> None:
            calls.append(1)
            watched(self, *args)

        GradScaler.update = counting  # type: ignore[assignment, method-assign]
        one_step(model, optimizer, scaler)
    assert GradScaler.update is counting
    with second:
        one_step(model, optimizer, scaler)
    one_step(model, optimizer, scaler)
    assert (len(calls), len(first.steps), len(second.steps)) == (3, 1, 1)


ALLOWED = r"; allowed: watch\(model, opt"


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ((None, []), "got a NoneType instead of a Module"),
        ((small_model(), None), "got a NoneType instead of a Optimizer"),
        ((small_model(), ["adam"]), "got a str instead of a Optimizer"),
        (([], []), "got a list instead of a Module"),
        ((small_model(), []), "got no optimizer, whose steps ampdbg watches"),
    ],
)
def test_an_argument_that_is_not_a_model_or_optimizer_is_refused_with_its_type(
    given: tuple[Any, Any], refused: str
) -> None:
    with pytest.raises(TypeError, match=f"^{refused}{ALLOWED}"):
        watch(*given)


def test_the_same_loop_can_be_watched_twice() -> None:
    model, optimizer, scaler = scaled_loop()
    with watch(model, optimizer) as outer:
        one_step(model, optimizer, scaler, clip=True)
        with watch(model, optimizer) as inner:
            one_step(model, optimizer, scaler, factor=1e38, clip=True)
    assert [step.skipped for step in outer.steps] == [False, True]
    assert [step.skipped for step in inner.steps] == [True]
    assert outer.misuses == inner.misuses == ()


def test_start_and_stop_act_as_entering_and_leaving() -> None:
    model, optimizer = small_loop()
    before = trace_of_watching(optimizer)
    watcher = watch(model, optimizer)
    assert trace_of_watching(optimizer) == before
    assert watcher.start() is watcher.start()
    assert trace_of_watching(optimizer) != before
    one_step(model, optimizer, GradScaler("cpu"))
    watcher.stop()
    watcher.stop()
    assert trace_of_watching(optimizer) == before
    assert len(watcher.steps) == 1


def test_an_unreferenced_watch_is_removed_and_an_entered_watch_stays() -> None:
    model, optimizer = small_loop()
    seen: list[Step] = []
    before = trace_of_watching(optimizer)
    with watch(model, optimizer, seen.append):
        gc.collect()
        one_step(model, optimizer, GradScaler("cpu"))
        other = watch(model, optimizer, seen.append).start()
        one_step(model, optimizer, GradScaler("cpu"))
        del other
        gc.collect()
        one_step(model, optimizer, GradScaler("cpu"))
    assert len(seen) == 4
    assert trace_of_watching(optimizer) == before
    dropped = watch(model, optimizer).start()
    one_step(model, optimizer, GradScaler("cpu"))
    assert trace_of_watching(optimizer) != before
    del dropped
    gc.collect()
    assert trace_of_watching(optimizer) == before


def test_no_step_is_lost_if_two_threads_first_step_their_optimizers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    look, looked = models.outermost_owners, threading.Event()

    def slowly(parameters: set[int]) -> list[torch.nn.Module]:
        looked.set()
        time.sleep(0.3)
        return look(parameters)

    monkeypatch.setattr(models, "outermost_owners", slowly)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(5):
            one_step(model, optimizer, GradScaler("cpu"))

    with Watch(None, ()) as watcher:
        nets = [small_model() for _ in range(2)]
        loops = [(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in nets]
        first, second = (threading.Thread(target=train, args=loop) for loop in loops)
        second.start()  # finds the model of its own optimizer, and then of the other's
        for _ in loops:
            looked.wait()
            looked.clear()
        first.start()
        for thread in (first, second):
            thread.join()
    assert len(watcher.steps) == 10


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize("machine", ["emulated", "without a GPU", "with a GPU"])
def test_a_loop_in_which_autocast_does_nothing_is_not_healthy(machine: str) -> None:
    model, optimizer = small_loop()
    with cuda_on_cpu() if machine == "emulated" else contextlib.nullcontext():
        # There autocast is on, and the model was left on the CPU.
        there = patch("torch.cuda.amp.common.amp_definitely_not_available", bool)
        with there if machine == "with a GPU" else contextlib.nullcontext():
            scaler = GradScaler("cuda")
        with watch(model, optimizer) as watcher:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(torch.ones(2, 3)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        record = diagnose(watcher.record())
    codes = [finding.code for finding in record.findings]
    expected = ("healthy", "cuda", []) if machine == "emulated" else ("inconclusive", "none", ["not-half"])
    assert (record.verdict, record.environment.policy, codes) == expected
    assert record.environment.emulated is (machine == "emulated")
    assert from_json(to_json(record)) == record


def test_a_failure_of_the_watch_leaves_the_loop_unchanged_and_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise ValueError("a fault of the watcher")

    weights = []
    for watched in (False, True):
        model, optimizer, scaler = scaled_loop()
        with (
            watch(model, optimizer) if watched else contextlib.nullcontext() as watcher,
            monkeypatch.context() as patched,
        ):
            for number in range(4):
                if number == 2:
                    patched.setattr("ampdbg.probes.gradients.gradient_norm", broken)
                one_step(model, optimizer, scaler, math.inf if number == 3 else 1.0)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert watcher is not None
    record = diagnose(watcher.record())
    assert all(map(torch.equal, *weights))
    assert len(record.steps) == 2
    assert "from step 2 on ampdbg noted nothing" in record.error
    assert "a fault of the watcher" in record.error
    assert record.verdict == "inconclusive"
    assert record.unseen.since == 2
    says = "ampdbg itself failed after 2 steps, and stopped watching. Inconclusive: none of 2 steps skipped."
    assert headline(record).sentence == says


@pytest.mark.parametrize("refuses", [False, True])
def test_a_failing_handler_never_makes_the_call_twice(refuses: bool) -> None:
    calls = []

    def original(number: int) -> int:
        calls.append(number)
        if refuses:
            raise LookupError("the loop's own")
        return number + 1

    def handler(watcher: object, run: Callable[..., int], number: int) -> int:
        with contextlib.suppress(LookupError):
            run(number)
        raise ValueError("a fault of the watcher")

    guard = Guard()
    with pytest.raises(LookupError, match="the loop's own") if refuses else contextlib.nullcontext() as raised:
        assert guard.around(handler, None, original, 1) == 2
    assert calls == [1]
    assert "a fault of the watcher" in guard.failure
    assert raised is None or raised.value.__context__ is None


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such signal")
def test_an_exception_of_a_signal_handler_inside_the_watch_reaches_the_loop() -> None:
    def out_of_time(number: int, frame: object) -> None:
        raise TimeoutError("too long")

    def handler(watcher: object, run: Callable[..., int], number: int) -> int:
        signal.raise_signal(signal.SIGUSR1)
        return run(number)

    guard, before = Guard(), signal.signal(signal.SIGUSR1, out_of_time)
    try:
        with pytest.raises(TimeoutError, match="too long"):
            guard.around(handler, None, lambda number: number, 1)
        with pytest.raises(TimeoutError, match="too long"):
            guard.run_hook(lambda: signal.raise_signal(signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert guard.failure == ""


def test_errors_of_calls_with_keyword_arguments_are_raised_while_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, scaler = scaled_loop()
    with watch(model, optimizer) as watcher:
        scaler.scale(model(torch.full((2, 3), math.inf)).sum()).backward()
        with pytest.raises(RuntimeError, match="non-finite"):
            torch.nn.utils.clip_grad_norm_(parameters=model.parameters(), max_norm=1.0, error_if_nonfinite=True)
        scaler.unscale_(optimizer=optimizer)
        with pytest.raises(RuntimeError, match="unscale_"):
            scaler.unscale_(optimizer=optimizer)
    assert watcher.record().error == ""
    assert "misuse-unscale-twice" in [misuse.code for misuse in watcher.misuses]


def test_an_exception_of_on_step_reaches_the_loop() -> None:
    def stop(step: Step) -> None:
        raise LookupError(f"no more after {step.step}")

    model, optimizer, scaler = scaled_loop()
    watcher = watch(model, optimizer, stop)
    with pytest.raises(LookupError, match="no more after 0"), watcher:
        one_step(model, optimizer, scaler)
    assert watcher.record().error == ""


@pytest.mark.parametrize("mode", [contextlib.nullcontext, functools.partial(FlopCounterMode, display=False)])
def test_a_loss_scaled_by_hand_is_not_a_misuse_with_or_without_a_dispatch_mode(mode: Any) -> None:
    model, optimizer = small_loop()
    with cuda_on_cpu(), mode(), watch(model, optimizer) as watcher:
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.ones(2, 3)).float().square().mean()
        (loss * 128.0).backward()
        optimizer.step()
    assert (watcher.failure, watcher.misuses, len(watcher.steps)) == ("", (), 1)


def test_steps_of_a_replay_are_not_recorded_by_a_watch_of_the_user() -> None:
    model, optimizer, scaler = scaled_loop()
    with watch(model, optimizer) as watcher:
        one_step(model, optimizer, scaler)
        with rewound(model, take_snapshot(model, 1, ())):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.step()
        one_step(model, optimizer, scaler)
    assert ([step.scale for step in watcher.steps], watcher.misuses) == ([4.0, 4.0], ())


@pytest.mark.parametrize("factor", [0.0, 1.0])
@pytest.mark.parametrize("taken", [FEW_STEPS, 2])
def test_a_run_whose_taken_steps_all_have_zero_gradients_has_a_note(taken: int, factor: float) -> None:
    model, optimizer, scaler = scaled_loop(lr=1e-3)
    with watch(model, optimizer) as watcher:
        for step in range(FEW_STEPS):
            one_step(model, optimizer, scaler, factor=math.inf if step < FEW_STEPS - taken else factor)
    assert (FLAT.format(f"{taken} measured steps") in watcher.notes) is (factor == 0.0)


@pytest.mark.parametrize("heals", [False, True])
def test_a_buffer_that_is_overwritten_does_not_stay_poisoned(heals: bool) -> None:
    model, optimizer, scaler, mean = normed_loop()
    with watch(model, optimizer) as watcher:
        one_step(model, optimizer, scaler)
        mean[0] = math.inf
        one_step(model, optimizer, scaler, factor=math.inf)
        if heals:
            mean.zero_()
        one_step(model, optimizer, scaler)
    kept = [counts.name for step in watcher.steps for counts in step.nonfinite if counts.when == "after"]
    assert kept == ([] if heals else ["1.running_mean"])


def test_buffers_of_a_deleted_model_keep_their_last_counts() -> None:
    def trained() -> None:
        model, optimizer, scaler, mean = normed_loop()
        one_step(model, optimizer, scaler)
        mean[0] = math.inf
        one_step(model, optimizer, scaler, factor=math.inf)

    watcher = Watch(None, ())
    with watcher:
        trained()
        gc.collect()
    assert [counts.name for step in watcher.steps for counts in step.nonfinite] == ["1.running_mean"]


def test_gradients_that_a_loop_adds_to_float32_copies_belong_to_one_step() -> None:
    net = torch.nn.Linear(4, 4).to(torch.bfloat16)
    copies = [weight.detach().float().requires_grad_() for weight in net.parameters()]
    optimizer, sums = torch.optim.SGD(copies, lr=1e-2), list[float]()
    with watch(net, optimizer) as watched:
        for _ in range(4):
            sums.append(0.0)
            for _ in range(3):
                loss = net(torch.randn(2, 4, dtype=torch.bfloat16)).float().square().mean()
                loss.backward()
                sums[-1] += loss.item()
                for weight, kept in zip(net.parameters(), copies, strict=True):
                    assert weight.grad is not None
                    kept.grad = weight.grad.float() + (0.0 if kept.grad is None else kept.grad)
                    weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for weight, kept in zip(net.parameters(), copies, strict=True):
                    weight.copy_(kept)
    steps = watched.record().steps
    assert [step.loss for step in steps] == pytest.approx(sums)
    assert [step.passes for step in steps] == [3] * 4
