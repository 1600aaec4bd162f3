"""Start a training script in this process as Python would: with its own argv, ``__main__``, path and exit.

A forked child continues as the script itself. Spawned children run without ampdbg.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import linecache
import os
import runpy
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder, SourceFileLoader
from importlib.util import decode_source, find_spec
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any
from unittest.mock import patch

from ampdbg.errors import EXIT_INTERRUPTED, ScriptError, named_error
from ampdbg.record.findings import Count
from ampdbg.script.signals import held_signals, take_timers
from ampdbg.source.ownership import is_ampdbgs, is_part_of

LAUNCHERS = {
    "torchrun": "torchrun --no-python ampdbg run train.py",
    "accelerate": "accelerate launch -m ampdbg run train.py",
    "deepspeed": "deepspeed --no_python ampdbg run train.py",
    "python": "ampdbg run train.py",
    "python3": "ampdbg run train.py",
}
"""Maps programs that start scripts themselves to the command line that runs ampdbg inside them."""

SHARED = {"__main__", "__mp_main__", "ampdbg", "torch", "torchgen", "functorch", *sys.stdlib_module_names}
"""Modules that a script shares with ampdbg, even if its own folder has a module of that name."""

LARGEST_SCRIPT = 2**26
"""In bytes. No real script comes close, and a data file named by mistake would fill the memory."""

RANKS = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
"""The variables in which launchers pass a process's rank and the number of processes."""


def launched_as() -> tuple[int, int]:
    """Return this process's rank and the number of processes from the launcher, or (0, 1) without a launcher."""
    for names in RANKS:
        rank, count = (os.environ.get(name, "") for name in names)
        if rank.isdecimal() and count.isdecimal() and int(rank) < int(count):
            return int(rank), int(count)
    return 0, 1


def processes_here() -> int:
    """Return how many processes the launcher has started on this machine, or 1 without a launcher."""
    told = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"))
    return max([1, *(int(count) for count in told if count.isdecimal())])


@dataclass(frozen=True)
class Script:
    """A file, or with ``is_module`` a module by its dotted name, and its arguments.

    ``ends_process`` means that the process ends with the script. Its non-daemon threads then finish first, as under
    Python. ``text`` replaces the content of the file.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    ends_process: bool = False
    text: bytes | None = None

    def check(self) -> None:
        """Raise ScriptError if there is nothing to run under this name."""
        if self.name in LAUNCHERS:
            raise ScriptError(f"{self.name} starts scripts itself; start ampdbg inside it: {LAUNCHERS[self.name]}")
        if self.is_module:
            with _path_of(self):
                if not _has_module(self.name):
                    raise ScriptError(f"-m {self.name}: there is no such module; needed: one that Python can import")
        elif what := _obstacle(self):
            raise ScriptError(f"{self.name}: {what}; needed: a Python file, or -m and the name of a module")


IN_A_GROUP = "WORLD_SIZE"
"""Present in the environment if a launcher or the user runs the script in a group, even of one process."""


CAPABILITY = "AMPDBG_CAPABILITY"
"""The environment variable for the compute capability of an emulated GPU."""

ENVIRONMENT = (
    CAPABILITY,
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    IN_A_GROUP,
)
"""Variables that affect the numbers or the script's behavior. They are reported, but not restored."""


@dataclass(frozen=True)
class Start:
    """How the script was started: its folder, whether a GPU was emulated, and its rank among the processes."""

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    folder: str = ""
    emulate: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    rank: Count = 0
    processes: Count = 1

    @property
    def typed(self) -> str:
        """The command line that starts the script again, as ``--script`` takes it."""
        return shlex.join([*(["-m"] if self.is_module else []), self.name, *self.arguments])

    @property
    def is_of_group(self) -> bool:
        """True if the script trained in a group of processes, even of one."""
        return self.processes > 1 or IN_A_GROUP in self.environment


def start_of(script: Script, *, emulate: bool) -> Start:
    """Return how a script is about to be started from this folder."""
    environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    return Start(script.name, script.arguments, script.is_module, os.getcwd(), emulate, environment, *launched_as())


@dataclass(frozen=True)
class ScriptEnd:
    """How a script ended: the exit code that Python would set, and the raised error or the signal, if any."""

    code: int
    error: BaseException | None = None
    signal: int = 0

    @property
    def note(self) -> str:
        """A note on an early end that no error explains, or ""."""
        if self.signal:
            return f"the script was ended by {signal.Signals(self.signal).name}"
        return f"the script ended with exit code {self.code}" if self.code and self.error is None else ""


def run_script(script: Script, at_end: Callable[[ScriptEnd], None] = lambda ended: None) -> ScriptEnd:
    """Run the script to its end. Show its exceptions as Python does, without frames of ampdbg.

    The script has its own ``sys.argv``, ``sys.path`` and ``__main__``, even during ``at_end``. At that time, local
    variables of functions that an error or exit has left are still alive. If the process ends with the script, the
    script's timers are stopped first.
    """
    argv, path, main = sys.argv, [*sys.path], sys.modules["__main__"]
    try:
        with _path_of(script):
            ended = _end_of(script, at_end)
            if script.ends_process:
                _wait_for_threads()
                take_timers()
        return ended if _is_flushed() else replace(ended, code=UNWRITTEN)
    finally:
        _clear_at_exit(script, {"__main__": sys.modules["__main__"]})
        sys.argv, sys.modules["__main__"] = argv, main
        sys.path += [folder for folder in path if folder not in sys.path]


def _end_of(script: Script, at_end: Callable[[ScriptEnd], None]) -> ScriptEnd:
    run = _run_module if script.is_module else _run_file
    end = ScriptEnd(0)
    at_end = held_signals()(at_end)
    try:
        run(script)
    except SystemExit as ended:
        end = ScriptEnd(_exit_code(ended.code))
        at_end(end)
    except KeyboardInterrupt as interrupt:
        _show(interrupt)
        end = ScriptEnd(EXIT_INTERRUPTED, interrupt)
        at_end(end)
    except BaseException as error:  # noqa: BLE001 - any exception ends the script as under Python
        _show(error)
        end = ScriptEnd(1, error)
        at_end(end)
    else:
        at_end(end)
    return end


def _run_file(script: Script) -> None:
    sys.argv = [script.name, *script.arguments]
    path = os.path.abspath(script.name)
    module = _new_main()
    vars(module).update(__file__=path, __loader__=SourceFileLoader("__main__", path), __cached__=None)
    text = Path(path).read_bytes() if script.text is None else script.text
    code = compile(text, path, "exec", dont_inherit=True)
    if script.text is not None or not os.path.isfile(path):  # reading a pipe again, to show a line, would block
        linecache.cache[path] = (len(text), None, decode_source(text).splitlines(keepends=True), path)
    exec(code, vars(module))


def _run_module(script: Script) -> None:
    """Run the module with Python's own implementation of ``-m``, including its messages."""
    sys.argv = ["-m", *script.arguments]
    _new_main()
    vars(runpy)["_run_module_as_main"](script.name)


def _new_main() -> ModuleType:
    """Install an empty ``__main__``, as Python does at startup."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    vars(module)["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        vars(module)["__annotations__"] = {}
    return module


def _obstacle(script: Script) -> str:
    """Return why a file cannot be run, or "". Endless or huge files are never read."""
    path = Path(script.name)
    if not path.exists():
        return "there is no such file"
    if path.is_dir():
        return "is a folder"
    if path.is_char_device() and not (
        sys.stdin and sys.stdin.isatty() and path.samefile(f"/dev/fd/{sys.stdin.fileno()}")
    ):
        return "is a device"
    if path.is_file() and path.stat().st_size > LARGEST_SCRIPT:
        return f"is larger than {LARGEST_SCRIPT:,} bytes"
    return ""


def _clear_at_exit(script: Script, modules: Mapping[str, ModuleType]) -> None:
    """Make Python clear the script's modules at process exit. Files that they still hold are then closed, with their
    unwritten data."""
    if script.ends_process and modules:
        atexit.register(_register_for_clearing, modules)


def _register_for_clearing(modules: Mapping[str, ModuleType]) -> None:
    for name, module in modules.items():
        vars(module)[""] = module  # a self-reference, because Python clears only modules that are still alive
        sys.modules.pop(name, None)
        sys.modules[name] = module  # moved to the end, so cleared first, while modules needed for writing are intact


@contextlib.contextmanager
def _path_of(script: Script) -> Iterator[None]:
    """Put the script's folder first on ``sys.path``, as Python would, instead of ampdbg's entry."""
    is_safe = getattr(sys.flags, "safe_path", False)  # Python then adds no entry
    if is_safe:
        yield
        return
    folder = os.getcwd() if script.is_module else os.path.dirname(os.path.realpath(script.name))
    with _own_modules(script, folder):
        before = sys.path[:1]
        sys.path[:1] = [folder]
        try:
            yield
        finally:
            if sys.path and sys.path[0] == folder:
                sys.path[:1] = before


@contextlib.contextmanager
def _own_modules(script: Script, folder: str) -> Iterator[None]:
    """Inside this context, find the folder's modules there, even if ampdbg has loaded others with the same names.

    Afterwards ampdbg finds its own modules again, including those not loaded yet. Shared modules do not change.
    """
    before = {*sys.modules}
    names = {name for name in before if _is_other(name, [folder])}
    ours = _taken_out(names)
    try:
        yield
    finally:
        theirs = _taken_out(names | {name for name in {*sys.modules} - before if _is_other(name, sys.path)})
        sys.modules.update(ours)
        _clear_at_exit(script, theirs)


def _taken_out(names: set[str]) -> dict[str, ModuleType]:
    """Remove the modules with these top-level names from ``sys.modules``, and return them."""
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in names}


def _is_other(name: str, path: list[str]) -> bool:
    """True if the module loaded under this name differs from the module on ``path``."""
    if "." in name or name in SHARED:
        return False
    with contextlib.suppress(Exception):  # a script may put anything into sys.path and sys.modules
        found, loaded = PathFinder.find_spec(name, path), sys.modules[name].__spec__
        if found is not None and found.origin and loaded is not None:  # a plain folder has no origin
            return os.path.realpath(found.origin) != os.path.realpath(loaded.origin or "")
    return False


def _has_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _exit_code(code: object) -> int:
    """Convert the argument of ``sys.exit`` to an exit code as Python does. Text is written to stderr."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF if -(2**63) <= code < 2**63 else 0xFF
    for write in (lambda: sys.stderr.write(str(code)), lambda: sys.stderr.write("\n")):
        with contextlib.suppress(BaseException):  # stderr is closed, or str(code) fails: the exit code is 1 anyway
            write()
    return 1


def _wait_for_threads() -> None:
    """Wait with the function that Python calls at exit, which then has nothing left to do. Ctrl-C ends the wait."""
    try:
        vars(threading)["_shutdown"]()
    except BaseException as error:  # noqa: BLE001 - Ctrl-C, or an error in a script's signal handler
        with contextlib.suppress(Exception):
            sys.stderr.write(f"Exception ignored in: {threading!r}\n")
        _show(error)


UNWRITTEN = 120
"""Python's exit code if the script's output could not be written."""


def _is_flushed() -> bool:
    """Flush the script's output, as Python does at exit, and report failures on stderr. True if all succeeded."""
    are_written = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except Exception as error:  # noqa: BLE001 - the disk is full, the reader is gone, or it is not a stream
            are_written = False
            with contextlib.suppress(Exception):
                if stream is not sys.stderr:
                    sys.stderr.write(f"Exception ignored in: {stream!r}\n{named_error(error)}\n")
    return are_written


def _show(error: BaseException) -> None:
    """Show the error with the script's own excepthook, from the script's first frame on."""
    shown = error.with_traceback(_of_script(error.__traceback__))
    try:
        sys.excepthook(type(shown), shown, shown.__traceback__)
    except Exception:  # noqa: BLE001 - the user's own hook failed, or the message cannot be formatted
        with contextlib.suppress(Exception):  # stderr is closed, or None
            sys.stderr.write("".join(traceback.format_tb(shown.__traceback__)))
            sys.stderr.write(f"{named_error(error)}\n")


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """Drop frames that lead into the script, and ampdbg's frames inside it. Return None if no frame is left."""
    while trace is not None and (is_ampdbgs(trace.tb_frame) or is_part_of(trace.tb_frame, "runpy")):
        trace = trace.tb_next
    frames: list[TracebackType] = []
    while trace is not None:
        frames += [trace] * (not is_ampdbgs(trace.tb_frame))
        trace = trace.tb_next
    shown: TracebackType | None = None
    for each in reversed(frames):
        shown = TracebackType(shown, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shown


ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals that end a process from outside: from a batch system, or from a closing terminal."""

ASKING = tuple(getattr(signal, name) for name in ("SIGUSR1",) if hasattr(signal, name))
"""The signals that request an action. They end a process that does not handle them."""

Handler = Callable[[int, FrameType | None], None]


@contextlib.contextmanager
def signals_noted(ends: Callable[[int], None], asks: Callable[[], None]) -> Iterator[None]:
    """Inside this context, a signal in ENDING ends the process as usual after a call of ``ends``. A signal in ASKING
    calls ``asks``.

    A script that handles the signal itself replaces this handler. Inside the context, SIG_DFL means this handler:
    ``signal.signal`` and ``signal.getsignal`` accept and return it under that name. A script that restores or calls the
    previous handler therefore behaves as usual. A forked child gets the real SIG_DFL at once. Otherwise a pool worker
    that is terminated just before it waits for a lock would never run the Python handler.
    """
    owner, install, ask = os.getpid(), signal.signal, signal.getsignal
    every: dict[int, Handler] = {
        **dict.fromkeys(ENDING, _ending(ends)),
        **dict.fromkeys(ASKING, lambda number, frame: asks()),
    }
    handles = threading.current_thread() is threading.main_thread()  # Python allows only the main thread
    ours = {number: handler for number, handler in every.items() if handles and ask(number) is signal.SIG_DFL}

    def leave() -> None:
        for number, handler in ours.items():
            if ask(number) is handler:
                install(number, signal.SIG_DFL)

    def told(current: Any) -> Any:
        return signal.SIG_DFL if current in ours.values() else current

    def replaced(number: int, new: Any) -> Any:
        is_ours = number in ours and new == signal.SIG_DFL and os.getpid() == owner
        return told(install(number, ours[number] if is_ours else new))

    with patch.object(signal, "signal", replaced), patch.object(signal, "getsignal", lambda number: told(ask(number))):
        for number, handler in ours.items():
            install(number, handler)
        if hasattr(os, "register_at_fork"):  # this cannot be undone, but after the context it has no effect
            os.register_at_fork(after_in_child=leave)
        try:
            yield
        finally:
            leave()


def _ending(ends: Callable[[int], None]) -> Handler:
    """Return a handler that calls ``ends``, except in a forked child, and then ends the process as usual."""
    owner, install, ask = os.getpid(), signal.signal, signal.getsignal

    def end(number: int, frame: FrameType | None) -> None:
        if ask(number) is not end:  # called by the script's own handler, where SIG_DFL would not be callable
            return
        install(number, signal.SIG_IGN)  # a shell sends SIGHUP a second time
        try:
            if os.getpid() == owner:
                ends(number)
        finally:
            install(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    return end
