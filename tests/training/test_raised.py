"""A step of a config that raises: blamed on half precision where FP32 comes through it and an op goes wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.errors import UserCodeError
from ampdbg.record.run import Record
from ampdbg.training.loop import train
from tests.siblings import slow_but_for
from tests.written import written

WORKLOAD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, gain, check):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
        self.gain, self.check, self.calls = gain, check, 0

    def forward(self, x):
        self.calls += self.training
        h = self.body(x) * (self.gain if self.calls > 3 else 1.0)
        scores = h @ h.T
        out = self.head((scores - scores.mean(-1, keepdim=True)).softmax(-1) @ h)
        if self.check == "finite":
            assert torch.isfinite(out).all(), "what comes out is wrong"
        if self.check == "always" and self.calls > 3:
            raise ValueError("it is time")
        if self.check == "half" and self.calls > 3:
            assert out.dtype is torch.float32, "this is no float32"
        if self.check == "dtypes" and self.calls > 3:
            out = out @ torch.ones(2, 2).double()
        return out

def data():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 8, generator=generator), torch.randn(6, 2, generator=generator)) for _ in range(8)]

def loss(model, batch):
    return (model(batch[0]).float() - batch[1]).pow(2).mean()
"""


def scanned(folder: Path, gain: float, check: str, precision: str = "float16", replays: int = 2) -> Record:
    config = written(
        folder,
        WORKLOAD,
        model=("Net", {"gain": gain, "check": check}),
        data="data",
        step="loss",
        train={"steps": 6},
        precision={"dtype": precision},
    )
    return diagnose(train(config, replays=replays))


def test_an_overflow_that_makes_the_code_raise_is_named(tmp_path: Path) -> None:
    record = scanned(tmp_path, 600.0, "finite")
    found = record.findings[0]
    assert (record.verdict, record.steps_run, found.code, found.step) == ("precision", 4, "forward-overflow", 3)
    assert found.source is not None
    assert found.source.text == "scores = h @ h.T"
    assert record.error.splitlines()[0].endswith("raised AssertionError: what comes out is wrong")


OTHER = {
    "in FP32 too": (1.0, "always", "float16"),
    "only in FP16, and no op goes wrong": (1.0, "half", "float16"),
    "torch itself says what is wrong": (600.0, "dtypes", "float16"),
    "nothing is half": (1e30, "finite", "float32"),
    "FP32 is not finite either": (1e30, "finite", "float16"),
}


@pytest.mark.parametrize("case", slow_but_for(["in FP32 too", "FP32 is not finite either"], OTHER))
def test_any_other_error_is_the_users_own_and_the_steps_before_it_are_kept(tmp_path: Path, case: str) -> None:
    with pytest.raises(UserCodeError) as raised:
        scanned(tmp_path, *OTHER[case])
    record = raised.value.record
    assert isinstance(record, Record)
    assert [step.step for step in record.steps] == [0, 1, 2]
    assert record.investigations == ()


def test_without_replays_nothing_is_blamed(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError):
        scanned(tmp_path, 600.0, "finite", replays=0)


def test_a_check_that_holds_is_healthy(tmp_path: Path) -> None:
    assert scanned(tmp_path, 1.0, "finite").verdict == "healthy"
