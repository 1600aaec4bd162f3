"""What runs beside a training loop: processes, threads and signal handlers."""

import os
import sys
from pathlib import Path

import pytest

from ampdbg.record.file import read_record
from tests.commands.program import start
from tests.script import scripts
from tests.script.test_run import run
from tests.siblings import slow_except


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the loop on the CPU even if there is a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


LOOP = scripts.loop("""
PRELUDE

calls = itertools.count()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)
    def forward(self, x):
        call = next(calls)
        FORWARD
        return self.linear(x)

net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cuda", init_scale=16.0)
steps = 0
while not stop and steps < 8:
    x = torch.ones(4, 8)
    if steps == 3:
        x[0, 0] = float("nan")
    with torch.autocast("cuda", dtype=torch.float16):
        loss = (net(x).float() - 1).square().mean()
    STEP
    steps += 1
ENDING
""")


def looped(folder: Path, prelude: str, forward: str, ending: str, loop: str = LOOP) -> str:
    """Returns the output of the script, whose step 3 is replayed."""
    text = loop.replace("PRELUDE", prelude).replace("FORWARD", forward).replace("ENDING", ending)
    (folder / "train.py").write_text(text, encoding="utf-8")
    done = start(folder, "run", "--emulate", "--record=r.json", "train.py")
    assert done.code in (0, 1), done.stderr
    return done.stdout


HANDLER = """
stop = False
before = None
def handle(number, frame):
    global stop
    stop = True
    print("autocast", torch.is_autocast_enabled("cpu"), "same", torch.equal(net.linear.weight, before))
signal.signal(signal.SIGTERM, handle)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such signals")
@pytest.mark.parametrize("call", [4, 5])
def test_a_signal_handler_during_a_replay_runs_outside_autocast_and_stops_the_loop(tmp_path: Path, call: int) -> None:
    forward = f"""
        if call == 3:
            globals()["before"] = self.linear.weight.detach().clone()
        if call == {call}:
            signal.raise_signal(signal.SIGTERM)"""
    said = looped(tmp_path, HANDLER, forward, "print('steps', steps, stop)")
    assert said.splitlines() == ["autocast False same True", "steps 4 True"]
    record = read_record(tmp_path / "r.json")
    assert (record.investigations, record.unseen.notes) == ((), ())  # the signal was handled without delay


RAISES = """
stop = False
class OutOfTime(Exception):
    pass
def handle(number, frame):
    raise OutOfTime
signal.signal(signal.SIGTERM, handle)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such signals")
def test_an_exception_of_a_signal_handler_during_a_replay_reaches_the_script(tmp_path: Path) -> None:
    forward = "\n        if call == 4: signal.raise_signal(signal.SIGTERM)"
    prelude = f"{RAISES}\nsys.excepthook = lambda kind, *_: print('raised', kind.__name__, steps)"
    said = looped(tmp_path, prelude, forward, "print('not reached')")
    assert said.splitlines() == ["raised OutOfTime 3"]


LOSS = """
stop = False
class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, 1))
        self.calls = 0
    def forward(self, output):
        self.calls += 1
        with torch.no_grad():
            self.mean.mul_(0.9).add_(output.nan_to_num(1.0), alpha=0.1)
        return output - self.mean
centred = Centred()
"""


@pytest.mark.slow
def test_a_replay_leaves_the_state_of_a_loss_module_unchanged(tmp_path: Path) -> None:
    text = LOOP.replace("(net(x).float() - 1)", "(centred(net(x).float()) - 1)")
    said = looped(tmp_path, LOSS, "pass", "print(centred.calls, steps)", text)
    assert said.split() == ["8", "8"]
    record = read_record(tmp_path / "r.json")
    assert [(made.step, made.reach, made.reproduced) for made in record.investigations] == [(3, "whole", 1)]
    assert [(found.code, found.step) for found in record.findings] == [("data-nonfinite", 3)]


THREAD = """
stop, ends, made, table, last = False, False, [], {}, 0
def work():
    global last
    while not ends:
        note(len(own))
        time.sleep(0.001)
def note(number):
    global last
    own.append(number)
    made.append(number)
    table[number] = last = number
own = type("Own", (list,), {})()
thread = threading.Thread(target=work)
thread.start()
seen = []
"""


@pytest.mark.slow
def test_writes_of_another_thread_during_a_replay_are_kept_and_noted(tmp_path: Path) -> None:
    forward = "seen.append(call); time.sleep(0.02)"
    ending = (
        "ends = True; thread.join()\nprint(made == list(own) == list(table), last == own[-1], len(seen) > 8, steps)"
    )
    assert looped(tmp_path, THREAD, forward, ending).split() == ["True"] * 3 + ["8"]
    notes = read_record(tmp_path / "r.json").unseen.notes
    [note] = [note for note in notes if note.startswith("replays may have changed")]
    assert "last of train.py" in note
    assert "made of train.py" in note


STARTS_PROCESSES = """
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
        with mp.get_context("spawn").Pool(1) as pool:
            print(pool.map(square, [1, 2, 3]))
        train()
    else:
        train()
    print("over")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "count"), [("spawn", "2 processes"), ("process", "1 process")])
def test_processes_started_by_multiprocessing_are_noted_as_unwatched(tmp_path: Path, how: str, count: str) -> None:
    result, record = run(tmp_path, STARTS_PROCESSES, how)
    verb = "were" if how == "spawn" else "was"
    (note,) = record.unseen.notes
    assert note.startswith(f"{count} started by multiprocessing {verb} not watched and had no emulated GPU; to watch")
    page = " ".join(result.stderr.split())
    assert "torchrun --nproc-per-node N --no-python ampdbg run SCRIPT" in page
    assert (result.stdout, record.verdict, record.steps) == ("over\n", "inconclusive", ())


@pytest.mark.parametrize("how", slow_except(["pool"], ["loader", "pool", "alone"]))
def test_data_loader_workers_and_pools_are_not_noted_as_unwatched(tmp_path: Path, how: str) -> None:
    result, record = run(tmp_path, STARTS_PROCESSES, how)
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
def test_a_forked_child_has_the_default_signal_handlers_of_the_os(tmp_path: Path) -> None:
    # A pool ends its workers by SIGTERM: a handler in Python never runs in a worker that waits for a lock forever.
    result, _ = run(tmp_path, SIGNALS)
    child, parent = result.stdout.splitlines()
    assert child == "child [True, True, True] [True, True, True]"
    assert parent == "parent [False, False, False] [True, True, True]"
