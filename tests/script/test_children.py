"""Processes that a script starts by itself: what they do goes unseen, and that is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.script.test_run import run
from tests.siblings import slow_but_for

SCRIPT = """
import sys, torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def train(rank=0):
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    workers = dict(num_workers=2, multiprocessing_context="spawn") if sys.argv[1] == "loader" else {}
    for (x,) in DataLoader(TensorDataset(torch.randn(4, 4)), batch_size=2, **workers):
        net(x).pow(2).mean().backward()
        optimizer.step()

def square(x):
    return x * x

if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        mp.spawn(train, nprocs=2)
    elif sys.argv[1] == "process":
        child = mp.get_context("spawn").Process(target=train)
        child.start()
        child.join()
    elif sys.argv[1] == "pool":
        with mp.get_context("spawn").Pool(2) as pool:
            print(pool.map(square, [1, 2, 3]))
        train()
    else:
        train()
    print("over")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "count"), [("spawn", "2 processes"), ("process", "1 process")])
def test_processes_that_train_unseen_are_told_of(tmp_path: Path, how: str, count: str) -> None:
    result, record = run(tmp_path, SCRIPT, how)
    verb = "were" if how == "spawn" else "was"
    (note,) = record.unseen.notes
    assert note.startswith(f"{count} started by multiprocessing {verb} not watched and had no emulated GPU; to watch")
    page = " ".join(result.stderr.split())
    assert "torchrun --nproc-per-node N --no-python ampdbg run SCRIPT" in page
    assert (result.stdout, record.verdict, record.steps) == ("over\n", "inconclusive", ())


@pytest.mark.parametrize("how", slow_but_for(["pool", "alone"], ["loader", "pool", "alone"]))
def test_helpers_of_a_script_are_no_matter(tmp_path: Path, how: str) -> None:
    result, record = run(tmp_path, SCRIPT, how)
    assert (record.unseen.notes, len(record.steps)) == ((), 2), result.stderr


SIGNALS = """
import _signal, os, signal, sys

numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

def are_default():
    return [_signal.getsignal(number) == _signal.SIG_DFL for number in numbers]

if os.fork() == 0:
    at_once = are_default()
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    print("child", at_once, are_default(), flush=True)
    os._exit(0)
os.wait()
print("parent", are_default(), [signal.getsignal(number) is signal.SIG_DFL for number in numbers])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no such processes")
def test_a_signal_ends_a_forked_child_without_python_having_to_run(tmp_path: Path) -> None:
    # A pool ends its workers by SIGTERM: a handler in Python came too late for one about to wait for a lock, for ever.
    result, _ = run(tmp_path, SIGNALS)
    child, parent = result.stdout.splitlines()
    assert child == "child [True, True, True] [True, True, True]"
    assert parent == "parent [False, False, False] [True, True, True]"
