"""A replay starts with the attributes that its step found, in the model of the run or in one that was built anew."""

from __future__ import annotations

import io
import random
from collections import deque
from typing import Any

import numpy as np
import torch

from ampdbg.replay.copies import Left
from ampdbg.replay.snapshot import ModelState
from ampdbg.replay.state import LARGEST, MOST, restored


class Net(torch.nn.Module):
    """A model with state of many kinds in plain attributes, which ``moved`` changes as a forward pass would."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.register_buffer("buffer", torch.zeros(2))
        self.alias, self.weights = self.buffer, [self.linear.weight]
        self.transposed = self.linear.weight.t()
        self.count, self.previous = 0, torch.zeros(2)
        self.bank, self.mask = torch.zeros(3, 2), torch.ones(3).expand(2, 3)
        self.recent: deque[int] = deque([1, 2], maxlen=2)
        self.cache: dict[Any, Any] = {(1, 2): [torch.zeros(1)]}
        self.generator, self.random = torch.Generator().manual_seed(1), random.Random(1)
        self.numpy, self.array = np.random.default_rng(1), np.zeros(2)
        self.other = object()


def moved(net: Any) -> list[float]:
    """Changes everything; returns the random numbers that were drawn."""
    net.count += 1
    net.previous = net.previous + 1
    net.bank.add_(1)
    net.recent.append(net.count)
    net.cache[(1, 2)].append(torch.ones(1))
    net.cache[3] = 4
    net.array += 1
    net.made = net.count
    return [float(torch.rand(1, generator=net.generator)), net.random.random(), net.numpy.random()]


def values(net: Any) -> list[Any]:
    plain = [net.count, net.previous.tolist(), net.bank.tolist(), list(net.recent), net.recent.maxlen, list(net.cache)]
    return [*plain, [tensor.tolist() for tensor in net.cache[(1, 2)]], net.array.tolist(), "made" in vars(net)]


def after_two_steps(net: Any) -> ModelState:
    """The attributes before the third step, taken at each as a run takes them."""
    for _ in range(2):
        moved(net)
    del net.made
    return ModelState.now(net)


def test_every_replay_starts_with_what_the_step_found() -> None:
    net = Net()
    saved, found = after_two_steps(net), values(net)
    drawn, ended = moved(net), values(net)
    for _ in range(2):
        with restored(net) as held:
            saved.write(net, held.ids)
            assert values(net) == found
            assert moved(net) == drawn
        assert values(net) == ended


def test_a_step_that_is_kept_does_not_change_with_the_run() -> None:
    net = Net()
    saved, found = after_two_steps(net), values(net)
    net.bank[0] = 7
    net.cache[(1, 2)][0].fill_(5)
    moved(net)
    with restored(net) as held:
        saved.write(net, held.ids)
        assert values(net) == found


def test_a_model_that_was_built_anew_starts_with_it_too_and_keeps_what_is_its_own() -> None:
    net, other = Net(), Net()
    saved, found = after_two_steps(net), values(net)
    file = io.BytesIO()
    torch.save(saved.for_another_model(), file)
    assert len(file.getvalue()) < 60_000
    file.seek(0)
    for carried in (saved, torch.load(file, weights_only=False)):
        other.added = 1  # type: ignore[assignment]
        with restored(other) as held:
            carried.write(other, held.ids)
            assert values(other) == found
            assert other.added == 1
            assert other.alias is other.buffer
            assert other.weights[0] is other.linear.weight
            other.transposed.sum().backward()
            assert other.linear.weight.grad is not None


def test_a_tensor_is_written_into_where_it_is_still_the_one_that_the_step_found() -> None:
    net = Net()
    saved = after_two_steps(net)
    mask, bank, transposed = net.mask, net.bank, net.transposed
    assert saved.attributes[""]["mask"].contents.untyped_storage().nbytes() == 12
    with restored(net) as held:
        bank.data.fill_(9)
        mask.data = torch.zeros(2)
        saved.write(net, held.ids)
        assert net.bank is bank
        assert bank.tolist() == [[2.0, 2.0]] * 3
        assert net.transposed is transposed
        assert net.mask is not mask
        assert net.mask.tolist() == [[1.0] * 3] * 2
    assert net.mask is mask


def test_what_two_attributes_share_stays_shared() -> None:
    net: Any = torch.nn.Module()
    net.one = [torch.zeros(1)]
    net.two = {"same": net.one, "inner": net.one[0]}
    saved = ModelState.now(net)
    with restored(net) as held:
        net.one = None
        saved.write(net, held.ids)
        assert net.two["same"] is net.one
        assert net.two["inner"] is net.one[0]


def test_what_is_no_plain_data_or_too_large_is_left_as_it_is() -> None:
    net: Any = torch.nn.Module()
    net.cycle = []
    net.cycle.append(net.cycle)
    net.code, net.object, net.mixed = len, object(), [1, object()]
    net.many, net.large = [0] * (MOST + 1), torch.empty(LARGEST + 1, dtype=torch.uint8)
    net.keys = {object(): 1}
    net.inference = torch.inference_mode()(torch.zeros)(1)
    saved = ModelState.now(net).attributes[""]
    assert saved.pop("training") is True  # type: ignore[attr-defined]
    assert set(saved.values()) == {Left.AS_IT_IS}
    assert len(saved) == 8


def test_a_tensor_that_wants_gradients_wants_them_in_a_replay() -> None:
    net: Any = torch.nn.Module()
    net.prompt = torch.zeros(2, requires_grad=True)
    saved = ModelState.now(net)
    with restored(net) as held:
        saved.write(net, held.ids)
        net.prompt.sum().backward()
    assert net.prompt.grad is None


def test_what_an_earlier_step_has_spoilt_is_as_the_run_began() -> None:
    net: Any = torch.nn.Module()
    net.bank, net.sound, net.bound = torch.zeros(2), torch.zeros(2), [torch.zeros(1)]
    net.mask = torch.full((2,), -torch.inf)
    net.register_buffer("causal", torch.tensor([0.0, -torch.inf, torch.nan]))
    net.register_buffer("mean", torch.zeros(1))
    first = ModelState.now(net)
    sound = ModelState.now(net)
    assert sound.unpoisoned(first) is sound
    net.bank.fill_(torch.nan)
    net.mean.fill_(torch.inf)
    net.sound.fill_(1)
    net.bound[0], net.late = torch.full((1,), torch.inf), torch.tensor(torch.nan)
    saved = ModelState.now(net)
    with restored(net) as held:
        saved.unpoisoned(first).write(net, held.ids)
        assert [net.bank.tolist(), net.sound.tolist(), net.bound[0].tolist()] == [[0, 0], [1, 1], [0]]
        assert "late" not in vars(net)
        assert net.mean.tolist() == [0]
    assert "late" in vars(net)
