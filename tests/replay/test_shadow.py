"""The wide shadow pass of a whole step: five overflows at once, the loss scale windows of gradients, and no trace."""

import contextlib
import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampdbg.errors import UserCodeError
from ampdbg.probes.shadow_trace import RangeSeen, sites_of
from ampdbg.record.file import to_json
from ampdbg.record.run import Record, Site
from ampdbg.replay.replay import shadow_step
from ampdbg.replay.run import Run, prepared
from ampdbg.replay.snapshot import Snapshot, take_snapshot
from ampdbg.training.loop import profile_ranges
from tests.written import written

FIVE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, big):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(8)
        self.big = big

    def forward(self, x):
        h = self.drop(torch.relu(self.inner(x))) + 1.0
        if self.big:
            h = h * 300.0
            h = h * h  # overflows
        return self.norm(h)

def build_model():
    return nn.Sequential(*(Block(index % 2 == 0) for index in range(10)))

def build_data():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(16, 8, generator=generator) for _ in range(3)]

def step(model, batch):
    return model(batch).square().mean()
"""
OVERFLOWING_LINE = next(i for i, line in enumerate(FIVE.splitlines(), 1) if "# overflows" in line)


KEYS: dict[str, Any] = {"model": "build_model", "data": "build_data", "step": "step", "train": {"device": "cpu"}}


@contextlib.contextmanager
def first_step(folder: Path, code: str = FIVE) -> Iterator[tuple[Run, Snapshot]]:
    with prepared(written(folder, code, **KEYS)) as run:
        yield run, take_snapshot(run.workload.model, 0, (next(run.workload.batches()),))


def profile(folder: Path, *settings: str, code: str = FIVE, **keys: Any) -> Record:
    return profile_ranges(written(folder, code, "train.steps=1", *settings, **KEYS, **keys))


def starts(sites: tuple[Site, ...]) -> list[tuple[str, str, int]]:
    return [
        (site.module, site.op, site.source.line if site.source else 0) for site in sites if site.overflow == "starts"
    ]


def test_five_overflows_at_five_depths_are_five_overflow_sites(tmp_path: Path) -> None:
    record = profile(tmp_path)
    forward = tuple(site for site in record.sites if site.phase == "forward")
    assert starts(forward) == [(str(index), "aten.mul.Tensor", OVERFLOWING_LINE) for index in range(0, 10, 2)]
    assert all(site.headroom_bits < 0 < site.abs_max for site in forward if site.overflow == "starts")
    assert {site.dtype for site in record.sites} == {"float16"}


def test_a_shadow_pass_leaves_model_optimizer_and_random_states_unchanged(tmp_path: Path) -> None:
    with first_step(tmp_path) as (run, snapshot):
        model, [optimizer] = run.workload.model, run.workload.optimizers
        sum(run.workload.losses(snapshot.batches[0]).values(), torch.tensor(0.0)).backward()
        optimizer.step()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        moments = copy.deepcopy(optimizer.state_dict()["state"])
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        states = torch.get_rng_state(), random.getstate()
        shadow_step(run, snapshot)
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        torch.testing.assert_close(optimizer.state_dict()["state"], moments, rtol=0.0, atol=0.0)
        assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None)
        assert torch.equal(states[0], torch.get_rng_state())
        assert states[1] == random.getstate()
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_same_seed_gives_the_same_record_except_for_times(tmp_path: Path) -> None:
    def stripped(record: Record) -> str:
        lines = to_json(record).splitlines()
        return "\n".join(line for line in lines if '"created"' not in line and '"elapsed"' not in line)

    first = stripped(profile(tmp_path, "train.steps=3"))
    assert first == stripped(profile(tmp_path, "train.steps=3"))
    assert first != stripped(profile(tmp_path, "train.steps=3", "train.seed=1"))


def test_the_last_planned_step_is_measured_after_the_others_are_trained(tmp_path: Path) -> None:
    record = profile(tmp_path, "train.steps=3")
    assert [step.step for step in record.steps] == [0, 1]
    assert record.planned_steps == 3
    assert record.sites


PRODUCT = """
import torch
from torch import nn

def build_model():
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    return model

def build_data():
    return [torch.full((1, 4), 2.0 ** -10)]

def step(model, batch):
    return model(batch).float().sum() * 2.0 ** -6
"""


def weight_gradient(ranges: tuple[RangeSeen, ...]) -> Site:
    (site,) = [site for site in sites_of(ranges) if site.phase == "backward" and site.op == "aten.mm.default"]
    return site


def test_the_loss_scale_window_of_a_gradient_is_exact(tmp_path: Path) -> None:
    with first_step(tmp_path, PRODUCT) as (run, snapshot):
        site = weight_gradient(shadow_step(run, snapshot).ranges)
    # Every element is 2**-16. Float16 keeps 2**-25 (a scale of 2**-9) to 2**15, the last below 65520 (2**31).
    assert site.abs_max == 2.0**-16
    assert (site.scale_floor, site.scale_ceiling) == (2.0**-9, 2.0**31)
    assert (site.lowest_exponent, site.exponents) == (-16, (4,))


def test_a_micro_batch_contributes_its_share_of_the_loss(tmp_path: Path) -> None:
    with first_step(tmp_path, PRODUCT) as (run, snapshot):
        twice = Snapshot(0, snapshot.batches * 2, snapshot.data * 2, snapshot.random_state, snapshot.state)
        site = weight_gradient(shadow_step(run, twice).ranges)
    assert (site.abs_max, site.calls) == (2.0**-17, 2)


def test_no_overflow_starts_in_a_pinned_module(tmp_path: Path) -> None:
    record = profile(tmp_path, precision={"pins": ["2"]})
    modules = [module for module, _, _ in starts(record.sites)]
    assert "2" not in modules
    assert {"0", "4", "6", "8"} <= set(modules)


@pytest.mark.parametrize("precision", [{"level": "O0"}, {"dtype": "bfloat16"}, {"loss_scale": 8}], ids=str)
def test_the_range_profile_is_that_of_float16_in_every_precision(tmp_path: Path, precision: dict[str, Any]) -> None:
    sites = profile(tmp_path, precision=precision).sites
    assert {site.dtype for site in sites} == {
        str(precision.get("dtype", "float32" if "level" in precision else "float16"))
    }
    assert tuple(replace(site, dtype="float16") for site in sites) == profile(tmp_path).sites


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_bfloat16_run_is_checked_in_the_same_float16_as_a_float16_run(tmp_path: Path, level: str) -> None:
    code = FIVE.replace("h * 300.0", "h * 30.0")
    half, wide = (
        profile(tmp_path, code=code, precision={"dtype": dtype, "level": level}) for dtype in ("float16", "bfloat16")
    )
    assert (half.checks[1].dtype, half.checks[1].scale) == ("float16", wide.checks[1].scale)
    assert wide.checks[1].loss == pytest.approx(half.checks[1].loss, rel=2e-3)  # weights were rounded to bfloat16
    assert wide.checks[1].loss != wide.checks[0].loss


def test_the_error_of_code_that_cannot_run_in_bfloat16_names_bfloat16(tmp_path: Path) -> None:
    code = FIVE.replace("return model(batch).square().mean()", "return model[0].inner(batch).detach().numpy()")
    with pytest.raises(UserCodeError, match="runs this step in bfloat16"):
        profile(tmp_path, code=code)


def test_an_error_caused_by_autocast_is_in_the_record(tmp_path: Path) -> None:
    code = FIVE.replace("model(batch).square().mean()", "nn.BCELoss()(model(batch).sigmoid(), batch.sigmoid())")
    record = profile(tmp_path, code=code)
    assert record.autocast_error is not None
    assert record.autocast_error.code == "misuse-bce"


def test_unused_parameters_and_scripted_or_compiled_modules_are_listed(tmp_path: Path) -> None:
    code = FIVE.replace("return nn.Sequential(*", "return nn.Sequential(torch.jit.script(nn.Linear(8, 8)), *")
    with first_step(tmp_path, code) as (run, snapshot):
        unused = nn.Linear(2, 2)
        run.workload.model.add_module("unused", unused)
        run.workload.model.unused.forward = lambda x: x  # type: ignore[union-attr]
        run.workload.model[1].compile(backend="eager")  # type: ignore[index]
        unseen = shadow_step(run, snapshot).unseen
    assert unseen.parameters_without_gradient == ("unused.weight", "unused.bias")
    assert "module '0' is scripted and cannot be watched inside" in unseen.notes
    assert "module '1' is compiled; its eager code was analysed" in unseen.notes
