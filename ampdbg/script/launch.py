"""A training script started in this process as Python would start it: its own argv, ``__main__``, path and ending.

A script that forks goes on as itself in the child; one that spawns starts children that know nothing of ampdbg.
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
"""What starts scripts itself, and the form in which ampdbg stands inside of it."""

SHARED = {"__main__", "__mp_main__", "ampdbg", "torch", "torchgen", "functorch", *sys.stdlib_module_names}
"""What a script shares with ampdbg, also where its own folder has a module of that name."""

LARGEST_SCRIPT = 2**26
"""In bytes; nobody's script comes near it, and a file of data named by mistake would fill the memory."""

RANKS = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
"""Where a launcher says which of how many processes one is."""


def launched_as() -> tuple[int, int]:
    """The rank of this process and how many were launched with it, as the launcher says; (0, 1) without one."""
    for names in RANKS:
        rank, count = (os.environ.get(name, "") for name in names)
        if rank.isdecimal() and count.isdecimal() and int(rank) < int(count):
            return int(rank), int(count)
    return 0, 1


def processes_here() -> int:
    """How many processes the launcher has started on this machine, as it says; 1 without one."""
    told = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"))
    return max([1, *(int(count) for count in told if count.isdecimal())])


@dataclass(frozen=True)
class Script:
    """A file, or with ``is_module`` a module by its dotted name, and the arguments that are its own.

    Where the process ends with it, all its threads but daemons end before it does, as under Python. ``text`` is taken
    for what the file holds.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    ends_process: bool = False
    text: bytes | None = None

    def check(self) -> None:
        """Raises ScriptError where there is nothing of this name to run."""
        if self.name in LAUNCHERS:
            raise ScriptError(f"{self.name} starts scripts itself; start ampdbg inside it: {LAUNCHERS[self.name]}")
        if self.is_module:
            with _path_of(self):
                if not _has_module(self.name):
                    raise ScriptError(f"-m {self.name}: there is no such module; needed: one that Python can import")
        elif what := _obstacle(self):
            raise ScriptError(f"{self.name}: {what}; needed: a Python file, or -m and the name of a module")


IN_A_GROUP = "WORLD_SIZE"
"""The environment has this where a launcher, or the user, tells a script to train in a group, of one process too."""


CAPABILITY = "AMPDBG_CAPABILITY"
"""The variable that says which compute capability an emulated GPU has."""

ENVIRONMENT = (
    CAPABILITY,
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    IN_A_GROUP,
)
"""What of the environment changes numbers, or what a script does: it is told of, and not set as it was."""


@dataclass(frozen=True)
class Start:
    """How the script was started: from which folder, with a GPU that was emulated or not, as one of how many."""

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
        """What to type to start it once more: ``--script`` takes that."""
        return shlex.join([*(["-m"] if self.is_module else []), self.name, *self.arguments])

    @property
    def is_of_group(self) -> bool:
        """It trained in a group of processes, be it of one."""
        return self.processes > 1 or IN_A_GROUP in self.environment


def start_of(script: Script, *, emulate: bool) -> Start:
    """How a script is about to be started, from this folder."""
    environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    return Start(script.name, script.arguments, script.is_module, os.getcwd(), emulate, environment, *launched_as())


@dataclass(frozen=True)
class ScriptEnd:
    """How a script ended: the exit code that Python would give it, the error that it raised, if it did, or the signal
    that ends it."""

    code: int
    error: BaseException | None = None
    signal: int = 0

    @property
    def note(self) -> str:
        """How it ended, where that was early and no error says so."""
        if self.signal:
            return f"the script was ended by {signal.Signals(self.signal).name}"
        return f"the script ended with exit code {self.code}" if self.code and self.error is None else ""


def run_script(script: Script, at_end: Callable[[ScriptEnd], None] = lambda ended: None) -> ScriptEnd:
    """Runs the script to its end; what it raises is shown as Python shows it, without a frame of ampdbg's.

    ``sys.argv``, ``sys.path`` and ``__main__`` are its own meanwhile, also while ``at_end`` runs. By then what the
    script holds in functions that an error or an exit has left is still alive. Where the process ends with it, alarms
    that it has set come no more behind it.
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
        _emptied_at_exit(script, {"__main__": sys.modules["__main__"]})
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
    except BaseException as error:  # noqa: BLE001 - whatever the script raises ends it as Python would
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
    if script.text is not None or not os.path.isfile(path):  # a pipe: who shows a line of it would wait for another
        linecache.cache[path] = (len(text), None, decode_source(text).splitlines(keepends=True), path)
    exec(code, vars(module))


def _run_module(script: Script) -> None:
    """By what Python itself calls for ``-m``, with its messages."""
    sys.argv = ["-m", *script.arguments]
    _new_main()
    vars(runpy)["_run_module_as_main"](script.name)


def _new_main() -> ModuleType:
    """An empty ``__main__``, as Python starts with it."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    vars(module)["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        vars(module)["__annotations__"] = {}
    return module


def _obstacle(script: Script) -> str:
    """Why a file cannot be run, and "" of one that may be: what has no end, or nearly none, is never read."""
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


def _emptied_at_exit(script: Script, modules: Mapping[str, ModuleType]) -> None:
    """Has Python empty modules of a script as the process ends with it: a file that one still holds is closed by that,
    with what is to be written yet."""
    if script.ends_process and modules:
        atexit.register(_handed_to_python, modules)


def _handed_to_python(modules: Mapping[str, ModuleType]) -> None:
    for name, module in modules.items():
        vars(module)[""] = module  # alive as long as what it holds is: Python empties no other
        sys.modules.pop(name, None)
        sys.modules[name] = module  # the last is emptied first, while what it needs to write a file is whole


@contextlib.contextmanager
def _path_of(script: Script) -> Iterator[None]:
    """What Python would have put first on the path, in the place of what it put there for ampdbg."""
    is_safe = getattr(sys.flags, "safe_path", False)  # there Python puts nothing
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
    """While this is entered, modules of the folder are found there, though ampdbg has loaded others of their names.

    Afterwards ampdbg finds its own again, also those that it has not loaded yet. What both share is left alone.
    """
    before = {*sys.modules}
    names = {name for name in before if _is_other(name, [folder])}
    ours = _taken_out(names)
    try:
        yield
    finally:
        theirs = _taken_out(names | {name for name in {*sys.modules} - before if _is_other(name, sys.path)})
        sys.modules.update(ours)
        _emptied_at_exit(script, theirs)


def _taken_out(names: set[str]) -> dict[str, ModuleType]:
    """The modules of these names, and those below them: until now in ``sys.modules``."""
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in names}


def _is_other(name: str, path: list[str]) -> bool:
    """The module that is loaded under this name is another than the one that stands on the path."""
    if "." in name or name in SHARED:
        return False
    with contextlib.suppress(Exception):  # a script may have put anything into sys.path and sys.modules
        found, loaded = PathFinder.find_spec(name, path), sys.modules[name].__spec__
        if found is not None and found.origin and loaded is not None:  # without an origin it is a mere folder
            return os.path.realpath(found.origin) != os.path.realpath(loaded.origin or "")
    return False


def _has_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _exit_code(code: object) -> int:
    """What Python makes of the argument of ``sys.exit``; a text goes to stderr."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF if -(2**63) <= code < 2**63 else 0xFF
    for write in (lambda: sys.stderr.write(str(code)), lambda: sys.stderr.write("\n")):
        with contextlib.suppress(BaseException):  # stderr is closed, or it cannot be made a text: the code is 1
            write()
    return 1


def _wait_for_threads() -> None:
    """By what Python calls at its end, where it then finds nothing to do; Ctrl-C ends the waiting, and no more."""
    try:
        vars(threading)["_shutdown"]()
    except BaseException as error:  # noqa: BLE001 - Ctrl-C, or what a script's handler of a signal raises
        with contextlib.suppress(Exception):
            sys.stderr.write(f"Exception ignored in: {threading!r}\n")
        _show(error)


UNWRITTEN = 120
"""Python's exit code where what the script has printed could not be written."""


def _is_flushed() -> bool:
    """As Python at its end: the last of what the script has printed is written, or stderr says that it is not."""
    are_written = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except Exception as error:  # noqa: BLE001 - the disk is full, the reader has gone, or it is not a stream
            are_written = False
            with contextlib.suppress(Exception):
                if stream is not sys.stderr:
                    sys.stderr.write(f"Exception ignored in: {stream!r}\n{named_error(error)}\n")
    return are_written


def _show(error: BaseException) -> None:
    """The error as the script's own hook shows it, from the script's first frame on."""
    shown = error.with_traceback(_of_script(error.__traceback__))
    try:
        sys.excepthook(type(shown), shown, shown.__traceback__)
    except Exception:  # noqa: BLE001 - a hook of the user's own, or a message that cannot be made
        with contextlib.suppress(Exception):  # stderr is closed, or None
            sys.stderr.write("".join(traceback.format_tb(shown.__traceback__)))
            sys.stderr.write(f"{named_error(error)}\n")


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames that lead into the script, and ampdbg's own among its; nothing where none is its own."""
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
"""The signals that end a process from outside: a batch system's, and a terminal's that goes."""

ASKING = tuple(getattr(signal, name) for name in ("SIGUSR1",) if hasattr(signal, name))
"""The signals by which somebody asks a process for something, which end one that does not know of it."""

Handler = Callable[[int, FrameType | None], None]


@contextlib.contextmanager
def signals_noted(ends: Callable[[int], None], asks: Callable[[], None]) -> Iterator[None]:
    """While this is entered a signal of ENDING ends the process as it always would, but ``ends`` is called first, and
    one of ASKING calls ``asks``.

    A script that handles the signal itself replaces this. For these signals SIG_DFL means what is done here, and Python
    says SIG_DFL of it: a script that calls the handler that was there before its own, or restores it, does then what it
    always does. In a forked child SIG_DFL is itself at once: a worker of a pool that is ended while it begins to wait
    for a lock would never come to run a handler in Python.
    """
    owner, install, ask = os.getpid(), signal.signal, signal.getsignal
    every: dict[int, Handler] = {
        **dict.fromkeys(ENDING, _ending(ends)),
        **dict.fromkeys(ASKING, lambda number, frame: asks()),
    }
    handles = threading.current_thread() is threading.main_thread()  # Python lets no other
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
        if hasattr(os, "register_at_fork"):  # Python takes none back: afterwards there is nothing to leave
            os.register_at_fork(after_in_child=leave)
        try:
            yield
        finally:
            leave()


def _ending(ends: Callable[[int], None]) -> Handler:
    """A handler that ends the process as its signal always would, and calls this first, but in a forked child."""
    owner, install, ask = os.getpid(), signal.signal, signal.getsignal

    def end(number: int, frame: FrameType | None) -> None:
        if ask(number) is not end:  # a handler of the script's own calls it, where SIG_DFL cannot be called
            return
        install(number, signal.SIG_IGN)  # a shell sends SIGHUP once more
        try:
            if os.getpid() == owner:
                ends(number)
        finally:
            install(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    return end
