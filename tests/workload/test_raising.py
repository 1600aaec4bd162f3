"""Whatever the user's code raises, wherever: a UserCodeError with their traceback, and the steps that had ended."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ampdbg.config.file import load_config
from ampdbg.errors import UserCodeError
from ampdbg.record.run import Record
from ampdbg.training.loop import train
from tests.commands.program import start

WORKLOAD = """\
import asyncio, sys
import torch
from torch import nn

calls = 0


class Stop(BaseException):
    pass


class ExitText(Exception):
    def __str__(self):
        sys.exit(0)


class NoText(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Unreadable(Exception):
    def __getattribute__(self, name):
        raise RuntimeError("no " + name)


class Nameless(type):
    def __getattribute__(cls, name):
        if name in ("__name__", "__qualname__", "__module__"):
            raise ValueError(name)
        return super().__getattribute__(name)


class OfNameless(Exception, metaclass=Nameless):
    pass


class OtherText(Exception):
    def __str__(self):
        return 3


def boom(after=0):
    global calls
    calls += 1
    if calls > after:
        {raising}


class Output:
    def __init__(self, value):
        self.value = value

    @property
    def loss(self):
        {loss}
        return self.value


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        {backward}
        return gradient


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        {factory}
        self.head = nn.Linear(4, 2)
        self.eval()

    def forward(self, x):
        {forward}
        return Output(Backward.apply(1e-3 * self.head(x).float().sum()))

    def to(self, *args, **kwargs):
        {to}
        return super().to(*args, **kwargs)

    def train(self, mode=True):
        if mode:
            {train}
        return super().train(mode)

    def parameters(self, *args, **kwargs):
        {parameters}
        return super().parameters(*args, **kwargs)

    def named_parameters(self, *args, **kwargs):
        {named_parameters}
        return super().named_parameters(*args, **kwargs)


class Optimizer(torch.optim.SGD):
    def __init__(self, params):
        {optimizer}
        super().__init__(params, lr=1e-4)

    def zero_grad(self, *args, **kwargs):
        {zero_grad}
        return super().zero_grad(*args, **kwargs)

    def step(self, *args, **kwargs):
        {step}
        return super().step(*args, **kwargs)


def batches():
    for _ in range(9):
        yield torch.ones(2, 4)
        {batch}


{importing}
"""
CONFIG = """\
model: {target: workload.py:Net}
data: {target: workload.py:batches}
optimizer: {target: workload.py:Optimizer}
train: {steps: 5, device: cpu}
"""
STEPS_BEFORE = {
    "importing": 0,
    "factory": 0,
    "to": 0,
    "train": 0,
    "parameters": 0,
    "named_parameters": 0,
    "optimizer": 0,
    "forward": 3,
    "loss": 3,
    "backward": 3,
    "zero_grad": 3,
    "step": 3,
    "batch": 4,
}
RAISED = {
    "a BaseException": ('raise Stop("halt")', "raised Stop: halt"),
    "GeneratorExit": ('raise GeneratorExit("gone")', "raised GeneratorExit: gone"),
    "StopIteration": ("raise StopIteration", "raised StopIteration"),
    "CancelledError": ("raise asyncio.CancelledError", "raised CancelledError"),
    "SystemExit": ("sys.exit(3)", "raised SystemExit: 3; keep what a script does"),
    "no text": ("raise NoText", "raised NoText"),
    "a text that exits": ("raise ExitText", "raised ExitText"),
    "no attribute": (
        "raise Unreadable",
        "raised RuntimeError: an exception, Unreadable, whose attributes cannot be read",
    ),
    "no name": ("raise OfNameless", "an exception, OfNameless, whose attributes cannot be read"),
    "another text": ("raise OtherText", "raised OtherText"),
    "half a surrogate pair": (r'raise ValueError("bad \udc80 name")', "raised ValueError: bad ? name"),
    "a very long text": ('raise ValueError("x" * 10**6)', "raised ValueError: xxx"),
}


def written(folder: Path, place: str, raising: str) -> Path:
    """A config whose workload runs ``raising`` at ``place``; in the loop, in a step after the third."""
    late = f"boom(after={3 * (STEPS_BEFORE[place] > 0)})"
    text = WORKLOAD.replace("{raising}", raising).replace(f"{{{place}}}", late)
    for other in STEPS_BEFORE:
        text = text.replace(f"{{{other}}}", "pass")
    (folder / "workload.py").write_text(text, encoding="utf-8")
    (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
    return folder / "config.yaml"


def failed(folder: Path, place: str, raising: str) -> UserCodeError:
    """What training ends with."""
    config = load_config(written(folder, place, raising))
    with pytest.raises(UserCodeError) as raised:
        train(config, replays=0)
    return raised.value


@pytest.mark.parametrize(
    ("place", "name"),
    [
        *((place, "a BaseException") for place in STEPS_BEFORE),
        # Loops of ours run above a step, and would end by it.
        *((place, "StopIteration") for place, steps in STEPS_BEFORE.items() if steps == 3),
        ("named_parameters", "no attribute"),
    ],
)
def test_an_exception_is_theirs_wherever_it_is_raised(place: str, name: str, tmp_path: Path) -> None:
    raising, message = RAISED[name]
    error = failed(tmp_path, place, raising)
    assert message in str(error)
    assert "in boom" in error.user_traceback
    assert "ampdbg" not in error.user_traceback.replace(str(tmp_path), "")
    steps = error.record.steps if isinstance(error.record, Record) else ()
    assert len(steps) == STEPS_BEFORE[place]


@pytest.mark.parametrize("name", RAISED)
def test_an_exception_is_theirs_whatever_it_is(name: str, tmp_path: Path) -> None:
    raising, message = RAISED[name]
    error = failed(tmp_path, "forward", raising)
    assert message in str(error)
    assert len(str(error)) < 1000
    assert "in boom" in error.user_traceback
    (str(error) + error.user_traceback).encode("utf-8")
    assert isinstance(error.record, Record)
    assert len(error.record.steps) == 3


def test_an_inference_mode_that_is_never_left_is_their_error(tmp_path: Path) -> None:
    """In a process of its own: what else ran in this one would be in that mode too."""
    written(tmp_path, "forward", "sys.entered = torch.inference_mode(); sys.entered.__enter__()")
    result = start(tmp_path, "scan", "config.yaml")
    assert result.code == 2
    assert "raised RuntimeError: " in result.stderr
    assert "ampdbg itself failed" not in result.stderr
    assert "the 3 steps before it: " in result.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.11 has groups")
def test_a_group_is_shown_with_what_is_in_it(tmp_path: Path) -> None:
    error = failed(tmp_path, "backward", 'raise BaseExceptionGroup("many", [Stop("one"), ValueError("two")])')
    assert "raised BaseExceptionGroup: many (2 sub-exceptions)" in str(error)
    assert "ValueError: two" in error.user_traceback


def test_an_interrupt_is_none(tmp_path: Path) -> None:
    record = train(load_config(written(tmp_path, "forward", "raise KeyboardInterrupt")), replays=0)
    assert (record.interrupted, len(record.steps)) == (True, 3)
