"""What runs beside a step that is run again: a script's other threads, and its handlers of signals."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ampdbg.record.file import read_record
from tests.commands.program import start
from tests.script import scripts


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is one of a CPU, also where there is a GPU."""
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


def run(folder: Path, prelude: str, forward: str, ending: str, loop: str = LOOP) -> str:
    """What the script prints, whose step 3 is run again."""
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
def test_a_signal_is_handled_as_in_the_loop_and_what_it_sets_stays(tmp_path: Path, call: int) -> None:
    forward = f"""
        if call == 3:
            globals()["before"] = self.linear.weight.detach().clone()
        if call == {call}:
            signal.raise_signal(signal.SIGTERM)"""
    said = run(tmp_path, HANDLER, forward, "print('steps', steps, stop)")
    assert said.splitlines() == ["autocast False same True", "steps 4 True"]
    record = read_record(tmp_path / "r.json")
    assert (record.investigations, record.unseen.notes) == ((), ())  # the signal was not kept waiting


RAISES = """
stop = False
class OutOfTime(Exception):
    pass
def handle(number, frame):
    raise OutOfTime
signal.signal(signal.SIGTERM, handle)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such signals")
def test_what_a_handler_raises_reaches_the_script(tmp_path: Path) -> None:
    forward = "\n        if call == 4: signal.raise_signal(signal.SIGTERM)"
    prelude = f"{RAISES}\nsys.excepthook = lambda kind, *_: print('raised', kind.__name__, steps)"
    said = run(tmp_path, prelude, forward, "print('not reached')")
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
def test_what_a_loss_of_its_own_keeps_is_not_moved_on(tmp_path: Path) -> None:
    text = LOOP.replace("(net(x).float() - 1)", "(centred(net(x).float()) - 1)")
    said = run(tmp_path, LOSS, "pass", "print(centred.calls, steps)", text)
    assert said.split() == ["8", "8"]
    assert any("run again" in note for note in read_record(tmp_path / "r.json").unseen.notes)


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
def test_what_another_thread_writes_meanwhile_is_not_taken_back(tmp_path: Path) -> None:
    forward = "seen.append(call); time.sleep(0.02)"
    ending = "ends = True; thread.join()\nprint(made == list(own) == list(table), last == own[-1], len(seen), steps)"
    assert run(tmp_path, THREAD, forward, ending).split() == ["True", "True", "8", "8"]
    assert any("run again" in note for note in read_record(tmp_path / "r.json").unseen.notes)
