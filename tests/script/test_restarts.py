"""A script that is started again for a capture: it ends in its middle, with the processes that it has started."""

from __future__ import annotations

import multiprocessing
import re
from pathlib import Path

import pytest

from tests.proof.test_proof_process import is_alive
from tests.script import scripts
from tests.script.test_captures import capture_of, on
from tests.script.test_run import run

WORKERS = {
    "a process": "p = mp.Process(target=late); p.start()",
    "a daemon": "p = mp.Process(target=late, daemon=True); p.start()",
    "a pool": "pool = ProcessPoolExecutor(1, mp); pool.submit(late); p, = pool._processes.values()",
}
"""What may live as long as the loop."""

AROUND_THE_LOOP = """
    import multiprocessing, os, time
    from concurrent.futures import ProcessPoolExecutor
    mp = multiprocessing.get_context("fork")

    global late
    def late():
        time.sleep(60)
        print("overdue", flush=True)
        os._exit(0)

    WORKER
    print("worker", p.pid, flush=True)
    main(float(sys.argv[1]), int(sys.argv[2]))
    p.kill()
"""


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="Windows forks no process")
@pytest.mark.parametrize(
    ("worker", "command"),
    [
        ("a process", "replay"),
        pytest.param("a daemon", "replay", marks=pytest.mark.slow),
        pytest.param("a pool", "suggest-fp32", marks=pytest.mark.slow),
    ],
)
def test_it_ends_with_the_workers_that_it_has_forked(worker: str, command: str, tmp_path: Path) -> None:
    head = scripts.PLAIN.partition("\n    main(")[0]
    run(tmp_path, head + AROUND_THE_LOOP.replace("WORKER", WORKERS[worker]), "400", "6")
    result, record = on(tmp_path, command, capture_of(tmp_path))
    assert (result.code, record.findings[0].code) == (command == "replay", "forward-overflow")
    workers = [int(pid) for pid in re.findall(r"worker (\d+)", result.stderr)]
    assert workers
    assert "overdue" not in result.stderr
    assert not any(map(is_alive, workers))
