"""A script that is restarted for a capture ends at the captured step, and existing files stay unchanged."""

import builtins
import contextlib
import io
import multiprocessing
import os
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ampdbg.files import temporary_folder
from ampdbg.script.guard import FileGuard
from tests.commands.program import Result, start, start_fresh, start_python
from tests.proof.test_proof_process import is_alive
from tests.script import scripts
from tests.script.test_captures import capture_of, interrupted, run_on_capture
from tests.script.test_run import run

BEGINS_ANEW = """
import logging, os, shutil, sqlite3, sys, torch
from pathlib import Path
logging.basicConfig(filename="train.log", filemode="w", level=logging.INFO)
logging.info("begun")
torch.save({"at": "the start"}, "last.pt")
Path("config.json").write_text("{}")
torch.save({"at": "the start"}, "new.pt")
os.replace("new.pt", "b.txt")
os.makedirs("out/deep", exist_ok=True)
shutil.copy(__file__, "out/train.txt")
with open("events.txt", "a") as events:
    events.write("one more")
Path("new.txt").write_text("new")
"""
"""Writes and replaces files before it trains."""

EARLIER_FILES = {
    "train.log": "a night's log\n" * 1000,
    "last.pt": "a night's weights",
    "config.json": '{"of": "the night"}',
    "out/deep/best.pt": "the best",
    "out/train.txt": "the script",
    "old.txt": "old",
    "a.txt": "a",
    "b.txt": "b",
    "events.txt": "events\n",
}


def contents(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in EARLIER_FILES if (folder / name).exists()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script, its capture, and the files of an earlier run."""
    folder = tmp_path_factory.mktemp("night")
    run(folder, BEGINS_ANEW + scripts.PLAIN, "400", "6")
    shutil.copy(capture_of(folder), folder / "c.safetensors")
    for name, text in EARLIER_FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        os.utime(folder / name, (1e9, 1e9))
    (folder / "new.txt").unlink()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", ["replay", "suggest-fp32"])
def test_a_restarted_script_leaves_existing_files_unchanged(command: str, made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    shutil.copytree(made, folder)
    result = start(folder, command, "c.safetensors")
    assert result.code == (1 if command == "replay" else 0)
    assert contents(folder) == EARLIER_FILES
    assert {(folder / name).stat().st_mtime for name in EARLIER_FILES} == {1e9}
    assert not (folder / "new.txt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["replay", "suggest-fp32"])
@pytest.mark.parametrize("caught", ["", "try: ", "threading.Thread(target=lambda: "])
def test_a_restarted_script_that_removes_an_existing_folder_is_refused_with_a_hint(
    caught: str, command: str, made: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "again"
    shutil.copytree(made, folder)
    script = (folder / "train.py").read_text(encoding="utf-8")
    behind = {"": "", "try: ": "\nexcept: pass", "threading.Thread(target=lambda: ": ").start()"}[caught]
    removes = f"import shutil, threading\n{caught}shutil.rmtree('out'){behind}\n"
    (folder / "train.py").write_text(removes + script, encoding="utf-8")
    result = start(folder, command, "c.safetensors")
    assert (result.code, result.stdout, "Traceback" in result.stderr) == (2, "", False)
    said = " ".join(result.stderr.split())
    assert f"train.py calls shutil.rmtree on {folder / 'out'}, an existing file" in said
    assert "write elsewhere: --script 'train.py 400 6 --output elsewhere'" in said
    assert contents(folder) == EARLIER_FILES


WORKS_IN_ITS_OWN = "import os\nos.makedirs('outputs/run', exist_ok=True)\nos.chdir('outputs/run')\n"


@pytest.mark.slow
@pytest.mark.parametrize("is_there", [True, False])
def test_a_restarted_script_may_change_to_its_own_folder(is_there: bool, tmp_path: Path) -> None:
    run(tmp_path, WORKS_IN_ITS_OWN + scripts.PLAIN, "400", "6")
    if not is_there:
        shutil.rmtree(tmp_path / "outputs")
    result = start(tmp_path, "suggest-fp32", str(capture_of(tmp_path)))
    assert (result.code, "the failing step (0): healthy" in result.stdout) == (0, True), result.stderr
    assert (tmp_path / "outputs" / "run").exists() == is_there


@pytest.mark.slow
def test_an_interrupted_replay_leaves_existing_files_unchanged(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    shutil.copytree(made, folder)
    interrupted("replaying step", folder, tmp_path, "replay")
    assert contents(folder) == EARLIER_FILES


PROGRAM = """
import io, os, shutil, sqlite3, torch
from pathlib import Path
from ampdbg.files import temporary_folder
from ampdbg.script.guard import FileGuard

class Refused(Exception):
    pass

with temporary_folder() as folder, FileGuard(folder, lambda event, path: Refused(event, path)).on():
    exec(CODE)
"""


def guarded(folder: Path, code: str, is_refused: bool = False) -> Result:
    """Runs the code in a process in the folder, with the files there guarded."""
    ended = start_python(folder, PROGRAM.replace("CODE", repr(code)))
    assert (ended.code == 0) != is_refused, ended.stderr
    return ended


CARRIED = {
    "written": "open('a.txt', 'w').write('new')\nassert open('a.txt').read() == 'new'",
    "appended": "open('a.txt', 'a').write('+')\nassert Path('a.txt').read_text() == 'old+'",
    "by a path": "Path('a.txt').write_text('new')\nassert Path('a.txt').read_bytes() == b'new'",
    "by a descriptor": "os.write(os.open('a.txt', os.O_WRONLY), b'new')\nassert open('a.txt').read() == 'new'",
    "by a descriptor that empties it": "os.write(os.open('a.txt', os.O_WRONLY | os.O_TRUNC), b'new')\n"
    "assert open('a.txt').read() == 'new'",
    "as the memory of a tensor": "torch.from_file('a.txt', shared=True, size=3, dtype=torch.uint8).fill_(78)\n"
    "assert open('a.txt').read() == 'NNN'",
    "as a scripted module": "module = torch.jit.script(torch.nn.Linear(2, 2))\n"
    "torch.jit.save(module, 'a.txt')\nmodule.save('d/b')",
    "locked": "os.chmod('a.txt', 0)",
    "emptied by a descriptor that reads": "os.open('a.txt', os.O_RDONLY | os.O_TRUNC)",
    "appended by a path of bytes": "open(b'a.txt', 'ab').write(b'x')\nassert open('a.txt').read() == 'oldx'",
    "truncated": "os.truncate('a.txt', 1)\nassert open('a.txt').read() == 'o'",
    "replaced": "open('t', 'w').write('new')\nos.replace('t', 'a.txt')\nassert open('a.txt').read() == 'new'",
    "through a link": "os.symlink('a.txt', 'l')\nopen('l', 'w').write('new')\nassert open('a.txt').read() == 'new'",
    "by numpy": "import numpy\nnumpy.savetxt('a.txt', [1.0])\nassert numpy.loadtxt('a.txt') == 1",
    "as a traced module": "module = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(2))\nmodule.save('a.txt')\n"
    "assert torch.jit.load('a.txt')(torch.ones(2)).shape == (2,)",
    "as a package": "with torch.package.PackageExporter('a.txt') as package:\n    package.save_pickle('a', 'b', 1)",
    "as the memory of a storage": "torch.UntypedStorage.from_file('a.txt', True, 3).fill_(78)\n"
    "assert open('a.txt').read() == 'NNN'",
    "as a profile": "from torch.profiler import profile\nwith profile() as seen:\n    torch.ones(3)\n"
    "seen.export_chrome_trace('a.txt')",
    "copied over": "shutil.copy2('d/b', 'a.txt')\nassert open('a.txt').read() == 'old'",
    "as a database": "base = sqlite3.connect('base')\nbase.execute('insert into t values (2)')\nbase.commit()\n"
    "assert sqlite3.connect('base').execute('select count(*) from t').fetchone() == (2,)",
    "as an array": "import numpy\nnumpy.save('x.npy', numpy.ones(3))\nassert numpy.load('x.npy').sum() == 3\n"
    "numpy.memmap('x.npy', mode='r+')[:] = 0",
    "as tensors": "from safetensors.torch import save_file\nsave_file({'a': torch.ones(3)}, 'a.txt')",
    "as a log": "import logging\nlogging.basicConfig(filename='a.txt')\nlogging.error('one')\n"
    "assert open('a.txt').read().startswith('old')",
}

REFUSED = {
    "removed": ("os.remove('a.txt')", "os.remove", "a.txt"),
    "unlinked": ("Path('a.txt').unlink()", "os.remove", "a.txt"),
    "removed from its folder": ("os.unlink('b', dir_fd=os.open('d', os.O_RDONLY))", "os.remove", "d/b"),
    "removed as a tree": ("shutil.rmtree('d', ignore_errors=True)", "shutil.rmtree", "d"),
    "removed as a tree through what is new": ("os.mkdir('n')\nshutil.rmtree('n/../d')", "shutil.rmtree", "d"),
    "moved away": ("os.rename('a.txt', 'b.txt')", "os.rename", "a.txt"),
    "moved elsewhere": ("os.mkdir('n')\nshutil.move('a.txt', 'n')", "os.rename", "a.txt"),
    "with its folder under a new name": ("Path('d').rename('old')", "os.rename", "d"),
    "replaced with its folder": ("os.rmdir('e')", "os.rmdir", "e"),
    "a folder replaced": ("os.mkdir('n')\nos.rename('n', 'e')", "os.rename", "e"),
    "a link that is made anew": ("os.remove('latest')", "os.remove", "latest"),
    "a link replaced by one": ("os.symlink('d', 'l')\nos.replace('l', 'latest')", "os.rename", "latest"),
    "through a second name": ("os.link('a.txt', 'l')", "os.link", "a.txt"),
    "by what open is made of": ("import _io\n_io.open('a.txt', 'w')", "open", "a.txt"),
    "by what os is made of": ("import posix\nposix.open('a.txt', os.O_WRONLY)", "open", "a.txt"),
    "truncated by that": ("import posix\nposix.truncate('a.txt', 1)", "os.truncate", "a.txt"),
    "as raw bytes": ("io.FileIO('a.txt', 'w')", "open", "a.txt"),
    "locked by its descriptor": ("os.fchmod(os.open('a.txt', os.O_RDONLY), 0)", "os.chmod", "a.txt"),
    "locked with its folder": ("os.chmod('d', 0)", "os.chmod", "d"),
    "as a database by its address": ("sqlite3.connect('file:base', uri=True)", "sqlite3.connect", "base"),
    "unpacked over": (
        """import tarfile
open('c', 'w').close()
with tarfile.open('t', 'w') as new:
    new.add('c', 'a.txt')
tarfile.open('t').extractall()""",
        "open",
        "a.txt",
    ),
}
"""The code, and the event and path in the error."""


def folder_state(folder: Path) -> dict[str, object]:
    """Returns the contents and modes of files and the targets of links below a folder."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else (path.stat().st_mode, read(path))
        for path in folder.rglob("*")
    }


def read(path: Path) -> bytes:
    return b"" if path.is_dir() else path.read_bytes()


@pytest.fixture
def before(tmp_path: Path) -> dict[str, object]:
    """A folder with files, folders, a link and a database."""
    (tmp_path / "d").mkdir()
    (tmp_path / "e").mkdir()
    (tmp_path / "a.txt").write_text("old")
    (tmp_path / "a.txt").chmod(0o644)
    (tmp_path / "d" / "b").write_text("old")
    (tmp_path / "latest").symlink_to("a.txt")
    np.save(tmp_path / "x.npy", np.zeros(2))
    with contextlib.closing(sqlite3.connect(tmp_path / "base")) as base:
        base.executescript("create table t (x); insert into t values (1)")
    return folder_state(tmp_path)


@pytest.mark.parametrize("way", CARRIED)
def test_guarded_writes_do_not_change_existing_files(tmp_path: Path, before: dict[str, object], way: str) -> None:
    guarded(tmp_path, CARRIED[way])
    assert folder_state(tmp_path) == before


@pytest.mark.parametrize("way", REFUSED)
def test_removing_or_renaming_an_existing_file_is_refused_with_its_path(
    tmp_path: Path, before: dict[str, object], way: str
) -> None:
    code, event, path = REFUSED[way]
    ended = guarded(tmp_path, code, is_refused=True)
    assert ended.stderr.splitlines()[-1] == f"Refused: ({event!r}, {str(tmp_path / path)!r})"
    left = {name: found for name, found in folder_state(tmp_path).items() if name in before}
    assert left == before


CREATING_EVENTS = (
    "os.makedirs('d/e')\n"
    "open('d/e/f', 'w').write('1')\nopen('d/e/f', 'a').write('2')\nopen('x', 'x').write('x')\n"
    "open('gone', 'w').close()\nos.remove('gone')\n"
    "os.mkdir('g')\nopen('g/h', 'w').close()\nshutil.rmtree('g')\nos.rename('x', 'y')\n"
    "open('y', 'a').write('y')\nos.symlink('y', 'l')\n"
    "assert {str(path) for path in Path().rglob('*')} == {'d', 'd/e', 'd/e/f', 'y', 'l'}\n"
    "assert (Path('d/e/f').read_text(), Path('l').read_text()) == ('12', 'xy')\n"
)


@pytest.mark.parametrize("ending", ["pass", "sys.exit()", "os.chdir('d')"])
def test_new_files_and_folders_are_usable_and_removed_at_the_end(tmp_path: Path, ending: str) -> None:
    guarded(tmp_path, f"import sys\n{CREATING_EVENTS}{ending}")
    assert list(tmp_path.rglob("*")) == []


def test_a_new_folder_that_holds_a_file_of_another_process_is_kept(tmp_path: Path) -> None:
    code = f"{CREATING_EVENTS}import subprocess\nsubprocess.run(['touch', 'd/theirs'], check=True)"
    guarded(tmp_path, code)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == {"d", "d/theirs"}


BESIDE = {
    "put in its place": ("open('new', 'w').write('ours')", "open('t', 'w').write('theirs')\nos.replace('t', 'new')"),
    "made after it was removed": ("open('new', 'w').close()\nos.remove('new')", "open('new', 'w').write('theirs')"),
    "made where ours could not be": (
        "try:\n    torch.save(0, 'no/new')\nexcept Exception:\n    pass",
        "os.makedirs('no')\nopen('no/new', 'w').close()\nopen('new', 'w').write('theirs')",
    ),
}


@pytest.mark.parametrize("way", BESIDE)
@pytest.mark.parametrize(
    "then", ["", "open('new', 'w').write('ours again')\nassert open('new').read() == 'ours again'"]
)
def test_a_file_that_another_process_put_in_place_of_a_new_file_is_kept(tmp_path: Path, way: str, then: str) -> None:
    ours, theirs = BESIDE[way]
    code = (
        f"{ours}\nimport subprocess, sys\nsubprocess.run([sys.executable, '-c', {f'import os{chr(10)}{theirs}'!r}])\n"
    )
    guarded(tmp_path, code + then)
    assert (tmp_path / "new").read_text() == "theirs"
    assert {path.name for path in tmp_path.iterdir()} <= {"new", "no"}


MOVES = {
    "a checkpoint": "torch.save(1, 't')\nos.replace('t', 'best.pt')\ntorch.save(2, 't')\nos.replace('t', 'best.pt')",
    "a folder": "os.makedirs('t/a')\ntorch.save(1, 't/a/b')\nopen('t/c', 'w').write('c')\nos.rename('t', 'step-1')\n"
    "assert torch.load('step-1/a/b') == 1",
    "a link": "open('y', 'w').close()\nos.symlink('y', 'l')\nos.remove('l')\nos.symlink('y', 'l')",
    "a package": "package = torch.package.PackageExporter('p')\npackage.save_pickle('a', 'b', 1)\npackage.close()",
    "a second name": "open('y', 'w').close()\nos.link('y', 'l')\nos.symlink('nothing', 's')",
    "a log that goes on": "log = open('log', 'w')\nlog.write('1')\nlog.flush()\nos.chmod('log', 0o600)\nlog.write('2')",
}


@pytest.mark.parametrize("what", MOVES)
def test_new_files_that_were_moved_linked_or_kept_open_are_removed(tmp_path: Path, what: str) -> None:
    guarded(tmp_path, MOVES[what])
    assert list(tmp_path.rglob("*")) == []


def test_existing_files_and_files_outside_the_folder_are_not_removed(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "a.txt").write_text("old")
    guarded(tmp_path / "work", "open('a.txt', 'w').write('new')\nopen('../cache', 'w').write('kept')")
    assert (tmp_path / "work" / "a.txt").read_text() == "old"
    assert (tmp_path / "cache").read_text() == "kept"


def test_guarded_calls_raise_the_same_file_errors_as_python(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    for code, error in (
        ("open('a.txt', 'x')", "FileExistsError"),
        ("os.remove('b.txt')", "FileNotFoundError"),
        ("os.open('a.txt', os.O_CREAT | os.O_EXCL | os.O_WRONLY)", "FileExistsError"),
        ("open('no/b', 'w')", "FileNotFoundError"),
        ("shutil.rmtree('no')", "FileNotFoundError"),
        ("os.rename('no', 'b')", "FileNotFoundError"),
    ):
        assert f"{error}: " in guarded(tmp_path, code, is_refused=True).stderr


def replaced_by_a_guard() -> list[object]:
    of_python = [builtins.open, io.open, os.open, os.replace, vars(tempfile)["_RandomNameSequence"].__next__]
    return [*of_python, torch.jit.load, torch._C.PyTorchFileWriter, "from_file" in vars(torch.UntypedStorage)]


def test_the_guard_restores_the_functions_that_it_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Else multiprocessing would make a folder, whose name is marked, and remove it as this process ends.
    monkeypatch.setitem(vars(multiprocessing.current_process())["_config"], "tempdir", str(tmp_path))
    then = replaced_by_a_guard()
    with temporary_folder() as folder, contextlib.suppress(ZeroDivisionError), FileGuard(folder, PermissionError).on():
        assert all(now is not before for now, before in zip(replaced_by_a_guard(), then, strict=True))
        raise ZeroDivisionError
    assert replaced_by_a_guard() == then
    (tmp_path / "a.txt").write_text("old")
    (tmp_path / "a.txt").unlink()


WORKERS = {
    "a process": "p = mp.Process(target=late); p.start()",
    "a daemon": "p = mp.Process(target=late, daemon=True); p.start()",
    "a pool": "pool = ProcessPoolExecutor(1, mp); pool.submit(late); p, = pool._processes.values()",
}
"""Workers that may live as long as the loop."""

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
def test_a_restarted_script_ends_with_its_forked_workers(worker: str, command: str, tmp_path: Path) -> None:
    head = scripts.PLAIN.partition("\n    main(")[0]
    run(tmp_path, head + AROUND_THE_LOOP.replace("WORKER", WORKERS[worker]), "400", "6")
    result, record = run_on_capture(tmp_path, command, capture_of(tmp_path))
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
"""With ``waits`` the main thread waits for the training, else it ends during a replay."""


@pytest.fixture(scope="module")
def threaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script that trains in a thread, and its capture."""
    folder = tmp_path_factory.mktemp("threaded")
    head = scripts.PLAIN.partition("\n    main(")[0]
    assert run(folder, head + IN_A_THREAD, "400", "6", "waits")[1].findings[0].code == "forward-overflow"
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("command", "how"), [("replay", "waits"), ("replay", "ends"), ("suggest-fp32", "ends")])
def test_a_restarted_script_may_train_in_a_thread(command: str, how: str, threaded: Path, tmp_path: Path) -> None:
    shutil.copytree(threaded, tmp_path, dirs_exist_ok=True)
    result, record = run_on_capture(tmp_path, command, capture_of(tmp_path), f"--script=train.py 400 6 {how}")
    found = record.findings[0]
    assert (result.code, found.code, found.module) == (command == "replay", "forward-overflow", "attention")
    assert command == "replay" or (record.verification is not None and record.verification.passed)
    assert ("main ends" in result.stderr, "Traceback" in result.stderr) == (how == "ends", False)


@pytest.mark.slow
def test_an_interrupt_ends_a_search_in_a_script_that_trains_in_a_thread(threaded: Path, tmp_path: Path) -> None:
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


LONGEST_SOCKET = 103
"""The number of characters in the path of a socket, on the system that allows the fewest."""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files with the longest name that leaves room for Python's own sockets in it."""
    with tempfile.TemporaryDirectory() as short:
        room = LONGEST_SOCKET - len(f"{short}//pymp-12345678/listener-12345678")
        (Path(short) / ("t" * max(1, room))).mkdir()
        yield next(Path(short).iterdir())


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no TMPDIR, and no semaphores that stay")
@pytest.mark.parametrize("arguments", ["400 6", "400 6 loader"])
@pytest.mark.parametrize("command", ["replay", "suggest-fp32"])
def test_temporary_files_and_semaphores_of_a_restarted_script_are_removed(
    command: str, arguments: str, temporaries: Path, tmp_path: Path, temporary: Path
) -> None:
    folder = tmp_path / "f"
    shutil.copytree(temporaries, folder)
    for name in ("cache", "tmp0123"):
        (temporary / name).write_text("of before")
    script = f"--script=train.py {arguments}"
    result = start_fresh(
        folder, command, str(capture_of(folder)), script, TMPDIR=str(temporary)
    )  # a fork keeps its own
    assert result.code == (command == "replay"), result.stderr
    assert "cached of before" in result.stderr
    assert ("loaded 8" in result.stderr) == arguments.endswith("loader")
    assert {path.name for path in temporary.iterdir()} - {"torchinductor_root"} == {"cache", "tmp0123"}
    names = re.findall(r"semaphore (\S+)", result.stderr)
    assert names
    assert not any(Path(f"/dev/shm/sem.{name[1:]}").exists() for name in names)
