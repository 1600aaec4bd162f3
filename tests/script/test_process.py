"""``ampdbg run`` ends a process as ``python`` does, whatever the script does with signals and streams."""

import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ampdbg.record.file import read_record
from tests.commands.program import Result, command, environment, start
from tests.siblings import slow_except

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="it has no such signals and files")


def alone(folder: Path, *arguments: str) -> Result:
    """Runs Python itself with the same arguments."""
    found = environment(PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run(
        [sys.executable, *arguments], check=False, cwd=folder, env=found, capture_output=True, text=True, timeout=60
    )
    return Result(done.returncode, done.stdout, done.stderr)


def both(folder: Path, text: str) -> tuple[Result, Result]:
    """Runs a script of this text alone and with ampdbg; the record is ``r.json``."""
    (folder / "train.py").write_text(text, encoding="utf-8")
    return alone(folder, "train.py"), start(folder, "run", "--record=r.json", "train.py")


CHECKPOINT = """
import os, signal
said = []
def stop(number, frame):
    for handler in handlers:
        handler(number, frame)
before = signal.getsignal(signal.SIGTERM)
handlers = [lambda number, frame: said.append(number)]
if before not in (None, signal.SIG_DFL):
    handlers.append(before)  # as lightning's signal connector does
signal.signal(signal.SIGTERM, stop)
os.kill(os.getpid(), signal.SIGTERM)
print("saved", said)
"""

CALLS_WHAT_WAS_THERE = """
import os, signal
def stop(number, frame):
    print("stopping", flush=True)
    if callable(before):
        before(number, frame)
    else:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
before = signal.signal(signal.SIGTERM, stop)
os.kill(os.getpid(), signal.SIGTERM)
print("not reached")
"""

RESTORES = """
import os, signal
print(signal.signal(signal.SIGHUP, signal.SIG_IGN) is signal.SIG_DFL)
os.kill(os.getpid(), signal.SIGHUP)
print(signal.signal(signal.SIGHUP, signal.SIG_DFL) is signal.SIG_IGN, flush=True)
os.kill(os.getpid(), signal.SIGHUP)
"""

IMPORTED_BEFORE = """
import os, signal
from _signal import getsignal, signal as install  # as a library has them that was imported before the script began
before = getsignal(signal.SIGTERM)
install(signal.SIGTERM, lambda number, frame: before and callable(before) and before(number, frame))
os.kill(os.getpid(), signal.SIGTERM)
print("saved")
"""


@pytest.mark.parametrize(
    ("text", "code", "stdout"),
    [
        ("import os\nos.kill(os.getpid(), 15)\nprint('not reached')", -signal.SIGTERM, ""),
        ("import os\nos.kill(os.getpid(), 1)\nprint('not reached')", -signal.SIGHUP, ""),
        (CHECKPOINT, 0, "saved [15]\n"),
        (CALLS_WHAT_WAS_THERE, -signal.SIGTERM, "stopping\n"),
        (RESTORES, -signal.SIGHUP, "True\nTrue\n"),
        (IMPORTED_BEFORE, 0, "saved\n"),
    ],
    ids=["SIGTERM", "SIGHUP", "own handler", "calls the one before", "restores", "imported before"],
)
def test_a_signal_acts_as_under_python_and_the_record_is_written(
    tmp_path: Path, text: str, code: int, stdout: str
) -> None:
    python, watched = both(tmp_path, text)
    assert (watched.code, watched.stdout) == (python.code, python.stdout) == (code, stdout)
    script = read_record(tmp_path / "r.json").script
    assert script is not None
    assert script.exit_code == (code if code >= 0 else 128 - code)


CLOSES = {
    "none": "import sys\nsys.stdout = sys.stderr = None\nprint(1)",
    "closed stdout": "import sys\nprint('a')\nsys.stdout.close()",
    "closed stderr": "import sys\nsys.stderr.close()\nprint('x')\n1 / 0",
    "closed descriptor": "import os\nos.close(2)\nprint('x')",
    "closed stderr, and a text": "import sys\nsys.stderr.close()\nsys.exit('no data')",
    "a log for stderr": "import sys\nsys.stderr = open('log', 'w')\nprint('x', file=sys.stderr)",
    "unlike a stream": "import sys\nclass Log:\n    write = print\nsys.stderr = Log()\nprint('x')",
}


@pytest.mark.parametrize("how", slow_except(["none", "closed stderr, and a text", "a log for stderr"], CLOSES))
def test_a_script_may_close_or_replace_its_streams(tmp_path: Path, how: str) -> None:
    text = CLOSES[how]
    python, watched = both(tmp_path, text)
    assert (watched.code, watched.stdout) == (python.code, python.stdout)
    assert "ampdbg itself" not in watched.stderr
    assert read_record(tmp_path / "r.json").steps_run == 0
    if "log" in text:
        assert (tmp_path / "log").read_text(encoding="utf-8") == "x\n"
        assert "ampdbg saw no optimizer step" in watched.stderr


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("streams", [">&- 2>&-", ">/dev/full", ">&-", "2>&-", "2>/dev/full"])
def test_a_closed_or_full_stream_does_not_change_the_exit_code(tmp_path: Path, streams: str) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint(1)\nsys.exit(3)", encoding="utf-8")

    def code(*program: str) -> int:
        line, found = f"{shlex.join(program)} train.py {streams}", environment(PYTHONUNBUFFERED="")
        return subprocess.run(line, shell=True, cwd=tmp_path, env=found, check=False).returncode

    assert code(*command("run", "--record=r.json")) == code(sys.executable) == (120 if streams == ">/dev/full" else 3)
    assert read_record(tmp_path / "r.json").script is not None


@pytest.mark.parametrize("arguments", [pytest.param("doctor", marks=pytest.mark.slow), "explain forward-overflow"])
def test_a_closed_stdout_gives_one_error_message(tmp_path: Path, arguments: str) -> None:
    line = f"{shlex.join(command())} {arguments} >&-"
    done = subprocess.run(
        line, shell=True, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "error: stdout: cannot be written: it is closed\n")


ODD = "class Odd:\n    def __str__(self):\n        raise ValueError('no')\nraise SystemExit(Odd())"
CODES = ["-1", "256", "2**31", "2**63 - 1", "2**63", "2**70", "-2**70", "True", "3.5", "(1, 2)", "None", "'büh'"]


@pytest.mark.parametrize("code", slow_except(["-1", "2**63", "(1, 2)", "odd"], [*CODES, "odd"]))
def test_exit_code_and_output_are_the_same_as_under_python(tmp_path: Path, code: str) -> None:
    text = ODD if code == "odd" else f"import sys\nsys.exit({code})"
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    ours, pythons = start(tmp_path, "run", "--no-watch", "train.py"), alone(tmp_path, "train.py")
    # Most releases from 3.12 on also show, at the very end, the error from converting such a code.
    leaves_an_error = text == ODD or "2**63)" in text or "2**70" in text
    if leaves_an_error and ("OverflowError: " in pythons.stderr or "ValueError: no" in pythons.stderr):
        pythons = replace(pythons, stderr="\n" if text == ODD else "")
    assert ours == pythons


TRAINS = """
import threading, time, torch

def train():
    REPLAY_SECONDS
    import beside
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    print("trained", flush=True)

threading.Thread(target=train, daemon=DAEMON).start()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("waits", "daemon", "steps"),
    [
        ("time.sleep(0.3)", False, 3),
        # Python reports that the main thread has ended, but still waits.
        ("threading.main_thread().join()", False, 3),
        ("time.sleep(60)", True, 0),
    ],
    ids=["outlives", "begins at the end", "daemon"],
)
def test_a_thread_that_outlives_the_script_is_watched(tmp_path: Path, waits: str, daemon: bool, steps: int) -> None:
    (tmp_path / "beside.py").touch()
    python, watched = both(tmp_path, TRAINS.replace("REPLAY_SECONDS", waits).replace("DAEMON", str(daemon)))
    assert (watched.code, watched.stdout) == (python.code, python.stdout) == (0, "trained\n" if steps else "")
    assert read_record(tmp_path / "r.json").steps_run == steps


LEAVES_BEHIND = {
    "no path": "import sys\ndel sys.path[:]",
    "a path of its own": "import sys\nsys.path = ['/nowhere']",
    "an alarm": "import signal\nsignal.signal(signal.SIGALRM, lambda *_: 1 / 0)\nsignal.setitimer(0, 0.01, 0.01)",
}


@pytest.mark.parametrize("what", slow_except(["no path", "an alarm"], LEAVES_BEHIND))
def test_a_changed_path_or_a_running_alarm_of_the_script_does_not_harm_the_report(tmp_path: Path, what: str) -> None:
    _, watched = both(tmp_path, f"print('trained')\n{LEAVES_BEHIND[what]}")
    assert (watched.code, watched.stdout) == (0, "trained\n")
    assert "ampdbg saw no optimizer step" in watched.stderr
    assert read_record(tmp_path / "r.json").steps_run == 0


POOLS = """
import threading, time
from concurrent.futures import ThreadPoolExecutor, ProcessPoolExecutor
pools = ThreadPoolExecutor(2), ProcessPoolExecutor(1)
print([pool.submit(abs, -1).result() for pool in pools])
threading.Thread(target=lambda: (time.sleep(0.2), print("late"))).start()
raise SystemExit(3)
"""


@pytest.mark.slow
def test_idle_pools_end_with_the_script(tmp_path: Path) -> None:
    python, watched = both(tmp_path, POOLS)
    assert (watched.code, watched.stdout) == (python.code, python.stdout) == (3, "[1, 1]\nlate\n")


HANGS = """
import atexit, os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)

def hang():
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

atexit.register(print, "at exit")
threading.Thread(target=hang).start()
sys.exit(4)
"""


@pytest.mark.slow
def test_an_interrupt_ends_the_wait_for_a_thread(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HANGS, encoding="utf-8")
    program = [*command("run", "--record=r.json"), "train.py"]
    watched = subprocess.run(
        program, check=False, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=50
    )
    python = alone(tmp_path, "train.py")
    assert (watched.returncode, watched.stdout) == (python.code, python.stdout) == (4, "at exit\n")
    assert "KeyboardInterrupt" in watched.stderr
    assert read_record(tmp_path / "r.json").steps_run == 0


LOOKS = """
import sys
print(__name__, __file__, __spec__ and __spec__.name, __package__, sys.argv, sys.path[0], type(__builtins__))
print(sorted(globals()), __annotations__, sys.modules["__main__"].__dict__ is globals())
class Held: pass
if __name__ == "__main__":
    import pickle
    pickle.loads(pickle.dumps(Held()))
raise SystemExit(5)
"""


@pytest.mark.parametrize(
    "given", slow_except(["script.py", "-m folder.inner"], ["script.py", "-m folder", "-m folder.inner"])
)
def test_a_script_or_module_sees_the_same_globals_and_arguments_as_under_python(tmp_path: Path, given: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for file in (folder / "__main__.py", folder / "inner.py", tmp_path / "script.py"):
        file.write_text(LOOKS, encoding="utf-8")
    typed = [*given.split(), "--lr", "1", "--", "-m", "--record=x"]
    python, watched = alone(tmp_path, *typed), start(tmp_path, "run", "--quiet", *typed)
    assert (watched.code, watched.stdout) == (python.code, python.stdout)
    assert python.code == 5


FAILS = """
import sys, traceback
print(sys.argv, __file__)
try:
    raise ValueError("bad")
except ValueError:
    print(traceback.format_exc())
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["/dev/stdin", "pipe"])
def test_a_script_from_a_pipe_is_read_once(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    program = subprocess.Popen(
        [*command("run", "--quiet", name, "1")], cwd=tmp_path, env=environment(), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    if name == "pipe":
        (tmp_path / "pipe").write_text(FAILS, encoding="utf-8")
    said, _ = program.communicate(FAILS if name != "pipe" else None, timeout=50)
    assert program.returncode == 0
    assert said.startswith(f"['{name}', '1'] {tmp_path / name}\n")
    assert '    raise ValueError("bad")\n' in said


@pytest.mark.parametrize("module", slow_except(["nomain.broken"], ["nomain", "nomain.broken"]))
def test_a_package_that_cannot_be_run_gives_the_error_of_python(tmp_path: Path, module: str) -> None:
    (tmp_path / "nomain").mkdir()
    (tmp_path / "nomain" / "__init__.py").touch()
    (tmp_path / "nomain" / "broken.py").write_text("import no_such_thing", encoding="utf-8")
    python, watched = alone(tmp_path, "-m", module), start(tmp_path, "run", "--quiet", "-m", module)
    assert (watched.code, watched.stdout) == (python.code, python.stdout) == (1, "")
    assert watched.stderr.splitlines()[-1] == python.stderr.splitlines()[-1]
    assert "runpy" not in watched.stderr
