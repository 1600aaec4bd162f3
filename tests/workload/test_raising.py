"""Any exception, anywhere in user code, becomes a UserCodeError with their traceback and the finished steps."""

import sys
from pathlib import Path

import pytest

from ampdbg.config.schema import Config
from ampdbg.errors import UserCodeError
from ampdbg.record.run import Record
from ampdbg.training.loop import train
from tests.commands.program import start
from tests.written import written

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


def boom():
    global calls
    calls += 1
    if calls > AFTER:
        RAISING


def booming(inner):
    def outer(*args, **kwargs):
        boom()
        return inner(*args, **kwargs)
    return outer


def loss_of(output):
    return output.value


class Output:
    def __init__(self, value):
        self.value = value

    @property
    def loss(self):
        return loss_of(self)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.training = False

    def forward(self, x):
        return Output(Backward.apply(1e-3 * self.head(x).float().sum()))


class Optimizer(torch.optim.SGD):
    def __init__(self, params):
        super().__init__(params, lr=1e-4)


def between():
    pass


def batches():
    for _ in range(9):
        yield torch.ones(2, 4)
        between()


PLACE
"""
PLACES = {
    "boom()": 0,
    **{
        f"Net.{name} = booming(Net.{name})": 0 for name in ("__init__", "to", "train", "parameters", "named_parameters")
    },
    "Optimizer.__init__ = booming(Optimizer.__init__)": 0,
    "Net.forward = booming(Net.forward)": 3,
    "loss_of = booming(loss_of)": 3,
    "Backward.backward = staticmethod(booming(Backward.backward))": 3,
    "Optimizer.zero_grad = booming(Optimizer.zero_grad)": 3,
    "Optimizer.step = booming(Optimizer.step)": 3,
    "between = booming(between)": 4,
}
"""Where the code raises, and how many steps ended before."""

FORWARD, BACKWARD = (place for place in PLACES if place.startswith(("Net.forward", "Backward")))
RAISED = {
    "a BaseException": ('raise Stop("halt")', "raised Stop: halt"),
    "GeneratorExit": ('raise GeneratorExit("gone")', "raised GeneratorExit: gone"),
    "StopIteration": ("raise StopIteration", "raised StopIteration"),
    "CancelledError": ("raise asyncio.CancelledError", "raised CancelledError"),
    "SystemExit": ("sys.exit(3)", "raised SystemExit: 3; put code that only the script should run"),
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


def raising_at(folder: Path, place: str, raising: str) -> Config:
    """A config whose workload runs ``raising`` at ``place``. In the loop it raises in a step after the third."""
    after = 3 * (PLACES[place] > 0)
    text = WORKLOAD.replace("RAISING", raising).replace("PLACE", place).replace("AFTER", str(after))
    keys = {"model": "Net", "data": "batches", "optimizer": "Optimizer", "train": {"steps": 5, "device": "cpu"}}
    return written(folder, text, **keys)


def failed(folder: Path, place: str, raising: str) -> UserCodeError:
    """The error that ends the training."""
    config = raising_at(folder, place, raising)
    with pytest.raises(UserCodeError) as raised:
        train(config, replays=0)
    return raised.value


@pytest.mark.parametrize(
    ("place", "name"),
    [
        *((place, "a BaseException") for place in PLACES),
        # Loops of ampdbg run around a step, and would end at a StopIteration.
        *((place, "StopIteration") for place, steps in PLACES.items() if steps == 3),
        ("Net.named_parameters = booming(Net.named_parameters)", "no attribute"),
    ],
)
def test_an_exception_raised_anywhere_in_user_code_is_a_user_code_error(place: str, name: str, tmp_path: Path) -> None:
    raising, message = RAISED[name]
    error = failed(tmp_path, place, raising)
    assert message in str(error)
    assert "in boom" in error.user_traceback
    assert "ampdbg" not in error.user_traceback.replace(str(tmp_path), "")
    steps = error.record.steps if isinstance(error.record, Record) else ()
    assert len(steps) == PLACES[place]


@pytest.mark.parametrize("name", RAISED)
def test_any_kind_of_exception_in_user_code_is_a_user_code_error(name: str, tmp_path: Path) -> None:
    raising, message = RAISED[name]
    error = failed(tmp_path, FORWARD, raising)
    assert message in str(error)
    assert len(str(error)) < 1000
    assert "in boom" in error.user_traceback
    (str(error) + error.user_traceback).encode("utf-8")
    assert isinstance(error.record, Record)
    assert len(error.record.steps) == 3


def test_an_inference_mode_that_is_never_left_is_a_user_code_error(tmp_path: Path) -> None:
    """The scan has its own process: in this one, other tests would run in that mode too."""
    raising_at(tmp_path, FORWARD, "sys.entered = torch.inference_mode(); sys.entered.__enter__()")
    result = start(tmp_path, "scan", "config.yaml")
    assert result.code == 2
    assert "raised RuntimeError: " in result.stderr
    assert "ampdbg itself failed" not in result.stderr
    assert "the 3 steps before it: " in result.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.11 has groups")
def test_an_exception_group_is_shown_with_its_exceptions(tmp_path: Path) -> None:
    error = failed(tmp_path, BACKWARD, 'raise BaseExceptionGroup("many", [Stop("one"), ValueError("two")])')
    assert "raised BaseExceptionGroup: many (2 sub-exceptions)" in str(error)
    assert "ValueError: two" in error.user_traceback


def test_a_keyboard_interrupt_in_user_code_interrupts_the_run(tmp_path: Path) -> None:
    record = train(raising_at(tmp_path, FORWARD, "raise KeyboardInterrupt"), replays=0)
    assert (record.interrupted, len(record.steps)) == (True, 3)
