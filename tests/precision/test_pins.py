"""Pins: what runs in FP32, what is unchanged, where a pinned forward is copied, and that removal leaves no trace."""

import copy
import functools
import inspect
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampdbg.errors import WorkloadError
from ampdbg.precision.emulation import cuda_on_cpu
from ampdbg.precision.pins import pin_fp32


class Seen(nn.Module):
    """A linear layer that records the dtype of its product and whether autocast was on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[tuple[torch.dtype, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.linear(x)
        self.seen.append((output.dtype, torch.is_autocast_enabled("cpu")))
        return output


class Block(nn.Module):
    """Two children, its own product between them, and a loop over a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Seen(), Seen()
        self.layers = nn.ModuleList([Seen(), Seen()])
        self.own: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        product = x @ x.T
        self.own.append(product.dtype)
        x = self.second(product @ x)
        for layer in self.layers:
            x = layer(x)
        self.own.append(x.dtype)
        return x


class Model(nn.Module):
    """A block, and a layer that the user runs in FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.wide = Seen()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x)
        with torch.autocast("cpu", enabled=False):
            return self.wide(x.float())


HALF, WIDE = (torch.float16, True), (torch.float32, False)


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    with cuda_on_cpu():
        yield


def run(model: Model) -> torch.Tensor:
    with torch.autocast("cuda", dtype=torch.float16):
        output: torch.Tensor = model(torch.randn(3, 4))
    return output


H, W, BFLOAT16 = torch.float16, torch.float32, torch.bfloat16

PINNED: dict[tuple[str, ...], tuple[list[torch.dtype], list[tuple[torch.dtype, bool]]]] = {
    (): ([H, H], [HALF] * 4),
    ("block",): ([W, W], [WIDE] * 4),
    ("block:own",): ([W, W], [HALF] * 4),
    (":own",): ([H, H], [HALF] * 4),
    ("block:own", "block.second"): ([W, W], [HALF, WIDE, HALF, HALF]),
    ("block", "block.first:own"): ([W, W], [WIDE] * 4),
    # The own line of the first module reads the cast result of its linear layer.
    (":own", "block:own", "block.first:own"): ([W, W], [WIDE, HALF, HALF, HALF]),
}
"""The dtypes of the block's own lines, and what its four inner modules see, for each set of pins."""


@pytest.mark.parametrize("names", PINNED, ids=lambda names: " ".join(names) or "none")
def test_pinned_modules_run_in_fp32_and_all_others_unchanged(names: tuple[str, ...]) -> None:
    model = Model()
    with pin_fp32(model, names) as pins:
        output = run(model)
    own, inner = PINNED[names]
    assert model.block.own == own
    assert [seen for module in model.block.modules() if isinstance(module, Seen) for seen in module.seen] == inner
    assert model.wide.seen == [WIDE]  # due to the user's own region
    assert output.dtype is torch.float32
    assert sorted(pins.modules) == sorted(names)


class Filling(torch.nn.Linear):
    """Puts its output into the dict that it gets."""

    def forward(self, batch: dict[str, torch.Tensor]) -> None:  # type: ignore[override]
        batch["made"] = super().forward(batch["x"])


@pytest.mark.parametrize("pin", ["0", "0:own"])
def test_a_caller_sees_values_that_a_pinned_module_puts_into_its_dict(pin: str) -> None:
    model, batch = torch.nn.Sequential(Filling(4, 4)), {"x": torch.randn(3, 4)}
    with pin_fp32(model, [pin]), torch.autocast("cuda", dtype=torch.float16):
        model(batch)
    assert batch["made"].dtype is torch.float32


def test_an_own_lines_pin_of_a_wholly_pinned_module_is_dropped() -> None:
    with pin_fp32(Model(), ["block", "block:own"]) as pins:
        assert pins.modules == ("block",)


def test_a_module_with_pinned_own_lines_can_be_called_again_after_an_error() -> None:
    class Picky(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 2:
                raise ValueError("two rows")
            return super().forward(x)

    model = Picky()
    with pin_fp32(model, [":own"]), torch.autocast("cuda", dtype=torch.float16):
        with pytest.raises(ValueError, match="two rows"):
            model(torch.randn(2, 4))
        model(torch.randn(3, 4))
    assert model.first.seen == [HALF]


@pytest.mark.parametrize(
    ("name", "shown"), [("blok", "blok"), ("blok:own", "blok"), ("b" * 200_000, "b" * 197 + "...")], ids=len
)
def test_a_misspelt_pin_is_refused_and_shortened_in_the_message(name: str, shown: str) -> None:
    with pytest.raises(WorkloadError, match=f"no module is named '{shown}'; the model has 'block'"):
        pin_fp32(Model(), [name])


def test_a_pin_is_read_as_an_exact_name_before_a_pattern() -> None:
    model = nn.ModuleDict({"a[0]": nn.Linear(4, 4), "a0": nn.Linear(4, 4), "a1": nn.Linear(4, 4)})
    assert pin_fp32(model, ["a[0]"]).modules == ("a[0]",)
    assert pin_fp32(model, ["a[1]", "a[0]:own"]).modules == ("a1", "a[0]:own")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((None, ["first"]), "got a NoneType instead of a Module"),
        ((Block(), None), "got a NoneType instead of a list of names"),
        ((Block(), ["first", None]), "got a NoneType instead of a module's name"),
        ((Block(), "first"), "got 'first' instead of a list of names"),
    ],
)
def test_pin_fp32_refuses_arguments_of_wrong_types_by_type(given: tuple[Any, Any], told: str) -> None:
    with pytest.raises(TypeError) as raised:
        pin_fp32(*given)
    assert str(raised.value).startswith(f'{told}; allowed: pin_fp32(model, ["blocks.2.attn", ...])')
    assert "\n" not in str(raised.value)


class Inner(nn.Module):
    """A linear layer that records the dtype of its product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = x @ self.linear.weight
        self.seen.append(product.dtype)
        return product + self.linear.bias


class Outer(nn.Module):
    """Its own product after an inner module, also recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = self.inner(x)
        product = x @ x.T * scale
        self.seen.append(product.dtype)
        return product


OUTER = {"outer": (W, W), "outer:own": (W, BFLOAT16), "outer.inner": (BFLOAT16, W), "*": (W, W)}
"""The dtypes of the outer and the inner module's product for each pin."""


def model() -> nn.ModuleDict:
    return nn.ModuleDict({"outer": Outer()})


def run_outer(model: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output: torch.Tensor = model["outer"](torch.ones(2, 4))
    return output


def dtypes(model: Any) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of the products of the next call."""
    run_outer(model)
    return model["outer"].seen[-1], model["outer"].inner.seen[-1]


def saved(model: nn.Module) -> Any:
    """The model after ``torch.save`` and ``torch.load``."""
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
@pytest.mark.parametrize("pin", OUTER)
def test_a_copy_of_a_pinned_model_is_pinned_and_runs_its_own_weights(pin: str, copied: Callable[[Any], Any]) -> None:
    original = model()
    handle = pin_fp32(original, [pin])
    twin = copied(original)
    handle.remove()
    assert dtypes(twin) == OUTER[pin]
    assert dtypes(original) == (BFLOAT16, BFLOAT16)
    run_outer(twin).sum().backward()
    assert all(parameter.grad is not None for parameter in twin.parameters())
    assert all(parameter.grad is None for parameter in original.parameters())


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_a_pin_handle_that_the_model_holds_is_copied_with_the_model(copied: Callable[[Any], Any]) -> None:
    original: Any = model()
    original.pins = pin_fp32(original, ["outer:own", "outer.inner"])
    twin = copied(original)
    twin.pins.remove()
    assert not any("forward" in vars(module) for module in twin.modules())
    assert dtypes(original) == (W, W)


def test_a_copy_of_an_unpinned_child_runs_as_without_the_pin() -> None:
    original: Any = model()
    pin_fp32(original, ["outer:own"])
    twin = copy.deepcopy(original["outer"].inner)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        twin(torch.ones(2, 4))
    assert twin.seen == [BFLOAT16]


def test_pins_do_not_change_the_keys_of_the_state_dict() -> None:
    pinned = model()
    pin_fp32(pinned, ["outer", "outer.inner:own"])
    assert list(pinned.state_dict()) == list(model().state_dict())


@pytest.mark.parametrize("first_gone", [0, 1])
@pytest.mark.parametrize("second", OUTER)
@pytest.mark.parametrize("first", OUTER)
def test_two_pin_handles_can_be_removed_in_any_order(first: str, second: str, first_gone: int) -> None:
    pinned = model()
    pins = [first, second]
    handles = [pin_fp32(pinned, [pin]) for pin in pins]
    assert dtypes(pinned) == tuple(
        W if W in both else BFLOAT16 for both in zip(OUTER[first], OUTER[second], strict=True)
    )
    handles.pop(first_gone).remove()
    del pins[first_gone]
    assert dtypes(pinned) == OUTER[pins[0]]
    handles[0].remove()
    assert not any("forward" in vars(module) for module in pinned.modules())


def test_own_lines_pins_of_nested_modules_work_by_two_handles() -> None:
    pinned = nn.ModuleDict({"outer": nn.Sequential(Outer(), nn.Flatten())})
    for pin in ("outer:own", "outer.0:own"):
        pin_fp32(pinned, [pin])
    run_outer(pinned)
    outer: Any = pinned["outer"]
    assert (outer[0].seen, outer[0].inner.seen) == ([W], [BFLOAT16])


def test_a_forward_set_by_the_user_is_run_and_restored() -> None:
    pinned: Any = model()
    outer = pinned["outer"]
    own = outer.forward = functools.partial(Outer.forward, outer, scale=0.0)
    with pin_fp32(pinned, ["outer"]):
        assert dtypes(pinned) == (W, W)
        assert not run_outer(pinned).any()
    assert vars(outer)["forward"] is own
    assert dtypes(pinned) == (BFLOAT16, BFLOAT16)


def test_a_forward_that_the_user_sets_around_a_pin_is_kept() -> None:
    pinned: Any = model()
    outer = pinned["outer"]
    handle = pin_fp32(pinned, ["outer"])
    around = outer.forward = functools.partial(outer.forward, scale=0.0)
    handle.remove()
    assert vars(outer)["forward"] is around
    assert dtypes(pinned) == (BFLOAT16, BFLOAT16)


def test_pinned_own_lines_may_call_their_module_again() -> None:
    class Recurring(Outer):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            own = super().forward(x, scale)
            again: torch.Tensor = self(own @ x, scale=0.0) if scale else own
            return again

    pinned = nn.ModuleDict({"outer": Recurring()})
    pin_fp32(pinned, ["outer:own"])
    run_outer(pinned)
    outer: Any = pinned["outer"]
    assert (outer.seen, outer.inner.seen) == ([W, W], [BFLOAT16, BFLOAT16])


@pytest.mark.parametrize("pin", OUTER)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_recomputes_in_the_dtypes_of_the_pinned_forward(pin: str, use_reentrant: bool) -> None:
    class Checkpointed(Outer):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            part: torch.Tensor = checkpoint(super().forward, x, scale, use_reentrant=use_reentrant)
            return part * 2

    pinned: Any = nn.ModuleDict({"outer": Checkpointed()})
    pin_fp32(pinned, [pin])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = pinned["outer"](torch.ones(2, 4, requires_grad=True)).sum()
    loss.backward()
    own, inner = OUTER[pin]
    # A checkpoint may stop before its end.
    assert (set(pinned["outer"].seen), pinned["outer"].inner.seen) == ({own}, [inner] * 2)


def test_each_thread_has_its_own_autocast_state_in_a_pinned_model() -> None:
    class Meeting(Outer):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            one_is_in_its_own_lines.set()
            both_are.wait(timeout=10)
            return super().forward(x, scale)

    one_is_in_its_own_lines, both_are = threading.Event(), threading.Barrier(2)
    pinned: Any = nn.ModuleDict({"outer": Meeting()})
    pin_fp32(pinned, ["outer:own"])
    with ThreadPoolExecutor(2) as threads:
        under_autocast = threads.submit(run_outer, pinned)
        one_is_in_its_own_lines.wait(timeout=10)
        without = threads.submit(pinned["outer"], torch.ones(2, 4))
        assert under_autocast.result().dtype is without.result().dtype is W
    assert set(pinned["outer"].inner.seen) == {BFLOAT16, W}


def test_a_pinned_forward_has_the_signature_of_its_module() -> None:
    pinned: Any = model()
    pin_fp32(pinned, ["outer"])
    assert str(inspect.signature(pinned["outer"].forward)) == "(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor"


@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < "2.7", reason="torch.compile of torch 2.6 cannot trace it"
)
def test_a_pinned_model_can_be_exported() -> None:
    linear = nn.Linear(4, 4)
    pin_fp32(linear, [""])
    exported = torch.export.export(linear, (torch.ones(2, 4),))
    assert torch.equal(exported.module()(torch.ones(2, 4)), linear(torch.ones(2, 4)))


class Both(nn.Module):
    """Returns the output of its layer and its own product of that output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.linear(x)
        return x, x @ x.T


@pytest.mark.parametrize(("pin", "wide"), [("", (W, W)), (":own", (W, W)), ("linear", (W, BFLOAT16))])
def test_torch_compile_follows_a_pin_and_its_removal(pin: str, wide: tuple[torch.dtype, ...]) -> None:
    pinned, batch = Both(), torch.ones(2, 4)
    handle = pin_fp32(pinned, [pin])
    # Own lines need not be one graph.
    compiled = torch.compile(pinned, backend="eager", fullgraph=":own" not in pin)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for expected in (wide, (BFLOAT16, BFLOAT16)):
            outputs = compiled(batch)
            assert tuple(output.dtype for output in outputs) == expected
            assert all(torch.equal(*pair) for pair in zip(outputs, pinned(batch), strict=True))
            handle.remove()
