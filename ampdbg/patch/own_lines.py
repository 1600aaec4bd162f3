"""Which lines of a pinned module's own code a patch has to wrap: those that go wrong, and those close to it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import libcst as cst

from ampdbg.errors import UserCodeError
from ampdbg.formats import FLOAT16
from ampdbg.patch.edits import LinePin
from ampdbg.probes.op_trace import OpTrace
from ampdbg.probes.source_lines import tracing
from ampdbg.record.pins import Pin
from ampdbg.replay.replay import Manner, replay_step, shadow_step
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import FailingStep, weights_of
from ampdbg.source.expressions import code_of, find
from ampdbg.source.ownership import Line, is_users_file
from ampdbg.source.source_file import EditError, read_source

CLOSE_BITS = 2
"""A line whose values are within so many bits of the limit is wrapped together with one that is beyond it."""

CLOSE = FLOAT16.largest / 2**CLOSE_BITS

ACCUMULATIONS = frozenset(
    "mm addmm bmm baddbmm addbmm mv dot sum mean cumsum prod cumprod norm linalg_vector_norm var std "
    "logsumexp logcumsumexp convolution _convolution".split()
)
"""Ops that add up many products or terms. One that leads straight into a wrapped line is wrapped with it, as a
person would: its result would only be rounded to half on the way."""


UsersCall = tuple[str, LinePin]
"""A file, and in it the user's own call of an installed library."""


@dataclass(frozen=True)
class OwnLines:
    """Lines of the user's code by module and function: ``close`` are beyond FP16 or near it, ``adding_up``
    holds the module, file and line of each accumulation, ``calls`` the file and the call that lead to a line of a
    library's."""

    close: Mapping[str, frozenset[Line]]
    adding_up: frozenset[tuple[str, str, int]]
    calls: Mapping[tuple[str, int], UsersCall] = field(default_factory=dict)

    def calls_of(self, pin: Pin) -> list[UsersCall]:
        """The calls of libraries in which the lines of a pin go wrong."""
        lines = [pin.source] if pin.source else [site.source for site in pin.sites] if pin.own else []
        found = [self.calls.get((source.file, source.line)) for source in lines if source is not None]
        return list(dict.fromkeys(call for call in found if call is not None))

    def of(self, pin: Pin) -> dict[tuple[str, str], list[int]]:
        """The lines to wrap for a pin, by file and function, in order."""
        lines: dict[tuple[str, str], set[int]] = {}
        for file, number, function in (*_sites(pin), *self.close.get(pin.module, ())):
            lines.setdefault((file, function), set()).add(number)
        seen = {(site.source.file, site.source.function) for site in pin.sites if site.source}
        return {
            place: sorted({*numbers, *self._leading_into(pin.module, place[0], min(numbers))})
            for place, numbers in lines.items()
            if place in seen
        }

    def _leading_into(self, module: str, file: str, first: int) -> Iterator[int]:
        """The accumulations in the statements just before a line."""
        for line in _lines_above(file, first):
            if (module, file, line) not in self.adding_up:
                return
            yield line


def own_lines(run: Run, failing: Sequence[FailingStep], pins: Iterable[Pin] = ()) -> OwnLines:
    """Runs each failing step as the shadow, which shows every value that FP16 would hold."""
    sources = [source for pin in pins for source in (pin.source, *(site.source for site in pin.sites)) if source]
    libraries = {(source.file, source.line) for source in sources if not is_users_file(source.file)}
    calls: dict[tuple[str, int], UsersCall] = {}
    close: dict[str, set[Line]] = {}
    adding_up: set[tuple[str, str, int]] = set()
    for step in failing:
        scale = step.scale if step.made.why == "gradients" else 1.0
        with weights_of(run.workload.model, step), _library_calls(libraries, calls):
            trace = replay_step(run, step.snapshot, Manner("float32"), traced=OpTrace).trace
            try:
                ranges, _ = shadow_step(run, step.snapshot)
            except UserCodeError:
                ranges = ()  # Code that names its dtype does not run in bfloat16; what FP16 showed has to do.
        for seen in ranges:
            value = seen.output.largest * (scale if seen.place.phase == "backward" else 1.0)
            if value >= CLOSE and seen.place.line is not None and is_users_file(seen.place.line[0]):
                close.setdefault(seen.place.module, set()).add(seen.place.line)
        for op in trace.ops if trace else ():
            if op.place.line is not None and op.op.split(".")[1].rstrip("_") in ACCUMULATIONS:
                adding_up.add((op.place.module, *op.place.line[:2]))
    return OwnLines({module: frozenset(lines) for module, lines in close.items()}, frozenset(adding_up), calls)


@contextlib.contextmanager
def _library_calls(lines: Collection[tuple[str, int]], found: dict[tuple[str, int], UsersCall]) -> Iterator[None]:
    """Notes for each of a library's ``lines`` which call in the user's code led to the function that holds it."""
    files = {file for file, _ in lines}

    def on_call(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_filename not in files:
            return
        numbers = {number for _, _, number in frame.f_code.co_lines()}
        wanted = [line for line in lines if line[0] == frame.f_code.co_filename and line[1] in numbers]
        call = _users_call(frame) if wanted and wanted[0] not in found else None
        found.update((line, call) for line in wanted if call is not None)

    with tracing(on_call) if lines else contextlib.nullcontext():
        yield


def _users_call(frame: FrameType) -> UsersCall | None:
    """The innermost call in the user's code around a frame of a library's; None where its line makes several calls."""
    called, caller = frame.f_code.co_name, frame.f_back
    while caller is not None and not is_users_file(caller.f_code.co_filename):
        called, caller = caller.f_code.co_name, caller.f_back
    if caller is None:
        return None
    file, line = caller.f_code.co_filename, caller.f_lineno
    try:
        statement = read_source(Path(file).read_bytes()).at(line).line
    except EditError:
        return None  # Not a line that could be edited.
    callees = [code_of(call.func) for call in find(statement, cst.Call)]
    named = [callee for callee in callees if callee.rpartition(".")[2] == called] or callees
    return (file, LinePin(caller.f_code.co_name, (line,), named[0])) if len(set(named)) == 1 else None


def _sites(pin: Pin) -> Iterator[Line]:
    for site in pin.sites:
        if site.source is not None and is_users_file(site.source.file):
            yield site.source.file, site.source.line, site.source.function


def _lines_above(file: str, line: int) -> list[int]:
    try:
        return read_source(Path(file).read_bytes()).above(line)
    except EditError:
        return []  # Not a line that could be edited.
