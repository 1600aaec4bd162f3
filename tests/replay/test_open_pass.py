"""The forward pass under way: noted from outside, held no longer than by its script, and run again."""

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ampdbg.replay.open_pass import PRUNED_FROM, OpenPass
from ampdbg.replay.pass_buffers import COPIED_AT_FIRST
from ampdbg.replay.pass_end import losses_of
from ampdbg.replay.random_state import LOOKED_AT


@dataclass
class Noting:
    """A pass that is noted, and what it asks for."""

    backward_passes: int = 0
    is_paused: bool = False
    found: OpenPass = field(init=False)

    def __post_init__(self) -> None:
        self.found = OpenPass(self)


@pytest.fixture
def noting() -> Iterator[Noting]:
    original = torch.nn.Module.__call__
    made = Noting()
    with made.found:
        assert torch.nn.Module.__call__ is not original
        yield made
    assert torch.nn.Module.__call__ is original


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.dropout = nn.Linear(6, 3), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.dropout(self.inner(x))}


class Criterion(nn.Module):
    def forward(self, outputs: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        return (outputs["logits"] - target).pow(2).mean()


X, Y = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), torch.ones(4, 3)


def test_it_gives_the_same_loss_and_gradients_again(noting: Noting) -> None:
    net = Net()
    loss = Criterion()(net(X), target=Y)
    loss.backward()
    assert net.inner.weight.grad is not None
    before = net.inner.weight.grad.clone()
    net.zero_grad()
    played = noting.found.played(net, "cpu")
    assert played is not None
    assert losses_of(played) == 1
    again = played.loss(played.given[0])
    again.backward()
    assert torch.equal(again, loss)
    assert torch.equal(net.inner.weight.grad, before)


def test_a_call_that_raised_is_the_end_of_the_pass_and_one_that_was_got_over_is_not_in_it(noting: Noting) -> None:
    net = Net()
    with pytest.raises(RuntimeError):
        net(torch.ones(4, 5))
    net(X)
    played = noting.found.played(net, "cpu")
    assert played is not None
    assert torch.isfinite(played.loss(played.given[0]))
    with pytest.raises(RuntimeError):
        net(torch.ones(4, 5))
    played = noting.found.played(net, "cpu")
    assert played is not None
    with pytest.raises(RuntimeError):
        played.loss(played.given[0])


def test_what_was_changed_since_is_not_run_again(noting: Noting) -> None:
    net, x = Net(), X.clone()
    net(x)
    x.add_(1.0)
    assert noting.found.played(net, "cpu") is None


def test_nothing_that_it_gave_is_held_and_a_loop_without_a_backward_pass_holds_no_batch_but_one_or_two(
    noting: Noting,
) -> None:
    net = Net()
    output = net(X)["logits"]
    held = weakref.ref(output)
    del output
    gc.collect()
    assert held() is None
    batches: list[weakref.ref[torch.Tensor]] = []
    for _ in range(200):
        x = torch.randn(4, 6)
        batches.append(weakref.ref(x))
        net(x)
        del x
    gc.collect()
    assert sum(batch() is not None for batch in batches) <= 2


def test_tensors_of_inference_mode_and_complex_ones_are_no_hindrance(noting: Noting) -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.rfft(x @ torch.ones(6, 3) * self.gain)

    with torch.inference_mode():
        x = X * 2
    model = Waves()
    model(x.clone())
    for given in (X, x.clone()):
        noting.backward_passes += 1
        model(given)
        played = noting.found.played(model, "cpu")
        assert played is not None
        assert torch.isfinite(played.loss(played.given[0]))


@pytest.mark.parametrize("draws_from", [0, 3 * LOOKED_AT, 5 * LOOKED_AT], ids=["ever", "late", "never"])
def test_a_call_draws_again_what_it_drew(noting: Noting, draws_from: int) -> None:
    class Flips(Net):
        draws = False

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return super().forward(x * (1.0 + (random.random() + torch.rand(()) if self.draws else 0.0)))

    net = Flips()
    net.dropout.p = 0.0
    for step in range(5 * LOOKED_AT):
        net.draws = step >= draws_from
        random.random()  # the loop's own
        torch.rand(())
        logits = net(X)["logits"]
        logits.sum().backward()
        noting.backward_passes += 1
    played = noting.found.played(net, "cpu")
    assert played is not None
    played.calls[0].random_state.restore()
    assert torch.equal(played.loss(played.given[0]), logits.detach().sum())


class Counting(nn.Module):
    """Computes with a buffer that each of its passes writes, ``how``."""

    passes: torch.Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, nn.Linear(6, 3)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        passes = self.passes
        if self.how == "data":
            passes.data.add_(1)
        elif self.how == "new":
            self.passes = passes + 1
        else:
            passes.add_(1)
        return (self.inner(x) * self.passes).sum()


def passes_before(noting: Noting, model: nn.Module) -> float:
    """What the model's buffer held before the pass under way, as a replay would begin with it."""
    state = noting.found.buffers.state(model)
    assert state is not None
    return float(state.buffers["passes"])


@pytest.mark.parametrize("how", ["in place", "data", "new"])
def test_buffers_are_those_from_before_the_pass_also_long_after_the_first(noting: Noting, how: str) -> None:
    model = Counting(how)
    for step in range(COPIED_AT_FIRST + 8):
        loss = model(X)
        assert (passes_before(noting, model), float(model.passes)) == (step, step + 1)
        loss.backward()
        noting.backward_passes += 1
        assert (passes_before(noting, model), float(model.passes)) == (step, step + 1)


def test_of_passes_that_the_loop_gives_up_those_are_kept_of_which_somebody_holds_a_result(noting: Noting) -> None:
    model = Counting("in place")
    for step in range(12):
        loss = model(X)  # meanwhile the last one is still held: both are run again, and the earlier one comes first
        assert step - 1 <= passes_before(noting, model) <= step
        assert loss.isfinite()


def test_a_user_s_mode_sees_nothing_of_the_copies(noting: Noting) -> None:
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ops.append(str(func))
            return func(*args, **(kwargs or {}))

    def once() -> None:
        with Seen():
            model(X)
        noting.backward_passes += 1

    ops: list[str] = []
    model = Counting("in place")
    noting.is_paused = True
    once()
    noting.is_paused, alone = False, list(ops)
    ops.clear()
    for _ in range(3):
        once()
    assert ops == alone * 3


class Policy(nn.Module):
    """Gives an object, with a spread of one number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mean, self.spread = nn.Linear(6, 3), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(mean=self.mean(x), spread=self.spread.exp())


def test_what_an_object_holds_leads_to_the_next_call_and_is_no_loss(noting: Noting) -> None:
    policy, value = Policy(), nn.Linear(3, 4)
    model = nn.ModuleList([policy, value])
    given = policy(X)
    alone = noting.found.played(model, "cpu")
    worth = value(given.mean)
    played = noting.found.played(model, "cpu")
    noting.is_paused = True
    assert alone is not None
    assert losses_of(alone) == 0
    torch.testing.assert_close(alone.loss(alone.given[0]), given.mean.sum() + given.spread.sum())
    assert played is not None
    torch.testing.assert_close(played.loss(played.given[0]), worth.sum())


def test_results_that_lead_from_pass_to_pass_do_not_make_one_pass_of_an_epoch(noting: Noting) -> None:
    cell, state = nn.Linear(6, 6), X
    for _ in range(100):
        state = cell(state)
        noting.backward_passes += 1
    assert len(noting.found.called) <= PRUNED_FROM


class Heads(nn.Module):
    """Gives what leads to another of its results, beside that."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        h = self.body(x).tanh()
        logits = self.head(h).masked_fill(torch.tensor([False, True, False]), -torch.inf)
        return h, {"logits": logits, "waves": torch.complex(h.float(), h.float() * 2)}


CLASSES = torch.tensor([0, 2, 2, 0, 2])

LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "of one": lambda h, more, out: nn.functional.cross_entropy(more["logits"].float(), CLASSES),
    "of all": lambda h, more, out: (
        h.float().pow(2).mean()
        + nn.functional.cross_entropy(more["logits"].float(), CLASSES) / 3
        + more["waves"].abs().mean()
        + out.float().pow(3).sum()
    ),
    "changes in place": lambda h, more, out: out.add_(1.0).mul_(h[:, :2].detach()).float().sum(),
}


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def lead_back(noting: Noting, loss: Callable[..., torch.Tensor], dtype: torch.dtype | None, scale: float) -> Any:
    """A step whose loss functions make, and the pass to run again: its model, its gradients and that."""
    heads, decoder = Heads(), nn.Linear(4, 2)
    model = nn.ModuleList([heads, decoder])
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        h, more = heads(torch.randn(5, 6))
        made = loss(h, more, decoder(h))
    (made * scale).backward()
    return model, gradients_of(model), noting.found.played(model, "cpu", scale=scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))
def test_the_gradients_of_a_loss_that_functions_make_lead_back_as_they_did(
    noting: Noting, loss: Callable[..., torch.Tensor], dtype: torch.dtype | None
) -> None:
    model, expected, played = lead_back(noting, loss, dtype, 1024.0)
    assert expected
    assert losses_of(played) == 0
    for scale in (1024.0, 64.0):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            again = played.loss(played.given[0])
        assert again.item() == 0.0
        (again * scale).backward()
        found = gradients_of(model)
        where = {name for name in found if name in expected or found[name].any()}  # elsewhere there is none, or zeros
        assert where == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient * (scale / 1024.0), rtol=0.0, atol=0.0)


def test_what_is_large_or_no_plain_tensor_is_not_held(noting: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampdbg.replay.noted_call.MOST_HELD", 5 * 4 * 4)
    assert lead_back(noting, lambda h, more, out: h.sum(), None, 8.0)[2] is not None
    noting.backward_passes += 1
    assert lead_back(noting, LOSSES["of all"], None, 8.0)[2] is None
    noting.backward_passes += 1
    words = nn.Embedding(9, 4, sparse=True)
    words(torch.tensor([1, 2])).sum().backward()
    assert noting.found.played(words, "cpu", scale=1.0) is not None  # what comes to its result is dense


def test_gradients_are_held_no_longer_than_the_pass(noting: Noting) -> None:
    net = nn.Linear(6, 3)
    loss = net(X).sum()
    loss.backward()
    (held,) = next(iter(noting.found._calls.values())).gradients.values()
    assert held is not None
    gone = weakref.ref(held)
    del held
    noting.backward_passes += 1
    again = net(X)
    gc.collect()
    assert gone() is None
    noting.found.forget()
    again.sum().backward()  # nobody waits for its gradient any more
    assert loss.grad_fn is not None
