"""A pinned module's forward: it goes where the module goes, in every thread, and other pins can come and go."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampdbg.precision.pins import pin_fp32


class Inner(nn.Module):
    """A linear layer that notes the dtype of its product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = x @ self.linear.weight
        self.seen.append(product.dtype)
        return product + self.linear.bias


class Outer(nn.Module):
    """A product of its own behind an inner module, also noted."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = self.inner(x)
        product = x @ x.T * scale
        self.seen.append(product.dtype)
        return product


HALF, WIDE = torch.bfloat16, torch.float32

PINNED = {"outer": (WIDE, WIDE), "outer:own": (WIDE, HALF), "outer.inner": (HALF, WIDE), "*": (WIDE, WIDE)}
"""By the pin: the dtype of the outer module's product, and of the inner one's."""


def model() -> nn.ModuleDict:
    return nn.ModuleDict({"outer": Outer()})


def run(model: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output: torch.Tensor = model["outer"](torch.ones(2, 4))
    return output


def dtypes(model: Any) -> tuple[torch.dtype, torch.dtype]:
    """What the next call's products are."""
    run(model)
    return model["outer"].seen[-1], model["outer"].inner.seen[-1]


def saved(model: nn.Module) -> Any:
    """The model as ``torch.save`` and ``torch.load`` give it back."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
@pytest.mark.parametrize("pin", PINNED)
def test_a_copy_is_pinned_too_and_runs_its_own_weights(pin: str, copied: Callable[[Any], Any]) -> None:
    original = model()
    handle = pin_fp32(original, [pin])
    twin = copied(original)
    handle.remove()
    assert dtypes(twin) == PINNED[pin]
    assert dtypes(original) == (HALF, HALF)
    run(twin).sum().backward()
    assert all(parameter.grad is not None for parameter in twin.parameters())
    assert all(parameter.grad is None for parameter in original.parameters())


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_a_handle_that_the_model_keeps_is_copied_with_it(copied: Callable[[Any], Any]) -> None:
    original: Any = model()
    original.pins = pin_fp32(original, ["outer:own", "outer.inner"])
    twin = copied(original)
    twin.pins.remove()
    assert not any("forward" in vars(module) for module in twin.modules())
    assert dtypes(original) == (WIDE, WIDE)


def test_a_copy_of_an_inner_module_alone_runs_as_without_the_pin() -> None:
    original: Any = model()
    pin_fp32(original, ["outer:own"])
    twin = copy.deepcopy(original["outer"].inner)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        twin(torch.ones(2, 4))
    assert twin.seen == [HALF]


def test_the_state_dict_is_as_without_the_pin() -> None:
    pinned = model()
    pin_fp32(pinned, ["outer", "outer.inner:own"])
    assert list(pinned.state_dict()) == list(model().state_dict())


@pytest.mark.parametrize("first_gone", [0, 1])
@pytest.mark.parametrize("second", PINNED)
@pytest.mark.parametrize("first", PINNED)
def test_two_handles_go_in_any_order(first: str, second: str, first_gone: int) -> None:
    pinned = model()
    pins = [first, second]
    handles = [pin_fp32(pinned, [pin]) for pin in pins]
    assert dtypes(pinned) == tuple(
        WIDE if WIDE in both else HALF for both in zip(PINNED[first], PINNED[second], strict=True)
    )
    handles.pop(first_gone).remove()
    del pins[first_gone]
    assert dtypes(pinned) == PINNED[pins[0]]
    handles[0].remove()
    assert not any("forward" in vars(module) for module in pinned.modules())


def test_nested_own_lines_are_the_same_by_two_handles() -> None:
    pinned = nn.ModuleDict({"outer": nn.Sequential(Outer(), nn.Flatten())})
    for pin in ("outer:own", "outer.0:own"):
        pin_fp32(pinned, [pin])
    run(pinned)
    outer: Any = pinned["outer"]
    assert (outer[0].seen, outer[0].inner.seen) == ([WIDE], [HALF])


def test_a_forward_of_the_users_own_is_run_and_put_back() -> None:
    pinned: Any = model()
    outer = pinned["outer"]
    own = outer.forward = functools.partial(Outer.forward, outer, scale=0.0)
    with pin_fp32(pinned, ["outer"]):
        assert dtypes(pinned) == (WIDE, WIDE)
        assert not run(pinned).any()
    assert vars(outer)["forward"] is own
    assert dtypes(pinned) == (HALF, HALF)


def test_a_forward_that_the_user_sets_around_the_pin_stays() -> None:
    pinned: Any = model()
    outer = pinned["outer"]
    handle = pin_fp32(pinned, ["outer"])
    around = outer.forward = functools.partial(outer.forward, scale=0.0)
    handle.remove()
    assert vars(outer)["forward"] is around
    assert dtypes(pinned) == (HALF, HALF)


def test_own_lines_that_call_their_own_module_again() -> None:
    class Recurring(Outer):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            own = super().forward(x, scale)
            again: torch.Tensor = self(own @ x, scale=0.0) if scale else own
            return again

    pinned = nn.ModuleDict({"outer": Recurring()})
    pin_fp32(pinned, ["outer:own"])
    run(pinned)
    outer: Any = pinned["outer"]
    assert (outer.seen, outer.inner.seen) == ([WIDE, WIDE], [HALF, HALF])


@pytest.mark.parametrize("pin", PINNED)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_computes_again_what_the_forward_pass_computed(pin: str, use_reentrant: bool) -> None:
    class Checkpointed(Outer):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            part: torch.Tensor = checkpoint(super().forward, x, scale, use_reentrant=use_reentrant)
            return part * 2

    pinned: Any = nn.ModuleDict({"outer": Checkpointed()})
    pin_fp32(pinned, [pin])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = pinned["outer"](torch.ones(2, 4, requires_grad=True)).sum()
    loss.backward()
    own, inner = PINNED[pin]
    # A checkpoint may stop before it has come to the end.
    assert (set(pinned["outer"].seen), pinned["outer"].inner.seen) == ({own}, [inner] * 2)


def test_each_thread_has_its_own_regions() -> None:
    class Meeting(Outer):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            one_is_in_its_own_lines.set()
            both_are.wait(timeout=10)
            return super().forward(x, scale)

    one_is_in_its_own_lines, both_are = threading.Event(), threading.Barrier(2)
    pinned: Any = nn.ModuleDict({"outer": Meeting()})
    pin_fp32(pinned, ["outer:own"])
    with ThreadPoolExecutor(2) as threads:
        under_autocast = threads.submit(run, pinned)
        one_is_in_its_own_lines.wait(timeout=10)
        without = threads.submit(pinned["outer"], torch.ones(2, 4))
        assert under_autocast.result().dtype is without.result().dtype is WIDE
    assert set(pinned["outer"].inner.seen) == {HALF, WIDE}


def test_a_pinned_forward_has_the_signature_of_its_module() -> None:
    pinned: Any = model()
    pin_fp32(pinned, ["outer"])
    assert (
        str(inspect.signature(pinned["outer"].forward)) == "(x: 'torch.Tensor', scale: 'float' = 1.0) -> 'torch.Tensor'"
    )


@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < "2.7", reason="torch.compile of torch 2.6 cannot trace it"
)
def test_a_pinned_model_can_be_exported() -> None:
    linear = nn.Linear(4, 4)
    pin_fp32(linear, [""])
    exported = torch.export.export(linear, (torch.ones(2, 4),))
    assert torch.equal(exported.module()(torch.ones(2, 4)), linear(torch.ones(2, 4)))


class Both(nn.Module):
    """Returns what its layer gives it and its own product of that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.linear(x)
        return x, x @ x.T


@pytest.mark.parametrize(("pin", "wide"), [("", (WIDE, WIDE)), (":own", (WIDE, WIDE)), ("linear", (WIDE, HALF))])
def test_torch_compile_sees_the_pin_and_that_it_is_gone(pin: str, wide: tuple[torch.dtype, ...]) -> None:
    pinned, batch = Both(), torch.ones(2, 4)
    handle = pin_fp32(pinned, [pin])
    # Own lines need not be one graph.
    compiled = torch.compile(pinned, backend="eager", fullgraph=":own" not in pin)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for expected in (wide, (HALF, HALF)):
            outputs = compiled(batch)
            assert tuple(output.dtype for output in outputs) == expected
            assert all(torch.equal(*pair) for pair in zip(outputs, pinned(batch), strict=True))
            handle.remove()
