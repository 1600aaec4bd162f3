"""A script that is started again for a capture ends in its middle, with its processes, threads and temporary files."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.commands.program import start
from tests.proof.test_proof_process import is_alive
from tests.script import scripts
from tests.script.test_captures import capture_of, interrupted, on
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


@pytest.mark.slow
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="Windows forks no process")
@pytest.mark.parametrize(("worker", "command"), [*zip(WORKERS, ("replay", "replay", "suggest-fp32"), strict=True)])
def test_it_ends_with_the_workers_that_it_has_forked(worker: str, command: str, tmp_path: Path) -> None:
    head = scripts.PLAIN.partition("\n    main(")[0]
    run(tmp_path, head + AROUND_THE_LOOP.replace("WORKER", WORKERS[worker]), "400", "6")
    result, record = on(tmp_path, command, capture_of(tmp_path))
    assert (result.code, record.findings[0].code) == (command == "replay", "forward-overflow")
    workers = [int(pid) for pid in re.findall(r"worker (\d+)", result.stderr)]
    assert workers
    assert "overdue" not in result.stderr
    assert not any(map(is_alive, workers))


IN_A_THREAD = """
    import threading, time
    calls = []
    nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1))
    thread = threading.Thread(target=main, args=(float(sys.argv[1]), int(sys.argv[2])), daemon=True)
    thread.start()
    if sys.argv[3] == "waits":
        thread.join()
    while len(calls) < 20:
        time.sleep(0.01)
    print("main ends")
"""
"""With ``waits`` it waits for its training, else it ends in the midst of a replay."""


@pytest.fixture(scope="module")
def threaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script that trains in a thread, and its capture."""
    folder = tmp_path_factory.mktemp("threaded")
    head = scripts.PLAIN.partition("\n    main(")[0]
    assert run(folder, head + IN_A_THREAD, "400", "6", "waits")[1].findings[0].code == "forward-overflow"
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("command", "how"), [("replay", "waits"), ("replay", "ends"), ("suggest-fp32", "ends")])
def test_it_may_train_in_a_thread(command: str, how: str, threaded: Path, tmp_path: Path) -> None:
    shutil.copytree(threaded, tmp_path, dirs_exist_ok=True)
    result, record = on(tmp_path, command, capture_of(tmp_path), f"--script=train.py 400 6 {how}")
    found = record.findings[0]
    assert (result.code, found.code, found.module) == (command == "replay", "forward-overflow", "attention")
    assert command == "replay" or (record.verification is not None and record.verification.passed)
    assert ("main ends" in result.stderr, "Traceback" in result.stderr) == (how == "ends", False)


@pytest.mark.slow
def test_an_interrupt_ends_it_in_a_thread(threaded: Path, tmp_path: Path) -> None:
    interrupted("searching", threaded, tmp_path, "bisect")


MAKES_TEMPORARIES = """
    import multiprocessing, os, shutil, tempfile
    folder, temporaries, file = tempfile.TemporaryDirectory(), tempfile.mkdtemp(), tempfile.NamedTemporaryFile()
    for one in folder.name, temporaries:
        open(os.path.join(one, "data"), "w").write("data")
    lock = multiprocessing.get_context("spawn").Lock()
    print("semaphore", lock._semlock.name, flush=True)
    cache = os.path.join(tempfile.gettempdir(), "cache")
    if os.path.exists(cache):
        print("cached", open(cache).read(), flush=True)
    if len(sys.argv) > 3:
        x = [torch.ones(3)] * 8
        loader = torch.utils.data.DataLoader(x, num_workers=1, multiprocessing_context="spawn", persistent_workers=True)
        print("loaded", len([*loader]), flush=True)
    main(float(sys.argv[1]), int(sys.argv[2]))
    shutil.rmtree(temporaries)
"""


@pytest.fixture(scope="module")
def temporaries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script and its capture."""
    folder = tmp_path_factory.mktemp("temporaries")
    run(folder, scripts.PLAIN.partition("\n    main(")[0] + MAKES_TEMPORARIES, "400", "6")
    return folder


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no TMPDIR, and no semaphores that stay")
@pytest.mark.parametrize("arguments", ["400 6", "400 6 loader"])
@pytest.mark.parametrize("command", ["replay", "suggest-fp32"])
def test_temporary_files_go_with_the_script(command: str, arguments: str, temporaries: Path, tmp_path: Path) -> None:
    folder, temporary = tmp_path / "f", tmp_path / "t"
    shutil.copytree(temporaries, folder)
    temporary.mkdir()
    for name in ("cache", "tmp0123"):
        (temporary / name).write_text("of before")
    result = start(folder, command, str(capture_of(folder)), f"--script=train.py {arguments}", TMPDIR=str(temporary))
    assert result.code == (command == "replay"), result.stderr
    assert "cached of before" in result.stderr
    assert ("loaded 8" in result.stderr) == arguments.endswith("loader")
    assert {path.name for path in temporary.iterdir()} - {"torchinductor_root"} == {"cache", "tmp0123"}
    names = re.findall(r"semaphore (\S+)", result.stderr)
    assert names
    assert not any(Path(f"/dev/shm/sem.{name[1:]}").exists() for name in names)
