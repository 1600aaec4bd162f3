"""Selection of the lines to wrap in a pinned module's own code: they overflow, or nearly do."""

from __future__ import annotations

import ast
import contextlib
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FrameType

import torch

from ampdbg.errors import UserCodeError
from ampdbg.formats import FLOAT16
from ampdbg.patch.edits import LinePin
from ampdbg.probes.module_calls import ModulePaths
from ampdbg.probes.op_trace import OpTrace, RunningOp, storage_of
from ampdbg.probes.source_lines import tracing
from ampdbg.probes.tensors import Magnitude
from ampdbg.record.findings import Source
from ampdbg.record.pins import Pin
from ampdbg.replay.replay import Manner, replay_step, shadow_step
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import FailingStep, weights_of
from ampdbg.source.expressions import walk
from ampdbg.source.ownership import Line, is_users_file
from ampdbg.source.source_file import EditError, read_source

CLOSE_BITS = 2
"""A line whose values are within this many bits of the limit is wrapped with a line beyond the limit."""

CLOSE = FLOAT16.largest / 2**CLOSE_BITS

ACCUMULATIONS = frozenset(
    "mm addmm bmm baddbmm addbmm mv dot sum mean cumsum prod cumprod norm linalg_vector_norm var std "
    "logsumexp logcumsumexp convolution _convolution".split()
)
"""Ops that sum many products or terms. An accumulation directly before a wrapped line is wrapped too, since its result
would only be rounded to half. CUDA's autocast runs some sums in FP32 that a CPU's autocast runs in half. Outside of the
block, their half results would meet FP32."""


MOST_GENERATIONS = 4
"""How many producer lines back to search for the rounding that spoils a value."""

UsersCall = tuple[str, LinePin]
"""A file, and the user's call of a function in it."""

Caller = tuple[Line, str]
"""The line of a call, and the name of its callee."""


@dataclass(frozen=True)
class OwnLines:
    """The user's lines that overflow or contribute to it, from replays of the failing steps.

    ``close`` are lines beyond or near the limit of FP16, by module. ``adding_up`` has the module, file and line of each
    accumulation. ``calls`` has the user's call for lines in libraries and in ``made_by``. ``made_by`` has the modules
    and lines that produced a line's inputs.
    """

    close: Mapping[str, Collection[Line]]
    adding_up: Collection[tuple[str, str, int]]
    calls: Mapping[tuple[str, int], UsersCall] = field(default_factory=dict)
    made_by: Mapping[tuple[str, int], Collection[tuple[str, Line]]] = field(default_factory=dict)

    def calls_of(self, pin: Pin) -> list[UsersCall]:
        """Return the library calls in which the lines of a pin overflow, or else the only calls on its lines."""
        library = [self.calls[line] for line in library_lines(pin) if line in self.calls]
        calls = library or map(_call_on, users_lines(pin))
        return list(dict.fromkeys(call for call in calls if call is not None))

    def generations_of(self, pin: Pin) -> list[list[Line]]:
        """Return the lines of a pin, then each earlier generation of producers in the same modules."""
        modules = {pin.module, *(site.module for site in pin.sites)}
        found, met = [sorted(users_lines(pin))], set(users_lines(pin))
        while found[-1] and len(found) <= MOST_GENERATIONS:
            makers = {maker for line in found[-1] for maker in self.made_by.get(line[:2], ())}
            found.append(sorted({line for at, line in makers if at in modules and is_users_file(line[0])} - met))
            met |= {line for _, line in makers}
        return [lines for lines in found if lines]

    def lines_to_wrap(self, pin: Pin) -> dict[tuple[str, str], list[int]]:
        """Return the lines to wrap for a pin, in order, by file and function."""
        lines: dict[tuple[str, str], set[int]] = defaultdict(set)
        for file, number, function in (*users_lines(pin), *self.close.get(pin.module, ())):
            lines[file, function].add(number)
        return {
            (file, function): sorted(lines[file, function] | self._leading_into(pin, file, min(lines[file, function])))
            for file, _, function in users_lines(pin)
        }

    def _leading_into(self, pin: Pin, file: str, first: int) -> set[int]:
        """Return the accumulations in the statements just before a line of a module's."""
        with contextlib.suppress(EditError):  # The line may not be editable.
            above = read_source(Path(file).read_bytes()).above(first) if pin.source is None else []
            return set(itertools.takewhile(lambda line: (pin.module, file, line) in self.adding_up, above))
        return set()


class _Flow(OpTrace):
    """Also records, for each line of the forward pass, the lines that produced its inputs, matched by storage."""

    def __init__(self, model: torch.nn.Module, paths: ModulePaths) -> None:
        super().__init__(model, paths)
        self.made_by: dict[tuple[str, int], set[tuple[str, Line]]] = defaultdict(set)
        self._makers: dict[int, tuple[str, Line]] = {}
        self._read: set[tuple[str, Line]] = set()

    def before(self, op: RunningOp) -> Magnitude:
        self._read = {self._makers[key] for key in map(storage_of, op.given) if key in self._makers}
        return super().before(op)

    def after(self, op: RunningOp) -> None:
        super().after(op)
        if op.place.phase == "forward" and op.place.line is not None:
            self.made_by[op.place.line[:2]] |= self._read
            self._makers |= {key: (op.place.module, op.place.line) for key in map(storage_of, op.made) if key}


def own_lines(run: Run, failing: Sequence[FailingStep], pins: Iterable[Pin] = ()) -> OwnLines:
    """Collect lines from replays of the failing steps in FP32 and in bfloat16, which exceeds FP16's range."""
    pins = tuple(pins)
    lines = {line for pin in pins for line in library_lines(pin)}
    close: dict[str, set[Line]] = defaultdict(set)
    adding_up: set[tuple[str, str, int]] = set()
    made_by: dict[tuple[str, int], set[tuple[str, Line]]] = defaultdict(set)
    with _callers({file for file, _ in lines}) as callers:
        for step in failing:
            scale = step.scale if step.made.why == "gradients" else 1.0
            with weights_of(run.workload.model, step):
                trace = replay_step(run, step.snapshot, Manner("float32"), traced=_Flow).trace
                # Code with a hard-coded dtype fails in bfloat16. Use only what the FP16 run showed.
                with contextlib.suppress(UserCodeError):
                    for seen in shadow_step(run, step.snapshot).ranges:
                        value = seen.output.largest * (scale if seen.place.phase == "backward" else 1.0)
                        if value >= CLOSE and seen.place.line is not None and is_users_file(seen.place.line[0]):
                            close[seen.place.module].add(seen.place.line)
            if isinstance(trace, _Flow):
                adds = (op.place for op in trace.ops if op.op.split(".")[1].rstrip("_") in ACCUMULATIONS)
                adding_up |= {(place.module, *place.line[:2]) for place in adds if place.line is not None}
                for line, makers in trace.made_by.items():
                    made_by[line] |= makers
    found = OwnLines(close, adding_up, {}, made_by)
    lines |= {maker[:2] for pin in pins for makers in found.generations_of(pin)[1:] for maker in makers}
    calls = {line: call for line in lines if (call := _users_call(line, callers)) is not None}
    return replace(found, calls=calls)


@contextlib.contextmanager
def _callers(libraries: Collection[str]) -> Iterator[Mapping[CodeType, Caller | None]]:
    """Record where user code first calls each user function and each function in the library files."""
    found: dict[CodeType, Caller | None] = {}

    def on_call(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if code not in found:
            is_wanted = code.co_filename in libraries or is_users_file(code.co_filename)
            found[code] = _caller(frame) if is_wanted else None

    with tracing(on_call):
        yield found


def _caller(frame: FrameType) -> Caller | None:
    called, caller = frame.f_code.co_name, frame.f_back
    while caller is not None and not is_users_file(caller.f_code.co_filename):
        called, caller = caller.f_code.co_name, caller.f_back
    return caller and ((caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_name), called)


def _users_call(line: tuple[str, int], callers: Mapping[CodeType, Caller | None]) -> UsersCall | None:
    """Return the user's call of the function that holds a line, or None if the calling line makes several calls."""
    codes = [code for code in callers if code.co_filename == line[0] and line[1] in {n for *_, n in code.co_lines()}]
    caller = next((callers[code] for code in codes), None)
    return _call_on(*caller) if caller is not None else None


def _call_on(line: Line, called: str = "") -> UsersCall | None:
    """Return the call of this name on a line, or the line's only callee; None if that is ambiguous."""
    file, number, function = line
    try:
        statement = read_source(Path(file).read_bytes()).at(number).statement
    except EditError:
        return None  # not an editable line
    callees = [ast.unparse(call.func) for call in walk(statement) if isinstance(call, ast.Call)]
    named = [callee for callee in callees if callee.rpartition(".")[2] == called] or callees
    return (file, LinePin(function, (number,), named[0])) if len(set(named)) == 1 else None


def sources_of(pin: Pin) -> list[Source]:
    """Return the lines on which a pin's ops overflow, in the user's code and in libraries, without duplicates."""
    sources = dict.fromkeys((pin.source, *(site.source for site in pin.sites)))
    return [source for source in sources if source is not None]


def users_lines(pin: Pin) -> list[Line]:
    """Return the user's own lines that overflow, without duplicates."""
    return [(one.file, one.line, one.function) for one in sources_of(pin) if is_users_file(one.file)]


def library_lines(pin: Pin) -> list[tuple[str, int]]:
    """Return the files and lines of libraries that overflow."""
    return [(one.file, one.line) for one in sources_of(pin) if not is_users_file(one.file)]
