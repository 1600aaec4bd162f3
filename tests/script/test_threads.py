"""Scripts that train several models at once, each in a thread: all steps are counted, and none is disturbed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.script import scripts
from tests.script.test_run import run
from tests.siblings import slow_but_for

LOOPS = scripts.loop("""
STEPS, LOOPS = 4, 3
together = threading.Barrier(LOOPS, timeout=60)
wrong = []

def train(net):
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-3), torch.amp.GradScaler("cuda", init_scale=1024.0)
    for step in range(STEPS):
        with torch.autocast("cuda"):
            loss = net(torch.ones(16, 8).cuda()).square().mean() * GAIN
        optimizer.zero_grad()
        together.wait()
        scaler.scale(loss).backward()
        together.wait()
        scaler.step(optimizer)
        together.wait()
        scaler.update()
        together.wait()

def watched(net):
    try:
        train(net)
    except Exception as error:
        wrong.append(error)
        together.abort()

nets = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).cuda() for _ in range(LOOPS)]
threads = [threading.Thread(target=watched, args=(net,)) for net in nets]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(wrong)
""")


@pytest.mark.parametrize("gain", slow_but_for(["1e9"], ["1.0", "1e9"]))
def test_each_step_of_loops_in_several_threads_is_counted_once(gain: str, tmp_path: Path) -> None:
    result, record = run(tmp_path, LOOPS.replace("GAIN", gain))
    assert result.stdout == "[]\n"
    assert Counter(step.step for step in record.steps) == Counter(range(12))
    assert sum(step.skipped for step in record.steps) == (0 if gain == "1.0" else 12)
    assert (record.steps_run, record.error, record.investigations) == (12, "", ())
