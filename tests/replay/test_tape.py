"""A tape plays a step again: the same loss and gradients, by the same code, on what the step was given."""

import contextlib
import copy
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ampdbg.precision.widening import lifted
from ampdbg.probes.seams import attached
from ampdbg.replay.random_state import RandomState
from ampdbg.replay.tape import Tape

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
    # What the first call gives enters the second as data, as of a generator of old code.
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


def changes_its_batch(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    batch = x()
    scaler.scale(model(batch).square().mean()).backward()
    batch.mul_(100)


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
    """The first prediction is of the model in training, the second of the model as it will be used."""
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


def multiplies_its_own(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    """A dice loss, whose union is in part a matrix product of masks alone; one number is drawn beside it."""
    mask = (torch.arange(12.0) % 2).view(4, 3)
    with torch.autocast("cpu", dtype=torch.half):
        inside = torch.einsum("nc,nc->c", mask, mask)
        noise = torch.randn_like(inside) * 1e-2
    union = model(x()).sigmoid().sum(0) + inside.reshape(1, 3).float().sqrt()[0] + noise
    scaler.scale((1 - 2 * (model(x(2)).sigmoid() * mask).sum(0) / union).mean()).backward()


def casts_what_needs_none(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    output = model(x())
    output.to(torch.float32).sum()
    scaler.scale(torch.ones(4, 3).type_as(output).square().mean() + output.mean()).backward()


def copies_the_model(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    copy.deepcopy(model)
    plain(model, scaler)


class Policy(nn.Module):
    """Gives a distribution of a distribution, beside a tensor, in a container."""

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


LOOPS = {name: loop for name, loop in globals().items() if "scaler" in getattr(loop, "__annotations__", ())}
PLAYED: dict[str, Loop] = {**LOOPS, **{name: scaled(loss) for name, loss in LOSSES.items()}}


class Traced(TorchDispatchMode):
    """Runs every op, as a trace does."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*args, **(kwargs or {}))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def taped(model: nn.Module, loop: Loop) -> tuple[Tape, dict[str, torch.Tensor]]:
    """The tape of a loop at a loss scale of 4, and the gradients that the loop has left."""
    tape = Tape(model, "cpu")
    with tape, attached(tape.around):
        loop(model, torch.amp.GradScaler("cpu", init_scale=4.0))
    return tape, gradients(model)


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("loop", PLAYED.values(), ids=PLAYED)
def test_a_played_step_has_the_gradients_of_the_step(loop: Loop, is_traced: bool) -> None:
    model = net()
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    with Traced() if is_traced else contextlib.nullcontext():
        tape, expected = taped(model, loop)
    played = tape.played()
    assert played is not None, tape.why_not
    model.zero_grad()
    model.eval()
    tape.state.write(model)
    for name, value in model.named_buffers():
        value.copy_(buffers[name])
    random_state = RandomState.now()
    scale = 1.0 if loop is without_a_scaler else 4.0
    total = 0.0
    for given in played.given:
        loss = played.loss(given)
        (loss * scale).backward()
        total += float(loss.detach())
    random_state.restore()
    assert total == pytest.approx(tape.loss, rel=1e-6)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name])
    assert expected.keys() == gradients(model).keys()


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
def test_what_a_loop_casts_is_cast_again_in_the_format_of_the_replay(
    cast: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    wide = torch.full((4, 3), 1e5)

    def loop(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
        scaler.scale((model(x()) * cast(wide)).square().mean()).backward()

    tape, _ = taped(net(), loop)
    played = tape.played()
    assert played is not None, tape.why_not
    assert math.isnan(tape.loss) or math.isinf(tape.loss)
    with lifted("float32"):
        assert played.loss(played.given[0]).isfinite()


def test_a_model_beside_is_no_part_of_a_step_for_what_is_cast_for_it() -> None:
    beside = nn.Linear(6, 6).to(torch.bfloat16)
    kept: list[weakref.ref[torch.Tensor]] = []

    def loop(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
        wide = x()
        kept.append(weakref.ref(wide))
        with torch.no_grad():
            encoded = beside(wide.to(torch.bfloat16))
        del wide
        assert kept[0]() is None  # nothing of it is held when what was cast is gone
        scaler.scale(model(encoded.float()).square().mean()).backward()

    tape, _ = taped(net(), loop)
    played = tape.played()
    assert played is not None, tape.why_not
    assert not any(call.function is beside for call in played.calls)


def hidden(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    scaler.scale(Double.apply(model(x())).mean()).backward()


def penalized_by_what_is_scaled(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    inner = x().requires_grad_()
    output = model(inner).sum()
    (gradient,) = torch.autograd.grad(scaler.scale(output), inner, create_graph=True)
    scaler.scale(output + (gradient / scaler.get_scale()).square().sum()).backward()


def penalized_by_many_that_are_scaled(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    inner = x().requires_grad_()
    output = model(inner)
    scaled, ones = scaler.scale(output), torch.ones_like(output)
    (gradient,) = torch.autograd.grad(scaled, inner, grad_outputs=ones, create_graph=True)
    scaler.scale((gradient / scaler.get_scale()).square().mean()).backward()


def no_scalar(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    loss = model(x())
    scaler.scale(loss).backward(torch.ones_like(loss))


def made_before(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    scaler.scale(model(x()).mean() + EARLIER.square().sum()).backward()


def steps_in_between(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    loss = model(x()).mean()
    torch.optim.SGD(model.parameters(), 0.1, momentum=0.9).step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.0)
    scaler.scale(loss)


EARLIER = torch.ones(3, requires_grad=True) * 2

REFUSED: dict[str, tuple[Loop, str]] = {
    "a function of autograd's": (hidden, "not all seen"),
    "a scaled loss in a loss": (penalized_by_what_is_scaled, "its loss takes gradients of what the scaler has scaled"),
    "scaled values in a loss": (penalized_by_many_that_are_scaled, "its loss takes gradients of what the scaler has"),
    "no scalar": (no_scalar, "no scalar"),
    "a graph from before": (made_before, "not all seen"),
    "other weights": (steps_in_between, "others by now"),
    "nothing": (lambda model, scaler: None, "no loss"),
}


@pytest.mark.parametrize(("loop", "why"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_played_is_said(loop: Loop, why: str) -> None:
    tape, _ = taped(net(), loop)
    assert tape.played() is None
    assert why in tape.why_not


@pytest.mark.parametrize("fails", [False, True])
def test_a_tape_that_is_full_or_fails_lets_the_loop_go_on(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    def loop(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
        for number in range(3):
            plain(model, scaler)
            if fails and not number:
                monkeypatch.setattr("ampdbg.replay.tape.innermost_line", lambda: 1 / 0)

    monkeypatch.setattr("ampdbg.replay.tape.MOST_CALLS", 2000 if fails else 3)
    tape, found = taped(net(), loop)
    monkeypatch.undo()
    bare = net()
    loop(bare, torch.amp.GradScaler("cpu", init_scale=4.0))
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients(bare).items())
    assert tape.played() is None
    assert ("ampdbg itself failed" if fails else "more than 3 calls") in tape.why_not


class Own(TorchFunctionMode):
    """A mode of the script's own."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_above", [False, True])
def test_a_tape_leaves_nothing_behind_in_any_order(is_above: bool) -> None:
    call, tape, own = nn.Module.__call__, Tape(net(), "cpu"), Own()
    before = torch._C._len_torch_function_stack()
    if is_above:
        tape.__enter__()
        own.__enter__()
        tape.__exit__()
        assert torch.overrides._get_current_function_mode() is own
        own.__exit__(None, None, None)
    else:
        with own, tape, pytest.raises(ValueError, match="of the loop"):
            raise ValueError("of the loop")
    assert nn.Module.__call__ is call
    assert torch._C._len_torch_function_stack() == before


def test_a_weight_that_a_pass_makes_anew_leaves_its_id_to_nobody() -> None:
    model = net()
    model.plain = torch.ones(3)
    known = id(model.plain)
    tape = Tape(model, "cpu")
    model.plain = torch.ones(3)
    gc.collect()
    made = [torch.empty(3) for _ in range(1000)]
    assert known not in map(id, made)
    assert all(tape.placeholder(tensor) is None for tensor in made)
