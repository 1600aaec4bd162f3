"""Tests of PyTorch's scaling-parity workload under a watch: a GradScaler does not change where training ends.

The workload is ``_create_scaling_case`` of ``torch.testing._internal.common_cuda``; the loops follow those of
PyTorch's ``test_grad_scaling_*``. An inf is planted in one of four steps.
"""

import inspect
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.testing._internal.common_cuda import _create_scaling_case

from ampdbg.precision.emulation import cuda_on_cpu
from ampdbg.probes.watch import Watch, watch
from tests.siblings import slow_except

INIT_SCALE, GROWTH, BACKOFF = 128.0, 2.0, 0.5
FLOAT_ATOL, CLIP_ATOL, HALF_ATOL = 1e-7, 1e-5, 1e-3
"""PyTorch's own tolerances: float32 against itself, the same with clipping, and float32 against float16."""


@dataclass(frozen=True)
class Variant:
    """An optimizer of torch.optim and its implementation."""

    kind: type[Optimizer]
    options: tuple[tuple[str, bool], ...] = ()

    def __str__(self) -> str:
        return "-".join([self.kind.__name__, *(f"{name}={value}" for name, value in self.options)])


NOT_FOR_THIS_WORKLOAD = {
    "LBFGS": "GradScaler.step refuses closures, which it needs",
    "SparseAdam": "takes sparse gradients only",
    "Muon": "takes matrices only, and the layers have biases",
}
IMPLEMENTATIONS = (("foreach", False), ("foreach", True), ("fused", True))


def variants() -> Iterator[Variant]:
    """Every optimizer that runs the workload, in each implementation that it has on a CPU."""
    for name, kind in sorted(vars(torch.optim).items()):
        if not (inspect.isclass(kind) and issubclass(kind, Optimizer)) or name in {"Optimizer", *NOT_FOR_THIS_WORKLOAD}:
            continue
        known = inspect.signature(kind).parameters
        yield from [Variant(kind, (option,)) for option in IMPLEMENTATIONS if option[0] in known] or [Variant(kind)]


VARIANTS = tuple(variants())
GENTLE = [variant for variant in VARIANTS if variant.kind is not torch.optim.RMSprop]
"""RMSprop's first step is ten times the gradient's sign, even if half without a scale rounds the gradient to zero."""

PLAIN_SGD = [variant for variant in VARIANTS if variant.kind is torch.optim.SGD]


@dataclass(frozen=True)
class Loop:
    """How a step is made.

    ``half`` runs the scaled training under float16 autocast, ``half_control`` the other one too. ``clip`` is
    "scaled" (by a multiple of the scale) or "unscaled" (after ``unscale_``). ``accumulate`` joins two batches.
    """

    half: bool = False
    half_control: bool = False
    clip: str = ""
    accumulate: bool = False
    pickled: bool = False


LOOPS = {
    "plain": Loop(),
    "clipping scaled gradients": Loop(clip="scaled"),
    "clipping after unscale_": Loop(clip="unscaled"),
    "accumulating over two batches": Loop(accumulate=True),
    "pickling the scaler": Loop(pickled=True),
}
MAX_NORM = 0.2
"""PyTorch's value, which has an effect on this workload."""

Model = nn.Sequential
Data = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """PyTorch's scaling case: two equal models with their optimizers, the batches, the loss, and the step to spoil."""

    control: Model
    scaling: Model
    control_optimizer: Optimizer
    scaling_optimizer: Optimizer
    data: Data
    loss: Callable[[Tensor, Tensor], Tensor]
    spoilt: int


def make_case(variant: Variant) -> Case:
    torch.manual_seed(0)
    options = dict(variant.options)
    return Case(*_create_scaling_case(device="cpu", optimizer_ctor=variant.kind, optimizer_kwargs=options))


def clip(model: Model, limit: float) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), limit, error_if_nonfinite=False)


def spoilt_batch(case: Case, loop: Loop) -> int:
    """The batch whose gradients become infinite; with accumulation, the last batch of the first window."""
    return 1 if loop.accumulate else case.spoilt


def train_without(case: Case, loop: Loop, skips: bool) -> None:
    """The control: without a scaler, and without the spoilt step."""
    for i, (x, target) in enumerate(case.data):
        first_of_two = i % 2 == 0
        if not loop.accumulate or first_of_two:
            case.control_optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=loop.half_control):
            loss = case.loss(case.control(x), target)
        loss.backward()
        if loop.accumulate and first_of_two:
            continue
        if loop.clip:
            clip(case.control, MAX_NORM)
        if not skips or i != spoilt_batch(case, loop):
            case.control_optimizer.step()


def train_with(case: Case, loop: Loop, scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    for i, (x, target) in enumerate(case.data):
        first_of_two = i % 2 == 0
        if not loop.accumulate or first_of_two:
            case.scaling_optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=loop.half):
            loss = case.loss(case.scaling(x), target)
        scaler.scale(loss).backward()
        if loop.accumulate and first_of_two:
            continue
        if i == spoilt_batch(case, loop) and scaler.is_enabled():
            spoil(case.scaling)
        if loop.clip == "scaled":
            clip(case.scaling, MAX_NORM * scaler.get_scale())
        elif loop.clip == "unscaled":
            scaler.unscale_(case.scaling_optimizer)
            clip(case.scaling, MAX_NORM)
        scaler.step(case.scaling_optimizer)
        scaler.update()
        if loop.pickled:
            scaler = pickle.loads(pickle.dumps(scaler))
    return scaler


def spoil(model: Model) -> None:
    gradient = model[1].weight.grad
    assert isinstance(gradient, Tensor)
    gradient.fill_(torch.inf)


def make_scaler(enabled: bool) -> torch.amp.GradScaler:
    # A growth after every step magnifies any mistake, as in PyTorch's test.
    return torch.amp.GradScaler(
        "cpu", INIT_SCALE, growth_factor=GROWTH, backoff_factor=BACKOFF, growth_interval=1, enabled=enabled
    )


def run(variant: Variant, loop: Loop, enabled: bool = True) -> tuple[Case, Watch, float]:
    """Runs both trainings. Returns the case after them, the watch, and the final scale."""
    case = make_case(variant)
    train_without(case, loop, skips=enabled)
    with watch(case.scaling, case.scaling_optimizer) as seen:
        scaler = train_with(case, loop, make_scaler(enabled))
    return case, seen, scaler.get_scale()


def assert_parity(case: Case, atol: float) -> None:
    close = partial(torch.testing.assert_close, atol=atol, rtol=1e-5)
    for control, scaling in zip(case.control.parameters(), case.scaling.parameters(), strict=True):
        close(scaling, control)
        close(scaling.grad, control.grad)
        ours = case.scaling_optimizer.state[scaling]
        for name, expected in case.control_optimizer.state[control].items():
            close(ours[name], expected)


def assert_seen(case: Case, loop: Loop, enabled: bool, seen: Watch, scale: float) -> None:
    """Asserts that the watch saw each step, that only the spoilt one was skipped, and that the final scale is right."""
    batches = 2 if loop.accumulate else 1
    assert len(seen.steps) == len(case.data) // batches
    spoilt = [spoilt_batch(case, loop) // batches] if enabled else []
    assert [step.step for step in seen.steps if step.skipped] == spoilt
    assert [step.step for step in seen.steps if step.groups] == spoilt
    good = len(seen.steps) - 1
    assert scale == (INIT_SCALE * GROWTH**good * BACKOFF if enabled else 1.0)


by_enabled = pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])

ONE_OF_EACH = list({variant.kind: variant for variant in reversed(VARIANTS)}.values())
"""The first implementation of each optimizer, which quickly runs the plain loop."""

QUICK = (Variant(torch.optim.SGD, (("foreach", True),)), Variant(torch.optim.Adam, (("fused", True),)))
"""They quickly run every loop."""

EACH = [
    pytest.param(variant, loop, enabled, id=f"{variant}-{name}-{how}", marks=() if quick else pytest.mark.slow)
    for variant in VARIANTS
    for name, loop in LOOPS.items()
    for how, enabled in {"enabled": True, "disabled": False}.items()
    for quick in [variant in QUICK or (enabled and name == "plain" and variant in ONE_OF_EACH)]
]


@pytest.mark.parametrize(("variant", "loop", "enabled"), EACH)
def test_watched_scaling_ends_where_training_without_a_scaler_ends(variant: Variant, loop: Loop, enabled: bool) -> None:
    case, seen, scale = run(variant, loop, enabled)
    # Clipping adds 1e-6 to the norm, a smaller part of a scaled norm.
    assert_parity(case, CLIP_ATOL if loop.clip else FLOAT_ATOL)
    assert_seen(case, loop, enabled, seen, scale)


by_policy = pytest.mark.parametrize("policy", [cuda_on_cpu, nullcontext], ids=["CUDA's policy", "the CPU's own"])
Policy = Callable[[], AbstractContextManager[None]]


@by_policy
@pytest.mark.parametrize("variant", slow_except(ONE_OF_EACH, GENTLE), ids=str)
def test_watched_scaling_in_float16_ends_where_training_without_a_scaler_ends(variant: Variant, policy: Policy) -> None:
    loop = Loop(half=True, half_control=True)
    with policy():
        case, seen, scale = run(variant, loop)
        bare = make_case(variant)
        train_with(bare, loop, make_scaler(enabled=True))
    assert_parity(case, HALF_ATOL)
    assert_seen(case, loop, True, seen, scale)
    for one, other in zip(case.scaling.parameters(), bare.scaling.parameters(), strict=True):
        assert torch.equal(one, other), "watching has changed a bit"


@by_policy
@by_enabled
@pytest.mark.parametrize("variant", slow_except(QUICK, PLAIN_SGD), ids=str)
def test_half_training_ends_where_float32_training_ends(variant: Variant, enabled: bool, policy: Policy) -> None:
    # Only SGD: adaptive optimizers magnify the last bit of a gradient near zero to a whole step.
    with policy():
        case, _, _ = run(variant, Loop(half=True), enabled)
    assert_parity(case, HALF_ATOL)


def test_the_excluded_optimizers_exist_in_torch() -> None:
    missing = {name for name in NOT_FOR_THIS_WORKLOAD if not hasattr(torch.optim, name)}
    assert missing <= {"Muon"}, "Muon came with torch 2.9"
