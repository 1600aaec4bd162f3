"""Whatever a forward pass writes into a model is undone: the model holds the same objects with the same contents."""

import io
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ampdbg.replay.copies import duplicate
from ampdbg.replay.snapshot import ModelState
from ampdbg.replay.state import LARGEST, MOST, notes_on, restored, tensors_in


class State:
    """A user's own object."""

    def __init__(self) -> None:
        self.count = 0
        self.seen = [torch.zeros(2)]
        self.pairs = torch.eye(2).to_sparse()


class Slotted:
    """An object without a ``__dict__``."""

    __slots__ = ("count",)


class Net(torch.nn.Module):
    """Holds one of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.hidden = [torch.nn.Linear(2, 2)]
        self.count, self.name, self.nothing = 1000, "a", None
        self.tensor, self.mask = torch.arange(3.0), torch.zeros(3).expand(4, 3)
        self.sparse = torch.eye(3).to_sparse()
        self.history = [1, [torch.ones(2)], {"a": torch.ones(2)}]
        self.recent, self.ids = deque([1, 2, 3], maxlen=3), {1, 2}
        self.cache: Any = OrderedDict(a=1, b=[torch.zeros(1)])
        self.tally, self.lists = Counter("aab"), defaultdict(list, a=[1])
        self.array, self.fixed = np.arange(3.0), np.arange(3.0)
        self.fixed.flags.writeable = False
        self.generator, self.random = torch.Generator().manual_seed(1), random.Random(1)
        self.numpy, self.old_numpy = np.random.default_rng(1), np.random.RandomState(1)
        self.state, self.space, self.slotted = State(), SimpleNamespace(n=1), Slotted()
        self.history.append(self.history)  # a cycle
        self.model = [self]
        self.shared = self.history[1]
        self.transposed = self.linear.weight.t()
        self.alias, self.weights = self.norm.running_mean, [self.linear.weight]
        self.previous, self.bank = torch.zeros(2), torch.zeros(3, 2)


def tensor_written(net: Any) -> None:
    net.tensor.mul_(2)
    net.sparse.mul_(2)
    net.mask[0] += 1
    net.transposed.data.add_(1)


def parameter_moved(net: Any) -> None:
    net.linear.weight.data = net.linear.weight.data * 0.9


def tensor_grown(net: Any) -> None:
    net.tensor.data = torch.ones(2, 7)


def tensor_cast(net: Any) -> None:
    net.tensor.data = net.tensor.data.double()


WRITES: dict[str, Callable[[Any], Any]] = {
    "numbers": lambda net: vars(net).update(count=net.count + 1, name="b", nothing=0, training=False),
    "a new attribute": lambda net: setattr(net, "made", torch.ones(1)),
    "a deleted attribute": lambda net: delattr(net, "tensor"),
    "a tensor bound anew": lambda net: setattr(net, "tensor", net.tensor + 1),
    "tensors in place": tensor_written,
    "a tensor that becomes part of a graph": lambda net: net.tensor.mul_(net.linear.weight.sum()),
    "a tensor of another shape": tensor_grown,
    "a tensor of another dtype": tensor_cast,
    "a parameter in place": lambda net: net.linear.weight.data.mul_(0.9),
    "a parameter by .data": parameter_moved,
    "a parameter registered anew": lambda net: net.linear.register_parameter("weight", None),
    "a frozen parameter": lambda net: net.linear.requires_grad_(False),
    "a gradient": lambda net: net.linear(torch.ones(1, 2)).sum().backward(),
    "a module that only a list holds": lambda net: net.hidden[0].weight.data.zero_(),
    "a module registered": lambda net: setattr(net, "late", torch.nn.Linear(2, 2)),
    "a buffer": lambda net: net.norm(torch.randn(4, 2)),
    "a buffer bound anew": lambda net: setattr(net.norm, "running_mean", torch.ones(2)),
    "a list": lambda net: net.history.append(2),
    "a list in a list": lambda net: net.history[1].clear(),
    "a tensor in a dict in a list": lambda net: net.history[2]["a"].zero_(),
    "a deque": lambda net: net.recent.append(4),
    "a set": lambda net: net.ids.add(3),
    "the order of a dict": lambda net: net.cache.move_to_end("a"),
    "dicts": lambda net: (net.cache.clear(), net.tally.update("c"), net.lists["b"].append(1)),
    "an array": lambda net: net.array.fill(7),
    "random numbers": lambda net: (torch.rand(1, generator=net.generator), net.random.random()),
    "NumPy's random numbers": lambda net: (net.numpy.random(), net.old_numpy.rand()),
    "an object": lambda net: vars(net.state).update(count=5),
    "a tensor of an object": lambda net: net.state.seen[0].add_(1),
    "a namespace": lambda net: setattr(net.space, "n", 2),
}


def tensor_facts(tensor: torch.Tensor) -> Any:
    place = None if tensor.is_sparse else (tensor.data_ptr(), tensor.stride())
    facts = place, tensor.shape, tensor.dtype, tensor.requires_grad, tensor.is_leaf
    gradient = tensor.grad if tensor.is_leaf else None
    contents = tensor.detach().to_dense().tolist()
    return (*facts, contents, id(gradient), None if gradient is None else gradient.tolist())


CONTENTS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (torch.Tensor, tensor_facts),
    (np.ndarray, lambda value: value.tolist()),
    (torch.Generator, lambda value: value.get_state().tolist()),
    (random.Random, lambda value: value.getstate()),
    (np.random.Generator, lambda value: repr(value.bit_generator.state)),
    (np.random.RandomState, lambda value: repr(value.get_state(legacy=False))),
    (str, str),
    (int, int),
)


def described(value: Any, met: dict[int, Any]) -> Any:
    """Identities and contents, at every depth. ``met`` keeps the visited values alive."""
    contents = next((contents for kind, contents in CONTENTS if isinstance(value, kind)), None)
    if contents is not None:
        return id(value), contents(value)
    if id(value) in met:
        return id(value)
    met[id(value)] = value
    if isinstance(value, dict):
        return id(value), [(key, described(inner, met)) for key, inner in value.items()]
    if isinstance(value, (list, tuple, deque, set)):
        return id(value), [described(inner, met) for inner in value]
    inside = getattr(value, "__dict__", {})
    return id(value), {key: described(inside[key], met) for key in inside if "hooks" not in key}


@pytest.mark.parametrize("what", WRITES)
def test_restored_undoes_each_kind_of_write_to_a_model(what: str) -> None:
    net = Net()
    net.linear(torch.ones(1, 2)).sum().backward()
    before, other = described(net, {}), None
    with restored(net):
        WRITES[what](net)
        other = described(net, {})
    assert other != before
    assert described(net, {}) == before


def fails(net: Any) -> None:
    net.history.append(2)
    raise ZeroDivisionError


def test_restored_restores_the_model_if_the_code_raises() -> None:
    net = Net()
    before = described(net, {})
    with pytest.raises(ZeroDivisionError), restored(net):
        fails(net)
    assert described(net, {}) == before


def test_a_graph_that_saved_a_restored_weight_still_runs_backward() -> None:
    layer = torch.nn.Linear(2, 2)
    made = (layer.weight * layer.weight).sum()
    with restored(layer), torch.no_grad():
        layer.weight.mul_(3.0)
    made.backward()
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, 2 * layer.weight.detach())


def test_values_that_cannot_be_copied_are_left_alone_and_the_rest_is_restored() -> None:
    class Stubborn(torch.Tensor):
        def clone(self) -> torch.Tensor:  # type: ignore[override]
            raise RuntimeError("not me")

    net: Any = Net()
    net.stubborn = [iter([1, 2, 3]), torch.ones(2).as_subclass(Stubborn)]
    with restored(net):
        assert next(net.stubborn[0]) == 1
        net.count = 7
    assert net.count == 1000
    assert next(net.stubborn[0]) == 2


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_that_holds_a_nested_tensor_is_restored() -> None:
    net: Any = Net()
    net.nested = nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    saved = ModelState.now(net)
    with restored(net):
        saved.held.restore()
        net.nested, net.count = None, 7
    assert net.nested is nested
    assert net.count == 1000


def test_notes_on_names_each_iterator_that_a_module_holds() -> None:
    net: Any = Net()
    net.linear.ticks, net.draws = iter([1]), (number for number in [1])
    assert notes_on(net) == (
        "the model holds an iterator, 'draws', which every replay advances",
        "module 'linear' holds an iterator, 'ticks', which every replay advances",
    )


def test_large_tensors_long_lists_and_objects_inside_an_object_are_not_walked() -> None:
    net: Any = Net()
    before = len(tensors_in(net))
    net.state.large = torch.empty(LARGEST + 1, dtype=torch.uint8)
    net.state.rows = [torch.zeros(1)] * (MOST + 1)
    net.state.other = State()
    assert len(tensors_in(net)) == before


def test_tensors_in_finds_every_tensor_of_a_model_once() -> None:
    net: Any = Net()
    found = tensors_in(net)
    assert len(found) == len({id(tensor) for tensor in found})
    wanted = [*net.parameters(), *net.buffers(), *net.hidden[0].parameters(), net.tensor, net.mask, net.transposed]
    wanted += [net.previous, net.bank, net.cache["b"][0]]
    wanted += [net.history[1][0], net.history[2]["a"], net.state.seen[0], net.state.pairs, net.sparse]
    assert {id(tensor) for tensor in found} == {id(tensor) for tensor in wanted}


class AttributeDict(dict[str, int]):
    """A dict whose keys are attributes, as in much public code."""

    __getattr__ = dict.__getitem__


def test_a_dict_that_raises_keyerror_for_a_missing_attribute_is_restored_and_copied() -> None:
    model: Any = torch.nn.Linear(1, 1)
    model.sizes = AttributeDict(width=1)
    with restored(model, batches=[AttributeDict(x=1)]):
        pass
    assert duplicate(AttributeDict(x=1)) == {"x": 1}


# A replay starts with the state before its step, in the model of the run or in a newly built one


def changed_as_by_forward(net: Any) -> list[float]:
    """Changes plain attributes, as a forward pass would, and returns the drawn random numbers."""
    net.count += 1
    net.previous = net.previous + 1
    net.bank.add_(1)
    net.recent.append(net.count)
    net.cache["b"].append(torch.ones(1))
    net.cache["c"] = 4
    net.array += 1
    net.made = net.count
    return [float(torch.rand(1, generator=net.generator)), net.random.random(), net.numpy.random()]


def values(net: Any) -> list[Any]:
    plain = [net.count, net.previous.tolist(), net.bank.tolist(), list(net.recent), net.recent.maxlen, list(net.cache)]
    return [*plain, [tensor.tolist() for tensor in net.cache["b"]], net.array.tolist(), "made" in vars(net)]


def after_two_steps(net: Any) -> ModelState:
    """The attributes before the third step."""
    for _ in range(2):
        changed_as_by_forward(net)
    del net.made
    return ModelState.now(net)


def test_every_replay_starts_with_the_attributes_before_the_step() -> None:
    net = Net()
    saved, found = after_two_steps(net), values(net)
    drawn, ended = changed_as_by_forward(net), values(net)
    for _ in range(2):
        with restored(net):
            saved.held.restore()
            assert values(net) == found
            assert changed_as_by_forward(net) == drawn
        assert values(net) == ended


def test_a_replay_starts_with_the_objects_of_the_model_before_the_step() -> None:
    net: Any = Net()
    saved = ModelState.now(net)
    net.state.count = 5
    net.state.seen[0].add_(1)
    with restored(net):
        saved.held.restore()
        assert (net.state.count, net.state.seen[0].tolist()) == (0, [0, 0])
        net.state.count = 9
    assert (net.state.count, net.state.seen[0].tolist()) == (5, [1, 1])


def test_a_replay_keeps_modules_added_since_the_step_and_the_current_weights() -> None:
    net: Any = Net()
    saved = ModelState.now(net)
    net.late = torch.nn.Linear(2, 2)
    net.linear.weight.data.fill_(3)
    with restored(net):
        saved.held.restore()
        assert "late" in net._modules
        assert net.linear.weight.tolist() == [[3, 3]] * 2


def test_a_saved_model_state_does_not_change_with_the_run() -> None:
    net = Net()
    saved, found = after_two_steps(net), values(net)
    net.bank[0] = 7
    net.cache["b"][0].fill_(5)
    changed_as_by_forward(net)
    with restored(net):
        saved.held.restore()
        assert values(net) == found


def test_a_packed_state_restores_a_newly_built_model_and_keeps_its_own_attributes() -> None:
    net, other = Net(), Net()
    saved, found = after_two_steps(net), values(net)
    file = io.BytesIO()
    packed_now = saved.packed()
    torch.save(packed_now, file)
    assert len(file.getvalue()) < 60_000
    file.seek(0)
    drawn = changed_as_by_forward(net)
    for packed in (packed_now, torch.load(file, weights_only=False)):
        other.added = 1  # type: ignore[assignment]
        carried = packed.unpacked(other)
        with restored(other):
            carried.held.restore()
            assert values(other) == found
            assert changed_as_by_forward(other) == drawn
            assert other.added == 1
            assert other.alias is other.norm.running_mean
            assert other.weights[0] is other.linear.weight
            other.transposed.sum().backward()
            assert other.linear.weight.grad is not None


def test_a_restored_tensor_stays_the_same_object_and_gets_its_old_contents() -> None:
    net = Net()
    saved = after_two_steps(net)
    mask, bank, transposed = net.mask, net.bank, net.transposed
    with restored(net):
        bank.data.fill_(9)
        mask.data = torch.ones(2)
        saved.held.restore()
        assert net.bank is bank
        assert bank.tolist() == [[2.0, 2.0]] * 3
        assert net.transposed is transposed
        assert net.mask is mask
        assert net.mask.tolist() == [[0.0] * 3] * 4
    assert net.mask is mask


def test_an_object_shared_by_two_attributes_stays_shared() -> None:
    net: Any = torch.nn.Module()
    net.one = [torch.zeros(1)]
    net.two = {"same": net.one, "inner": net.one[0]}
    saved = ModelState.now(net)
    with restored(net):
        net.one = None
        saved.held.restore()
        assert net.two["same"] is net.one
        assert net.two["inner"] is net.one[0]


def test_a_replay_keeps_requires_grad_of_tensor_attributes() -> None:
    net: Any = torch.nn.Module()
    net.prompt = torch.zeros(2, requires_grad=True)
    saved = ModelState.now(net)
    with restored(net):
        saved.held.restore()
        net.prompt.sum().backward()
    assert net.prompt.grad is None


def test_nonfinite_tensors_of_a_model_are_counted_but_masks_are_not() -> None:
    net: Any = torch.nn.Module()
    net.inner = torch.nn.Module()
    net.bank, net.inner.sound, net.bound = torch.zeros(2), torch.zeros(2), [torch.zeros(1)]
    net.mask, net.late = torch.full((2,), -torch.inf), None
    net.register_buffer("causal", torch.tensor([0.0, -torch.inf, torch.nan]))
    net.register_buffer("mean", torch.zeros(1))
    assert ModelState.now(net).held.bad == 1
    net.inner.sound.fill_(1)
    net.late = torch.full((3, 3), -torch.inf).triu(1)
    assert ModelState.now(net).held.bad == 1
    net.bank.fill_(torch.nan)
    net.mean.fill_(torch.inf)
    net.bound[0] = torch.full((1,), torch.inf)
    assert ModelState.now(net).held.bad == 4
