"""Tests of averages of weights that a script keeps in half: found, judged and named, without a trace left behind."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ampdbg.commands.output import PLAIN
from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.diagnosis.updates import why_no_edit
from ampdbg.probes.averages import AverageTrace, found_in
from ampdbg.probes.watch import watch
from ampdbg.record.file import from_json, to_json
from ampdbg.record.run import Record, ScriptRun
from ampdbg.report.formats import written as text_of
from ampdbg.report.view import CommandContext
from tests.script.test_run import run_with_page
from tests.siblings import slow_except

HALF = torch.bfloat16
CALL = nn.Module.__call__

Keep = Callable[[], None]
"""Code that a script runs after each step."""


def pairs(average: nn.Module, net: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(average.parameters(), net.parameters(), strict=True))


def by_two_ops(net: nn.Module, dtype: torch.dtype, decay: float) -> Keep:
    """As in most handwritten averages."""
    average = copy.deepcopy(net).to(dtype)

    def keep() -> None:
        for kept, weight in pairs(average, net):
            kept.data.mul_(decay).add_(weight.data, alpha=1.0 - decay)

    return keep


def by_lerp(net: nn.Module, dtype: torch.dtype, decay: float) -> Keep:
    """As in timm's ModelEmaV3, tensor by tensor."""
    average = copy.deepcopy(net).to(dtype).requires_grad_(False)

    def keep() -> None:
        for kept, weight in pairs(average, net):
            kept.lerp_(weight.detach().to(kept), 1.0 - decay)

    return keep


def by_lists(net: nn.Module, dtype: torch.dtype, decay: float) -> Keep:
    average = [weight.detach().clone().to(dtype) for weight in net.parameters()]

    def keep() -> None:
        torch._foreach_lerp_(average, [weight.detach().to(dtype) for weight in net.parameters()], 1.0 - decay)

    return keep


def by_the_state(net: nn.Module, dtype: torch.dtype, decay: float) -> Keep:
    """As in timm's ModelEma: computes the whole average and copies it."""
    average = copy.deepcopy(net).to(dtype)

    def keep() -> None:
        for kept, weight in zip(average.state_dict().values(), net.state_dict().values(), strict=True):
            kept.copy_(decay * kept + (1.0 - decay) * weight)

    return keep


def by_shadows(net: nn.Module, dtype: torch.dtype, decay: float) -> Keep:
    """As in diffusers' EMAModel: a list of parameters."""
    shadows = [weight.detach().clone().to(dtype) for weight in net.parameters()]

    def keep() -> None:
        for kept, weight in zip(shadows, net.parameters(), strict=True):
            kept.sub_((1.0 - decay) * (kept - weight.detach()))

    return keep


def by_name(net: nn.Module, dtype: torch.dtype, decay: float) -> Keep:
    """Makes new tensors in each step."""
    shadows = {name: weight.detach().clone().to(dtype) for name, weight in net.named_parameters()}

    def keep() -> None:
        for name, weight in net.named_parameters():
            shadows[name] = (decay * shadows[name] + (1.0 - decay) * weight.detach()).to(dtype)

    return keep


def by_averaged_model(net: nn.Module, dtype: torch.dtype, decay: float) -> Keep:
    average = AveragedModel(copy.deepcopy(net).to(dtype), avg_fn=get_ema_avg_fn(decay))
    return lambda: average.update_parameters(net)


def every_third_step(net: nn.Module, dtype: torch.dtype, decay: float) -> Keep:
    keep, steps = by_lerp(net, dtype, decay), iter(range(1000))
    return lambda: None if next(steps) % 3 else keep()


def copied(net: nn.Module, dtype: torch.dtype, decay: float) -> Keep:
    """A target network that is copied whole, or half weights of float32 masters."""
    target = copy.deepcopy(net).to(dtype)

    def keep() -> None:
        for kept, weight in pairs(target, net):
            kept.data.copy_(weight.data)

    return keep


def clamped(net: nn.Module, dtype: torch.dtype, decay: float) -> Keep:
    frozen = copy.deepcopy(net).to(dtype)

    def keep() -> None:
        for one in frozen.parameters():
            one.data.clamp_(-1.0, 1.0)

    return keep


WAYS = [by_two_ops, by_lerp, by_lists, by_the_state, by_shadows, by_name, by_averaged_model, every_third_step]


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))


def trained(
    made: Callable[[nn.Module], Keep],
    dtype: torch.dtype = torch.float32,
    steps: int = 150,
    *,
    by_hook: bool = False,
    kind: type[nn.Module] = Net,
) -> Record:
    net = kind().to(dtype)
    optimizer, keep = torch.optim.AdamW(net.parameters(), lr=1e-3), made(net)
    if by_hook:
        optimizer.register_step_post_hook(lambda *given: keep())
    goal = torch.randn(32, 32)
    with watch(net, optimizer) as watched:
        for _ in range(steps):
            x = torch.randn(16, 32)
            optimizer.zero_grad()
            (net(x.to(dtype)).float() - x @ goal).square().mean().backward()
            optimizer.step()
            if not by_hook:
                keep()
    assert (_get_current_dispatch_mode_stack(), nn.Module.__call__, watched.failure) == ([], CALL, "")
    return diagnose(watched.record())


class Linear(nn.Linear):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(32, 32, bias=False)


@pytest.mark.parametrize("decay", [0.99, 0.997])
def test_averages_that_lose_over_half_of_their_total_motion_are_a_warning(decay: float) -> None:
    record = trained(lambda net: by_lerp(net, HALF, decay), kind=Linear)
    assert record.updates is not None
    assert max(one.lost for one in record.updates.averages) < 0.9
    lost = sum(one.lost * one.way for one in record.updates.averages) / sum(one.way for one in record.updates.averages)
    assert (lost > 0.5) == (decay == 0.997)
    assert codes(record) == [("frozen-average", "warning")] * (lost > 0.5)


def test_an_average_updated_every_sixteenth_step_is_found_and_moves() -> None:
    def kept(net: nn.Module) -> Keep:
        keep, steps = by_lerp(net, HALF, 0.5), iter(range(1000))
        return lambda: None if next(steps) % 16 else keep()

    record = trained(kept, steps=150)
    assert (codes(record), record.updates is None) == ([], False)
    assert record.updates is not None
    assert {(one.decay, one.steps) for one in record.updates.averages} == {(0.5, 64)}
    assert max(one.lost for one in record.updates.averages) < 0.3


class Strange(torch.Tensor):
    """Raises on every access."""

    @classmethod
    def __torch_function__(cls, *_: object) -> Any:
        raise RuntimeError("own")


def test_a_tensor_that_raises_hides_no_average() -> None:
    strange = torch.ones(2).as_subclass(Strange)
    assert codes(trained(lambda net: by_lerp(net, HALF, 0.999))) == [("frozen-average", "error")]
    with pytest.raises(RuntimeError, match="own"):
        strange.dtype  # noqa: B018 - it is still there


@pytest.mark.parametrize("decay", [0.9, 0.99, 0.999, 0.99996])
def test_the_lost_share_of_an_average_is_that_beside_a_float64_average(decay: float) -> None:
    references: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def make(net: nn.Module) -> Keep:
        average = copy.deepcopy(net).to(HALF)
        parameters = [(one, one.detach().double()) for one in average.parameters()]
        references.extend((kept, start, start.clone()) for kept, start in parameters)

        def keep() -> None:
            for (kept, _, exact), weight in zip(references, net.parameters(), strict=True):
                kept.data.mul_(decay).add_(weight.data.to(HALF), alpha=1.0 - decay)
                exact.lerp_(weight.detach().double(), 1.0 - decay)

        return keep

    record = trained(make)
    assert record.updates is not None
    of_all, wanted = sum(one.lost * one.way for one in record.updates.averages), 0.0
    seen = of_all / sum(one.way for one in record.updates.averages)
    made = 0.0
    for kept, start, exact in references:
        way = exact - start
        wanted, made = wanted + float(way.square().sum()), made + float((way * (kept.double() - start)).sum())
    assert seen == pytest.approx(1.0 - made / wanted, abs=0.1)


def codes(record: Record) -> list[tuple[str, str]]:
    return [(found.code, found.severity) for found in record.findings]


@pytest.mark.parametrize("way", slow_except([by_name], WAYS))
def test_an_average_in_bfloat16_freezes_at_a_high_decay_and_not_in_float32(way: Any) -> None:
    record = trained(lambda net: way(net, HALF, 0.999))
    assert (codes(record), record.verdict) == ([("frozen-average", "error")], "precision")
    assert record.updates is not None
    averages = {one.name: (one.decay, one.dtype) for one in record.updates.averages}
    assert averages.keys() >= {"0.weight", "0.bias", "2.weight"}
    assert set(averages.values()) == {(0.999, "bfloat16")}
    assert (
        "At a decay of 0.999 only values that differ from their weight by over 2 times their size move"
        in record.findings[0].message
    )
    assert from_json(to_json(record)) == record

    moving = trained(lambda net: way(net, HALF, 0.9))
    assert codes(moving) == []
    assert moving.updates is not None
    assert max(one.lost for one in moving.updates.averages) < 0.3

    in_float32 = trained(lambda net: way(net, torch.float32, 0.999))
    assert (codes(in_float32), in_float32.updates) == ([], None)


def test_an_average_of_half_weights_is_frozen_only_where_its_weights_move() -> None:
    record = trained(lambda net: by_two_ops(net, HALF, 0.999), dtype=HALF)
    assert [code for code, _ in codes(record)] == ["frozen-weights", "frozen-average"]
    assert record.findings[0].evidence["parameters"] == ["1.weight"]
    named = record.findings[1].evidence["parameters"]
    assert isinstance(named, list)
    assert {"0.bias"} <= set(named) <= {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_an_average_kept_by_an_optimizer_hook_is_found_as_one_kept_by_the_loop() -> None:
    by_loop, by_hook = (trained(lambda net: by_lerp(net, HALF, 0.999), by_hook=is_hook) for is_hook in (False, True))
    assert codes(by_hook) == codes(by_loop) == [("frozen-average", "error")]
    assert (by_hook.updates, by_hook.findings) == (by_loop.updates, by_loop.findings)


def test_an_average_of_a_generator_updated_after_the_step_of_its_critic_is_found() -> None:
    net, critic = Net(), nn.Linear(32, 1)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (net, critic)]
    keep, goal = by_two_ops(net, HALF, 0.999), torch.randn(32, 32)
    with watch(nn.ModuleList([net, critic]), optimizers) as watched:
        for _ in range(100):
            x = torch.randn(16, 32)
            made = net(x)
            optimizers[0].zero_grad()
            ((made - x @ goal).square().mean() - critic(made).mean()).backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            (critic(made.detach()) - critic(x @ goal)).square().mean().backward()
            optimizers[1].step()
            keep()
    record = diagnose(watched.record())
    assert codes(record) == [("frozen-average", "error")]
    assert record.updates is not None
    assert {one.steps for one in record.updates.averages} == {94}  # found in steps 2, 3, 6, 12 … 96 of 100


@pytest.mark.parametrize("way", [copied, clamped])
def test_copies_that_are_overwritten_whole_or_clamped_are_not_averages(way: Any) -> None:
    record = trained(lambda net: way(net, HALF, 0.999))
    assert (codes(record), record.updates) == ([], None)


@pytest.mark.parametrize("is_own", [True, False])
def test_an_average_that_replaces_the_weight_is_not_reported_and_a_separate_one_is(is_own: bool) -> None:
    def into_weights(net: nn.Module) -> Keep:
        """As a script that trains on the average, or keeps the average and trains on a copy."""
        slow = [weight.detach().clone() for weight in net.parameters()]

        def keep() -> None:
            for at, weight in enumerate(net.parameters()):
                slow[at] = 0.999 * slow[at] + 0.001 * weight.detach()
                if is_own:
                    weight.data = slow[at]

        return keep

    record = trained(into_weights, dtype=HALF)
    assert record.updates is not None
    assert bool(record.updates.averages) == (not is_own)
    assert (("frozen-average", "error") in codes(record)) == (not is_own)


def test_tracing_averages_changes_no_bit_of_weights_averages_or_random_numbers() -> None:
    def ended(is_watched: bool) -> list[torch.Tensor]:
        net = Net()
        optimizer, average = torch.optim.AdamW(net.parameters(), lr=1e-2), copy.deepcopy(net).to(HALF)
        with watch(net, optimizer) if is_watched else torch.enable_grad():
            for _ in range(20):
                optimizer.zero_grad()
                net(torch.ones(4, 32)).square().mean().backward()
                optimizer.step()
                for kept, weight in pairs(average, net):
                    kept.data.mul_(0.9).add_(weight.data * torch.rand(()), alpha=0.1)
        return [one.detach() for one in (*net.parameters(), *average.parameters(), torch.rand(3))]

    assert all(map(torch.equal, ended(is_watched=False), ended(is_watched=True)))


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*args, **(kwargs or {}))


def test_a_dispatch_mode_of_the_script_stays_on_top() -> None:
    net = Net()
    optimizer, mode = torch.optim.AdamW(net.parameters(), lr=1e-3), Mode()
    keep = by_two_ops(net, HALF, 0.999)
    with watch(net, optimizer):
        for step in range(20):
            optimizer.zero_grad()
            net(torch.ones(4, 32)).square().mean().backward()
            optimizer.step()
            keep()
            if step == 5:  # a stretch is traced after the sixth step
                assert len(_get_current_dispatch_mode_stack()) == 1
                mode.__enter__()
            if step == 7:
                assert _get_current_dispatch_mode_stack()[-1] is mode
                mode.__exit__(None, None, None)
    assert (_get_current_dispatch_mode_stack(), nn.Module.__call__) == ([], CALL)


def test_a_script_that_raises_in_a_traced_stretch_leaves_no_dispatch_mode() -> None:
    net = Net()
    optimizer, keep = torch.optim.AdamW(net.parameters(), lr=1e-3), by_two_ops(net, HALF, 0.999)
    with pytest.raises(KeyError), watch(net, optimizer):  # noqa: PT012 - all of it is the script's
        for step in range(3):
            net(torch.ones(4, 32)).square().mean().backward()
            optimizer.step()
            keep()
            if step == 1:
                assert len(_get_current_dispatch_mode_stack()) == 1
                raise KeyError
    assert (_get_current_dispatch_mode_stack(), nn.Module.__call__) == ([], CALL)


def test_an_op_that_is_not_elementwise_hides_no_other_average() -> None:
    weight, average, other = (torch.full((8, 8), value).to(HALF) for value in (3.0, 1.0, 2.0))
    with AverageTrace({weight.shape}, {weight.untyped_storage().data_ptr()}) as trace:
        average.lerp_(weight, 0.25)
        other.copy_(other @ other)
        other.mul_(0.5)
    found = list(found_in(trace, {7: weight}))
    assert [(one.of, one.decay, one.aim.unique().tolist()) for one in found] == [(7, 0.75, [3.0])]


def masters_averaged(decay_at: Callable[[int], float], parts: Callable[[nn.Parameter], bool]) -> Record:
    """Half weights with float32 masters, as in apex, and a half average of the weights for which ``parts`` is true."""
    net = Net().bfloat16()
    masters = [weight.detach().float().requires_grad_() for weight in net.parameters()]
    kept = [
        (weight.detach().clone() if parts(weight) else weight.detach().float(), weight) for weight in net.parameters()
    ]
    optimizer, goal = torch.optim.AdamW(masters, lr=1e-3), torch.randn(32, 32)
    with watch(net, optimizer) as watched:
        for step in range(150):
            x = torch.randn(16, 32)
            (net(x.bfloat16()).float() - x @ goal).square().mean().backward()
            for master, weight in zip(masters, net.parameters(), strict=True):
                assert weight.grad is not None
                master.grad = weight.grad.float()
            optimizer.step()
            with torch.no_grad():
                for master, weight in zip(masters, net.parameters(), strict=True):
                    weight.copy_(master)
                for average, weight in kept:
                    average.lerp_(weight.to(average.dtype), 1.0 - decay_at(step))
            net.zero_grad()
    return diagnose(watched.record())


def test_averages_beside_masters_have_the_names_of_the_weights_and_suggest_no_edit() -> None:
    record = masters_averaged(lambda step: 0.9993, lambda weight: True)
    assert codes(record) == [("frozen-average", "error")]
    assert record.updates is not None
    assert {one.name for one in record.updates.averages} <= {
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "2.weight",
        "2.bias",
    }
    # The memory layout decides the last bits of sums: 1,008 values, or one more or less.
    assert re.search(r"of the 1,00\d values that move in float32\)", record.findings[0].message)
    assert "its averages alone lose by half" in why_no_edit(record)
    shown = replace(record, command="run", script=ScriptRun("train.py"))
    page, whole = (text_of(shown, CommandContext("r.json", ""), PLAIN, kind) for kind in ("text", "markdown"))
    assert "suggest-fp32" not in page
    assert "ampdbg explain frozen-average" in page
    assert "The share of the way of averages in float32 that those in half do not go." in whole
    lost = trained(lambda net: by_lerp(net, HALF, 0.999), HALF)
    assert why_no_edit(lost) == ""  # its weights are half themselves


def test_a_changing_decay_is_reported_as_a_range_without_a_bound_for_one_decay() -> None:
    record = masters_averaged(lambda step: 1.0 - (1.0 + step) ** -0.75, lambda weight: True)
    assert record.updates is not None
    lost = {one.name: one.lost for one in record.updates.averages}
    assert max(lost["0.weight"], lost["2.weight"]) < 0.1  # most values do move
    assert lost["1.weight"] > 0.9  # ones move too little
    (found,) = record.findings
    assert (found.code, found.severity) == ("frozen-average", "warning")
    assert "The decay went from 0" in found.message
    assert "only values that differ from their weight" not in found.message


SCRIPT = """
import torch
from torch import nn

net = nn.Linear(64, 64, bias=False)
net.weight.data.fill_(1.5)
average = nn.Linear(64, 64, bias=False).to(torch.{dtype})
average.weight.data.fill_(1.0)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
for _ in range(5000):
    net(torch.randn(2, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for kept, weight in zip(average.parameters(), net.parameters()):
            kept.mul_(1 - 1e-3).add_(weight, alpha=1e-3)
print(float(average.weight.float().mean()))
"""


@pytest.mark.slow
def test_run_reports_that_an_average_of_ones_stays_at_one_in_bfloat16(tmp_path: Path) -> None:
    record, page, code = run_with_page(tmp_path, SCRIPT.format(dtype="bfloat16"), options=())
    assert (codes(record), code) == ([("frozen-average", "error")], 1)
    assert "that of weight (0 of the 4,096 values that move in float32)" in page
    assert record.findings[0].parameter == "weight"

    twin, _, code = run_with_page(tmp_path, SCRIPT.format(dtype="float32"), options=())
    assert (codes(twin), code, twin.updates) == ([], 0, None)
