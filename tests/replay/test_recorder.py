"""A recorded step is replayed on the inputs of the step, and gives the same loss and gradients."""

import contextlib
import copy
import gc
import math
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ampdbg.precision.widening import lifted
from ampdbg.probes.seams import attached
from ampdbg.replay import recorder as recorders
from ampdbg.replay.before import EXAMINED_CALLS
from ampdbg.replay.random_state import SAMPLING_PERIOD, RandomState
from ampdbg.replay.recorder import Recorder
from ampdbg.replay.snapshot import ModelState, rewound
from ampdbg.replay.step import NotReplayableError, RecordedStep

Loop = Callable[[nn.Module, torch.amp.GradScaler], None]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def x(seed: int = 1) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def plain(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    scaler.scale(F.cross_entropy(model(x()), torch.tensor([0, 1, 2, 0]))).backward()


LOSSES: dict[str, Callable[[Any], torch.Tensor]] = {
    "by a criterion": lambda model: nn.SmoothL1Loss(reduction="sum")(input=model(x()), target=torch.ones(4, 3)) / 7,
    "of a part of the model": lambda model: model[3](model[0](x())).square().mean(),
    "regularized": lambda model: (
        model(x()).mean() + 0.1 * torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
    ),
    "tied": lambda model: (model(x()) @ model[3].weight @ model[3].weight.T @ model[3].weight.mT.data.T).mean(),
    # The result of the first call enters the second as data, as from a generator in old code.
    "of a variable": lambda model: (model(x()) @ torch.autograd.Variable(model(x()).data).mT).mean(),
    "by ops": lambda model: torch.ops.aten.mean.default(torch.ops.aten.square(model(x()))),
}


def scaled(loss: Callable[[Any], torch.Tensor]) -> Loop:
    return lambda model, scaler: scaler.scale(loss(model)).backward()


def in_micro_batches(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    for seed in range(3):
        scaler.scale(model(x(seed)).square().mean() / 3).backward()


def several_losses(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    output = model(x())
    scaler.scale(output.square().mean()).backward(retain_graph=True)
    scaler.scale(output.abs().sum()).backward()


def written_into(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    output = model(x()) * 2
    output[:, 0] = 0
    output[:, 1].mul_(3)
    output += 1
    loss = torch.zeros(())
    loss = loss + output.square().mean()
    loss += output.mean()
    scaler.scale(loss).backward()


def with_values_of_its_own(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    output = model(x())
    with torch.no_grad():
        weights = output.softmax(-1)
    _ = float(output.detach().sum()), output.shape, output.dtype
    scaler.scale((output * weights * (output.detach() > 0)).sum()).backward()


def draws_outside_of_the_model(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    output = F.dropout(model(x() + torch.randn(4, 6)), 0.5)
    scaler.scale((output * torch.rand(3)).mean()).backward()


def without_a_scaler(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    model(x()).square().mean().backward()


def penalized(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    inner = x().requires_grad_()
    output = model(inner).sum()
    (gradient,) = torch.autograd.grad(output, inner, create_graph=True)
    scaler.scale(output + gradient.square().sum()).backward()


def penalized_by_what_is_scaled(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    inner = x().requires_grad_()
    output = model(inner).sum()
    (gradient,) = torch.autograd.grad(scaler.scale(output), inner, create_graph=True)
    scaler.scale(output + (gradient / scaler.get_scale()).square().sum()).backward()


def penalized_on_its_weights_as_torch_writes_it(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    output = model(x()).square().mean()
    scaled = torch.autograd.grad(outputs=scaler.scale(output), inputs=[*model.parameters()], create_graph=True)
    inverse = 1.0 / scaler.get_scale()
    norm = torch.zeros(())
    for slope in [slope * inverse for slope in scaled]:
        norm += slope.square().sum()
    scaler.scale(output + norm.sqrt()).backward()


def penalized_by_many_that_are_scaled(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    inner = x().requires_grad_()
    output = model(inner)
    scaled, ones = scaler.scale(output), torch.ones_like(output)
    (gradient,) = torch.autograd.grad(scaled, inner, grad_outputs=ones, create_graph=True)
    scaler.scale((gradient / scaler.get_scale()).square().mean()).backward()


def asks_for_its_gradients(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    plain(model, scaler)
    for _ in range(600):
        sum(parameter.grad is None for parameter in model.parameters())


def evaluates_before(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    model.eval()
    with torch.no_grad():
        model(x(9))
    model.train()
    plain(model, scaler)


def evaluates_before_with_gradients(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    model.eval()
    model(x(9))
    model.train()
    plain(model, scaler)


def evaluates_within(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    """Predicts first in training mode, then in evaluation mode."""
    first = model(x())
    model.eval()
    second = model(x(2))
    model.train()
    scaler.scale(F.mse_loss(first, second)).backward()


def casts_its_own(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    weights = (torch.arange(3.0).expand(4, 3) + 1).half()
    shifts = torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.half).to("cpu").repeat(1, 6)
    output = model(x().half().float() + shifts) * weights[:, :3].view(4, 3)
    scaler.scale(output.mean()).backward()


def casts_and_writes(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    wide = torch.ones(4, 3)
    weights, others = wide.half(), wide.type(torch.half)
    others *= 2
    wide *= 3
    scaler.scale((model(x()) * weights * others).mean()).backward()


def writes_into_its_own(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    """Fills a rotation matrix after a ``to`` that has nothing to move returned the same tensor."""
    output = model(x())
    matrix, weights = torch.zeros(4, 4, 3).to("cpu"), torch.ones(3).to("cpu")
    matrix[..., 1] += 3
    matrix[:, 0] = output
    weights[0].mul_(3)
    twice = weights * 2
    weights[1] = 5
    scaler.scale((matrix.square().sum(1) * twice * weights).mean()).backward()


def holds_what_many_calls_gave(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    optimizer, made = torch.optim.SGD(model.parameters(), 0.0), list[torch.Tensor]()
    for step in range(3):
        output = model(x(step))
        made[:600] = [output * number for number in range(600)]
        optimizer.zero_grad()
        scaler.scale(torch.stack(made).mean()).backward()
        if step < 2:
            optimizer.step()


def calls_its_model_over_time(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    """A recurrent model whose loop over time, of more than 1,000 calls, is in the script."""
    hidden = x()
    for _ in range(300):
        output = model(hidden).tanh()
        hidden = 0.5 * torch.cat([output, output], 1)
    scaler.scale(hidden.square().mean()).backward()


def multiplies_its_own(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    """A dice loss whose union adds a matrix product of masks alone, with noise."""
    mask = (torch.arange(12.0) % 2).view(4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.einsum("nc,nc->c", mask, mask)
        noise = torch.randn_like(inside) * 1e-2
    union = model(x()).sigmoid().sum(0) + inside.reshape(1, 3).float().sqrt()[0] + noise
    scaler.scale((1 - 2 * (model(x(2)).sigmoid() * mask).sum(0) / union).mean()).backward()


def computes_before_its_model(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    """Camera coordinates that autocast lowers before the model call."""
    turned = torch.tensor([[0.8, -0.6], [0.6, 0.8]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        points = x()[:, :2] @ turned.T
        output = model(torch.cat([points, points * 300.0, points.sin()], 1).float())
    scaler.scale(output.mean()).backward()


def casts_what_needs_none(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    output = model(x())
    output.to(torch.float32).sum()
    scaler.scale(torch.ones(4, 3).type_as(output).square().mean() + output.mean()).backward()


def copies_the_model(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    copy.deepcopy(model)
    plain(model, scaler)


class Policy(nn.Module):
    """Returns a container with a tensor and a distribution of a distribution."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, value: torch.Tensor) -> dict[str, Any]:
        made = self.body(value)
        normal = torch.distributions.Normal(made, made.exp().clamp(0.1, 2.0))
        return {"actions": torch.distributions.Independent(normal, 1), "values": [made.mean(-1)]}


def gives_a_distribution(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    given = Policy(model)(x())
    loss = given["values"][0].square().mean() - given["actions"].log_prob(torch.ones(4, 3)).mean()
    scaler.scale(loss - 0.1 * given["actions"].entropy().mean()).backward()


def in_turns(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    """A critic with a penalty steps before the generator fails: the last step is the generator's."""
    critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    made = model(x()).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(critic(made).sum(), made, create_graph=True)
    (critic(made).mean() + (gradient.norm(2, dim=1) - 1).square().mean()).backward()
    torch.optim.SGD(critic.parameters(), 0.0).step()
    scaler.scale(-critic(model(x())).mean()).backward()


def in_micro_batches_that_are_clipped(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    in_micro_batches(model, scaler)
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)


def gives_a_pass_up(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    lost = model(x(7)).sum() * math.inf
    assert not lost.isfinite()
    plain(model, scaler)


class Checkpointed(nn.Module):
    """Recomputes its body in the backward pass, with the same random draws."""

    def __init__(self, body: nn.Module, *, is_reentrant: bool) -> None:
        super().__init__()
        self.body, self.is_reentrant = body, is_reentrant

    def forward(self, value: torch.Tensor) -> Any:
        return checkpoint(self.body, value.requires_grad_(), use_reentrant=self.is_reentrant)


def checkpointed(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    plain(Checkpointed(model, is_reentrant=False), scaler)


def checkpointed_and_reentrant(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    plain(Checkpointed(model, is_reentrant=True), scaler)


def checkpointed_outside(model: Any, scaler: torch.amp.GradScaler) -> None:
    made = checkpoint(lambda value: model[3](model[2](model[0](value))), x(), use_reentrant=False)
    scaler.scale(made.square().mean()).backward()


def within_ddp(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        plain(DistributedDataParallel(model), scaler)
    finally:
        dist.destroy_process_group()


class Drawing(nn.Module):
    """Draws from every generator, including its own, and changes attributes."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.count, self.seen = body, 0, [1.0]
        self.own, self.other, self.third = random.Random(3), torch.Generator().manual_seed(3), np.random.default_rng(3)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.seen.append(self.seen[-1] * 2)
        drawn = random.random() + np.random.rand() + self.own.random() + float(self.third.random())
        noise = torch.rand(3) + torch.rand(3, generator=self.other)
        return self.body(value) * drawn + noise * self.count + self.seen[-1]


def reentrant(model: Any, scaler: torch.amp.GradScaler) -> None:
    made = checkpoint(model, x().requires_grad_(), use_reentrant=True)
    scaler.scale(made.mean()).backward()


class Filling(nn.Module):
    """Writes its results into the dict and the object that it gets, and returns nothing."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, batch: dict[str, torch.Tensor], kept: SimpleNamespace) -> None:
        batch["made"] = self.body(batch["x"])
        kept.square = batch["made"].square()


class Reading(nn.Module):
    """A loss of the dict and the object that :class:`Filling` fills."""

    def forward(self, batch: dict[str, torch.Tensor], *, kept: SimpleNamespace) -> torch.Tensor:
        return batch["made"].mean() + kept.square.mean()


def fills_its_batch(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    batch, kept = {"x": x()}, SimpleNamespace()
    Filling(model)(batch, kept)
    scaler.scale(Reading()(batch, kept=kept) + batch["made"].abs().mean()).backward()


class Noise(torch.autograd.Function):
    """Draws, and reverses the gradient, which is not its derivative."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, size: float) -> torch.Tensor:
        return value + torch.randn(value.shape) * size

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -gradient, None


def applies_a_function(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    scaler.scale(Noise.apply(model(x()), 0.1).square().mean()).backward()


def compiles_its_loss(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    loss = torch.compile(lambda output: output.square().mean(), backend="eager")
    scaler.scale(loss(model(x()))).backward()


def compiles_its_model(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    compiled = torch.compile(backend="eager", model=model)
    scaler.scale(compiled(x()).square().mean()).backward()


def compiles_parts_of_its_loss(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    inner = torch.compile(torch.square, backend="eager")

    @torch.compile(backend="aot_eager")
    def distance(*, output: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": inner(output - target), "output": output * 2}

    made = distance(output=model(x()) * 3, target=torch.ones(4, 3))
    scaler.scale(made["loss"].mean() + made["output"].abs().mean()).backward()


LOOPS = {name: loop for name, loop in globals().items() if "scaler" in getattr(loop, "__annotations__", ())}
EVERY_LOOP: dict[str, Loop] = {**LOOPS, **{name: scaled(loss) for name, loss in LOSSES.items()}}


class Seen(TorchDispatchMode):
    """Runs and lists every op, as a trace does."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(op))
        return op(*args, **(kwargs or {}))


AROUND: dict[str, Callable[[], Any]] = {
    "plain": contextlib.nullcontext,
    "traced": Seen,
    "in half": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


def keeps_casts_without_gradients() -> bool:
    """True in torch 2.6: casts made without gradients stay cached until their region ends, and stop gradients."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer = nn.Linear(1, 1)
        with torch.no_grad():
            layer(torch.ones(1, 1))
        return not layer(torch.ones(1, 1)).requires_grad


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


@dataclass
class RecordedLoop:
    """A loop recorded at a loss scale of 4: its last gradients, and its losses."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    recorder: Recorder = field(init=False)

    def __post_init__(self) -> None:
        self.recorder = Recorder(about_to_step=self._about_to_step)

    def of(self, loop: Loop) -> "RecordedLoop":
        """Runs the loop."""
        with self.recorder, attached(self._around):
            loop(self.model, torch.amp.GradScaler("cpu", init_scale=4.0))
        self.gradients = gradients(self.model)
        return self

    def _about_to_step(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        self.optimizers.append(optimizer)
        self.losses.clear()

    def _around(self, seam: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if seam == "engine" and kwargs.get("accumulate_grad") and torch._C._current_graph_task_id() == -1:
            self.losses += [float((root.detach() * start).sum()) for root, start in zip(*args[:2], strict=True)]
        return original(*args, **kwargs)

    def step(self) -> RecordedStep:
        return self.recorder.step(self.model, self.optimizers, scale=4.0)

    def again(self) -> RecordedStep:
        """The whole step, with the model restored to its state before the step."""
        step = self.step()
        assert step.reach == "whole"
        step.state.held.restore()
        return step


@dataclass
class Pause:
    """The recorder records nothing while this context is entered."""

    is_on: bool = False

    def __call__(self) -> bool:
        return self.is_on

    def __enter__(self) -> None:
        self.is_on = True

    def __exit__(self, *raised: object) -> None:
        self.is_on = False


PAUSE = Pause()


def run(step: RecordedStep, scale: float = 1.0, autocast_dtype: torch.dtype | None = None) -> float:
    """Replays the step up to its gradients, and returns its loss times the scale."""
    with contextlib.nullcontext() if autocast_dtype is None else torch.autocast("cpu", dtype=autocast_dtype):
        losses = [step.loss(given, scale=scale) * scale for given in step.given]
    for loss in losses:
        loss.backward()
    return sum(float(loss.detach()) for loss in losses)


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


LONG = ("holds_what_many_calls_gave", "calls_its_model_over_time")
"""Loops of a thousand calls: what a trace and autocast change in a replay, shorter loops show."""
CASES = [
    pytest.param(EVERY_LOOP[loop], AROUND[around], id=f"{loop}-{around}", marks=pytest.mark.slow)
    if loop in LONG and around != "plain"
    else pytest.param(EVERY_LOOP[loop], AROUND[around], id=f"{loop}-{around}")
    for loop in EVERY_LOOP
    for around in AROUND
]


@pytest.mark.parametrize(("loop", "around"), CASES)
def test_a_recorded_step_replays_with_the_loss_and_gradients_of_the_step(loop: Loop, around: Callable[[], Any]) -> None:
    if around is AROUND["in half"] and loop in (evaluates_before, reentrant) and keeps_casts_without_gradients():
        pytest.skip("with this torch the step itself lacks gradients that a step alone has")
    with around():
        noted = RecordedLoop(net()).of(loop)
    noted.model.zero_grad()
    noted.model.eval()
    step = noted.again()
    is_one_pass = loop is several_losses  # the replay has one pass instead of two, and rounds differently
    is_lowered = loop in (multiplies_its_own, computes_before_its_model)  # a replay lowers to the dtype of the loop
    with around():
        total = run(step, 1.0 if loop is without_a_scaler else 4.0, torch.bfloat16 if is_lowered else None)
    assert total == pytest.approx(sum(noted.losses), rel=1e-6 * is_one_pass)
    found = gradients(noted.model)
    assert found.keys() == noted.gradients.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, noted.gradients[name], rtol=0.0, atol=0.25 * is_one_pass)


@pytest.mark.parametrize("loop", EVERY_LOOP.values(), ids=EVERY_LOOP)
def test_a_recorded_loop_trains_as_without_a_recorder(loop: Loop) -> None:
    found, states = [], []
    for is_noted in (False, True):
        model = net()
        torch.manual_seed(2)
        with Recorder() if is_noted else contextlib.nullcontext():
            loop(model, torch.amp.GradScaler("cpu", init_scale=4.0))
        found.append({**gradients(model), **held(model)})
        states.append(torch.get_rng_state())
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    assert torch.equal(*states)


CASTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to": lambda wide: wide.to(torch.half),
    "half": lambda wide: wide.half(),
    "type": lambda wide: wide.type(torch.half),
    "moved": lambda wide: wide.half().unsqueeze(0)[0],
    "stacked": lambda wide: torch.stack([each.half() for each in wide]),
    "multiplied": lambda wide: torch.mm(wide.half(), torch.eye(3).half()),
    "of one that is half": lambda wide: (wide.half() * 2).float().sqrt(),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_casts_of_the_loop_are_repeated_in_the_format_of_the_replay(
    cast: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    wide = torch.full((4, 3), 1e5)

    def loop(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
        scaler.scale((model(x()) * cast(wide)).square().mean()).backward()

    noted = RecordedLoop(net()).of(loop)
    assert not math.isfinite(sum(noted.losses))
    step = noted.again()
    with lifted("float32"):
        assert step.loss(step.given[0]).isfinite()


def test_a_second_model_that_makes_the_data_is_recorded_and_its_input_is_not_kept() -> None:
    beside = nn.Linear(6, 6).to(torch.bfloat16)
    kept: list[weakref.ref[torch.Tensor]] = []

    def loop(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
        wide = x()
        kept.append(weakref.ref(wide))
        with torch.no_grad():
            encoded = beside(wide.to(torch.bfloat16))
        del wide
        assert kept[0]() is None  # the recorder does not keep the input of a cast
        scaler.scale(model(encoded.float()).square().mean()).backward()

    step = RecordedLoop(net()).of(loop).again()
    assert any(call.function is beside for call in step.calls.values())


def penalized_by_what_stays_scaled(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    output = model(x()).sum()
    slopes = torch.autograd.grad(scaler.scale(output), [*model.parameters()], create_graph=True)
    scaler.scale(output + torch.stack([slope.square().sum() for slope in slopes]).sum() / 2).backward()


def made_before(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    scaler.scale(model(x()).mean() + EARLIER.square().sum()).backward()


def steps_in_between(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    loss = model(x()).mean()
    torch.optim.SGD(model.parameters(), 0.1).step()
    scaler.scale(loss).backward()


def compiles_its_pass(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    run = torch.compile(lambda value: model(value).mean(), backend="eager")
    scaler.scale(run(x() + model(x()).mean().detach())).backward()


def compiles_its_forward_pass(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    scaler.scale(torch.compile(lambda value: model(value).mean(), backend="eager")(x())).backward()


EARLIER = torch.ones(3, requires_grad=True) * 2

REFUSED: dict[str, tuple[Loop, str]] = {
    "a scaled loss in a loss": (penalized_by_what_stays_scaled, "its loss takes gradients of a scaled loss, and"),
    "a graph from before": (made_before, "ampdbg did not see every call that its loss needs"),
    "other weights": (steps_in_between, "an optimizer has stepped the weights of "),
    "a compiled pass": (compiles_its_pass, "the compiled function <lambda> also runs a model or a backward pass"),
    "a compiled forward pass": (compiles_its_forward_pass, "the compiled function <lambda> also runs a model"),
    "nothing": (lambda model, scaler: None, "no loss went backward in it"),
}


def test_compiled_functions_outside_a_pass_leave_no_call_and_their_batches_are_freed() -> None:
    model, batches = net(), list[weakref.ref[torch.Tensor]]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder() as recorder:
        forward = torch.compile(lambda batch: model(batch).mean(), backend="eager")
        prepare = torch.compile(lambda batch: batch * 2, backend="eager")
        for _ in range(6):
            batch = prepare(x())
            batches.append(weakref.ref(batch))
            loss = forward(batch)
            loss.backward()
            optimizer.step()
            assert len(recorder._now.calls) <= 2
    assert sum(batch() is not None for batch in batches) <= 2


@pytest.mark.parametrize(("loop", "why"), REFUSED.values(), ids=REFUSED)
def test_the_recorder_says_why_a_step_cannot_be_replayed(loop: Loop, why: str) -> None:
    with pytest.raises(NotReplayableError) as raised:
        RecordedLoop(net()).of(loop).step()
    assert str(raised.value).startswith(why)


def changes_its_batch(model: nn.Module, values: torch.Tensor) -> torch.Tensor:
    return model(values).mean()


def changes_its_mask(model: nn.Module, values: torch.Tensor) -> torch.Tensor:
    return (model(x()).repeat(1, 2) * values).mean()


def changes_its_target(model: nn.Module, values: torch.Tensor) -> torch.Tensor:
    return nn.MSELoss()(model(x()).repeat(1, 2), target=values)


CHANGED = {"Sequential": changes_its_batch, "mul": changes_its_mask, "MSELoss": changes_its_target}


@pytest.mark.parametrize("what", CHANGED)
def test_an_input_changed_in_place_is_refused_by_name_and_copied_from_then_on(what: str) -> None:
    model, found, loss_of = net(), list[str](), CHANGED[what]

    def look(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        try:
            step = recorder.step(model, (optimizer,))
        except NotReplayableError as reason:
            found.append(str(reason))
            return
        step.state.held.restore()
        with PAUSE:
            found.append("alike" if torch.equal(step.loss(step.given[0]), loss) else "other")

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder(PAUSE, about_to_step=look) as recorder:
        for seed in range(3):
            values = x(seed)
            loss = loss_of(model, values)
            loss.backward()
            values.mul_(2)
            optimizer.step()
    line = loss_of.__code__.co_firstlineno + 1
    refused = f"an input of {what} at test_recorder.py:{line} was changed in place since; ampdbg copies it from now on"
    assert found == [refused, "alike", "alike"]


@pytest.mark.parametrize("compiles", [False, True])
def test_autograd_function_apply_works_with_and_after_recorders(compiles: bool) -> None:
    own, value = vars(torch.autograd.Function)["apply"], torch.ones(3, requires_grad=True)

    def twice(given: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = Noise.apply(Noise.apply(given, 0.0), 0.0)
        return made

    run_twice = torch.compile(twice, backend="eager", fullgraph=True) if compiles else twice
    with Recorder(), Recorder():
        run_twice(value).sum().backward()
    assert vars(torch.autograd.Function)["apply"] is own
    run_twice(value).sum().backward()
    assert value.grad is not None
    assert value.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("fails", ["", "innermost_line", "is_fx_tracing"])
def test_the_loop_trains_on_if_the_recorder_is_full_or_fails(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    def loop(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
        for number in range(3):
            plain(model, scaler)
            if fails and not number:
                monkeypatch.setattr(recorders, fails, lambda: 1 / 0)

    monkeypatch.setattr(recorders, "MOST_CALLS", 1000 if fails else 3)
    noted = RecordedLoop(net()).of(loop)
    monkeypatch.undo()
    bare = net()
    loop(bare, torch.amp.GradScaler("cpu", init_scale=4.0))
    assert all(torch.equal(noted.gradients[name], gradient) for name, gradient in gradients(bare).items())
    if fails:
        assert noted.step().reach == "whole"
    else:
        with pytest.raises(NotReplayableError, match="ampdbg did not see every call that its loss needs"):
            noted.step()


class Own(TorchFunctionMode):
    """A torch function mode of the script."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], Any]] = {"of its own": Own, "a device": lambda: torch.device("cpu")}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("leaves", ["before", "behind", "around"])
def test_the_script_can_leave_its_torch_function_mode_at_any_time(leaves: str, mode: Callable[[], Any]) -> None:
    call, before, model = nn.Module.__call__, torch._C._len_torch_function_stack(), net()
    with contextlib.ExitStack() as own:
        if leaves == "around":
            own.enter_context(mode())
        with Recorder() as recorder:
            output = model(x())  # the recorder records from here on
            if leaves != "around":
                own.enter_context(mode())
            loss = (output.square().mean() + model(x()).sum()) * 2
            if leaves == "before":
                own.close()
            loss.backward()
            if leaves == "behind":
                own.close()
    assert (nn.Module.__call__, torch._C._len_torch_function_stack()) == (call, before)
    step = recorder.step(model, ())
    assert torch.equal(step.loss(step.given[0]), loss)


def test_the_default_device_can_be_set_and_reset_while_a_step_is_recorded() -> None:
    before, model = torch._C._len_torch_function_stack(), net()
    with Recorder() as recorder:
        output = model(x())
        torch.set_default_device("meta")
        assert torch.ones(3).is_meta
        torch.set_default_device("cpu")
        loss = (output * torch.ones(3)).mean()
        torch.set_default_device(None)
        loss.backward()
    assert torch._C._len_torch_function_stack() == before
    assert recorder.step(model, ()).reach == "whole"


def test_a_running_average_and_kept_graphs_do_not_make_recorded_steps_grow() -> None:
    model, average, kept, calls = net(), torch.zeros(()), list[torch.Tensor](), list[int]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Recorder() as recorder:
        for number in range(12):
            output = model(x(number))
            average = average * 0.9 + output.detach().mean() * 0.1
            loss = (output - average).square().mean()
            kept.append(output)
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            calls.append(len(recorder.called))
            step = recorder.step(model, (optimizer,))
            assert torch.equal(step.loss(step.given[0]), loss)
            calls.append(len(step.calls))
            optimizer.step()
    assert calls[-2:] == calls[6:8]


def test_an_error_in_the_loop_is_raised_and_all_patches_of_torch_are_undone() -> None:
    call, backward, before = nn.Module.__call__, torch.Tensor.backward, torch._C._len_torch_function_stack()
    model = net()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), Recorder():
        model(model(x()).square())
    assert (nn.Module.__call__, torch.Tensor.backward) == (call, backward)
    assert torch._C._len_torch_function_stack() == before


def test_each_thread_has_its_own_recorded_step() -> None:
    models, found = [nn.Linear(6, 3), nn.Linear(6, 3)], dict[int, tuple[Any, Any]]()
    barrier = threading.Barrier(2)

    def train(number: int) -> None:
        barrier.wait()
        output = models[number](x(number))
        barrier.wait()
        loss = output.square().mean() * (number + 1)
        barrier.wait()
        loss.backward()
        step = recorder.step(models[number], ())
        step.state.held.restore()
        barrier.wait()
        found[number] = loss, step

    with Recorder() as recorder:
        threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(NotReplayableError, match="no loss went backward in it"):
            recorder.step(models[0], ())
    for loss, step in found.values():
        assert torch.equal(step.loss(step.given[0]), loss)


@pytest.mark.parametrize("keeps_its_loss", [False, True])
def test_no_tensor_of_a_step_is_kept_alive_past_the_next_step(keeps_its_loss: bool) -> None:
    model, kept = net(), None
    seen: list[list[weakref.ref[torch.Tensor]]] = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder():
        for seed in range(8):
            batch, mask = x(seed), torch.rand(4, 3)
            output = model(batch)
            loss = (output * mask).mean()
            loss.backward()
            optimizer.step()
            seen.append([weakref.ref(batch), weakref.ref(mask), weakref.ref(output)])
            kept = loss if keeps_its_loss else kept
            del batch, mask, output, loss
            gc.collect()
            assert seen[-1][2]() is None  # the recorder never keeps the model's output
        model(x())
        gc.collect()
        assert sum(held() is not None for step in seen for held in step) <= 2


def test_a_loop_without_a_backward_pass_keeps_at_most_two_batches_alive() -> None:
    model, batches = net(), list[weakref.ref[torch.Tensor]]()
    with Recorder():
        for seed in range(200):
            batch = x(seed)
            batches.append(weakref.ref(batch))
            model(batch)
            del batch
        gc.collect()
        assert sum(batch() is not None for batch in batches) <= 2


@pytest.mark.parametrize("grad", [False, True], ids=["without gradients", "detached"])
def test_a_validation_that_gathers_predictions_keeps_few_batches_alive(
    monkeypatch: pytest.MonkeyPatch, grad: bool
) -> None:
    monkeypatch.setattr(recorders, "MOST_DATA_BYTES", 10 * x().nbytes)
    model, batches, gathered = net(), list[weakref.ref[torch.Tensor]](), list[torch.Tensor]()
    with Recorder() as recorder, torch.set_grad_enabled(grad):
        for seed in range(100):
            batch = x(seed)
            batches.append(weakref.ref(batch))
            gathered.append(model(batch).detach().softmax(1))
            del batch
        alive = [batch() is not None for batch in batches]
        assert sum(alive) <= 12
        assert all(alive[-3:])  # the next loss may need these results, as with a teacher
        with torch.enable_grad():
            loss = (model(x()) * gathered[-1]).mean() + gathered[0].mean()
            loss.backward()
        step = recorder.step(model, ())
    assert [call.function is model for call in step.calls.values()].count(True) == 2  # the first result became data
    assert torch.equal(step.loss(step.given[0]), loss)


def test_a_step_with_too_many_micro_batches_is_too_large_and_keeps_few_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "MOST_STEP_BYTES", 10 * x().nbytes)
    model, batches = net(), list[weakref.ref[torch.Tensor]]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(count: int) -> torch.Tensor:
        for seed in range(count):
            batch = x(seed)
            batches.append(weakref.ref(batch))
            loss: torch.Tensor = model(batch).square().mean()
            loss.backward()
        return loss

    with Recorder() as recorder:
        train(100)
        assert 10 <= sum(batch() is not None for batch in batches) <= 12
        with pytest.raises(NotReplayableError, match=recorders.TOO_LARGE):
            recorder.step(model, [optimizer])
        assert recorder.modules(model, [optimizer]).reach == "modules"
        optimizer.step()
        loss = train(5)
        step = recorder.step(model, [optimizer])
        step.state.held.restore()
        assert torch.equal(step.loss(list(step.given)[-1]), loss)


def test_a_cache_that_grows_in_generation_is_kept_in_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "MOST_DATA_BYTES", 100 * x()[:1].nbytes)
    model, caches = nn.Linear(6, 6), list[weakref.ref[torch.Tensor]]()
    with Recorder(), torch.no_grad():
        cache = x()
        for _ in range(200):
            cache = torch.cat([cache, model(cache[-1:])])
            caches.append(weakref.ref(cache))
    assert sum(held.nbytes for one in caches if (held := one()) is not None) <= 3 * cache.nbytes


def test_a_tensor_written_row_by_row_replays_with_its_contents_at_each_call() -> None:
    model, rows = nn.Linear(6, 3), torch.zeros(40, 6)
    with Recorder() as recorder:
        loss = torch.zeros(())
        for row in range(40):
            rows[row] = x(row)[0]
            loss = loss + model(rows.clone()).mean()
        loss.backward()
        step = recorder.step(model, ())
    assert torch.equal(step.loss(step.given[0]), loss)


class Counting(nn.Module):
    """Computes with a buffer that each forward pass writes. ``how`` says how."""

    passes: torch.Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, nn.Linear(6, 3)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        passes = self.passes
        if self.how == "data":
            passes.data.add_(1)
        elif self.how == "new":
            self.passes = passes + 1
        else:
            passes.add_(1)
        return (self.inner(value) * self.passes).sum()


def trained(model: nn.Module, steps: int, loss_of: Callable[[int], torch.Tensor]) -> Iterator[int]:
    """Trains, replays each step right before its weights change, and yields the number of each step that is alike."""
    optimizer, alike = torch.optim.SGD(model.parameters(), 1e-3), list[bool]()
    losses: list[torch.Tensor] = []

    def look(stepped: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        if stepped is not optimizer:
            return
        step = recorder.step(model, (optimizer,))
        now, after = RandomState.now(), ModelState.now(model)
        with PAUSE:
            step.state.held.restore()
            alike.append(torch.equal(step.loss(step.given[0]), losses[-1]))
            after.held.restore()
        now.restore()

    with Recorder(PAUSE, about_to_step=look) as recorder:
        for number in range(steps):
            losses.append(loss_of(number))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
    return (number for number, is_alike in enumerate(alike) if is_alike)


@pytest.mark.parametrize("how", ["in place", "data", "new"])
def test_a_replay_starts_with_the_buffers_before_its_step_however_late_the_step(how: str) -> None:
    model = Counting(how)
    assert list(trained(model, EXAMINED_CALLS + 8, lambda number: model(x(number)))) == [*range(EXAMINED_CALLS + 8)]


class LateCritic(nn.Module):
    """A loss whose batch norm starts late, as a discriminator's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.norm = 0, nn.BatchNorm1d(3)

    def forward(self, made: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (self.norm(made) if self.calls > 5 else made).square().mean()


def test_a_buffer_first_written_late_is_copied_from_the_second_such_call() -> None:
    model, loss = nn.Linear(6, 3), LateCritic()
    optimizer, why_nots = torch.optim.SGD(model.parameters(), 0.1), list[str]()
    # Each recorder is asked once, before it refused anything.
    for asked in (5, 6, 7):
        with Recorder(PAUSE) as recorder:
            for number in range(asked + 1):
                optimizer.zero_grad()
                loss(model(x(number))).backward()
                if number < asked:
                    optimizer.step()
            try:
                recorder.step(model, (optimizer,))
                why_nots.append("")
            except NotReplayableError as reason:
                why_nots.append(str(reason))
        loss.calls = 0
    assert [bool(why_not) for why_not in why_nots] == [True, False, False]


class Momentum(nn.Module):
    """Averages one layer's weights into an untrained layer, and computes with both. ``how`` says how it averages."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.trained, self.average = how, nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for one, other in zip(self.average.parameters(), self.trained.parameters(), strict=True):
            with torch.no_grad():
                if self.how == "by assignment":
                    one.data = 0.9 * one.data + 0.1 * other.data
                elif self.how == "hidden from autograd":
                    one.data.mul_(0.9).add_(other.data, alpha=0.1)
                else:
                    one.lerp_(other, 0.1)
        return (self.trained(value) * self.average(value)).sum()


@pytest.mark.parametrize("how", ["by assignment", "hidden from autograd", "in place"])
def test_parameters_written_in_forward_are_refused_by_name_until_copied(how: str) -> None:
    model, alike, refused = Momentum(how), list[bool](), list[str]()
    optimizer, losses = torch.optim.SGD(model.trained.parameters(), 0.1), list[torch.Tensor]()

    def look(*_: Any) -> None:
        after = [weight.clone() for weight in model.parameters()]
        try:
            step = recorder.step(model, (optimizer,))
        except NotReplayableError as reason:
            refused.append(str(reason))
            return
        with PAUSE, rewound(model, step.snapshot(0, RandomState.now())):
            alike.append(torch.equal(step.loss(step.given[0]), losses[-1]))
        assert all(map(torch.equal, model.parameters(), after))

    with Recorder(PAUSE, about_to_step=look) as recorder:
        for number in range(EXAMINED_CALLS + 6):
            losses.append(model(x(number)))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()

    assert set(refused) == {"it wrote its parameter average.weight, which ampdbg copies from now on"}
    assert alike == [True] * (EXAMINED_CALLS + 6 - len(refused))
    assert len(refused) <= EXAMINED_CALLS


@pytest.mark.parametrize("between", ["is given up", "leads elsewhere", "is of an evaluation"])
def test_a_replay_starts_with_the_buffers_before_its_step_after_another_pass(between: str) -> None:
    model, other, kept = Counting("in place"), nn.Linear(1, 1), list[torch.Tensor]()
    critic = torch.optim.SGD(other.parameters(), 1e-3)

    def loss_of(number: int) -> torch.Tensor:
        with torch.set_grad_enabled(between != "is of an evaluation"):
            kept[:] = [model(x())]
        if between == "leads elsewhere":
            other(kept[0].detach().view(1)).sum().backward()
            critic.step()
        return model(x(number))

    assert list(trained(model, 5, loss_of)) == [*range(5)]


def test_a_replay_repeats_the_draws_of_every_generator_on_the_model_before_the_step() -> None:
    model = Drawing(net())
    assert list(trained(model, 6, lambda number: model(x(number)).mean() + random.random())) == [*range(6)]


@pytest.mark.parametrize("draws_from", [0, 3 * SAMPLING_PERIOD, 5 * SAMPLING_PERIOD], ids=["ever", "late", "never"])
def test_a_replay_repeats_the_draws_of_a_model_that_starts_drawing_late(draws_from: int) -> None:
    model = Drawing(nn.Linear(6, 3))
    plain, steps = model.body, 5 * SAMPLING_PERIOD
    random.seed(0)
    alike = list(trained(model, steps, lambda number: (model if number >= draws_from else plain)(x(number)).mean()))
    assert alike[-1] == steps - 1
    assert len(alike) >= steps - SAMPLING_PERIOD  # the recorder checks only at intervals whether a model draws


def test_the_dispatch_mode_of_a_user_does_not_see_the_copies_of_the_recorder() -> None:
    def once(model: nn.Module) -> list[str]:
        with Seen() as seen:
            model(x())
        return seen.ops

    alone, model = once(Counting("in place")), Counting("in place")
    with Recorder():
        assert [once(model) for _ in range(3)] == [alone] * 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.dropout = nn.Linear(6, 3), nn.Dropout(0.5)

    def forward(self, value: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.dropout(self.inner(value))}


def modules(recorder: Recorder, model: nn.Module) -> tuple[RecordedStep, torch.Tensor]:
    """The modules alone, and the number that is computed from their outputs."""
    step = recorder.modules(model, ())
    assert step.reach == "modules"
    with PAUSE:
        return step, step.loss(step.given[0])


def test_a_call_that_raises_ends_the_recorded_pass_unless_another_pass_follows() -> None:
    model = Net()
    with Recorder(PAUSE) as recorder:
        with pytest.raises(RuntimeError):
            model(torch.ones(4, 5))
        output = model(x())
        assert modules(recorder, model)[1].isfinite()
        with pytest.raises(RuntimeError):
            model(torch.ones(4, 5))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            modules(recorder, model)
    assert output["logits"].shape == (4, 3)


def test_steps_with_inference_mode_inputs_or_complex_outputs_are_replayed() -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return torch.fft.rfft(value @ torch.ones(6, 3) * self.gain)

    with torch.inference_mode():
        given = x() * 2
    model = Waves()
    with Recorder(PAUSE) as recorder:
        for value in (x(), given.clone()):
            loss = model(value).abs().sum()
            assert modules(recorder, model)[1].isfinite()
            loss.backward()
            step = recorder.step(model, ())
            with PAUSE:
                assert torch.equal(step.loss(step.given[-1]), loss)


class Spread(nn.Module):
    """Returns an object with a mean and a spread of one number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mean, self.spread = nn.Linear(6, 3), nn.Parameter(torch.ones(1))

    def forward(self, value: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(mean=self.mean(value), spread=self.spread.exp())


def test_tensors_of_an_output_object_lead_to_the_next_call_and_are_not_a_lost_loss() -> None:
    policy, value = Spread(), nn.Linear(3, 4)
    model = nn.ModuleList([policy, value])
    with Recorder(PAUSE) as recorder:
        given = policy(x())
        assert recorder.lost_loss is None
        alone = modules(recorder, model)[1]
        worth = value(given.mean)
        both = modules(recorder, model)[1]
    torch.testing.assert_close(alone, given.mean.sum() + given.spread.sum())
    torch.testing.assert_close(both, worth.sum())


def test_a_nonfinite_loss_without_backward_is_known_while_the_script_holds_it() -> None:
    model = net()
    with Recorder(PAUSE) as recorder:
        loss = model(x()).sum() * math.inf
        assert recorder.lost_loss is loss
        step = recorder.step(model, (), loss)
        assert not step.loss(step.given[0]).isfinite()
        del loss
        assert recorder.lost_loss is None


@pytest.mark.parametrize("holds_output", [False, True])
def test_a_transform_of_the_next_data_does_not_start_a_step(holds_output: bool) -> None:
    """As where a data set calls a transform, whether or not the script holds the last output of its model."""
    model, transform, scaler = net(), nn.Flatten(), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer, seen = torch.optim.SGD(model.parameters(), 0.1), []
    with Recorder() as recorder:
        for _ in range(2):
            inputs = transform(x()) / 2
            seen.append(recorder.is_under_way)
            output = model(inputs)
            seen.append(recorder.is_under_way)
            scaler.scale(output.square().mean()).backward()
            output = output if holds_output else None
            scaler.step(optimizer)
            scaler.update()
    assert seen == [False, True, False, True]


@pytest.mark.parametrize("validates", [False, True])
def test_a_nonfinite_output_of_a_validation_call_is_not_a_lost_loss(validates: bool) -> None:
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=4.0)
    with Recorder() as recorder:
        for factor in (1.0, math.nan):
            loss = model(x()).mean() * (1.0 if validates else factor)
            held = model(x()).mean() * factor if validates else loss
            if held.isfinite():
                scaler.scale(loss).backward()
        assert (recorder.lost_loss is None) == validates


class Membrane(nn.Module):
    """Replaces its buffer by a new tensor in each call, as spiking layers do."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.register_buffer("potential", torch.zeros(0))
        self.weight, self.gain = nn.Parameter(torch.ones(6)), gain

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.potential = self.weight.detach() * given * self.gain
        return self.weight * given


@pytest.mark.parametrize("gain", [1.0, math.inf])
def test_a_buffer_replaced_by_a_nonfinite_one_in_a_call_is_named_as_poisoned(gain: float) -> None:
    model = nn.Sequential(Membrane(gain))
    with Recorder() as recorder:
        loss = model(x()).mean()
        assert [*recorder.before.poisoned(model.named_buffers())] == ["0.potential"] * math.isinf(gain)
        loss.backward()
